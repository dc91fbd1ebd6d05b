"""`RecompileMonitor` with simulated compilations. Real ones are tested in test_recompile_monitor_xla.py."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from torch import Tensor, nn

from trainkit.callbacks import RecompileMonitor, recompile_monitor
from trainkit.callbacks.recompile_monitor import inputs_of_batch, numbers_in
from trainkit.console import TrainkitWarning
from trainkit.errors import ConfigurationError
from trainkit.micro_batch import WHOLE_WINDOW


class Lazy:
    """A placeholder for a strategy; the test sets the number of graphs that it has compiled."""

    name = "lazy"

    def __init__(self) -> None:
        self.compilations: int | None = 7  # graphs of an earlier run in this process
        self.hints = {"graphs": 40, "reads": 3}

    def compilation_hints(self) -> dict[str, int]:
        return dict(self.hints)


class Run:
    """A fit, one hook at a time. `step` is a micro-batch in which `compiled` graphs are compiled."""

    def __init__(self, trainer: Any, module: Any, **arguments: Any) -> None:
        self.trainer, self.module, self.strategy = trainer, module, Lazy()
        trainer.strategy, trainer.should_log = self.strategy, False
        trainer.accelerator.accumulation = SimpleNamespace(current=WHOLE_WINDOW)
        trainer.optimizers = [torch.optim.AdamW(module.parameters(), weight_decay=0.1)]
        self.callback = RecompileMonitor(**arguments)
        self.callback._module = module
        self.start()

    def start(self) -> None:
        self.batch_idx = 0
        self.callback.setup(self.trainer, self.module, "fit")
        self.callback.on_fit_start(self.trainer, self.module)
        self.callback.on_train_start(self.trainer, self.module)

    def compile(self, graphs: int = 1) -> None:
        assert self.strategy.compilations is not None
        self.strategy.compilations += graphs

    def step(
        self,
        batch: Any = (8, 16),
        compiled: int = 0,
        *,
        first: bool = True,
        full: bool = True,
        outputs: Any = (),
        graphs: int = 1,
        **hints: int,
    ) -> list[str]:
        """Run a micro-batch; returns its warnings. A tuple of sizes is the shape of a tensor "x"."""
        batch = {"x": torch.zeros(batch)} if isinstance(batch, tuple) and all(isinstance(n, int) for n in batch) else batch
        accelerator = self.trainer.accelerator
        accelerator.accumulation.current = accelerator.accumulation.current._replace(first=first, last=full)
        self.trainer.accelerator.sync_gradients = full
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.callback.on_train_batch_start(self.trainer, self.module, batch, self.batch_idx)
            if compiled:
                self.compile(compiled)
            for name, number in {"graphs": graphs, **hints}.items():
                self.strategy.hints[name] = self.strategy.hints.get(name, 0) + number
            self.trainer.global_step += full
            self.callback.on_train_batch_end(self.trainer, self.module, outputs, batch, self.batch_idx)
        self.batch_idx += 1
        assert all(warning.category is TrainkitWarning for warning in caught)
        return [str(warning.message) for warning in caught]

    def warm_up(self) -> None:
        assert self.step(compiled=1) == self.step(compiled=1) == self.step() == []

    def validate(self, *batches: tuple[tuple[int, ...], int], sanity: bool = False, index: int = 0) -> None:
        """Run a validation. Each batch is a shape and the number of graphs that are compiled in it."""
        self.trainer.sanity_checking = sanity
        self.callback.on_validation_start(self.trainer, self.module)
        for batch_idx, (sizes, compiled) in enumerate(batches):
            if compiled:
                self.compile(compiled)
            self.callback.on_validation_batch_end(self.trainer, self.module, None, torch.zeros(sizes), batch_idx, index)
        self.callback.on_validation_end(self.trainer, self.module)
        self.trainer.sanity_checking = False


@pytest.fixture
def run(trainer: Any, module: Any) -> Run:
    return Run(trainer, module)


@pytest.fixture
def said(monkeypatch: Any) -> list[str]:
    """The notices of the callback."""
    messages: list[str] = []
    monkeypatch.setattr(recompile_monitor, "notice", messages.append)
    return messages


def holds(texts: list[str], *words: str) -> None:
    """Check that there is one text, and that it contains these words."""
    assert len(texts) == 1, texts
    for word in words:
        assert word in texts[0]


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("warmup_steps", 0, "≥ 1"),
        ("warmup_steps", 2.0, "not 2.0"),
        ("max_warnings", -1, "≥ 0"),
        ("max_warnings", None, "not None"),
    ],
)
def test_a_wrong_argument_is_named_with_its_fix(name: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        RecompileMonitor(**{name: value})
    holds([str(caught.value)], words, f"RecompileMonitor({name}=")


# -------------------------------------------------------------------------------------------- expected compilations


def test_warm_up_is_expected(run: Run, said: list[str]) -> None:
    run.warm_up()
    assert run.callback.counts == {"warm-up": 2}
    assert run.callback.unexpected == 0
    run.callback.on_train_end(run.trainer, run.module)
    assert said == []


def test_warm_up_counts_updates_of_this_fit(trainer: Any, module: Any) -> None:
    trainer.global_step = 1000  # a resumed run
    run = Run(trainer, module, warmup_steps=3)
    for _ in range(3):
        for first, full in ((True, False), (False, False), (False, True)):
            assert run.step(compiled=1, first=first, full=full) == []
    holds(run.step(compiled=1, full=False), "in step 1004 (epoch 0, batch_idx 9)")


def test_the_short_last_batch_is_said_once(run: Run, said: list[str]) -> None:
    run.warm_up()
    run.batch_idx = 9
    assert run.step((5, 16), compiled=1) == []
    holds(said, "1 graph was compiled in step 4 (epoch 0, batch_idx 9), as expected once", "batch['x']: [8, 16] → [5, 16]")
    holds(said, "DataLoader(drop_last=True)", "XLAStrategy(pad_last_batch=True)")
    assert run.step((5, 16)) == []
    assert run.callback.counts == {"warm-up": 2, "expected": 1}
    run.batch_idx = 9
    holds(run.step((3, 16), compiled=1), "batch['x']: [5, 16] → [3, 16]", "pad_last_batch=True")  # only one size is expected
    assert run.callback.unexpected == 1


@pytest.mark.parametrize("place, length, expected", [(3, 10, False), (3, math.inf, True)])
def test_a_short_batch_in_the_middle(run: Run, place: int, length: float, expected: bool) -> None:
    """It is expected if the length of the epoch is unknown, because it may be the last batch."""
    run.trainer.num_training_batches = length
    run.warm_up()
    run.batch_idx = place
    assert (run.step((5, 16), compiled=1) == []) is expected


def test_a_short_batch_in_warm_up_is_the_one_to_expect(run: Run) -> None:
    run.step((8, 16), compiled=1)
    run.step((5, 16), compiled=1)
    run.step((8, 16), compiled=1)
    run.batch_idx = 9
    holds(run.step((3, 16), compiled=1), "[5, 16] → [3, 16]")


def test_what_the_first_step_alone_has_had(run: Run) -> None:
    """In the first step the optimizer has no state yet, so a batch of the same shape needs one more graph later."""
    run.step((8, 12), compiled=1)
    run.step((8, 16), compiled=1)
    assert run.step((8, 12), compiled=1) == []
    holds(run.step((8, 12), compiled=1), "Neither")


def test_known_parts_in_a_new_combination(run: Run, said: list[str]) -> None:
    """A known shape at a known place in the window, in a new combination, needs another graph: once, without a warning."""
    for length in (16, 12):
        for first, full in ((True, False), (False, True)):
            run.step((8, length), compiled=1, first=first, full=full)
    run.step((8, 10), first=False)
    assert run.step((8, 10), compiled=1, full=False) == []
    assert said == []
    assert run.callback.counts["expected"] == 1


def test_the_first_log_boundary(run: Run, said: list[str]) -> None:
    run.warm_up()
    run.trainer.should_log = True
    assert run.step(compiled=1) == []
    holds(said, "the first step at a log boundary")
    holds(run.step(compiled=1), "Neither")


def test_the_shorter_last_window(run: Run, said: list[str]) -> None:
    for _ in range(2):
        run.step(compiled=1, full=False)
        run.step(compiled=1, first=False)
    assert run.step(compiled=1) == []
    holds(said, "place in its accumulation window")


def test_a_window_in_which_not_all_processes_have_a_batch(run: Run, said: list[str]) -> None:
    """The gradients to be averaged are computed first, in a graph of their own."""
    run.warm_up()
    run.trainer.accelerator.accumulation.current = WHOLE_WINDOW._replace(uneven=True)
    assert run.step(compiled=2, graphs=2) == []
    holds(said, "2 graphs were compiled in step 4 (epoch 0, batch_idx 3), as expected once: no earlier step had this place")


# ----------------------------------------------------------------------------------- the change that a warning names


def test_a_new_length_is_warned_of(run: Run) -> None:
    run.warm_up()
    run.trainer.current_epoch = 3
    [text] = run.step((8, 24), compiled=2)
    assert text == (
        "RecompileMonitor: 2 graphs were compiled after warm-up in step 4 (epoch 3, batch_idx 3). "
        "batch['x']: [8, 16] → [8, 24]. Each size needs its own graph: in collate_fn pad to one length, or to a few lengths."
    )
    assert run.step((8, 16)) == run.step((8, 24)) == []


def test_the_nearest_of_all_before_is_named(run: Run) -> None:
    run.warm_up()
    for length in (12, 20):
        run.step((8, length))
    run.step((4, 20))
    holds(run.step((8, 28), compiled=1), "[8, 20] → [8, 28]")


def test_one_cause_is_warned_of_once(run: Run, said: list[str]) -> None:
    run.warm_up()
    assert [len(run.step((8, length), compiled=1)) for length in (17, 18, 19)] == [1, 0, 0]
    assert run.callback.unexpected == 3
    run.callback.on_train_end(run.trainer, run.module)
    holds(said, "5 graphs were compiled in this fit: 2 (warm-up), 3 (batch['x'] dimension 1)")


def test_a_batch_that_changes_in_other_ways(run: Run) -> None:
    tensors = {"x": torch.zeros(8, 4), "y": torch.zeros(8)}
    for _ in range(3):
        run.step(tensors)
    holds(
        run.step({**tensors, "y": torch.zeros(8, dtype=torch.long)}, compiled=1),
        "batch['y'].dtype: float32 → int64",
        "the same dtypes",
    )
    holds(run.step({"x": tensors["x"]}, compiled=1), "batch['y']: [8] → missing", "the same tensors")
    holds(
        run.step({**tensors, "z": torch.zeros(2)}, compiled=1),
        "batch['z']: missing → [2]; batch['z'].dtype: missing → float32.",
    )
    holds(run.step({**tensors, "x": torch.zeros(8)}, compiled=1), "batch['x']: [8, 4] → [8]", "pad to one length")


@dataclasses.dataclass
class Held:
    x: Tensor
    length: int = 5


def test_where_tensors_are_found() -> None:
    pair = namedtuple("pair", "left right")
    both = pair(torch.zeros(2), {3: torch.zeros(3)})
    batch = {"a": [torch.zeros(1), "text", None], "b": both, "c": Held(torch.zeros(4)), "d": True}
    assert inputs_of_batch(batch)[::2] == (
        ("batch['a'][0]", (1,)),
        ("batch['b'].left", (2,)),
        ("batch['b'].right[3]", (3,)),
        ("batch['c'].x", (4,)),
    )
    assert numbers_in(batch) == ["batch['c'].length = 5", "batch['d'] = True"]
    assert inputs_of_batch(torch.zeros(2, dtype=torch.long)) == (("batch", (2,)), ("batch.dtype", torch.int64))
    assert inputs_of_batch("nothing") == ()


def test_freezing_is_named(run: Run) -> None:
    run.warm_up()
    run.module.bias.requires_grad_(False)
    holds(run.step(compiled=1), "bias.requires_grad: True → False.", "before training starts")
    run.module.bias.requires_grad_(True)
    assert run.step() == []  # nothing is compiled, because that state is known
    run.module.weight.requires_grad_(False)
    run.module.eval()
    holds(run.step(compiled=1), "weight.requires_grad: True → False; module.training: True → False")


def test_after_a_change_each_kind_of_step_has_another_graph(run: Run) -> None:
    run.warm_up()
    run.step((5, 16))
    run.module.eval()
    assert len(run.step(compiled=1)) == 1
    assert run.step((5, 16), compiled=1) == []
    holds(run.step((5, 16), compiled=1), "Neither")


def test_options_of_the_optimizer(run: Run) -> None:
    run.warm_up()
    [group] = run.trainer.optimizers[0].param_groups
    group["lr"], group["betas"] = 0.0, (0.8, 0.9)
    holds(run.step(compiled=1), "Neither")  # other values of these need no other graph
    group["weight_decay"] = 0.0
    holds(run.step(compiled=1), "optimizer 0, group 0, weight_decay: another number → 0.0")
    run.trainer.optimizers[0].add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    holds(run.step(compiled=1), "optimizer 0, group 1, parameters: missing → 1")


# ------------------------------------------------------------------------------------------ causes that inputs do not show


def test_an_unknown_cause_names_the_numbers_of_the_batch(run: Run) -> None:
    batch = {"x": torch.zeros(8, 4), "n": 3}
    for _ in range(3):
        run.step(batch)
    text = run.step({**batch, "n": 4}, compiled=1)
    holds(text, "Neither the batch's shapes", "a Python number that changes", "in step 4")
    holds(text, "The batch has such numbers: batch['n'] = 4.")


@pytest.mark.parametrize("hints, cause, words", [
    ({"reads": 1}, "values read in a step", ("A value was read before the step was complete", ".item()", "self.log(")),
    ({}, "values read in a step", ("print, .cpu()",)),
    ({"aten::nonzero": 1}, "operations on the host", ("aten::nonzero", "torch.where(mask, x, 0)")),
])  # fmt: skip
def test_a_step_that_was_cut_in_two(run: Run, hints: dict[str, int], cause: str, words: tuple[str, ...]) -> None:
    run.warm_up()
    holds(run.step(compiled=2, graphs=2, **hints), *words)
    assert run.callback.counts[cause] == 2


def test_a_step_that_does_nothing_is_not_the_usual(run: Run) -> None:
    run.warm_up()
    run.step(graphs=0)
    holds(run.step(compiled=1), "Neither")


def test_a_read_value_that_decides_the_graph(run: Run, said: list[str]) -> None:
    for _ in range(4):
        run.step(graphs=2, reads=1)
    holds(said, "a step runs in 2 graphs", ".item()")  # a notice: each step waits for the device
    holds(run.step(compiled=1, graphs=2, reads=1), "each new number that is used in a shape needs another graph")


def test_manual_optimization_may_make_more_updates_in_a_step(run: Run, said: list[str]) -> None:
    run.module.automatic_optimization = False
    run.warm_up()
    holds(run.step(compiled=1, graphs=2), "Neither")
    run.step(graphs=2)
    assert said == []


# -------------------------------------------------------------------------------------------- outside of training steps


def test_the_first_evaluation_is_expected(run: Run, said: list[str]) -> None:
    run.validate(((8, 4), 1), sanity=True)
    run.warm_up()
    run.validate(((8, 4), 0), ((8, 4), 0), ((3, 4), 1))
    holds(said, "2 graphs were compiled for the first evaluation, as expected")
    run.validate(((8, 4), 0), ((3, 4), 0))
    assert run.callback.counts == {"evaluation": 2, "warm-up": 2}
    with pytest.warns(TrainkitWarning) as caught:
        run.validate(((8, 4), 0), ((8, 6), 1))
    holds([str(w.message) for w in caught], "in batch 1 of the validation after step 3 (epoch 0). batch: [8, 4] → [8, 6]")
    with pytest.warns(TrainkitWarning, match="Neither"):
        run.validate(((8, 6), 1))
    assert run.callback.unexpected == 2


def test_validation_is_not_the_step(run: Run) -> None:
    run.warm_up()
    run.validate(((8, 4), 3))
    assert run.step() == []
    assert run.callback.unexpected == 0


def test_between_steps(run: Run) -> None:
    run.warm_up()
    run.compile(2)
    holds(run.step(), "2 graphs were compiled after warm-up between steps, after step 3 (epoch 0)", "self.log('name', value)")
    run.compile()
    assert run.step() == []
    assert run.callback.counts["between steps"] == 3


def test_a_step_without_a_loss(run: Run) -> None:
    run.warm_up()
    run.step(outputs=None)
    run.compile()
    holds(run.step(), "training_step returned None")


def test_between_steps_in_warm_up(run: Run) -> None:
    run.compile()
    run.step(compiled=1)
    run.compile()
    assert run.step() == []
    assert run.callback.counts == {"warm-up": 3}


# ----------------------------------------------------------------------------------------- warnings and logged values


def test_no_more_than_max_warnings(trainer: Any, module: Any) -> None:
    run = Run(trainer, module, max_warnings=2)
    run.warm_up()
    texts = [run.step(tuple([8] * dimensions), compiled=1) for dimensions in (3, 4, 5, 6)]
    assert [len(text) for text in texts] == [1, 0, 0, 0]  # one cause, so one warning
    texts = [run.step({name: torch.zeros(8)}, compiled=1) for name in "abcd"]
    assert [len(text) for text in texts] == [1, 1, 0, 0]
    holds(texts[1], "Further compilations are only counted, in compilations/unexpected (max_warnings=2)")
    assert run.callback.unexpected == 8


def test_none_but_the_last_line(trainer: Any, module: Any) -> None:
    """With `max_warnings=0` the only warning says that further compilations are counted."""
    run = Run(trainer, module, max_warnings=0)
    run.warm_up()
    holds(run.step((8, 3), compiled=1), "Further compilations are only counted")
    assert run.step({"y": torch.zeros(1)}, compiled=1) == []


def test_what_is_logged(run: Run) -> None:
    run.warm_up()
    assert run.module.logged == {}
    run.trainer.should_log = True
    run.step(full=False)
    assert run.module.logged == {}  # inside an accumulation window
    run.step((8, 20), compiled=2)
    assert run.module.logged == {"compilations/total": 11.0, "compilations/unexpected": 2.0}
    assert run.module.options == {"on_step": True, "on_epoch": False, "batch_size": 1}


def test_a_second_fit_begins_again(run: Run) -> None:
    run.warm_up()
    run.step((8, 20), compiled=1)
    run.compile(5)  # graphs that were compiled between the fits
    run.start()
    run.warm_up()
    assert run.callback.counts == {"warm-up": 2}
    assert run.callback.unexpected == 0
    assert len(run.step((8, 20), compiled=1)) == 1


def test_a_validation_by_itself_is_not_looked_at(run: Run, said: list[str]) -> None:
    run.warm_up()
    run.callback.setup(run.trainer, run.module, "validate")
    run.validate(((8, 4), 3))
    assert said == []
    assert run.callback.counts == {"warm-up": 2}


def test_an_epoch_that_another_hook_leaves(run: Run) -> None:
    run.warm_up()
    run.callback.on_train_batch_start(run.trainer, run.module, {"x": torch.zeros(1)}, 0)  # another hook returned -1
    assert run.step() == []


def test_where_nothing_is_compiled(run: Run, said: list[str]) -> None:
    run.strategy.compilations = None
    for _ in range(2):
        run.start()
        run.trainer.should_log = True
        assert run.step() == []
        run.validate(((8, 4), 0))
        run.callback.on_train_end(run.trainer, run.module)
    holds(said, "no effect with strategy='lazy'", "for 'xla'")
    assert run.module.logged == {}


def test_a_real_strategy_that_compiles_nothing(make_trainer: Any, said: list[str]) -> None:
    trainer = make_trainer(RecompileMonitor())
    trainer.fit(TinyModule(), tiny_loader())
    assert not any("compilations" in name for name in trainer.callback_metrics)
    assert sum("no effect with strategy='single'" in text for text in said) == 1
