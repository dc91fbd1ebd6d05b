"""`trainkit demo`: baselines compared with values computed by hand, the corpus, the model, and the whole command."""

from __future__ import annotations

import csv
import importlib.util
import math
import re
import signal
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.support import run_python

from trainkit.cli.demo import ByteGPT, SourceCode, bigram_bits, unigram_bits
from trainkit.cli.demo.command import SMALL, Result, report, train
from trainkit.cli.demo.corpus import Windows, is_validation, read_corpus, source_files
from trainkit.cli.main import main
from trainkit.errors import ConfigurationError, DataError

# ------------------------------------------------------------------------------------------------------- baselines


def as_bytes(text: bytes) -> np.ndarray:
    return np.frombuffer(text, np.uint8)


def test_unigram_by_hand() -> None:
    # "aab": 3 bytes, plus one of each of the 256 (smoothing), so p(a) = 3/259, p(b) = 2/259, p(c) = 1/259.
    expected = -(math.log2(3 / 259) + math.log2(2 / 259) + math.log2(1 / 259)) / 3
    assert unigram_bits(b"aab", as_bytes(b"abc")) == pytest.approx(expected, rel=1e-12)


def test_bigram_by_hand() -> None:
    # "aaab" has the pairs aa, aa, ab; unigram p(a) = 4/260, p(b) = 2/260, p(c) = 1/260.
    after_a = [(2 + 0.5 * 4 / 260) / 3.5, (1 + 0.5 * 2 / 260) / 3.5, (0 + 0.5 * 1 / 260) / 3.5]
    after_c = 2 / 260  # no byte follows c, so only the unigram model counts
    expected = -sum(map(math.log2, [*after_a, after_c])) / 4
    got = bigram_bits(b"aaab", as_bytes(b"aaac"), as_bytes(b"abcb"), strength=0.5)
    assert got == pytest.approx(expected, rel=1e-12)


def test_each_row_of_the_bigram_model_sums_to_one() -> None:
    targets = np.arange(256, dtype=np.uint8)
    for previous in b"azq":
        bits = [bigram_bits(b"abracadabra", np.array([previous], np.uint8), targets[i : i + 1]) for i in range(256)]
        assert sum(2.0**-b for b in bits) == pytest.approx(1.0, rel=1e-9)


def test_baselines_take_windows_of_any_shape() -> None:
    text = b"the quick brown fox jumps over the lazy dog, and then over the quick one"
    flat, square = as_bytes(text[:64]), as_bytes(text[:64]).reshape(8, 8)
    assert unigram_bits(text, square) == unigram_bits(text, flat)
    assert bigram_bits(text, square[:, :-1], square[:, 1:]) < unigram_bits(text, square[:, 1:])


