"""`trainkit test`: a working setup, and the messages about a broken one."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.launch.configurations import MULTI_CPU, ONE_CPU, TPU, TWO_MACHINES, ZERO2
from helpers.support import without_gloo
from helpers.worlds.worlds import run_world

from trainkit.cli import setup_checks, test
from trainkit.cli.main import main
from trainkit.cli.setup_checks import CHECKS, Check, CheckContext
from trainkit.config.settings import Settings, carry, read_process_settings
from trainkit.distributed.requested_devices import RequestedDevices
from trainkit.distributed.world import World
from trainkit.registry import make_strategy
from trainkit.trainer.eval_loop import gather_predictions

NAMES = ["processes", "collectives", "training", "evaluation", "checkpoint"]


def test_a_working_setup(capfd: pytest.CaptureFixture[str], run_dir: Path) -> None:
    """Only the check `settings` uses the configuration: the other checks would fail with its precision and accumulation."""
    text = "distributed_type: MULTI_CPU\nnum_processes: 2\nmixed_precision: bf16\ngradient_accumulation_steps: 3\n"
    Path("conf.yaml").write_text(text)
    assert main(["test", "--config_file", "conf.yaml"]) == 0
    said = without_gloo(capfd.readouterr().out).splitlines()
    assert [line.split()[:2] for line in said] == [[name, "ok"] for name in ["environment", *NAMES, "settings", "end"]]
    assert "gloo" in said[0]
    assert "trainkit test, on cpu, cpu" in said[1]
    assert "from those of one process by " in said[3]
    assert "written and read by 2" in said[5]
    line = "2 optimizer steps with DDPStrategy(device='cpu', precision='bf16-mixed'), 3 micro-batches each"
    assert said[6].split(maxsplit=2)[2] == line
    assert [path.name for path in run_dir.iterdir()] == ["conf.yaml"]


# ------------------------------------------------------------------------------------------------- what is found to be wrong


def wrong_sum(*arguments: Any, **options: Any) -> None:
    """An all-reduce that does nothing, like a network that loses data."""


def without_last(world: World, outputs: list[list[Any]], device: torch.device) -> list[list[Any]]:
    return [own[:-1] for own in gather_predictions(world, outputs, device)]


def other_versions(value: Any) -> list[Any]:
    return [{**value, "rank": rank, "pid": rank, "torch": f"2.{rank}"} for rank in range(2)]


def out_of_order(world: World, outputs: list[list[Any]], device: torch.device) -> list[list[Any]]:
    return [own[::-1] for own in gather_predictions(world, outputs, device)]


def found_wrong(folder: str) -> list[str]:
    """Break one part after another on all processes; returns the messages of the checks."""
    make = partial(make_strategy, "ddp", device="cpu")
    strategy = make()
    strategy.join(RequestedDevices(accelerator="cpu"))
    context = CheckContext(strategy, make, Path(folder))
    said = []
    broken_parts: list[tuple[str, Any, str, Any]] = [
        ("processes", strategy.world, "exchange", other_versions),
        ("collectives", dist, "all_reduce", wrong_sum),
        ("evaluation", "trainkit.trainer.trainer", "gather_predictions", without_last),
        ("evaluation", "trainkit.trainer.trainer", "gather_predictions", out_of_order),
        ("training", "trainkit.cli.setup_checks", "_difference", lambda one, other: 1e-3),
    ]
    for name, target, place, broken in broken_parts:
        with pytest.MonkeyPatch.context() as patch:
            if isinstance(target, str):
                patch.setattr(f"{target}.{place}", broken)
            else:
                patch.setattr(target, place, broken)
            (check,) = (check for check in CHECKS if check.name == name)
            with pytest.raises(setup_checks.WrongResultError) as caught:
                check.run(context)
        said.append(str(caught.value))
    return said


def test_checks_can_fail(tmp_path: Path) -> None:
    first, second = run_world(2, found_wrong, str(tmp_path))
    assert first[0] == second[0] == "different versions of torch: 2.0, 2.1"
    assert "the sum of the ranks + 1 is" in first[1]
    assert first[2] == "20 predictions for 21 samples"
    assert first[3] == "the predictions are not in the order of the data"
    assert "differ from those of one process by 1.0e-03" in first[4]


def test_differences_are_measured() -> None:
    one, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    other.load_state_dict(one.state_dict())
    assert setup_checks._difference(one, other) == 0
    largest = max(float(parameter.detach().abs().max()) for parameter in one.parameters())
    with torch.no_grad():
        other.bias[1] += 0.5
    assert setup_checks._difference(one, other) == pytest.approx(0.5 / largest, rel=1e-6)


# ------------------------------------------------------------------------------------------------------------- one process


def one_fails(folder: str) -> int:
    """The second of three checks fails on one process."""

    def fails(context: CheckContext) -> str:
        if context.strategy.world.rank:
            raise OSError("no such wire")
        return "all is well"

    setup_checks.CHECKS = (Check("first", lambda setup: "fine", ""), Check("second", fails, ""), Check("third", fails, ""))
    return setup_checks.main([folder, "ddp", "gloo"])


def test_a_check_that_fails_on_one_process_fails(tmp_path: Path) -> None:
    assert run_world(2, one_fails, str(tmp_path)) == [1, 1]
    assert (tmp_path / "ended").read_text() == "first\n"
    assert [path.name for path in tmp_path.glob("error-*")] == ["error-1.txt"]
    assert (tmp_path / "error-1.txt").read_text() == "rank 1: OSError: no such wire"


# ------------------------------------------------------------------------------------------------------------ the command


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Fakes the processes: the names of the completed checks, the errors of the next check by rank, and the exit code."""

    def stand_in(ended: list[str], errors: dict[int, str], code: int) -> None:
        def start(count: int, arguments: Any, variables: Any) -> int:
            folder = Path(arguments[0])
            (folder / "ended").write_text("".join(f"{name}\n" for name in ended)) if ended else None
            for rank, text in errors.items():
                (folder / f"error-{rank}.txt").write_text(text)
            assert arguments[1:] == ["ddp", "gloo"]
            return code

        monkeypatch.setattr(test, "_start", start)

    return stand_in


