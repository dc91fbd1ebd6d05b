"""`trainkit checkpoint import`, with files that the other libraries wrote."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.launch.agents import alive
from helpers.patience import PATIENCE
from helpers.resume.checkpoints import IMPORTABLE
from helpers.runs.tiny import TinyModule
from helpers.runs.trainers import make_trainer, same
from helpers.support import run_python
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainkit import Accelerator, TrainModule
from trainkit.checkpoint import open_checkpoint, restricted_load
from trainkit.cli.main import main

LIGHTNING = Path(__file__).parent / "data" / "lightning.ckpt"


def imported(*arguments: object) -> int:
    return main(["checkpoint", "import", *map(str, arguments)])


class Line(TrainModule):
    """The module of lightning.ckpt, for trainkit; records what it starts with."""

    def __init__(self, width: int = 5, lr: float = 1.0, activation: type | None = None) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["activation"])
        self.net = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_start(self) -> None:
        optimizer, scheduler = self.trainer.optimizers[0], self.trainer.lr_scheduler_configs[0].scheduler
        self.began = {name: tensor.clone() for name, tensor in self.state_dict().items()}
        self.slots = {n: {k: v.clone() for k, v in own.items()} for n, own in optimizer.state_dict()["state"].items()}
        self.facts = optimizer.param_groups[0]["lr"], scheduler.last_epoch, self.trainer.global_step, self.trainer.current_epoch


def data() -> DataLoader:
    torch.manual_seed(0)
    inputs = torch.randn(6, 4)
    return DataLoader(TensorDataset(inputs, inputs[:, :1]), batch_size=2)


# ------------------------------------------------------------------------------------------------------------- Lightning


@pytest.fixture(scope="module")
def from_lightning(tmp_path_factory: pytest.TempPathFactory) -> Path:
    new = tmp_path_factory.mktemp("imported") / "new"
    assert imported(LIGHTNING, new) == 0
    return new


def test_a_run_of_lightning_continues(from_lightning: Path) -> None:
    """Weights, buffers, optimizer, schedule and counters are those of the file, bit for bit."""
    theirs = torch.load(LIGHTNING, weights_only=False)
    module = Line(width=3)
    trainer = make_trainer(max_epochs=3, seed=0)
    trainer.fit(module, data(), ckpt_path=from_lightning)
    assert same(module.began, theirs["state_dict"])
    assert module.slots.keys() == theirs["optimizer_states"][0]["state"].keys()
    for number, slots in theirs["optimizer_states"][0]["state"].items():
        assert same(module.slots[number], slots)
    assert module.facts == (pytest.approx(0.01), 3, 3, 1)
    assert trainer.global_step == 9


def test_the_weights_and_the_hyper_parameters_of_lightning(from_lightning: Path) -> None:
    theirs = torch.load(LIGHTNING, weights_only=False)["state_dict"]
    module = Line.load_from_checkpoint(from_lightning)
    assert (module.hparams.width, module.hparams.lr) == (3, 0.1)
    assert same(module.state_dict(), theirs)
    started = Line(width=3)
    make_trainer().fit(started, data(), ckpt_path=from_lightning, restore={"model"})
    assert same(started.began, theirs)
    assert started.facts[2:] == (0, 0)


def test_what_was_imported_is_printed(from_lightning: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert imported(LIGHTNING, tmp_path / "again", "--prefix", "model.") == 0
    shown = capsys.readouterr().out
    for line in (
        "a checkpoint of Lightning 2.6.6",
        "weights: 9 tensors",
        "optimizer: AdamW, 6 parameters",
        "scheduler: StepLR",
        "hyper-parameters: width, lr",
        "counters: step 3, epoch 1",
        "hyper_parameters.activation (torch.nn.modules.activation.ReLU), a class that is not read",
        "note: the parameters of the optimizer are assumed to be in the order of the state dict",
        f"trainer.fit(module, ckpt_path='{tmp_path / 'again'}')",
    ):
        assert line in shown
    assert all(name.startswith("model.net.") for name in load_file(tmp_path / "again" / "model.safetensors"))
    assert main(["checkpoint", "verify", str(tmp_path / "again")]) == 0


# -------------------------------------------------------------------------------------------- Accelerate and transformers


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    done = run_python("-m", "helpers.resume.foreign_writers", "accelerate", "transformers", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_a_state_of_accelerate(written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = written / "accelerated", tmp_path / "new"
    assert imported(old, new, "--names", written / "accelerated.txt") == 0
    assert "restore={'model', 'optimizer', 'scheduler'}" in capsys.readouterr().out
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(net, optimizer, scheduler)
    accelerator.load_state(new, restore={"model", "optimizer", "scheduler"})
    assert same(net.state_dict(), load_file(old / "model.safetensors"))
    theirs = torch.load(old / "optimizer.bin", weights_only=True)
    for number, slots in theirs["state"].items():
        assert same(optimizer.state_dict()["state"][number], slots)
    assert optimizer.param_groups[0]["momentum"] == 0.9
    assert scheduler.last_epoch == 3


@pytest.mark.slow
def test_a_checkpoint_of_the_trainer_of_transformers(written: Path, tmp_path: Path) -> None:
    """Its optimizer has two groups, in another order than the model."""
    old, new = written / "checkpoint-3", tmp_path / "new"
    assert imported(old, new, "--prefix", "model.", "--names", written / "trainer.txt") == 0
    loaded = open_checkpoint(new).read()
    theirs = torch.load(old / "optimizer.pt", weights_only=True)
    groups = loaded.state["optimizers"][0]["groups"]
    order = [name for group in groups for name in group["parameters"]]
    assert [len(group["parameters"]) for group in groups] == [6, 10]
    assert all(name.endswith("weight") and ".ln_" not in name for name in groups[0]["parameters"])
    for number, name in enumerate(order):
        for slot, tensor in theirs["state"][number].items():
            assert torch.equal(loaded.tensors["optimizer"][f"0/{name}/{slot}"], tensor)
    assert same(
        {name.removeprefix("model."): tensor for name, tensor in loaded.tensors["model"].items()},
        load_file(old / "model.safetensors"),
    )
    loop, manifest = loaded.state["loop"], loaded.manifest
    assert (loop["global_step"], loop["current_epoch"], manifest.step) == (3, 1, 3)
    assert loaded.state["schedulers"][0]["class"] == "LambdaLR"


@pytest.mark.slow
def test_numbered_state_without_names_is_not_imported(
    written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The order of a safetensors file is not that of the model."""
    assert imported(written / "accelerated", tmp_path / "new") == 0
    shown = capsys.readouterr().out
    assert "not imported: optimizer: its state is numbered" in shown
    assert "--names names.txt" in shown
    assert open_checkpoint(tmp_path / "new").manifest.contents == {"model": "all", "optimizer": False, "resumable": False}


