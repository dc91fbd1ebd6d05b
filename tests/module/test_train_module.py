"""`TrainModule` outside and inside a run, and its exports. `test_hparams.py` has the tests of hyper-parameters."""

from __future__ import annotations

import copy
import inspect
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import Memory, make_trainer
from torch import nn
from torch.utils.tensorboard import SummaryWriter

import trainkit.callbacks
from trainkit import Callback, DataModule, TrainModule
from trainkit.callbacks import ModelCheckpoint
from trainkit.console import TrainkitWarning
from trainkit.errors import (
    ConfigurationError,
    MissingMethodError,
    MissingPackageError,
    ModuleError,
    NotAvailableError,
    UnsupportedArgumentError,
)

# Without a Trainer


def test_a_module_without_a_trainer() -> None:
    module = TinyModule()
    assert (module.global_step, module.current_epoch, module.global_rank, module.local_rank) == (0, 0, 0, 0)
    assert (module.logger, module.loggers) == (None, [])
    assert (module.device, module.dtype) == (torch.device("cpu"), torch.float32)
    assert module.automatic_optimization is True
    assert module.example_input_array is None
    assert module(torch.zeros(2, 4)).shape == (2, 1)  # it is a torch module like any other
    assert set(module.state_dict()) == {"layer.weight", "layer.bias"}


@pytest.mark.parametrize(
    "use", [lambda m: m.trainer, lambda m: m.optimizers(), lambda m: m.lr_schedulers(), lambda m: m.all_gather(1)]
)
def test_what_needs_a_trainer(use: Any) -> None:
    with pytest.raises(ModuleError, match=r"TinyModule is not attached to a Trainer yet. Call trainer.fit\(module\) first"):
        use(TinyModule())


def test_logging_without_a_trainer_is_a_warning() -> None:
    with pytest.warns(TrainkitWarning, match="outside a Trainer does nothing"):
        loss = TinyModule().training_step(next(iter(tiny_loader())), 0)
    assert loss.requires_grad
    with pytest.warns(TrainkitWarning):
        TinyModule().log_dict({"a": 1.0})


def test_printing_without_a_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    TinyModule().print("a", "b", sep="-", end="!")
    assert capsys.readouterr().out == "a-b!"


@pytest.mark.filterwarnings("ignore:no optimizer step was made")
def test_printing_and_backward_pass_their_arguments_on(capsys: pytest.CaptureFixture[str]) -> None:
    class Twice(TinyModule):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            loss = self.loss(batch)
            self.manual_backward(loss, retain_graph=True)
            self.manual_backward(loss)
            if batch_idx == 0:
                self.print("a", "b", sep="-", end="!")
                self.trainer.print("c", "d", sep="+", end="?")

    make_trainer().fit(Twice(), tiny_loader())
    assert "a-b!c+d?" in capsys.readouterr().out


def test_log_dict_passes_its_options_on() -> None:
    class Logging(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log_dict({"a": 1.0, "b": 2.0}, on_step=False, on_epoch=True, prog_bar=True)
            return self.loss(batch)

    class Beside(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.log("c", 3.0, on_epoch=True, on_step=False)
            self.log_dict({"d": 4.0}, on_epoch=True, on_step=False, prog_bar=True)

    logger = Memory()
    trainer = make_trainer(Beside(), logger=logger)
    trainer.fit(Logging(), tiny_loader())
    assert [logger.of(name) for name in "abcd"] == [{4: 1.0}, {4: 2.0}, {4: 3.0}, {4: 4.0}]
    assert {name: float(value) for name, value in trainer.progress_bar_metrics.items()} == {"a": 1.0, "b": 2.0, "d": 4.0}


@pytest.mark.parametrize("name", ["training_step", "validation_step", "test_step", "configure_optimizers", "train_dataloader"])
def test_what_a_module_does_not_define(name: str) -> None:
    with pytest.raises(NotImplementedError):
        getattr(TrainModule(), name)(*([None, 0] if name.endswith("step") else []))


def test_a_module_without_a_forward() -> None:
    with pytest.raises(MissingMethodError, match=r"TrainModule was called, but has no forward. Define: def forward\(self, x\)"):
        TrainModule()(torch.zeros(1))


def test_device_and_dtype_are_the_parameters() -> None:
    module = TinyModule().double()
    module.register_buffer("count", torch.zeros(1, dtype=torch.int64))
    assert module.dtype is torch.float64
    assert module.to("meta").device == torch.device("meta")

    class OnlyBuffers(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1, dtype=torch.int64, device="meta"))

    assert OnlyBuffers().device == torch.device("meta")
    assert (TrainModule().device, TrainModule().dtype) == (torch.device("cpu"), torch.float32)


def test_freezing() -> None:
    module = TinyModule()
    assert module.freeze() is module
    assert not any(parameter.requires_grad for parameter in module.parameters())
    assert not module.training
    assert not module.layer.training
    assert module.unfreeze() is module
    assert all(parameter.requires_grad for parameter in module.parameters())
    assert module.layer.training


# In a run


class Looking(TinyModule):
    """Calls `look(self)` in each training step and keeps the results."""

    def __init__(self, look: Any) -> None:
        super().__init__()
        self.look, self.seen = [look], []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(self.look[0](self))
        return self.loss(batch)


def looked(look: Any, **arguments: Any) -> tuple[Looking, Any]:
    module, trainer = Looking(look), make_trainer(**arguments)
    trainer.fit(module, tiny_loader())
    return module, trainer


def test_a_module_knows_where_the_run_is() -> None:
    module, trainer = looked(lambda m: (m.current_epoch, m.global_step), max_epochs=2)
    assert module.seen == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 4), (1, 5), (1, 6), (1, 7)]
    assert (module.current_epoch, module.global_step) == (2, 8)
    assert module.trainer is trainer


