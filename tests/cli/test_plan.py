"""`trainkit plan`: runs a user's script up to the call that would start the training."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from trainkit import Accelerator, Trainer
from trainkit.cli.main import main

TRAINER = """
import argparse
import torch
from torch import nn
from trainkit import Trainer, TrainModule

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=300)
parser.add_argument("--gpu", action="store_true")
parser.add_argument("--odd", default="")
arguments = parser.parse_args()


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters()
        rates = [x.item() for x in torch.linspace(0, 0.1, 3)]  # tensors that are not parameters have values
        self.layers = nn.ModuleList(nn.Linear(arguments.width, arguments.width) for _ in rates)
        self.scale = nn.Parameter(torch.randn(arguments.width))
        self.tied = shared = nn.Parameter(torch.randn(arguments.width))
        self.layers[0].bias = shared
        if arguments.odd == "values":
            print("norm", self.scale.norm().item())

    def training_step(self, batch, batch_idx):
        raise AssertionError("nothing is trained")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


module = Net()
print("on", module.scale.device.type)
if arguments.odd == "broken":
    broken
if arguments.odd != "nothing":
    options = {"accelerator": "gpu", "devices": 8, "strategy": "zero3"} if arguments.gpu else {"devices": 2}
    trainer = Trainer(precision="bf16-true", logger=False, enable_checkpointing=False, **options)
    trainer.fit(module, [1])
    print("after fit")
"""

ACCELERATOR = """
import torch
from torch import nn
from trainkit import Accelerator

accelerator = Accelerator(precision="bf16-mixed")
model = nn.Linear(300, 300)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), [1])
print("after prepare")
"""

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """`run(source, *options, after=())` plans a script with the arguments `after`; returns exit code, stdout and stderr."""

    def command(source: str, *options: str, after: tuple[str, ...] = ()) -> tuple[int, str, str]:
        script = tmp_path / "train.py"
        script.write_text(source)
        code = main(["plan", *options, str(script), *after])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return command


def test_a_script_with_a_trainer(run: Run) -> None:
    before = sys.argv, sys.path[:], Trainer.fit, Trainer.__init__, Accelerator.prepare, nn.Module.register_parameter
    code, out, _ = run(TRAINER, "--processes", "1,4", after=("--width", "400"))
    assert code == 0
    assert "on meta\n" in out
    assert "after fit" not in out
    assert f"{3 * 400 * 401 + 400:,} parameters, {3 * 400 * 401 + 400:,} of them trainable" in out
    assert "bf16-true" in out
    assert "Smallest that fits in" in out
    rows = [line.split() for line in out.splitlines() if line.startswith("  zero2, optimizer on cpu")]
    assert [row[4] for row in rows] == ["1", "4"]
    assert before == (sys.argv, sys.path, Trainer.fit, Trainer.__init__, Accelerator.prepare, nn.Module.register_parameter)
    assert nn.Linear(2, 2).weight.device.type == "cpu"


def test_activations_of_the_scripts_loader(run: Run) -> None:
    _, out, _ = run(TRAINER)
    assert "Activations are not included: AssertionError: nothing is trained, in train.py, line " in out
    steps = TRAINER.replace('raise AssertionError("nothing is trained")', "return self.layers[0](batch * self.scale).sum()")
    _, out, _ = run(steps.replace("fit(module, [1])", "fit(module, [torch.ones(5, arguments.width)])"))
    assert "activations" in out.splitlines()[2].split()


def test_a_script_for_gpus(run: Run) -> None:
    """It can be planned without GPUs, and no process is started."""
    code, out, _ = run(TRAINER, "--device-memory", "80G", "--host-memory", "512GiB", after=("--gpu",))
    assert code == 0
    assert "fits in 80.0 GiB a device and 512.0 GiB a node: single, 1 process" in out
    assert any(line.startswith("* zero3 ") for line in out.splitlines())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, whose memory is known")
def test_the_memory_of_a_gpu_that_is_not_here(run: Run) -> None:
    code, _, err = run(TRAINER, after=("--gpu",))
    assert code == 2
    assert "trainkit plan --device-memory 80G" in err


def test_a_script_with_an_accelerator(run: Run) -> None:
    code, out, _ = run(ACCELERATOR, "--processes", "2")
    assert code == 0
    assert "90,300 parameters" in out
    assert "bf16-mixed" in out
    assert "after prepare" not in out


def test_parameters_with_values(run: Run) -> None:
    code, out, _ = run(TRAINER, "--real", after=("--odd", "values"))
    assert code == 0
    assert "norm " in out
    assert "on cpu\n" in out
    code, _, err = run(TRAINER, after=("--odd", "values"))
    assert code == 2
    assert "trainkit plan --real" in err
    assert "self.scale.norm().item()" in err


def test_a_script_that_fails(run: Run) -> None:
    code, _, err = run(TRAINER, after=("--odd", "broken"))
    assert code == 2
    assert "name 'broken' is not defined" in err
    assert "The script raised an error, see above." in err
    assert "runpy" not in err


def test_a_script_that_trains_nothing(run: Run) -> None:
    code, _, err = run(TRAINER, after=("--odd", "nothing"))
    assert code == 2
    assert "The script ended without a call of Trainer.fit" in err


def test_the_exit_code_of_a_script_is_kept(run: Run) -> None:
    code, _, err = run(TRAINER, after=("--colour", "red"))
    assert code == 2
    assert "unrecognized arguments: --colour" in err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nowhere.py"], "Expected a Python file, got 'nowhere.py', which does not exist"),
        (["."], "which is a folder"),
        (["--processes", "1,x", "train.py"], "expected whole numbers ≥ 1 such as 1,2,4,8, got '1,x'"),
        (["--processes", "0", "train.py"], "expected whole numbers"),
        (["--device-memory", "lots", "train.py"], "expected an amount of memory such as 80G or 512GiB, got 'lots'"),
        (["--colour", "train.py"], "unrecognized arguments: --colour"),
        ([], "the following arguments are required: SCRIPT"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_interrupted(run: Run) -> None:
    code, _, err = run("raise KeyboardInterrupt")
    assert code == 130
    assert err == "interrupted\n"