@pytest.mark.zero
def test_a_universal_checkpoint_of_deepspeed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = run_python("-m", "helpers.resume.foreign_writers", "deepspeed", cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stderr
    assert imported(tmp_path / "universal", tmp_path / "new", "--prefix", "net.") == 0
    assert "counters: step 3" in capsys.readouterr().out
    zero = tmp_path / "universal" / "zero"
    loaded = open_checkpoint(tmp_path / "new").read()
    assert len(loaded.tensors["model"]) == 9
    for folder in zero.iterdir():
        if (folder / "exp_avg.pt").exists():
            name = f"net.{folder.name}"
            for slot in ("exp_avg", "exp_avg_sq"):
                expected = torch.load(folder / f"{slot}.pt", weights_only=True)["param"]
                assert torch.equal(loaded.tensors["optimizer"][f"0/{name}/{slot}"], expected)
            assert torch.equal(loaded.tensors["model"][name], torch.load(folder / "fp32.pt", weights_only=True)["param"])
    make_trainer().fit(Quiet(), data(), ckpt_path=tmp_path / "new", restore={"model", "optimizer"})


class Quiet(Line):
    """Without a scheduler."""

    def __init__(self) -> None:
        super().__init__(width=3)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.5)

    def on_train_start(self) -> None:
        assert self.trainer.optimizers[0].param_groups[0]["lr"] == 0.1


# --------------------------------------------------------------------------------------------------------- other files


def test_a_state_dict(tmp_path: Path) -> None:
    """Tied tensors stay tied, and names lose what `torch.compile` adds."""
    module, new = TinyModule(), tmp_path / "new"
    weight = module.layer.weight.detach()
    save_file(
        {"_orig_mod.layer.weight": weight, "_orig_mod.layer.bias": module.layer.bias.detach()}, tmp_path / "a.safetensors"
    )
    assert imported(tmp_path / "a.safetensors", new) == 0
    assert same(TinyModule.load_from_checkpoint(new).state_dict(), module.state_dict())