def test_a_module_sees_its_trainers_loggers() -> None:
    loggers = [Memory(), Memory()]
    module, _ = looked(lambda m: (m.logger, m.loggers), logger=loggers)
    assert module.seen[0] == (loggers[0], loggers)


def test_a_gathered_tensor_is_the_tensor() -> None:
    # with one process, all_gather returns the tensor itself
    module, _ = looked(lambda m: m.all_gather({"a": torch.ones(2)}))
    assert module.seen[0]["a"].tolist() == [1.0, 1.0]


def test_a_group_of_processes_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"expected group=None, got 'mine'.*self.all_gather\(data\)"):
        TinyModule().all_gather(torch.ones(2), group="mine")


def test_printing_in_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    looked(lambda m: m.print("seen", m.global_step))
    assert capsys.readouterr().out == "".join(f"seen {step}\n" for step in range(4))


@pytest.mark.parametrize(
    "trainer, given, expected",
    [
        ({}, {}, None),
        ({"gradient_clip_val": 0.01}, {}, 0.01),
        ({"gradient_clip_val": 0.01}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "norm"}, 0.01),
        ({"gradient_clip_val": 0.01}, {"gradient_clip_val": 0.02}, "gradient_clip_val=0.02.*differ"),
        ({"gradient_clip_val": 0.01}, {"gradient_clip_val": 0}, "gradient_clip_val=0.*differ"),
        ({"gradient_clip_val": 0.01, "gradient_clip_algorithm": "norm"}, {"gradient_clip_algorithm": "value"}, "differ"),
        ({}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "nrom"}, "'norm', 'value', not 'nrom'"),
        ({}, {"gradient_clip_val": 0}, None),
    ],
)
def test_what_clips_by_default(trainer: dict[str, Any], given: dict[str, Any], expected: float | str | None) -> None:
    """`clip_gradients` uses the trainer's value and algorithm unless others are given, which must not contradict them."""
    seen: list[float] = []

    class Clipping(TinyModule):
        def configure_gradient_clipping(self, optimizer: Any, value: Any = None, algorithm: Any = None) -> None:
            before = self.layer.weight.grad.norm()
            self.clip_gradients(optimizer, **given)
            after = torch.cat([p.grad.flatten() for p in self.parameters()]).norm()
            seen.append(None if self.layer.weight.grad.norm() == before else after.item())

    def train() -> None:
        make_trainer(limit_train_batches=1, **trainer).fit(Clipping(), tiny_loader())

    if isinstance(expected, str):
        with pytest.raises(ConfigurationError, match=expected):
            train()
    else:
        train()
        assert seen == [expected if expected is None else pytest.approx(expected, rel=1e-4)]


