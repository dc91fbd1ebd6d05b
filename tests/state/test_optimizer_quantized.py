"""The quantized state of torchao's optimizers, and of bitsandbytes': saved and restored bit for bit."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs.trainers import make_trainer, parameters_of
from helpers.worlds.worlds import run_world
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trainkit import TrainModule
from trainkit.errors import CorruptCheckpointError, MissingPackageError, StateMismatchError
from trainkit.optim.parameter_names import ParameterNames, parameter_names
from trainkit.state.optimizer import QUANTIZED_CLASSES, capture_optimizer, plan_optimizer

KINDS_OF = {"AdamW8bit": "OptimState8bit", "AdamW4bit": "OptimState4bit", "AdamWFp8": "OptimStateFp8"}


@pytest.fixture(autouse=True)
def _eager() -> Iterator[None]:
    """torchao compiles its step, which would take half a minute."""
    with torch.compiler.set_stance("force_eager"):
        yield


class Blocks(torch.optim.Optimizer):
    """Sign descent with a state like that of bitsandbytes: codes of the parameter's shape, a scale for each block, a table."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state |= {"step": 0, "state1": torch.zeros_like(parameter, dtype=torch.uint8)}
                state |= {"absmax1": torch.zeros(3), "qmap1": torch.linspace(-1, 1, 256)}
            state["step"] += 1
            state["state1"] += (parameter.grad > 0).to(torch.uint8)
            state["absmax1"] += parameter.grad.abs().max()
            parameter.data -= (
                self.param_groups[0]["lr"] * parameter.grad.sign() / (1 + state["state1"] + state["absmax1"].mean())
            )


def optimizer(name: str, module: nn.Module) -> torch.optim.Optimizer:
    if name == "Blocks":
        return Blocks(module.parameters(), lr=1e-2)
    from torchao import optim

    kind: Callable[..., torch.optim.Optimizer] = getattr(optim, name)
    return kind(module.parameters(), lr=1e-2)


class Net(TrainModule):
    def __init__(self, name: str, width: int = 128) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.name, self.losses = name, list[float]()
        self.net = nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 8))  # state of 4096 values is quantized

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer(self.name, self)


def batches() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(48, 32, generator=generator), torch.randint(8, (48,), generator=generator))
    return DataLoader(data, batch_size=16)


def fitted(name: str, epochs: int, folder: Path | None = None, ckpt_path: str | None = None) -> Net:
    module = Net(name)
    options: dict[str, Any] = {"enable_checkpointing": folder is not None, "default_root_dir": folder}
    make_trainer(max_epochs=epochs, **options).fit(module, batches(), ckpt_path=ckpt_path)
    return module


def resumed(module: Net, folder: Path, **options: Any) -> None:
    """Resume from a checkpoint in the folder, and save none."""
    make_trainer(max_epochs=2, **options).fit(module, batches(), ckpt_path=newest(folder))


def newest(folder: Path) -> Path:
    return max(folder.rglob("step-*"))


@pytest.mark.parametrize("name", [*KINDS_OF, "Blocks"])
def test_resume_is_bit_identical(name: str, tmp_path: Path) -> None:
    whole = fitted(name, 2)
    first, second = fitted(name, 1, tmp_path), fitted(name, 2, tmp_path, "last")
    assert first.losses + second.losses == whole.losses
    assert all(torch.equal(value, parameters_of(whole)[key]) for key, value in parameters_of(second).items())


class Restored(Net):
    """Stops before its first step; has what was restored."""

    def on_train_start(self) -> None:
        self.restored = capture_optimizer(self.trainer.optimizers[0], 0, parameter_names([self])).tensors
        self.trainer.should_stop = True


def restored_under_ddp(folder: Path) -> dict[str, Tensor]:
    module = Restored("AdamW8bit")
    with torch.compiler.set_stance("force_eager"):
        resumed(module, folder, strategy="ddp", devices=2, accelerator="cpu")
    return module.restored


@pytest.mark.slow
def test_from_one_device_to_ddp(tmp_path: Path) -> None:
    """Each rank has the whole state."""
    fitted("AdamW8bit", 1, tmp_path)
    module = Restored("AdamW8bit")
    resumed(module, tmp_path)
    assert module.restored["0/net.0.weight/exp_avg.codes"].any()
    for found in run_world(2, restored_under_ddp, tmp_path):
        assert found.keys() == module.restored.keys()
        assert all(torch.equal(value, module.restored[key]) for key, value in found.items())


def trained(name: str, width: int = 128) -> tuple[Net, torch.optim.Optimizer, ParameterNames]:
    module = Net(name, width)
    made = optimizer(name, module)
    module.net(torch.ones(4, 32)).sum().backward()
    made.step()
    return module, made, parameter_names([module])


@pytest.mark.parametrize("name", KINDS_OF)
def test_inner_tensors_are_slots(name: str) -> None:
    _, made, names = trained(name)
    stored = capture_optimizer(made, 0, names)
    inner = [f"0/net.0.weight/exp_avg.{part}" for part in QUANTIZED_CLASSES[KINDS_OF[name]][1]]
    assert set(inner) <= set(stored.irregular)
    assert all(type(tensor) is Tensor for tensor in stored.tensors.values())
    about = stored.described["state"]["net.0.weight"]["quantized"]["exp_avg"]
    assert (about["class"], about["shape"]) == (KINDS_OF[name], (128, 32))
    assert "quantized" not in stored.described["state"]["net.0.bias"]  # small state is not


def plan(stored: Any, module: Net, made: torch.optim.Optimizer) -> Any:
    return plan_optimizer(made, 0, parameter_names([module]), stored.tensors, stored.described, {}, "the checkpoint")


def test_a_parameter_of_another_shape() -> None:
    _, made, names = trained("AdamW8bit")
    other, theirs, _ = trained("AdamW8bit", width=256)
    with pytest.raises(StateMismatchError, match=r"net.0.weight: exp_avg has shape \(128, 32\), but the parameter has shape"):
        plan(capture_optimizer(made, 0, names), other, theirs)


@pytest.mark.parametrize("change", [{"class": "os:system"}, {"shape": [128, 32]}, {"attributes": 3}, {"shape": ("a",)}, None])
def test_a_malformed_description(change: dict[str, Any] | None) -> None:
    module, made, names = trained("AdamW8bit")
    stored = capture_optimizer(made, 0, names)
    stored.described = copy.deepcopy(stored.described)
    quantized = stored.described["state"]["net.0.weight"]["quantized"]
    if change is None:
        quantized["exp_avg"] = 3
    else:
        quantized["exp_avg"] |= change
    with pytest.raises(CorruptCheckpointError, match="net.0.weight"):
        plan(stored, module, made)


def test_an_inner_tensor_that_is_missing() -> None:
    module, made, names = trained("AdamW8bit")
    stored = capture_optimizer(made, 0, names)
    del stored.tensors["0/net.0.weight/exp_avg.scale"]
    with pytest.raises(CorruptCheckpointError, match="the quantized tensor 'exp_avg' of 'net.0.weight' is incomplete"):
        plan(stored, module, made)


def test_without_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    module, made, names = trained("AdamW8bit")
    stored = capture_optimizer(made, 0, names)
    monkeypatch.setitem(sys.modules, "torchao.optim.subclass_8bit", None)
    with pytest.raises((MissingPackageError, StateMismatchError), match="needs the package 'torchao'"):
        plan(stored, module, made)()