# ---------------------------------------------------------------------------------------------------------- corpus


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A small library that also contains every kind of file that is skipped."""
    root = tmp_path / "lib"
    texts = {f"package/module_{n}.py": f"x = {n}\n" for n in range(200)}
    texts |= {
        "test/test_x.py": "skipped",
        "package/tests/y.py": "skipped",
        "site-packages/z.py": "skipped",
        "encodings/table.py": "skipped",
        "config-3.11/made.py": "skipped",
        "_sysconfigdata_linux.py": "skipped",
        "notes.txt": "skipped",
        "empty.py": "",
        "copy.py": "x = 7\n",
        "windows.py": "a = 1\r\nb = 2\r\n",
    }
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text.encode())
    (root / "latin.py").write_bytes(b"# caf\xe9\n")
    return root


def test_files_of_the_corpus(library: Path) -> None:
    corpus = read_corpus(library)
    files = {*corpus.train_files, *corpus.val_files}
    assert "windows.py" in files
    assert len(files & {"copy.py", "package/module_7.py"}) == 1, "one of two files with the same text"
    assert files | {"copy.py", "package/module_7.py"} == {
        "copy.py",
        "windows.py",
        *(f"package/module_{n}.py" for n in range(200)),
    }
    text = corpus.train + corpus.val
    assert b"skipped" not in text
    assert b"\r" not in text
    assert b"\xe9" not in text


def test_the_split_is_by_file_and_does_not_depend_on_other_files(library: Path) -> None:
    first = read_corpus(library)
    assert not set(first.train_files) & set(first.val_files)
    assert 5 <= len(first.val_files) <= 40  # about a tenth of 201
    removed = [name for name in first.train_files if name != "copy.py"][:50]
    for name in removed:
        (library / name).unlink()
    second = read_corpus(library)
    assert second.val_files == first.val_files
    assert second.val == first.val
    assert set(second.train_files) == set(first.train_files) - set(removed)


def test_the_split_is_frozen() -> None:
    names = ["abc.py", "argparse.py", "ast.py", "email/message.py", "heapq.py", "json/decoder.py", "random.py"]
    assert [name for name in names if is_validation(name, 0.5)] == ["heapq.py", "json/decoder.py", "random.py"]
    assert not any(is_validation(name, 0.0) for name in names)
    assert all(is_validation(name, 1.0) for name in names)


def test_the_standard_library_has_enough_text() -> None:
    corpus = read_corpus()
    assert len(corpus.train) > 2_000_000
    assert 0.02 < len(corpus.val) / len(corpus.train) < 0.5
    assert "argparse.py" in {*corpus.train_files, *corpus.val_files}


def test_a_library_without_sources_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="found 0 and 0"):
        read_corpus(tmp_path)


def test_names_are_in_the_same_order_on_every_system(library: Path) -> None:
    names = list(source_files(library))
    assert names == sorted(names)
    assert not any("\\" in name for name in names)


# --------------------------------------------------------------------------------------------------------- windows


def test_windows_predict_every_byte_but_the_first_once() -> None:
    windows = Windows(b"0123456789ab", 3)  # 11 bytes to predict: three windows, two bytes left over
    assert [bytes(window.tolist()) for window in windows] == [b"0123", b"3456", b"6789"]
    assert windows.all().shape == (3, 4)
    assert windows.all().dtype == torch.uint8


def test_a_limit_spreads_windows_over_the_text() -> None:
    windows = Windows(bytes(range(101)), 10, limit=4)
    assert [window[0].item() for window in windows] == [0, 20, 50, 70]
    assert len(Windows(bytes(range(101)), 10, limit=99)) == 10


def test_impossible_windows() -> None:
    with pytest.raises(DataError, match="at least 11 bytes"):
        Windows(b"0123456789", 10)
    with pytest.raises(ConfigurationError, match="length=0"):
        Windows(b"0123456789", 0)
    with pytest.raises(IndexError):
        Windows(b"0123456789", 3)[3]


def test_batches(library: Path) -> None:
    data = SourceCode(context=16, batch_size=4, val_windows=3, library=library)
    data.setup("fit")
    assert next(iter(data.train_dataloader())).shape == (4, 17)
    assert sum(len(batch) for batch in data.val_dataloader()) == 3


# ----------------------------------------------------------------------------------------------------------- model


def small_model() -> ByteGPT:
    return ByteGPT(width=16, depth=2, heads=2, context=8)


def test_the_model_has_about_a_million_parameters() -> None:
    assert 800_000 < sum(p.numel() for p in ByteGPT().parameters()) < 1_200_000


def test_sizes_of_the_model() -> None:
    model = ByteGPT(width=24, depth=4, heads=3, context=5)
    assert (model.embedding.embedding_dim, len(model.blocks), model.cosine.shape) == (24, 4, (5, 4))


def test_options_of_its_training() -> None:
    model = ByteGPT(width=16, depth=1, heads=2, learning_rate=0.25, weight_decay=0.5, warmup=10)
    model._trainer = types.SimpleNamespace(estimated_stepping_batches=100, max_steps=100)  # type: ignore[assignment]
    configured = model.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    assert optimizer.defaults["lr"] == 0.25
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.5, 0.0}
    rates = []
    for _ in range(20):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates[9] == max(rates) == 0.25
    assert rates[0] < rates[5] < rates[9]


def test_losses_are_logged_in_bits_per_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: dict[str, torch.Tensor] = {}
    monkeypatch.setattr(ByteGPT, "log", lambda self, name, value, **options: logged.update({name: value}))
    model, batch = small_model(), torch.randint(0, 256, (4, 9))
    loss = model.training_step(batch, 0)
    model.validation_step(batch, 0)
    assert loss.item() == pytest.approx(math.log(256), abs=0.1), "in nats; an untrained model is nearly uniform"
    assert {name: value.item() for name, value in logged.items()} == pytest.approx(
        {"train_loss": loss.item() / math.log(2), "val_loss": loss.item() / math.log(2)}
    )


def test_attention_is_causal() -> None:
    model = small_model()
    tokens = torch.randint(0, 256, (1, 8))
    changed = tokens.clone()
    changed[0, 5:] = 255 - changed[0, 5:]
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_positions_matter() -> None:
    model = ByteGPT(width=16, depth=1, heads=2, context=8)  # without positions, one block would see only a set of bytes
    last = model(torch.tensor([[1, 2, 3]]))[0, -1], model(torch.tensor([[2, 1, 3]]))[0, -1]
    assert not torch.allclose(*last, rtol=1e-3)


def test_generation_depends_on_the_seed_alone() -> None:
    model = small_model()
    text = model.generate(b"def f", 20, seed=1)
    torch.rand(1)
    assert text == model.generate(b"def f", 20, seed=1)
    assert text != model.generate(b"def f", 20, seed=2)
    assert text.startswith(b"def f")
    assert len(text) == 25
    assert model.training, "as it was before"
    assert text != model.generate(b"def f", 20, temperature=9.0, seed=1)
    assert text[:12] == model.generate(b"def f", length=7, seed=1)


@pytest.mark.parametrize("arguments", [{"prompt": b""}, {"prompt": b"x", "temperature": 0.0}])
def test_generation_refuses(arguments: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match="temperature > 0"):
        small_model().generate(**arguments)


def test_a_width_that_is_not_divisible_by_the_heads() -> None:
    with pytest.raises(ConfigurationError, match="Fix: width=160"):
        ByteGPT(width=161, heads=5)


# --------------------------------------------------------------------------------------------------------- command


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """The demo, run once for all tests below: its directory, stdout and stderr."""
    folder = tmp_path_factory.mktemp("demo")
    done = run_python("-m", "trainkit", "demo", "--small", "--seed", "3", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout, done.stderr


def figure(stdout: str, label: str) -> float:
    found = re.search(rf"^ *{label} +(\d+\.\d+)", stdout, re.MULTILINE)
    assert found is not None, stdout
    return float(found[1])


def test_the_demo_writes_below_its_root_only(finished: tuple[Path, str, str]) -> None:
    folder, stdout, _ = finished
    run = folder / "trainkit_runs/demo/logs/default/version_0"
    files = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    assert all(path.parts[:2] == ("trainkit_runs", "demo") for path in files)
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert len(list(run.glob("events.out.tfevents.*"))) == 1
    assert str(Path("trainkit_runs/demo/logs/default/version_0")) in stdout


def test_the_demo_logs_a_curve(finished: tuple[Path, str, str]) -> None:
    folder, stdout, _ = finished
    with (folder / "trainkit_runs/demo/logs/default/version_0/metrics.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    curve = {name: [(int(r["step"]), float(r[name])) for r in rows if r[name]] for name in ("train_loss", "val_loss")}
    assert [step for step, _ in curve["train_loss"]] == [10, 20, 30, 40, 50, 60]
    assert [step for step, _ in curve["val_loss"]] == [20, 40, 60]
    assert 4.0 < curve["train_loss"][0][1] < 9.0, "bits per byte, falling from 8"
    assert curve["val_loss"][-1][1] < curve["val_loss"][0][1]
    assert curve["val_loss"][-1][1] == pytest.approx(figure(stdout, "Validation loss"), abs=5e-4)


def test_the_demo_prints_its_results(finished: tuple[Path, str, str]) -> None:
    _, stdout, stderr = finished
    stdout = stdout.replace("\r", "\n")
    unigram, bigram = figure(stdout, "unigram baseline"), figure(stdout, "bigram baseline")
    assert 4.0 < unigram < 5.0
    assert 3.0 < bigram < 4.0
    assert figure(stdout, "Validation loss") < 6.5
    assert re.search(r"^    def .*", stdout, re.MULTILINE), "the sample"
    assert "-m tensorboard.main --logdir trainkit_runs" in stdout
    assert re.search(r"\b60/60\b", stdout + stderr), "the progress bar"


@pytest.mark.slow
def test_the_demo_depends_on_the_seed_alone(finished: tuple[Path, str, str], run_dir: Path) -> None:
    def told(stdout: str) -> str:
        return re.sub(r"in \d+ s", "", stdout[stdout.index("What it writes") :])  # the progress bar shows speeds

    again = run_python("-m", "trainkit", "demo", "--small", "--seed", "3", cwd=run_dir)
    assert told(again.stdout) == told(finished[1])
    other = run_python(
        "-m", "trainkit", "demo", "--small", "--seed", "4", "--max-steps", "7", "--root", "elsewhere", cwd=run_dir
    )
    assert other.returncode == 0, other.stderr
    assert "7 optimizer steps" in other.stdout
    assert (run_dir / "elsewhere/logs/default/version_0/loss.png").is_file()


def test_the_demo_stops_when_the_validation_loss_no_longer_falls(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], run_dir: Path
) -> None:
    monkeypatch.setattr("trainkit.rng._process_seed", None)
    monkeypatch.setattr(ByteGPT, "validation_step", lambda self, batch, batch_idx: self.log("val_loss", 5.0))
    result = train(replace(SMALL, max_steps=12, checks=6, sample=1), seed=0, root=run_dir)
    assert (result.steps, result.stopped_early) == (8, True)  # the first validation, and three without an improvement
    report(result, seconds=1.0)
    assert "stopped early" in capsys.readouterr().out


@pytest.mark.slow
def test_the_whole_demo_beats_the_bigram_model_clearly(run_dir: Path) -> None:
    done = run_python("-m", "trainkit", "demo", cwd=run_dir, timeout=1500)
    assert done.returncode == 0, done.stderr
    assert figure(done.stdout, "Validation loss") < figure(done.stdout, "bigram baseline") - 0.7


def test_what_is_printed_is_safe(capsys: pytest.CaptureFixture[str]) -> None:
    sample = b"def f():\n\treturn \x1b[31m\x00\xff \xe2\x82\xac"
    report(Result(2.0, 3.0, 4.0, sample, 5, False, Path("logs"), Path("logs/loss.png")), seconds=1.0)
    out = capsys.readouterr().out
    assert "    def f():\n        return ?[31m?\ufffd €\n" in out
    assert "1.00 bits better than the bigram baseline" in out
    assert "stopped early" not in out


def test_a_wrong_number_of_steps(capsys: pytest.CaptureFixture[str], run_dir: Path) -> None:
    assert main(["demo", "--max-steps", "0"]) == 2
    assert "Fix: --max-steps 100" in capsys.readouterr().err
    assert not list(run_dir.iterdir())


@pytest.mark.parametrize("package", ["matplotlib", "tensorboard"])
def test_a_missing_package_is_named_before_anything_is_done(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], run_dir: Path
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *args: None if name == package else find(name, *args))
    assert main(["demo", "--small"]) == 2
    assert f"pip install {package}" in capsys.readouterr().err
    assert not list(run_dir.iterdir())


def test_optional_packages_are_not_loaded_with_the_command() -> None:
    done = run_python("import sys, trainkit.cli.demo; print({'matplotlib', 'tensorboard'} & set(sys.modules))", bare=True)
    assert done.stdout.strip() == "set()", done.stderr


# ----------------------------------------------------------------------------------------------- stopped and started again


def test_a_demo_that_was_killed_continues(finished: tuple[Path, str, str], run_dir: Path) -> None:
    """After SIGKILL, and then Ctrl-C, the same command resumes the run and prints the results of an uninterrupted run."""
    arguments = ("demo", "--small", "--seed", "3")
    killing = (
        "import os, signal, sys\n"
        "from trainkit.cli.demo import ByteGPT\n"
        "from trainkit.cli.main import main\n"
        "step = ByteGPT.training_step\n"
        "def killed(self, batch, batch_idx):\n"
        "    batch_idx == {at} and os.kill(os.getpid(), signal.{signal})\n"
        "    return step(self, batch, batch_idx)\n"
        "ByteGPT.training_step = killed\n"
        f"sys.exit(main({list(arguments)}))\n"
    )
    first = run_python(killing.format(at=50, signal="SIGKILL"), cwd=run_dir)
    assert first.returncode == -signal.SIGKILL, first.stderr
    second = run_python(killing.format(at=55, signal="SIGINT"), cwd=run_dir)
    assert second.returncode == 130, second.stderr
    folder = Path("trainkit_runs/demo/unfinished/width-32-steps-60-seed-3")
    assert second.stderr.splitlines()[-1] == (
        f"stopped. To continue, run the same command again; to start over, first remove {folder}."
    )
    third = run_python("-m", "trainkit", *arguments, cwd=run_dir)
    assert third.returncode == 0, third.stderr
    assert f"Resuming the run that was interrupted. To start over, remove {folder}." in third.stdout

    def told(stdout: str) -> str:
        return re.sub(r"in \d+ s", "", stdout[stdout.index("What it writes") :])

    assert told(third.stdout) == told(finished[1])
    assert [path.name for path in (run_dir / "trainkit_runs/demo/logs/default").iterdir()] == ["version_0"]
    assert not (run_dir / folder).exists()


def test_a_demo_that_has_finished_starts_over(finished: tuple[Path, str, str]) -> None:
    folder, _, _ = finished
    again = run_python("-m", "trainkit", "demo", "--small", "--seed", "3", cwd=folder)
    assert again.returncode == 0, again.stderr
    assert "continues" not in again.stdout
    assert (folder / "trainkit_runs/demo/logs/default/version_1/loss.png").is_file()


@pytest.mark.slow
def test_threads_of_the_demo_do_not_spin() -> None:
    """Next to another busy process, a step took 2.8 s with spinning threads instead of 0.3 s."""
    program = (
        "import os, sys\n"
        "from trainkit.cli.main import main\n"
        "assert 'torch' not in sys.modules\n"
        "main(['demo', '--help'])\n"
        "print(os.environ['OMP_WAIT_POLICY'])\n"
    )
    assert run_python(program, bare=True).stdout.splitlines()[-1] == "PASSIVE"
    assert run_python(program, env={"OMP_WAIT_POLICY": "ACTIVE"}).stdout.splitlines()[-1] == "ACTIVE"  # the user's own choice
