"""`trainkit verify-resume`: real scripts in real processes, killed with SIGKILL."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from trainkit.cli.main import main

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the processes that are left are counted in /proc")

SCRIPT = """
import os, sys
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from trainkit import TrainModule, Trainer, seed_everything
from trainkit.callbacks import EarlyStopping, ModelCheckpoint
from trainkit.loggers import CSVLogger

HIDDEN, UNKEYED, WORKERS = "hidden" in sys.argv, "unkeyed" in sys.argv, 2 * ("workers" in sys.argv)
GENERATOR = np.random.default_rng(3 if "seeded" in sys.argv else None)


class Data(Dataset):
    def __len__(self):
        return 22

    def __getitem__(self, index):
        noise = GENERATOR.standard_normal() if UNKEYED else torch.randn(()) + np.random.rand()
        return {"x": torch.arange(4.0) + index + float(noise), "y": torch.tensor(float(index)), "name": str(index)}


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.calls = 0

    def training_step(self, batch, batch_idx):
        self.calls += 1
        loss = nn.functional.mse_loss(self.net(batch["x"])[:, 0], batch["y"])
        self.log("loss", loss)
        return loss * (1 + 0.01 * self.calls) if HIDDEN else loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20), "interval": "step"}]


class Manual(Net):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()


if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    %s
    saved = ModelCheckpoint(os.path.join(here, "mine"), every_n_train_steps=2, save_top_k=-1)
    trainer = Trainer(max_epochs=4, accumulate_grad_batches=2 if not MANUAL else 1, accelerator="cpu", callbacks=saved,
                      logger=CSVLogger(os.path.join(here, "logs")), enable_progress_bar=False, num_sanity_val_steps=0)
    loader = DataLoader(Data(), batch_size=4, shuffle=True, num_workers=WORKERS)
    trainer.fit((Manual if MANUAL else Net)(), loader%s)
    open(os.path.join(here, "after"), "w").close()
