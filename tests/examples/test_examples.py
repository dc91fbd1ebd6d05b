"""Runs every example as a user would, and checks that it learns."""

from __future__ import annotations

import csv
import importlib.util
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.support import ROOT, run_python
from helpers.worlds.worlds import run_world
from safetensors.torch import load_file
from torch.distributed.tensor import Shard
from torch.utils.data import DataLoader

from trainkit import Trainer, seed_everything
from trainkit.strategies import FSDPStrategy

EXAMPLES = ROOT / "examples"


@pytest.fixture(autouse=True)
def _no_seed_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores the seed that an example sets, so that later tests do not see it."""
    monkeypatch.setattr("trainkit.rng._process_seed", None)


def imported(example: str) -> ModuleType:
    """Import an example from its file."""
    name = f"example_{example}"
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{example}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def example(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """An imported example. The module is removed after the test."""
    module = imported(request.param)
    yield module
    del sys.modules[module.__name__]


def test_each_example_is_tested() -> None:
    text = Path(__file__).read_text("utf-8")
    for path in EXAMPLES.glob("*.py"):
        assert re.search(rf'"{path.stem}(\.py)?"', text), f"{path.name} has no test here"


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_the_readme_describes_it_and_help_shows_its_options(
    name: str, run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))  # as when Python runs a script
    assert f"`{name}.py`" in (EXAMPLES / "README.md").read_text("utf-8")
    with pytest.raises(SystemExit) as ended:
        imported(name).main(["--help"])
    assert ended.value.code == 0
    assert "--seed" in capsys.readouterr().out
    assert not list(run_dir.iterdir()), "asking for help writes nothing"


@pytest.mark.parametrize("example", ["digits"], indirect=True)
def test_digits_are_classified(example: ModuleType, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    accuracy = example.main([])
    assert accuracy >= 0.95
    assert f"test accuracy {accuracy:.3f}" in capsys.readouterr().out
    [table] = run_dir.glob("trainkit_runs/digits/logs/default/version_0/metrics.csv")
    columns = table.read_text("utf-8").splitlines()[0].split(",")
    assert {"train_loss", "val_loss", "val_accuracy", "test_accuracy"} <= set(columns)


@pytest.mark.parametrize("example", ["digits"], indirect=True)
def test_digits_depend_on_the_seed_alone(example: ModuleType) -> None:
    def losses(seed: int) -> str:
        example.main(["--max-epochs", "1", "--seed", str(seed), "--root", f"runs/{seed}"])
        newest = max(Path(f"runs/{seed}/logs/default").iterdir())
        return (newest / "metrics.csv").read_text("utf-8")

    assert losses(1) == losses(1)
    assert losses(1) != losses(2)


@pytest.mark.slow
@pytest.mark.parametrize("example", ["gan"], indirect=True)
def test_the_gan_covers_all_modes(example: ModuleType) -> None:
    before = example.coverage(example.GAN().sample(2000))
    result = example.main([])
    assert before.modes < 4
    assert result.modes == 8
    assert result.near >= 0.7


@pytest.mark.parametrize("example", ["gan"], indirect=True)
def test_coverage_counts_what_lies_near_a_centre(example: ModuleType) -> None:
    real = example.real_points(2000)
    assert example.coverage(real).modes == 8
    assert example.coverage(real).near > 0.97  # 1 - exp(-4.5) of a Gaussian in two dimensions lies within 3 deviations
    collapsed = example.centres()[:1].repeat(2000, 1)
    assert example.coverage(collapsed) == (1, 1.0)
    assert example.coverage(torch.zeros(2000, 2)) == (0, 0.0)


@pytest.mark.parametrize("example", ["own_loop"], indirect=True)
def test_the_own_loop_learns(example: ModuleType, run_dir: Path) -> None:
    assert example.main(["--seed", "1"]) >= 0.94
    assert not list(run_dir.iterdir()), "an own loop writes nothing by itself"


@pytest.mark.parametrize("example", ["own_loop"], indirect=True)
def test_the_own_loop_depends_on_the_seed_alone(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    def printed(seed: int) -> str:
        example.main(["--epochs", "2", "--seed", str(seed)])
        return capsys.readouterr().out

    assert printed(1) == printed(1)
    assert printed(1) != printed(2)


@pytest.mark.slow
@pytest.mark.parametrize("example", ["byte_gpt"], indirect=True)
def test_the_byte_gpt_learns(example: ModuleType, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A few optimizer steps of a model a tenth of the size. Measured: 3.15 bits per byte; the bigram model has 3.43."""
    size = ["--width", "64", "--depth", "2", "--heads", "2", "--context", "32", "--batch-size", "32"]
    loss, bigram = example.main(["--max-steps", "200", "--learning-rate", "6e-3", *size])
    assert 3.0 < bigram < 4.0
    assert loss < bigram - 0.1
    assert re.search(rf"{loss:.3f} bits per byte; a bigram model has {bigram:.3f}", capsys.readouterr().out)
    assert list(run_dir.glob("trainkit_runs/byte_gpt/logs/default/version_0/metrics.csv"))