def test_gradients_are_clipped_by_hand() -> None:
    class Clipping(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.norms: list[Any] = []

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            self.norms.append(self.clip_gradients(optimizer, None))
            self.norms.append(self.clip_gradients(optimizer, 0.5).item())
            self.norms.append(self.clip_gradients(optimizer, 1.0, "norm").item())
            self.norms.append(self.clip_gradients(optimizer, 0.01, gradient_clip_algorithm="value"))
            assert max(p.grad.abs().max().item() for p in self.parameters()) <= 0.01
            optimizer.step()

    module = Clipping()
    make_trainer(limit_train_batches=1).fit(module, tiny_loader())
    nothing, large, small, value = module.norms
    assert nothing is None
    assert large > 1.0
    assert small == pytest.approx(0.5, rel=1e-5)
    assert value is None


def test_a_module_defines_its_own_loaders_and_its_model_late() -> None:
    class Whole(TrainModule):
        def configure_model(self) -> None:
            if not hasattr(self, "layer"):
                self.layer = nn.Linear(4, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", nn.functional.mse_loss(self.layer(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def train_dataloader(self) -> Any:
            return tiny_loader()

        def val_dataloader(self) -> Any:
            return tiny_loader()

    module, trainer = Whole(), make_trainer(precision="64-true")
    trainer.fit(module)
    assert module.layer.weight.dtype is torch.float64
    assert trainer.callback_metrics["val"].item() > 0
    trainer.fit(module)  # a second fit works too


def test_a_copy_leaves_the_run_behind() -> None:
    # a deep copy of a module is not attached to the Trainer
    module, _ = looked(copy.deepcopy)
    start, later = module.seen[0], module.seen[-1]
    assert start._trainer is None
    assert not torch.equal(start.layer.weight, later.layer.weight)
    with pytest.raises(ModuleError, match="not attached"):
        start.trainer


def test_backward_is_automatic_unless_said_otherwise() -> None:
    with pytest.raises(
        ConfigurationError, match=r"manual_backward needs manual optimization. Set self.automatic_optimization ="
    ):
        looked(lambda m: m.manual_backward(torch.zeros((), requires_grad=True)))


# DataModule


def test_a_data_module_knows_its_trainer() -> None:
    class Data(DataModule):
        def __init__(self) -> None:
            self.stages: list[Any] = []

        def prepare_data(self) -> None:
            self.stages.append("prepare")

        def setup(self, stage: str) -> None:
            self.stages.append(("setup", stage, self.trainer is not None))

        def teardown(self, stage: str) -> None:
            self.stages.append(("teardown", stage))

        def train_dataloader(self) -> Any:
            return tiny_loader()

        def test_dataloader(self) -> Any:
            return tiny_loader()

    data, trainer, module = Data(), make_trainer(), TinyModule()
    assert data.trainer is None
    trainer.fit(module, data)
    trainer.test(module, datamodule=data, verbose=False)
    assert data.stages == [
        "prepare",
        ("setup", "fit", True),
        ("teardown", "fit"),
        "prepare",
        ("setup", "test", True),
        ("teardown", "test"),
    ]
    assert trainer.datamodule is data
    assert copy.deepcopy(data).trainer is None


def test_a_trainer_can_be_assigned() -> None:
    trainer, module = make_trainer(), TinyModule()
    module.child = TinyModule()
    module.trainer = trainer
    assert module.trainer is module.child.trainer is trainer
    module.trainer = None
    with pytest.raises(ModuleError, match="not attached to a Trainer"):
        module.child.trainer
    assert not any("trainer" in name for name in module.state_dict())


def test_the_kind_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TinyModule().on_gpu is False
    monkeypatch.setattr(TinyModule, "device", torch.device("cuda", 0))
    assert TinyModule().on_gpu is True


def test_one_optimizer_is_toggled() -> None:
    seen = []

    class Two(TinyModule):
        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__()
            self.other = torch.nn.Linear(4, 1)

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
            first, _ = self.optimizers()
            with suppress(KeyError), self.toggled_optimizer(first):
                seen.append((self.layer.weight.requires_grad, self.other.weight.requires_grad))
                raise KeyError
            seen.append((self.layer.weight.requires_grad, self.other.weight.requires_grad))
            self.manual_backward(self.loss(batch))
            first.step()

        def configure_optimizers(self) -> list[torch.optim.Optimizer]:
            return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.layer, self.other)]

    make_trainer(max_steps=1).fit(Two(), tiny_loader())
    assert seen == [(True, False), (True, True)]