@pytest.mark.parametrize(
    "ended, errors, code, last",
    [
        ([], {}, 1, ["processes    FAILED  the processes exited; see their output above.", "What to do: Start all"]),
        (NAMES[:2], {0: "a\nb", 2: "a\nb"}, 1, ["training     FAILED  a", "b", "What to do: Try --backend gloo"]),
        (NAMES[:4], {0: "x", 1: "y"}, 0, ["checkpoint   FAILED  x", "y", "What to do: All processes must be able to write to"]),
        (NAMES, {}, 3, ["end          FAILED  the processes exited with code 3"]),
    ],
)
def test_the_message_of_a_failure(processes: Any, capsys: Any, ended: Any, errors: Any, code: int, last: list[str]) -> None:
    processes(ended, errors, code)
    assert main(["test", "--nproc-per-node", "3", "--backend", "gloo"]) == 1
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("environment  ok      Python 3")
    assert len(rest) == len(last)
    for line, expected in zip(rest, last, strict=True):
        assert line.strip().startswith(expected)


@pytest.mark.parametrize("code", [130, 143])
def test_an_interrupted_test_has_not_failed(processes: Any, capsys: Any, code: int) -> None:
    processes(NAMES[:2], {0: "rank 0: RuntimeError: Connection closed by peer"}, code)
    assert main(["test", "--nproc-per-node", "3", "--backend", "gloo"]) == code
    said = capsys.readouterr()
    assert "FAILED" not in said.out
    assert said.err == "interrupted before the check training was complete\n"


@pytest.mark.parametrize("text, arguments, expected", [
    (MULTI_CPU, [], (2, "gloo")),
    (MULTI_CPU, ["--nproc-per-node", "3"], (3, "gloo")),
    (TWO_MACHINES.replace("machine_rank: 1", "machine_rank: 0"), [], (8, "nccl")),
    (ZERO2, ["--backend", "gloo"], (2, "gloo")),
    (ONE_CPU, [], (1, "gloo")),
    ("mixed_precision: bf16", [], (2, "nccl")),
])  # fmt: skip
def test_a_configuration(text: str, arguments: list[str], expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(test, "_start", lambda *started: given.append(started) or 130)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    Path("conf.yaml").write_text(text)
    assert main(["test", "--config_file", "conf.yaml", *arguments]) == 130
    ((count, (_, _, backend), variables),) = given
    assert (count, backend) == expected
    assert read_process_settings(variables).source == "conf.yaml"


def test_unsupported_configurations(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    Path("conf.yaml").write_text(TPU)
    assert main(["test", "--config-file", "conf.yaml"]) == 2
    assert "conf.yaml: distributed_type: XLA is not supported by this command" in capsys.readouterr().err
    monkeypatch.setenv("TRAINKIT_CONFIG_FILE", "default.yaml")
    Path("default.yaml").write_text(ONE_CPU)
    assert main(["test", "--nproc-per-node", "2"]) == 2
    assert "default.yaml: distributed_type: NO means one process, but --nproc-per-node is 2." in capsys.readouterr().err


def settings_fail(folder: str) -> int:
    """Run only the check of the configuration, while the parameters of the processes differ."""
    os.environ |= carry(Settings({"distributed_type": "MULTI_CPU", "use_cpu": True}))
    setup_checks.CHECKS = ()
    rank = int(os.environ["RANK"])
    setup_checks.Trainer = lambda **arguments: SimpleNamespace(fit=partial(spoil, rank), global_step=2)
    return setup_checks.main([folder, "ddp", "gloo"])


def spoil(rank: int, module: torch.nn.Module, loader: Any) -> None:
    with torch.no_grad():
        next(module.parameters()).fill_(rank)


def test_a_configuration_under_which_processes_drift_apart_fails(tmp_path: Path) -> None:
    assert run_world(2, settings_fail, str(tmp_path)) == [1, 1]
    said = "WrongResultError: after 2 optimizer steps the parameters of the processes differ"
    assert [(tmp_path / f"error-{rank}.txt").read_text() for rank in range(2)] == [f"rank {rank}: {said}" for rank in range(2)]


def test_wrong_arguments(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["test", "--nproc-per-node", "0"]) == 2
    assert "at least 1" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(test, "_start", lambda *given: 1 / 0)
    assert main(["test", "--backend", "nccl"]) == 1
    said = capsys.readouterr().out
    assert "FAILED  NCCL needs a GPU for each of 2 processes, but there are 1." in said
    assert "--nproc-per-node 1 or --backend gloo" in said
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert main(["test", "--backend", "nccl"]) == 1
    assert "no NCCL" in capsys.readouterr().out
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    assert main(["test", "--backend", "gloo"]) == 1
    assert "no gloo" in capsys.readouterr().out


def test_nccl_is_used_with_a_gpu_per_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert test._environment(2, None)[1:] == ("nccl", None)
    assert test._environment(3, None)[1:] == ("gloo", None)