@pytest.mark.parametrize("example", ["resume"], indirect=True)
def test_a_killed_run_resumes_to_the_same_result(example: ModuleType, run_dir: Path) -> None:
    expected = example.main(["--root", "whole"])
    for step in (30, 110):
        done = run_python(str(EXAMPLES / "resume.py"), "--root", "killed", "--kill-at", str(step), cwd=run_dir)
        assert done.returncode == (-signal.SIGKILL if os.name == "posix" else signal.SIGTERM), done.stderr
    assert example.main(["--root", "killed", "--num-workers", "2"]) == expected
    # the newest log: a process that is killed before its first checkpoint leaves a log that is never resumed
    logs = [max(Path(root, "logs/default").iterdir()) for root in ("whole", "killed")]
    tables = [(log / "metrics.csv").read_text("utf-8") for log in logs]
    assert tables[0] == tables[1]
    losses = [float(row.split(",")[2]) for row in tables[0].splitlines()[1:] if row.split(",")[2]]
    assert losses[0] > 0.3
    assert losses[-1] < 0.1


@pytest.mark.parametrize("example", ["resume"], indirect=True)
def test_the_result_depends_on_the_seed_alone(example: ModuleType) -> None:
    results = [example.main(["--max-epochs", "1", "--seed", seed, "--root", root]) for seed, root in ("1a", "1b", "2c")]
    assert results[0] == results[1] != results[2]


def adapt(pairs: int) -> tuple[float, float, list[str]]:
    size = ["--pairs", str(pairs), "--width", "32", "--batch-size", "4", "--base-epochs", "4", "--max-epochs", "3"]
    return imported("seq2seq_lora").main([*size, "--learning-rate", "3e-3", "--device", "cpu", "--root", "run"])


def reopened(pairs: int) -> tuple[float, list[str]]:
    """Open the base model and the adapter with PEFT, as any user would; returns the perplexity and the generated texts."""
    from peft import PeftModel
    from transformers import AutoModelForSeq2SeqLM

    example = imported("seq2seq_lora")
    model = PeftModel.from_pretrained(AutoModelForSeq2SeqLM.from_pretrained("run/base"), "run/adapter").eval()
    batch = example.collate(example.pairs("*/**/*.py", pairs)[1])
    perplexity = math.exp(model(**batch).loss.detach())
    del batch["labels"]
    return perplexity, example.decode(model.generate(**batch, max_new_tokens=example.LONGEST, do_sample=False))


@pytest.mark.zero
@pytest.mark.parametrize("size", [1, 2])
def test_the_adapter_learns_and_opens_elsewhere(size: int, run_dir: Path) -> None:
    """The example itself sets ZeRO-3 with offload in each process."""
    results = run_world(size, adapt, 48)
    assert all(result == results[0] for result in results)
    before, after, said = results[0]
    assert after < before
    assert len(said) == 12
    [(perplexity, again)] = run_world(1, reopened, 48)
    assert perplexity == pytest.approx(after, rel=1e-5)
    assert again == said


@pytest.mark.zero
@pytest.mark.parametrize("name", ["seq2seq_lora_loop"])
def test_a_configuration_file_puts_the_loop_under_zero3(name: str, run_dir: Path) -> None:
    size = ["--pairs", "48", "--width", "32", "--batch-size", "4", "--base-epochs", "4", "--max-epochs", "3"]
    file, script = str(EXAMPLES / "zero3_offload.yaml"), str(EXAMPLES / f"{name}.py")
    done = run_python(
        "-m", "trainkit", "launch", "--config_file", file, script, *size, "--learning-rate", "1e-2", "--root", "run"
    )
    assert done.returncode == 0, done.stderr
    assert "processes: 2, ZeROStrategy(stage=3, offload_optimizer='cpu', offload_params='cpu'" in done.stdout
    found = re.search(r"perplexity ([\d.]+) before, ([\d.]+) after", done.stdout)
    assert found is not None, done.stdout
    assert float(found[2]) < float(found[1])
    [(perplexity, _)] = run_world(1, reopened, 48)
    assert perplexity == pytest.approx(float(found[2]), rel=1e-3)


@pytest.mark.parametrize("example", ["seq2seq_lora"], indirect=True)
def test_the_pairs_are_those_of_the_standard_library(example: ModuleType) -> None:
    train, held_out = example.pairs("sh*.py", 10**6)
    assert abs(len(train) - 4 * len(held_out)) <= 4
    assert not {*train} & {*held_out}
    assert ("Copy data and metadata. Return the file's destination.", "copy2") in train + held_out
    assert all(text and name.isidentifier() for text, name in train)
    assert [len(part) for part in example.pairs("sh*.py", 8)] == [8, 2]
    assert {*example.pairs("email/**/*.py", 10**6)[0]}.isdisjoint(train)


@pytest.mark.parametrize("example", ["seq2seq_lora"], indirect=True)
def test_bytes_are_tokens_as_those_of_byt5(example: ModuleType) -> None:
    texts = ["naïve", "x"]
    assert example.decode(example.encode(texts)) == texts
    labels = example.collate([("a b", "x" * 40), ("", "y")])["labels"]
    assert labels.shape == (2, example.LONGEST)
    assert labels[1].tolist() == [ord("y") + 3, 1] + [-100] * 22


