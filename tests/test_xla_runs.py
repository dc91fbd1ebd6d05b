"""The helpers of the XLA tests report runs that raise an error, exit, or hang."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.patience import VAIN
from helpers.resume.faulting import tell, told
from helpers.support import ROOT
from helpers.worlds.worlds import WorldError
from helpers.xla import main_runs, xla_runs
from helpers.xla.main_runs import run_main
from helpers.xla.xla_runs import run_xla, start_xla

pytestmark = pytest.mark.xla


def on_the_device(values: list[float]) -> dict[str, Any]:
    import torch
    import torch_xla
    import torch_xla.runtime

    tensor = torch.tensor(values, device=torch_xla.device(), requires_grad=True)
    tensor.square().sum().backward()
    torch_xla.sync()
    assert tensor.grad is not None
    return {
        "kind": torch_xla.runtime.device_type(),
        "devices": torch_xla.runtime.global_runtime_device_count(),
        "gradient": tensor.grad.tolist(),
        "folder": os.getcwd(),
        "launched": sorted(os.environ.keys() & {"RANK", "WORLD_SIZE", "MASTER_PORT"}),
        "flags": os.environ["XLA_FLAGS"].split(),
        "pid": os.getpid(),
    }


def fails() -> None:
    print("before it failed")
    raise ValueError("as it should")


def ends_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def goes_on_for_ever() -> None:
    on_the_device([1.0])
    tell("on the device")
    time.sleep(VAIN)


@pytest.mark.parametrize("devices", [1, 4, 2])
def test_what_a_run_returns(devices: int, run_dir: Path) -> None:
    """Each run has the number of devices that it requests, also after runs with other numbers in the same test process."""
    found = run_xla(on_the_device, [1.0, -3.0], devices=devices)
    assert found["gradient"] == [2.0, -6.0]
    assert (found["kind"], found["devices"]) == (os.environ.get("PJRT_DEVICE", "CPU"), devices)
    assert (found["folder"], found["launched"]) == (str(run_dir), [])
    assert found["pid"] != os.getpid()


def test_runs_after_each_other_have_runtimes_of_their_own() -> None:
    if os.environ.get("PJRT_DEVICE", "CPU") != "CPU":
        pytest.skip("the number of devices is given")
    assert [run_xla(on_the_device, [1.0], devices=n)["devices"] for n in (4, 1)] == [4, 1]


def test_variables_of_a_run() -> None:
    flags = run_xla(on_the_device, [1.0], env={"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"})["flags"]
    assert flags[-2:] == ["--xla_cpu_enable_fast_math=false", "--xla_cpu_multi_thread_eigen=false"]


def test_devices_that_cannot_be_made_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a TPU has another number of devices than a test needs, the test is skipped and nothing is started."""
    monkeypatch.setattr(xla_runs, "_devices_of", {"TPU": 4}.__getitem__)
    monkeypatch.setattr(xla_runs, "XLARun", lambda function, args, env: pytest.fail("started"))
    with pytest.raises(pytest.skip.Exception, match="needs 2 devices, and this TPU has 4"):
        run_xla(fails, devices=2, env={"PJRT_DEVICE": "TPU"})
    with pytest.raises(pytest.fail.Exception, match="started"):
        run_xla(fails, devices=4, env={"PJRT_DEVICE": "TPU"})


def test_devices_are_counted() -> None:
    assert xla_runs._devices_of("CPU") == 1


def test_a_run_that_raises_shows_where_and_what_it_printed() -> None:
    with pytest.raises(WorldError, match="in fails\n(.*\n)*ValueError: as it should\n(.*\n)*before it failed"):
        run_xla(fails)


def test_a_run_that_is_killed() -> None:
    with pytest.raises(WorldError, match="ended with -9"):
        run_xla(ends_itself)
    with start_xla(goes_on_for_ever) as run:
        run.until(told, "it was on the device")
        assert not run.ended
        run.kill()
        assert run.ended
        assert run.end() == (False, "ended with -9")


def test_a_run_that_ends_before_what_is_waited_for() -> None:
    with start_xla(fails) as run, pytest.raises(WorldError, match="it ended before the moon(.*\n)*ValueError: as it should"):
        run.until(lambda: Path("moon").exists(), "the moon")


def test_a_run_that_hangs_shows_its_stacks() -> None:
    with start_xla(goes_on_for_ever) as run:
        run.until(told, "it was on the device")
        with pytest.raises(WorldError, match="have not ended within 0.1 s(.*\n)*.*in goes_on_for_ever"):
            run.result(0.1)


def test_without_torch_xla_a_run_says_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="make test-xla"):
        run_xla(fails)


def there(value: Any) -> Any:
    import torch

    import trainkit

    rank, total = None, None
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
        rank, tensor = torch.distributed.get_rank(), torch.tensor([1.0])
        torch.distributed.all_reduce(tensor)
        total = tensor.item()
    place = Path(trainkit.__file__).resolve().parents[1]
    return {"value": value, "python": sys.executable, "rank": rank, "total": total, "place": place, "folder": os.getcwd()}


def test_what_the_main_environment_returns(run_dir: Path) -> None:
    found = run_main(there, {"a": (1, Path("x"))})
    assert found["value"] == {"a": (1, Path("x"))}
    assert (found["rank"], found["place"], found["folder"]) == (None, ROOT, str(run_dir))
    assert os.path.samefile(Path(found["python"]).parent, Path(os.environ[main_runs.VARIABLE]).parent)
    assert found["python"] != sys.executable


def test_processes_of_the_main_environment() -> None:
    assert [(found["rank"], found["total"]) for found in run_main(there, 1, size=2)] == [(0, 2.0), (1, 2.0)]


def test_a_function_that_raises_in_the_main_environment() -> None:
    with pytest.raises(WorldError, match="in fails\n(.*\n)*ValueError: as it should\n(.*\n)*before it failed"):
        run_main(fails)
    with pytest.raises(WorldError, match="rank 1: Traceback"):
        run_main(fails, size=2)
    assert run_main(there, 2)["value"] == 2


def test_a_main_environment_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A main environment that does not work is an error. If none is set, the test is skipped."""
    monkeypatch.setenv(main_runs.VARIABLE, "/bin/false")
    with pytest.raises(WorldError, match="/bin/false has ended with 1"):
        run_main(fails)
    monkeypatch.delenv(main_runs.VARIABLE)
    with pytest.raises(pytest.skip.Exception, match="make test-xla"):
        run_main(fails)
