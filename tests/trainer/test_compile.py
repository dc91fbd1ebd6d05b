"""`Trainer(compile=)`, and a module from `torch.compile`: trained like the module itself, and compiled once for each kind."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.runs.blocks import Block, BlockModule, Counting, block_loader
from helpers.runs.tiny import ManualModule, TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer, parameters_of
from helpers.worlds.worlds import run_world
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainkit import Callback
from trainkit.checkpoint import open_checkpoint
from trainkit.errors import ConfigurationError, UnknownNameError, UnsupportedArgumentError
from trainkit.strategies import DDPStrategy, ZeROStrategy


@pytest.fixture(autouse=True)
def _no_graphs_left() -> Iterator[None]:
    yield
    torch.compiler.reset()


class Graphs(Callback):
    """Records how many graphs there are after each training batch and each validation."""

    def __init__(self, backend: Counting) -> None:
        self.backend = backend
        self.training: list[int] = []
        self.validation: list[int] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.training.append(self.backend.graphs)

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        self.validation.append(self.backend.graphs)


def trained(compile: Any, kind: type[BlockModule] = BlockModule, **arguments: Any) -> tuple[dict[str, float], Any]:
    """The metrics and the parameters after two epochs."""
    module = kind()
    trainer = make_trainer(max_epochs=2, compile=compile, **arguments)
    trainer.fit(module, block_loader(), block_loader())
    return {name: float(value) for name, value in trainer.callback_metrics.items()}, parameters_of(module)


def assert_equal(one: Any, other: Any) -> None:
    assert one[0] == other[0]
    assert all(torch.equal(one[1][name], other[1][name]) for name in other[1])


# ------------------------------------------------------------------------------------------------------ what is compiled


@pytest.mark.parametrize("regional", [True, False])
@pytest.mark.parametrize("inference_mode", [True, False])
def test_compilations(regional: bool, inference_mode: bool) -> None:
    """One for training, one for the short last batch, one for evaluation; none in the second epoch."""
    backend = Counting()
    graphs = Graphs(backend)
    how = {"backend": backend, "regional": regional, "fullgraph": True}
    trainer = make_trainer(graphs, max_epochs=2, compile=how, inference_mode=inference_mode)
    trainer.fit(BlockModule(), block_loader(), block_loader())
    assert graphs.training == [1, 1, 1, 1, 1, 2] + [3] * 6
    assert graphs.validation == [3, 3]


@pytest.mark.parametrize("regional, window", [(True, 1), (False, 4)])
def test_the_same_results(regional: bool, window: int) -> None:
    """Also with dropout, whose masks are the same ones, and with accumulation."""
    how = {"backend": Counting(autograd=True), "regional": regional}
    assert_equal(trained(how, accumulate_grad_batches=window), trained(None, accumulate_grad_batches=window))
    assert how["backend"].graphs >= 3  # type: ignore[attr-defined]


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_other_precisions(precision: str) -> None:
    assert_equal(trained({"backend": "eager"}, precision=precision), trained(False, precision=precision))


class Checkpointing(BlockModule):
    def run_block(self, block: nn.Module, hidden: Tensor) -> Tensor:
        return checkpoint(block, hidden, use_reentrant=False)


@pytest.mark.parametrize("regional", [True, False])
def test_activation_checkpointing(regional: bool) -> None:
    backend = Counting(autograd=True)
    assert_equal(trained({"backend": backend, "regional": regional}, Checkpointing), trained(None))
    assert backend.graphs >= 3


def test_names_and_types_stay_and_nothing_is_compiled_after_the_run() -> None:
    backend, module, seen = Counting(), BlockModule(), []

    class Looking(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            seen.append(([type(block) for block in module.blocks], list(module.state_dict())))

    trainer = make_trainer(Looking(), compile={"backend": backend})
    trainer.fit(module, block_loader())
    trainer.save_checkpoint("there")
    names = list(BlockModule().state_dict())
    assert seen == [([Block] * 3, names)]
    assert set(open_checkpoint("there").read().tensors["model"]) == set(names)
    graphs = backend.graphs
    assert graphs > 0
    make_trainer().fit(module, block_loader())
    module(torch.ones(7, 4))
    assert backend.graphs == graphs


def test_a_run_that_fails_undoes_it() -> None:
    class Failing(BlockModule):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            super().training_step(batch, batch_idx)
            raise OSError("the disk")

    backend, module = Counting(), Failing()
    with pytest.raises(OSError, match="the disk"):
        make_trainer(compile={"backend": backend}).fit(module, block_loader())
    module(torch.ones(7, 4))
    assert backend.graphs == 1


def test_blocks_that_the_user_has_compiled() -> None:
    """They stay as the user compiled them, in the run and after it."""
    backend, own, module = Counting(), Counting(), BlockModule()
    module.blocks[1].compile(backend=own)
    make_trainer(compile={"backend": backend}).fit(module, block_loader(8))
    assert (backend.graphs, own.graphs) == (1, 1)
    module(torch.ones(7, 4))
    assert (backend.graphs, own.graphs) == (1, 2)


def test_blocks_of_configure_model() -> None:
    class Late(BlockModule):
        def configure_model(self) -> None:
            self.blocks = nn.ModuleList(Block(8) for _ in range(3))

    backend = Counting()
    make_trainer(compile={"backend": backend}).fit(Late(), block_loader(8))
    assert backend.graphs == 1


def test_evaluations() -> None:
    backend, module = Counting(), BlockModule()
    trainer = make_trainer(compile={"backend": backend})
    expected = make_trainer().validate(module, block_loader(), verbose=False)
    assert trainer.validate(module, block_loader(), verbose=False) == expected
    assert backend.graphs == 2  # whole batches and the short one
    trainer.validate(module, block_loader(), verbose=False)
    assert backend.graphs == 2


@pytest.mark.parametrize("modules", ["Linear", "blocks.*.inner", [nn.Linear], lambda name, module: name.endswith("inner")])
def test_modules_that_the_user_chooses(modules: Any) -> None:
    backend = Counting()
    make_trainer(compile={"backend": backend, "modules": modules}).fit(BlockModule(), block_loader(8))
    assert backend.graphs >= 1


def test_a_model_without_blocks() -> None:
    """`True` compiles its steps."""
    torch.manual_seed(1)
    backend, module = Counting(), TinyModule()
    make_trainer(compile={"backend": backend}).fit(module, tiny_loader(), tiny_loader())
    assert backend.graphs == 2
    with pytest.raises(ConfigurationError, match=r"compile='regional': TinyModule has no repeated blocks\. .*compile='whole'"):
        make_trainer(compile="regional").fit(module, tiny_loader())


# ------------------------------------------------------------------------------------------------------------- self.log


def test_log_breaks_no_graph() -> None:
    """`torch._dynamo.explain` finds one graph, although the step logs."""
    found = []

    class Explaining(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            report = torch._dynamo.explain(module.training_step)(batch, batch_idx)
            found.append((report.graph_count, report.graph_break_count))

    make_trainer(Explaining(), compile={"backend": "eager", "regional": False}, max_steps=1).fit(BlockModule(), block_loader())
    assert found == [(1, 0)]


class Logging(BlockModule):
    """Logs in several ways, and changes a tensor in place after it has logged it."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        changed = loss.detach() * 1
        self.log("changed", changed, on_step=True)
        self.log("largest", changed, on_step=False, on_epoch=True, reduce_fx=torch.max)
        changed.mul_(100)
        self.log("median", loss, on_step=False, on_epoch=True, reduce_fx=lambda values: values.median(), batch_size=3)
        self.log_dict({"samples": len(batch[0]), "constant": 2.5}, on_epoch=True)
        return loss