SMALL = ["--batch-size", "4", "--global-batch-size", "8", "--context", "32", "--width", "32", "--depth", "2"]


def llama_trained(tensor_parallel: int, precision: str) -> tuple[list[float], list[float], list[Any]]:
    """Train on one process, or on the processes of the world; returns the losses, the parameters and what layers have seen."""
    example, seen = imported("llama"), []
    seed_everything(0)
    model = example.Llama(32, 2, 4, 2, 48, context=16)
    model.layers[1].register_forward_hook(lambda layer, given, output: seen.append((given[0].shape[1], output.shape[1])))
    model.head.register_forward_hook(lambda head, given, output: seen.append(getattr(output, "placements", None)))
    trainer = Trainer(
        strategy=FSDPStrategy(tensor_parallel=tensor_parallel) if tensor_parallel > 1 else "auto",
        precision=precision,
        max_epochs=3,
        global_batch_size=4,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
    )
    # 14 samples in batches of 2 are 7 micro-batches, so one group has no data in the last step of an epoch
    data = torch.randint(256, (14, 17), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    trainer.fit(model, DataLoader(data, batch_size=2, shuffle=True), DataLoader(data[:5], batch_size=1))
    losses = [float(trainer.callback_metrics[name]) for name in ("train_loss", "val_loss")]
    return losses, torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(), seen[-2:]


@pytest.mark.fsdp
@pytest.mark.parametrize(("precision", "loss_limit", "limit"), [("64-true", 1e-9, 1e-9), ("32-true", 2e-6, 1e-4)])
def test_sharded_llama_learns_the_same_as_on_one_process(precision: str, loss_limit: float, limit: float) -> None:
    """2 × 2 processes, with sequence parallelism and a loss over sharded logits. AdamW in float32 drifts from rounding."""
    [(losses, parameters, (_, whole))] = run_world(1, llama_trained, 1, precision)
    assert whole is None
    for sharded_losses, sharded, seen in run_world(4, llama_trained, 2, precision):
        assert sharded_losses == pytest.approx(losses, rel=loss_limit)
        assert sharded == pytest.approx(parameters, rel=limit, abs=limit)
        assert seen == [(8, 8), (Shard(2),)]  # half of 16 positions, half of the logits


def llama(*arguments: str) -> subprocess.CompletedProcess[str]:
    options = [*SMALL, "--max-steps", "42", "--save-every", "7", *arguments]
    return run_python(str(EXAMPLES / "llama.py"), *options, timeout=300.0)


def logged(root: str, name: str) -> dict[int, float]:
    """Optimizer step → value."""
    newest = max(Path(root, "logs/default").iterdir())
    rows = csv.DictReader((newest / "metrics.csv").read_text("utf-8").splitlines())
    return {int(row["step"]): float(row[name]) for row in rows if row[name]}


@pytest.mark.fsdp
def test_llama_is_killed_under_fsdp_resumed_compiled_on_one_process_and_exported(run_dir: Path) -> None:
    whole = llama("--devices", "2", "--strategy", "fsdp", "--root", "whole")
    assert whole.returncode == 0, whole.stderr
    killed = llama("--devices", "2", "--strategy", "fsdp", "--root", "killed", "--kill-at", "27")
    assert killed.returncode != 0
    assert "rank 1 was ended by SIGKILL" in killed.stderr
    # one batch of 8 instead of one of 4 on each of 2 processes: the loss of a step is a mean over the same samples
    resumed = llama("--devices", "1", "--batch-size", "8", "--compile", "--root", "killed")
    assert resumed.returncode == 0, resumed.stderr
    assert "step 21, 0 epochs complete" in resumed.stderr
    assert "compile: 2 × Block" in resumed.stderr
    for name in ("train_loss", "val_loss"):
        expected = logged("whole", name)
        assert max(expected) >= 40
        assert logged("killed", name) == pytest.approx(expected, rel=2e-6), name

    [last] = Path("killed").rglob("step-00000042")
    exported = run_python("-m", "trainkit", "checkpoint", "export", str(last), "weights")
    assert exported.returncode == 0, exported.stderr
    weights = load_file("weights/model.safetensors")
    example = imported("llama")
    model = example.Llama(32, 2, hidden=88, context=32)
    model.load_state_dict(weights)
    prompt = torch.tensor([[*b"def "]])
    assert torch.equal(model(prompt), example.Llama.load_from_checkpoint(last)(prompt))
    data = example.SourceCode(context=32, val_windows=256)
    data.setup()
    with torch.no_grad():
        assert float(model.loss(data.val.all())) / math.log(2) == pytest.approx(logged("killed", "val_loss")[42], rel=1e-5)


def test_an_example_runs_as_a_script(run_dir: Path) -> None:
    done = run_python(str(EXAMPLES / "digits.py"), "--max-epochs", "1", cwd=run_dir)
    assert done.returncode == 0, done.stderr
    assert "test accuracy" in done.stdout
    assert [path.name for path in run_dir.iterdir()] == ["trainkit_runs"]