"""


Verify = Callable[..., tuple[int, list[str], str]]


@pytest.fixture
def verify(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Verify:
    """`verify(*words, first="", fit="", steps=4, more=3)` runs the script; returns exit code, lines of stdout, and stderr."""

    def run(*words: str, first: str = "", fit: str = "", steps: int = 4, more: int = 3) -> tuple[int, list[str], str]:
        script = tmp_path / "train.py"
        script.write_text(SCRIPT % (f"MANUAL = {'manual' in words}\n    " + first, fit))
        capfd.readouterr()
        code = main(["verify-resume", str(script), "--steps", str(steps), "--more", str(more), "--", *words])
        shown = capfd.readouterr()
        # the Trainer's files go to another folder, and the code after the fit does not run
        assert sorted(os.listdir(tmp_path)) == ["train.py"]
        return code, shown.out.splitlines(), shown.err

    return run


def processes_of(script: Path) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if os.fsencode(script) in command:
            found.append(command.decode("utf-8", "replace"))
    return found


SAME = [
    "All bit-identical: the batches, losses and learning rates of the 3 optimizer steps after the resume,",
    "and all parameters, buffers and optimizer state at the end.",
]


def test_a_script_that_resumes_exactly(verify: Verify, tmp_path: Path) -> None:
    code, lines, _ = verify("workers")
    assert (code, lines[-2:]) == (0, SAME)
    assert [line.split(" … ")[0] for line in lines[:-2]] == [
        "7 optimizer steps without interruption",
        "again, saved at step 4, killed with SIGKILL at step 6",
        "resumed at step 4, to step 7",
    ]
    assert processes_of(tmp_path / "train.py") == []  # no worker is left


@pytest.mark.slow
def test_hidden_state_shows_in_the_first_loss(verify: Verify) -> None:
    code, lines, _ = verify("hidden")
    assert code == 1
    # an epoch has 6 micro-batches and 3 optimizer steps, so step 5 begins with batch 2 of epoch 1
    assert lines[3].startswith("DIFFERENT at step 5 (epoch 1, batch 2): the loss is ")
    assert lines[4:] == [
        "The batch and the learning rates are the same.",
        "The loss depends on something that is not in the checkpoint.",
        "Look for numbers, lists and generators that are plain attributes of the module, a callback or the dataset.",
        "Fix: register_buffer(), or on_save_checkpoint and on_load_checkpoint.",
    ]


@pytest.mark.slow
def test_an_unkeyed_generator_shows_in_the_batch(verify: Verify) -> None:
    code, lines, _ = verify("unkeyed")
    assert code == 1
    assert lines[2] == "DIFFERENT at step 1 (epoch 0, batch 0): the batch differs: ['x'], sample 0 and 3 more of 4"
    assert lines[3].startswith("This is before the kill: two runs of the script differ even without a resume")
    assert "numpy.random.default_rng()" in lines[-1]  # a seed would not help


@pytest.mark.slow
def test_a_generator_that_starts_again(verify: Verify) -> None:
    """Its seed makes two uninterrupted runs the same, but a resume does not restore its position."""
    code, lines, _ = verify("unkeyed", "seeded")
    assert code == 1
    assert lines[3] == "DIFFERENT at step 5 (epoch 1, batch 2): the batch differs: ['x'], sample 0 and 3 more of 4"


@pytest.mark.slow
def test_the_last_states_are_compared_and_not_the_best(verify: Verify) -> None:
    """After `restore_best` a checkpoint has weights only, so it is removed: its metric, which is never logged, is no error."""
    best = "import functools; Trainer = functools.partial(Trainer, restore_best=ModelCheckpoint(monitor='never'))"
    code, lines, _ = verify(first=best)
    assert code == 0
    assert lines[-2:] == SAME


@pytest.mark.slow
@pytest.mark.parametrize("words, steps, more", [
    ((), 3, 1),  # the checkpoint at the end of an epoch, killed in the step after it
    (("workers", "manual"), 5, 2),
    (("manual",), 6, 3),
])  # fmt: skip
def test_other_scripts_that_resume_exactly(words: tuple[str, ...], steps: int, more: int, verify: Verify) -> None:
    code, lines, _ = verify(*words, steps=steps, more=more)
    assert code == 0
    assert lines[-2].startswith("All bit-identical")


@pytest.mark.slow
def test_hidden_state_without_a_loss_shows_in_the_parameters(verify: Verify) -> None:
    code, lines, _ = verify("manual", "hidden", steps=7)
    assert code == 1
    assert lines[3] == "DIFFERENT at step 8 (epoch 1, batch 1): the parameters differ after this step"


@pytest.mark.slow
def test_data_that_is_drawn_again_without_a_seed(verify: Verify) -> None:
    code, lines, _ = verify(first="Data.shift = float(torch.rand(())); real = Data.__getitem__; "
                            "Data.__getitem__ = lambda self, i: {**real(self, i), 'y': torch.tensor(Data.shift)}")  # fmt: skip
    assert code == 1
    assert lines[3].startswith("DIFFERENT at step 5 (epoch 1, batch 2): the batch differs: ['y'], sample 0")
    assert lines[-1] == "Set a seed before data is created or split: trainkit.seed_everything(1)."


@pytest.mark.slow
def test_data_that_is_drawn_before_the_seed(verify: Verify) -> None:
    code, lines, _ = verify(first="Data.shift = float(torch.rand(())); real = Data.__getitem__; seed_everything(5); "
                            "Data.__getitem__ = lambda self, i: {**real(self, i), 'y': torch.tensor(Data.shift)}")  # fmt: skip
    assert code == 1
    assert lines[-2].startswith("The script sets a seed. If data is created or split at random, the seed must come first, ")
    assert lines[-1] == "generators: trainkit.seed_everything(1)."


@pytest.mark.slow
def test_a_script_that_fails_shows_its_traceback(verify: Verify) -> None:
    code, lines, err = verify(first="{}['no such key']")
    assert (code, len(lines)) == (2, 1)
    assert err.startswith("Traceback (most recent call last):\n  File ")
    assert "KeyError: 'no such key'\ntrainkit: The script raised an error, see above." in err
    assert "runpy" not in err


@pytest.mark.slow
@pytest.mark.parametrize("first, fit, words", [
    ("sys.exit(0)", "", "The script ended without a complete Trainer.fit."),
    ("", ", ckpt_path='last'", "the script calls fit(ckpt_path='last'), so it does not start at step 0."),
    ("print('so far'); os._exit(3)", "", "so far\ntrainkit: The script failed with exit code 3"),
    ("real = Trainer; Trainer = lambda **given: real(**{**given, 'fast_dev_run': True, 'logger': False})", "", "fast_dev_run"),
    ("real = Trainer; Trainer = lambda **given: real(**{**given, 'devices': 2, 'logger': False})", "", "trains on 2 processes"),
    ("real = Trainer; Trainer = lambda **given: real(**{**given, 'max_steps': 5})", "", "after 5 optimizer steps (max_"),
])  # fmt: skip
def test_what_cannot_be_verified(verify: Verify, first: str, fit: str, words: str) -> None:
    code, _, err = verify(first=first, fit=fit)
    assert code == 2
    assert words in err


@pytest.mark.slow
def test_auto_starts_at_step_0_and_a_failed_resume_is_a_difference(verify: Verify) -> None:
    code, lines, _ = verify(fit=", ckpt_path='auto'")
    assert (code, lines[-2:]) == (0, SAME)
    code, lines, err = verify(first="Net.on_load_checkpoint = lambda self, checkpoint: checkpoint['gone']")
    assert code == 1
    assert "KeyError: 'gone'" in err
    assert lines[-1].startswith("DIFFERENT at step 4, where it should resume: The script raised an error")


@pytest.mark.parametrize("arguments, words", [
    (["nowhere.py"], "Expected a Python file, got 'nowhere.py', which does not exist."),
    (["."], "Expected a Python file, got '.', which is a folder."),
    (["x.py", "--steps", "0"], "--steps and --more must be at least 1, not 0 and 10."),
    (["x.py", "--lr", "1"], "unrecognized arguments: --lr 1; write the script's arguments after --"),
    (["x.py", "--steps", "many"], "invalid int value: 'many'"),
    ([], "the following arguments are required: SCRIPT"),
    (["--steps", "3", "--"], "the following arguments are required: SCRIPT"),
])  # fmt: skip
def test_wrong_arguments(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify-resume", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_dashes_after_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    monkeypatch.setattr("trainkit.cli.verify_resume.run", lambda args: given.append(args) or 0)
    assert main(["verify-resume", "x.py", "--", "--lr", "0.1", "-h"]) == 0
    assert (given[0].script, given[0].args) == ("x.py", ["--lr", "0.1", "-h"])


@pytest.mark.parametrize("arguments", [
    ["x.py", "--steps", "3", "--more", "5", "--", "--steps", "9", "--", "a"],
    ["--steps", "3", "x.py", "--more", "5", "--", "--steps", "9", "--", "a"],
    ["--more", "5", "--steps", "3", "x.py", "--", "--steps", "9", "--", "a"],
])  # fmt: skip
def test_options_before_the_dashes_and_script_arguments_after(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    monkeypatch.setattr("trainkit.cli.verify_resume.run", lambda args: given.append(args) or 0)
    assert main(["verify-resume", *arguments]) == 0
    [args] = given
    assert (args.script, args.steps, args.more, args.args) == ("x.py", 3, 5, ["--steps", "9", "--", "a"])


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    monkeypatch.setattr("trainkit.cli.verify_resume.run", lambda args: given.append(args) or 0)
    assert main(["verify-resume", "x.py"]) == 0
    assert (given[0].steps, given[0].more, given[0].args) == (10, 10, [])