def test_what_is_logged() -> None:
    how = {"backend": Counting(autograd=True), "regional": False, "fullgraph": True}
    expected = trained(None, Logging)
    assert_equal(trained(how, Logging), expected)
    assert {"changed", "largest", "median", "samples_epoch", "constant_step", "val_loss"} <= set(expected[0])


def test_the_order_of_what_is_logged() -> None:
    """A graph break between two calls does not change their order."""

    class Breaking(BlockModule):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = nn.functional.mse_loss(self(batch[0]), batch[1])
            self.log("twice", loss)
            torch._dynamo.graph_break()
            self.log("twice", loss * 2)
            return loss

    backend = Counting()
    assert_equal(trained({"backend": backend, "regional": False}, Breaking), trained(None, Breaking))
    assert backend.graphs > 3


def test_an_error_of_log() -> None:
    class Wrong(TinyModule):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            self.log("vector", batch[0])
            return self.loss(batch)

    with pytest.raises(Exception, match=r"log\('vector'\): expected a number or a tensor with one element"):
        make_trainer(compile={"backend": "eager", "regional": False}).fit(Wrong(), tiny_loader())


def test_manual_optimization() -> None:
    results = []
    for how in (None, {"backend": "eager", "regional": False}):
        torch.manual_seed(2)
        module = ManualModule()
        make_trainer(compile=how).fit(module, tiny_loader())
        results.append(parameters_of(module))
    torch.testing.assert_close(results[0], results[1])  # torch 2.9 rounds one of them in another way