def test_a_training_state_of_a_hand_written_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The class of an old optimizer is not clear, and a tied tensor is one parameter."""
    net = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2, bias=False)})
    net["b"].weight = net["a"].weight
    optimizer = torch.optim.Adam(net.parameters())
    net["a"](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    saved = optimizer.state_dict()
    del saved["param_groups"][0]["decoupled_weight_decay"]  # as before torch 2.7
    old = {"model": net.state_dict(), "optimizer": saved, "epoch": 3, "args": argparse.Namespace(x=Path("x"))}
    torch.save(old, tmp_path / "old.pt")
    assert imported(tmp_path / "old.pt", tmp_path / "unclear") == 0
    shown = capsys.readouterr().out
    assert "not imported: optimizer: its class is unknown. Name it: --optimizer AdamW" in shown
    assert "not imported: epoch: its meaning is unknown" in shown
    assert imported(tmp_path / "old.pt", tmp_path / "new", "--optimizer", "Adam") == 0
    loaded = open_checkpoint(tmp_path / "new").read()
    assert loaded.manifest.aliases == {"model": {"b.weight": "a.weight"}}
    assert loaded.state["optimizers"][0]["class"] == "Adam"
    assert torch.equal(loaded.tensors["optimizer"]["0/a.weight/exp_avg"], saved["state"][0]["exp_avg"])


@pytest.mark.parametrize(
    "old, options, words",
    [
        ("absent", (), ["does not exist"]),
        ("folder", (), ["not a folder of a known format", "ds_to_universal"]),
        ("broken.pt", (), ["broken.pt cannot be read", "safetensors"]),
        ("good.safetensors", ("--names", "names.txt"), []),
    ],
)
def test_errors(
    old: str, options: tuple[str, ...], words: list[str], run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_dir / "folder").mkdir()
    (run_dir / "broken.pt").write_bytes(b"PK\x03\x04 not a zip file")
    (run_dir / "names.txt").write_text("x")
    save_file({"x": torch.zeros(1)}, run_dir / "good.safetensors")
    code = imported(old, "new", *options)
    shown = capsys.readouterr()
    assert (code == 0) == (not words)
    assert all(word in shown.err for word in words)
    assert (run_dir / "new").exists() == (not words)
    assert not [path for path in run_dir.iterdir() if path.name.startswith(".")]


def test_an_existing_checkpoint_is_not_replaced(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "new").mkdir()
    (run_dir / "new" / "notes.txt").write_text("mine")
    assert imported(LIGHTNING, "new") != 0
    assert "exists. Choose another name" in capsys.readouterr().err


def test_a_file_cannot_run_code(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pickle that would call a function is read without the call."""

    class Trap:
        def __reduce__(self) -> Any:
            return shutil.rmtree, (str(run_dir / "kept"),)

    (run_dir / "kept").mkdir()
    torch.save({"model": {"x": torch.zeros(1)}, "trap": Trap()}, run_dir / "trap.pt")
    assert imported("trap.pt", "new") == 0
    assert "trap (shutil.rmtree), a class that is not read" in capsys.readouterr().out
    assert (run_dir / "kept").is_dir()


class Call:
    """Pickles to a call of `os.system`."""

    def __reduce__(self) -> Any:
        return os.system, ("touch PWNED",)


def _self() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def _hostile() -> dict[str, tuple[Any, str]]:
    """Name → what is saved, and what the message says."""
    ones, state = torch.ones(1), {"w": torch.ones(2)}
    lightning = {"pytorch-lightning_version": "2.5", "state_dict": state}
    return {
        "a stride of 0": ({"w": ones.as_strided((10**14,), (0,))}, "declares tensors of 400,000,000,000,000 bytes"),
        "a call": ({"model": state, "x": Call()}, "the file tries to run code: it calls posix.system when pickle loads it"),
        "only a call": (Call(), "the file tries to run code: it calls posix.system"),
        "a list in itself": ({**state, "more": _self()}, "expected at most 5,000,000 values and 90 levels"),
        "no state dict": ({**lightning, "state_dict": 5}, "is malformed"),
        "loops": ({**lightning, "loops": {"fit_loop": {"epoch_progress": {"current": 5}}}}, "is malformed"),
        "a step that is text": ({**lightning, "global_step": "x"}, "is malformed"),
        "negative steps": ({**lightning, "global_step": -5}, "['step']: expected an integer ≥ 0, got -5"),
        "hyper-parameters": ({**lightning, "hyper_parameters": 5}, "is malformed"),
        "groups": ({**lightning, "optimizer_states": [{"state": 5, "param_groups": [5]}]}, "is malformed"),
        "a schedule": ({**lightning, "lr_schedulers": 5}, "is malformed"),
        "a name of many parts": ({".".join("a" * 20_000): ones}, "is malformed"),
        "an empty name": ({"": ones}, "is malformed"),
    }