def test_modules_inside_follow_the_run() -> None:
    steps = []

    class Outer(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = TinyModule()

        def on_train_batch_end(self, *given: object) -> None:
            steps.append((self.inner.global_step, self.inner.trainer is self.trainer))

    make_trainer(max_steps=2).fit(Outer(), tiny_loader())
    assert steps == [(1, True), (2, True)]


def walked(thing: Any) -> set[str]:
    """The public properties of an object; reading one raises nothing, or an AttributeError that says more than its name."""
    names = {name for name in dir(type(thing)) if isinstance(getattr(type(thing), name), property) and name[0] != "_"}
    for name in names:
        with suppress(NotAvailableError):  # an AttributeError of another kind fails the test
            getattr(thing, name)
    return names


def test_tools_may_look_at_every_property() -> None:
    """`inspect`, `torch.jit` and `hasattr` read all attributes, of modules and trainers before and after a run."""
    fresh, module = TinyModule(), TinyModule()
    callbacks = [kind() for kind in without_arguments()]
    loose = [kind() for kind in without_arguments()]
    trainer = make_trainer(ModelCheckpoint(), max_epochs=1, enable_checkpointing=True)
    before = make_trainer()
    trainer.fit(module, tiny_loader(4))
    for thing in (fresh, module, trainer, before, *trainer.callbacks, *callbacks, *loose):
        walked(thing)
        inspect.getmembers(thing)
    assert {"sample_mask", "trainer", "device"} <= walked(module)
    assert len(callbacks) > 20
    assert not hasattr(fresh, "sample_mask")
    assert not hasattr(before, "lightning_module")
    with pytest.raises(NotAvailableError, match="not attached to a Trainer"):
        fresh.sample_mask


def without_arguments() -> list[Any]:
    """The callbacks that need no argument."""
    found = []
    for name in trainkit.callbacks.__all__:
        kind = getattr(trainkit.callbacks, name)
        if not (inspect.isclass(kind) and issubclass(kind, Callback)):
            continue
        needed = [p for p in inspect.signature(kind).parameters.values() if p.default is p.empty and p.kind < p.VAR_POSITIONAL]
        if not needed:
            found.append(kind)
    return found


@pytest.mark.parametrize("attached", [False, True])
def test_a_module_can_be_traced_scripted_and_drawn(attached: bool, run_dir: Path) -> None:
    module, batch = TinyModule(), torch.ones(2, 4)
    if attached:
        make_trainer(max_epochs=1).fit(module, tiny_loader(4))
    expected = module(batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch advises torch.export
        assert torch.equal(torch.jit.trace(module, batch)(batch), expected)
        assert torch.equal(torch.jit.script(module)(batch), expected)
        with SummaryWriter(str(run_dir)) as writer:
            writer.add_graph(module, batch)
    assert list(run_dir.glob("events*"))


def test_an_error_of_an_own_property_is_shown() -> None:
    """`nn.Module` says that the property is missing."""

    class Wrong(TinyModule):
        @property
        def size(self) -> int:
            return self.layer.missing  # type: ignore[no-any-return]

    with pytest.raises(AttributeError, match="'Linear' object has no attribute 'missing'"):
        Wrong().size


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What `torch.onnx.export` was called with."""
    made: list[tuple[Any, ...]] = []

    def export(module: nn.Module, args: Any, file: Any, **options: Any) -> str:
        made.append((args, file, options, module.training, torch.is_grad_enabled()))
        return "program"

    monkeypatch.setattr(torch.onnx, "export", export)
    return made


def test_what_torch_gets(calls: list[tuple[Any, ...]], run_dir: Path) -> None:
    module, x = TinyModule(), torch.zeros(1, 4)
    module.layer.eval()
    assert module.to_onnx(run_dir / "model.onnx", x, verbose=False) == "program"
    assert calls == [((x,), run_dir / "model.onnx", {"verbose": False}, False, False)]
    assert (module.training, module.layer.training) == (True, False)
    module.example_input_array = (x,)
    module.to_onnx()
    assert calls[1][:3] == ((x,), None, {})


def test_without_an_input() -> None:
    with pytest.raises(ConfigurationError, match=r"TinyModule.to_onnx needs an input of forward. Pass it: module.to_onnx"):
        TinyModule().to_onnx("model.onnx")


@pytest.mark.parametrize("package", ["onnx", "onnxscript"])
def test_a_missing_package(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def export(*args: Any, **options: Any) -> None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    monkeypatch.setattr(torch.onnx, "export", export)
    module = TinyModule()
    with pytest.raises(MissingPackageError, match=f"needs the package '{package}'.* pip install onnx onnxscript"):
        module.to_onnx("model.onnx", torch.zeros(1, 4))
    assert module.training


def test_another_missing_module_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def export(*args: Any, **options: Any) -> None:
        raise ModuleNotFoundError("No module named 'mine'", name="mine")

    monkeypatch.setattr(torch.onnx, "export", export)
    with pytest.raises(ModuleNotFoundError, match="mine"):
        TinyModule().to_onnx("model.onnx", torch.zeros(1, 4))


def test_tensorrt_is_refused() -> None:
    with pytest.raises(
        UnsupportedArgumentError, match=r"to_tensorrt is not supported. Use the package torch_tensorrt: torch_te"
    ):
        TinyModule().to_tensorrt("model.pt", input_sample=torch.zeros(1, 4))


def test_torchscript_is_refused_and_the_advice_works(run_dir: Path) -> None:
    module, x = TinyModule(), torch.randn(3, 4)
    with pytest.raises(UnsupportedArgumentError, match=r"to_torchscript is not supported.* Use torch.export:") as error:
        module.to_torchscript("model.pt", method="trace")
    exec(str(error.value).partition("torch.export: ")[2], {"torch": torch, "module": module, "x": x})
    assert torch.equal(torch.export.load("model.pt2").module()(x), module(x))