# ---------------------------------------------------------------------------------------------------------- exact resume


class Stopping(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 8:
            trainer.save_checkpoint("there")


def assert_resumes(how: Any) -> None:
    whole = BlockModule()
    make_trainer(Stopping(), max_epochs=3, compile=how).fit(whole, block_loader(), block_loader())
    torch.compiler.reset()
    resumed = BlockModule()
    trainer = make_trainer(max_epochs=3, compile=how)
    trainer.fit(resumed, block_loader(), block_loader(), ckpt_path="there")
    expected, found = parameters_of(whole), parameters_of(resumed)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize("regional", [True, False])
def test_resume_is_bit_identical(regional: bool) -> None:
    assert_resumes({"backend": "aot_eager", "regional": regional})


@pytest.mark.slow
@pytest.mark.parametrize("how", ["regional", "whole"])
def test_resume_is_bit_identical_with_inductor(how: str) -> None:
    run_world(1, assert_resumes, how)  # inductor leaves processes and threads behind


# ---------------------------------------------------------------------------------------------------- several processes


class Wide(BlockModule):
    width = 320  # 2.4 MB of parameters


@pytest.mark.world_size(2)
def test_two_processes() -> None:
    """The blocks, or the steps, run inside DDP's forward; buckets of 1 MB cut the graph of a step."""

    def trained_by(how: Any) -> Any:
        torch.compiler.reset()
        strategy = DDPStrategy(device="cpu", bucket_cap_mb=1)
        return trained(how, Wide, strategy=strategy, devices=2, accumulate_grad_batches=2)

    expected, graphs = trained_by(None), []
    for regional in (True, False):
        backend = Counting(autograd=True)
        assert_equal(trained_by({"backend": backend, "regional": regional}), expected)
        graphs.append(backend.graphs)
    assert 2 <= graphs[0] < graphs[1]


# --------------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    "value, error, message",
    [
        ("blocks", ConfigurationError, "compile='blocks': expected True, False, 'regional', 'whole' or a dict of arguments"),
        (1.5, ConfigurationError, r"compile=1\.5: expected True, False"),
        ({"mod": "x"}, UnknownNameError, r"unknown key 'mod'; known: regional, modules, fullgraph, .*Did you mean 'mode'"),
        ({"backend": "inducter"}, ConfigurationError, r"compile=.*: expected one of .*inductor.*Did you mean 'inductor'"),
        (
            {"mode": "fastest"},
            ConfigurationError,
            r"torch\.compile does not accept these arguments: .*fastest.*compile=\{'mode'",
        ),
        ({"regional": "yes"}, ConfigurationError, "expected True or False for regional, not 'yes'"),
        ({"regional": False, "modules": "Block"}, ConfigurationError, r"Remove one of the two: compile=\{'modules': 'Block'\}"),
    ],
)
def test_wrong_arguments(value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_trainer(compile=value)


def test_modules_that_are_not_there() -> None:
    with pytest.raises(UnknownNameError, match=r"compile\['modules'\]='Blok' matches no module .*Did you mean 'Block'"):
        make_trainer(compile={"modules": "Blok"}).fit(BlockModule(), block_loader())


def test_strategies_that_compile_only_blocks_or_nothing() -> None:
    with pytest.raises(UnsupportedArgumentError, match="compile='whole' does not work with ZeROStrategy, .*compile='regional'"):
        make_trainer(strategy=ZeROStrategy(2, device="cpu"), compile="whole")
    with pytest.raises(UnsupportedArgumentError, match="compile='regional' does not work with ZeROStrategy, .*strategy='ddp'"):
        make_trainer(strategy=ZeROStrategy(3, device="cpu"), compile="regional")


@pytest.mark.parametrize("off", [None, False, {"disable": True}])
def test_without_compiling(off: Any) -> None:
    trainer = make_trainer(compile=off)
    assert trainer._run.compilation is None
    assert "compile" not in trainer.explain(BlockModule())


@pytest.mark.parametrize(
    "how, fact",
    [
        (True, "3 × Block, backend inductor"),
        ("whole", "the steps, backend inductor"),
        ({"mode": "reduce-overhead", "modules": "Linear"}, "8 × Linear, backend inductor, mode reduce-overhead"),
        ({"backend": Counting(), "dynamic": False}, "3 × Block, backend Counting, dynamic False"),
    ],
)
def test_explain(how: Any, fact: str) -> None:
    assert re.search(rf"compile +{fact}\n", make_trainer(compile=how).explain(BlockModule()))


def test_a_run_says_what_it_compiles(caplog: pytest.LogCaptureFixture) -> None:
    make_trainer(compile={"backend": "eager"}).fit(BlockModule(), block_loader())
    assert "compile: 3 × Block, backend eager." in caplog.text


# ----------------------------------------------------------------------------------------- a module from torch.compile


def test_steps_are_compiled_and_results_are_the_same() -> None:
    torch.manual_seed(3)
    plain = TinyModule()
    compiled, backend = TinyModule(), Counting()
    compiled.load_state_dict(plain.state_dict())
    results = []
    for given in (plain, torch.compile(compiled, backend=backend, fullgraph=True)):
        trainer = make_trainer(max_epochs=2)
        trainer.fit(given, tiny_loader(), tiny_loader())
        results.append({name: float(value) for name, value in trainer.callback_metrics.items()})
        assert trainer.lightning_module in (plain, compiled)
    assert backend.graphs == 2  # of training and of validation
    assert results[0] == pytest.approx(results[1], rel=1e-6)
    assert set(results[0]) == {"train_loss", "val_loss"}


def test_a_later_fit_of_the_module_itself_is_not_compiled() -> None:
    module, backend = TinyModule(), Counting()
    trainer = make_trainer()
    trainer.fit(torch.compile(module, backend=backend), tiny_loader())
    graphs = backend.graphs
    trainer.fit(module, tiny_loader())
    assert backend.graphs == graphs > 0


def test_compiling_leaves_no_trace_in_a_checkpoint() -> None:
    trainer = make_trainer()
    trainer.fit(torch.compile(TinyModule(), backend="eager"), tiny_loader())
    trainer.save_checkpoint("there")
    assert set(open_checkpoint("there").read().tensors["model"]) == {"layer.weight", "layer.bias"}


def test_two_ways_at_once() -> None:
    with pytest.raises(ConfigurationError, match=r"Trainer\(compile=True\) and torch\.compile\(module\) both .*fit\(Tiny"):
        make_trainer(compile=True).fit(torch.compile(TinyModule(), backend="eager"), tiny_loader())