@pytest.mark.parametrize("name", _hostile())
def test_a_hostile_file_is_refused(name: str, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value, words = _hostile()[name]
    torch.save(value, "old.pt")
    assert imported("old.pt", "new") == 2
    assert words in capsys.readouterr().err
    assert [path.name for path in run_dir.iterdir()] == ["old.pt"]


def test_lists_that_refer_to_lists_have_too_many_values(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is lower here, as 5 million values take half a minute."""
    value: list[Any] = [1]
    for _ in range(60):
        value = [value, value]
    torch.save({"w": torch.ones(2), "more": value}, "old.pt")
    monkeypatch.setattr(restricted_load, "_MOST_VALUES", 5_000)
    with pytest.raises(ValueError, match="expected at most 5,000 values and 90 levels"):
        restricted_load._convert(Path("old.pt"), Path("new.bin"))
    assert not Path("new.bin").exists()


def test_a_plain_pickle_that_calls_a_function(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Newer protocols of pickle than torch reads, which write names in another way."""
    (run_dir / "old.pt").write_bytes(b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x0btouch PWNED\x85R.")
    assert imported("old.pt", "new") == 2
    assert "the file tries to run code: it calls posix.system" in capsys.readouterr().err
    assert not (run_dir / "PWNED").exists()


def test_a_compressed_file_is_refused(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"w": torch.zeros(2**20)}, "plain.pt")
    with zipfile.ZipFile("plain.pt") as plain, zipfile.ZipFile("old.pt", "w", zipfile.ZIP_DEFLATED) as small:
        for entry in plain.infolist():
            small.writestr(entry.filename, plain.read(entry))
    assert imported("old.pt", "new") == 2
    assert "it is compressed" in capsys.readouterr().err


def test_a_disk_without_room_is_found_before_anything_is_written(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"w": torch.zeros(2**20)}, "old.pt")
    monkeypatch.setattr(restricted_load.shutil, "disk_usage", lambda path: SimpleNamespace(free=5_000_000))
    with pytest.raises(
        ValueError, match="its tensors need 8,388,608 bytes .* which has 5,000,000 free. Fix: free some, or set TMPDIR"
    ):
        restricted_load._convert(Path("old.pt"), Path("new.bin"))
    assert not Path("new.bin").exists()


@pytest.mark.parametrize("part", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "", 5])
def test_an_index_cannot_lead_elsewhere(part: Any, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "old").mkdir()
    save_file({"x": torch.zeros(1)}, run_dir / "x.safetensors")
    (run_dir / "old" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": part}}))
    assert imported("old", "new") == 2
    assert "expected the names of files in its own folder" in capsys.readouterr().err
    assert not (run_dir / "new").exists()


@pytest.mark.parametrize("text", ["[" * 100_000, "5", "{}", '{"weight_map": 5}', '{"weight_map": {"a": [1]}}', "\x00"])
def test_a_malformed_index(text: str, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "old").mkdir()
    (run_dir / "old" / "model.safetensors.index.json").write_text(text)
    assert imported("old", "new") == 2
    assert "model.safetensors.index.json" in (shown := capsys.readouterr().err) or "is malformed" in shown


# In a process of its own, which is ended by a signal. The child stands for one that reads a large file: as that does, it ends
# when its standard input is closed, if the signal comes before its parent knows that it runs.
_ENDED = """
import sys
from trainkit.checkpoint import read_foreign
from trainkit.cli.main import main
sys.executable = sys.argv[1]
sys.exit(main(["checkpoint", "import", "old.pt", "new"]))
"""


def test_sigterm_leaves_no_process_and_no_folder(run_dir: Path) -> None:
    torch.save({"w": torch.zeros(1)}, "old.pt")
    child = run_dir / "child"
    child.write_text("#!/bin/sh\necho $$ > pid.tmp\nmv pid.tmp pid\nexec cat\n")
    child.chmod(0o755)
    with subprocess.Popen([sys.executable, "-c", _ENDED, str(child)], env={**os.environ, **IMPORTABLE}) as process:
        end = time.monotonic() + PATIENCE
        while not Path("pid").exists() and time.monotonic() < end:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 143
    while alive(int(Path("pid").read_text())):
        assert time.monotonic() < end
        time.sleep(0.02)
    assert sorted(path.name for path in run_dir.iterdir()) == ["child", "old.pt", "pid"]


def test_the_process_that_reads_ends_with_the_one_that_started_it(run_dir: Path) -> None:
    """Its file is a pipe in which nothing ever comes: it waits for it, until its standard input is closed."""
    os.mkfifo("old.pt")
    command = [sys.executable, "-m", restricted_load.__name__, "old.pt", "new.bin"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, **IMPORTABLE}) as process:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(PATIENCE) == 1
