"""A checkpoint with right digests and odd values: every reader refuses it by its key, before anything changes."""

from __future__ import annotations

import copy
import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.resume.checkpoints import seal
from helpers.resume.saving import SaveIn
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from trainkit import Accelerator, Callback, Trainer
from trainkit.callbacks import EarlyStopping, ModelCheckpoint, NonFiniteGuard, Timer
from trainkit.checkpoint import open_checkpoint
from trainkit.checkpoint.state_schema import PHASES, SCOPES
from trainkit.cli.main import main
from trainkit.errors import CorruptCheckpointError, MetricError, StateMismatchError, TrainkitError
from trainkit.loggers import CSVLogger
from trainkit.metrics.record import Scope
from trainkit.trainer.progress import Phase

Place = tuple[Any, ...]
POOL: list[Any] = [None, True, -7, "evil", [], {}, [-7], {"x": [None]}]


class Net(TinyModule):
    """Has each kind of thing that a checkpoint stores; keeps what it trains with."""

    def __init__(self, width: int = 4, name: str = "net") -> None:
        super().__init__(0.1)
        self.save_hyperparameters()
        torch.manual_seed(3)
        self.layer = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("spread", 1.0, on_epoch=True, reduce_fx="max")
        return loss

    def configure_optimizers(self) -> Any:
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        self.schedule = CosineAnnealingLR(self.optimizer, 9)
        return [self.optimizer], [{"scheduler": self.schedule, "interval": "step"}]


def trainer() -> Trainer:
    return make_trainer(
        ModelCheckpoint("saves", every_n_train_steps=3, save_top_k=-1),
        EarlyStopping("val_loss", patience=99),
        Timer(),
        NonFiniteGuard(),
        max_epochs=2,
        max_steps=5,
        enable_checkpointing=True,
        logger=CSVLogger("logs"),
        default_root_dir="runs",
        log_every_n_steps=2,
    )


def trained() -> Path:
    """A run of five steps; returns its checkpoint of step 3, in the middle of an epoch."""
    trainer().fit(Net(), tiny_loader(shuffle=True), tiny_loader(8))
    return Path("saves/step-00000003")


def own_loop() -> tuple[Accelerator, nn.Module, Any, Any, Any]:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    torch.manual_seed(3)
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    prepared = accelerator.prepare(net, optimizer, CosineAnnealingLR(optimizer, 9), tiny_loader())
    accelerator.register_for_checkpointing(Counting())
    return accelerator, *prepared


class Counting:
    """Something registered."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": 3}

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def nodes(value: Any, path: Place = ()) -> Iterator[Place]:
    """The paths of all values in nested JSON, leaves and containers."""
    if path:
        yield path
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in pairs:
        yield from nodes(item, (*path, key))


def at(value: Any, path: Place) -> Any:
    for key in path:
        value = value[key]
    return value


def kind(value: Any) -> type:
    return float if type(value) is int else type(value)


def changed(state: Any, path: Place, value: Any) -> Any:
    other = copy.deepcopy(state)
    at(other, path[:-1])[path[-1]] = value
    return other


def write(path: Path, state: Any) -> None:
    (path / "state.json").write_text(json.dumps(state))
    seal(path)


def accepted(path: Path, count: int) -> Iterator[tuple[Place, Any]]:
    """Write `state.json` with each value replaced by `count` others; yields those that are read without an error."""
    state = json.loads((path / "state.json").read_text())
    shutil.copytree(path, "copy", dirs_exist_ok=True)
    for number, place in enumerate(nodes(state)):
        others = [value for value in POOL if kind(value) is not kind(at(state, place))]
        for value in [others[(number + n) % len(others)] for n in range(min(count, len(others)))]:
            write(path, changed(state, place, value))
            try:
                open_checkpoint(path).read()
            except CorruptCheckpointError as error:
                check_named(error, place)
            else:
                yield place, value
    write(path, state)


def check_named(error: TrainkitError, place: Place) -> None:
    """The message has the part of the state, and the last key that is a word."""
    place = place[:2] if place[0] == "callbacks" else place  # a callback reads the inner part itself
    words = [key for key in place if isinstance(key, str) and not key.startswith("$")]
    assert place[0] in str(error), (place, str(error))
    assert any(word[:100] in str(error) for word in words[-2:]), (place, str(error))


def resumed(path: Path, module: Net) -> dict[str, Tensor]:
    """Resume from a checkpoint; the state of model and schedule at the end."""
    run = trainer()
    run.fit(module, tiny_loader(shuffle=True), tiny_loader(8), ckpt_path=str(path))
    return {**module.state_dict(), "lr": torch.tensor(module.schedule.get_last_lr()), "step": torch.tensor(run.global_step)}


def check_fit(path: Path, expected: dict[str, Tensor], place: Place, value: Any) -> None:
    """A fit ends as without the change, or is refused and has changed nothing."""
    module = Net()
    try:
        found = resumed(path, module)
    except MetricError as error:  # null stands for a function of the user, or for what was passed to log
        if value is not None or "the options differ from those before the checkpoint" not in str(error):
            raise
    except CorruptCheckpointError as error:
        check_named(error, place)
        assert all(map(torch.equal, module.state_dict().values(), Net().state_dict().values()))
        assert not module.optimizer.state
        assert module.schedule.last_epoch == 0
        assert module.optimizer.param_groups[0]["lr"] == 0.1
    else:
        assert all(torch.equal(found[name], expected[name]) for name in expected), (place, value)


@pytest.mark.filterwarnings("ignore:CSVLogger")  # its folder may have another name in the changed state
@pytest.mark.parametrize("count", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_fit_and_the_commands_with_every_value_replaced(count: int, capsys: pytest.CaptureFixture[str]) -> None:
    path = trained()
    shutil.copytree(path, "copy")
    expected = resumed(path, Net())
    commands = [
        ["show", "--state", str(path)],
        ["show", "--json", str(path)],
        ["verify", str(path)],
        ["diff", str(path), "copy"],
    ]
    for place, value in accepted(path, count):
        check_fit(path, expected, place, value)
        assert [main(["checkpoint", *command]) for command in commands][:3] == [0, 0, 0], (place, value)
        capsys.readouterr()
        if place[0] != "hyper_parameters" or len(place) < 2:  # those are arguments of the user's class
            try:
                Net.load_from_checkpoint(path)
            except CorruptCheckpointError as error:
                check_named(error, place)


@pytest.mark.parametrize("count", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_load_state_with_every_value_replaced(count: int) -> None:
    accelerator, net, optimizer, _, loader = own_loop()
    for batch in itertools.islice(loader, 3):
        with accelerator.accumulate(net):
            accelerator.backward(net(batch[0]).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    accelerator.save_state("there")
    fresh, other, _, _, _ = own_loop()
    for place, _ in accepted(Path("there"), count):
        try:
            fresh.load_state("there", resume_loaders=True)
        except CorruptCheckpointError as error:
            check_named(error, place)
        except StateMismatchError as error:
            check_named(error, place)
        else:
            again, same, _, _, _ = own_loop()
            again.load_state("copy" if Path("copy").exists() else "there", resume_loaders=True)
            assert [torch.equal(a, b) for a, b in zip(other.parameters(), same.parameters(), strict=True)] == [True, True], (
                place
            )


ODD: list[tuple[Place, Any, str]] = [
    (("loop", "global_step"), "x", "loop.global_step: expected an integer ≥ 0, got 'x'"),
    (("loop", "global_step"), -3, "loop.global_step: expected an integer ≥ 0, got -3"),
    (("loop", "current_epoch"), -1, "loop.current_epoch"),
    (("loop", "validated"), -1, "loop.validated"),
    (("loop", "position"), None, "loop.position: expected a dict, got None"),
    (("loop", "position", "samples"), -4, "loop.position.samples"),
    (("loop", "position", "batches"), 2**63, "loop.position.batches"),
    (("loop", "phase"), "evil", "loop.phase: expected one of step, updated, validating, epoch_end, got 'evil'"),
    (("loop", "computed"), {"val_loss": -1}, "loop.computed.val_loss"),
    (("optimizers", 0, "groups", 0, "options", "betas"), 5, "optimizers[0].groups[0].options['betas']: expected a list, got 5"),
    (("optimizers", 0, "groups", 0, "options", "betas"), [0.9], "options['betas']: expected 2 items"),
    (("optimizers", 0, "groups", 0, "options", "lr"), "0.1", "options['lr']: expected a number, got '0.1'"),
    (("optimizers", 0, "groups", 0, "options", "amsgrad"), 7, "options['amsgrad']: expected true or false"),
    (("optimizers", 0, "groups", 0, "parameters"), 5, "optimizers[0].groups[0].parameters: expected a list, got 5"),
    (("schedulers", 0, "state", "last_epoch"), -9, "schedulers[0].state['last_epoch']"),
    (("schedulers", 0, "state", "T_max"), "x", "schedulers[0].state['T_max']: expected a number, got 'x'"),
    (("metrics", "stamp"), -2, "metrics.stamp"),
    (("metrics", "metrics", 1, "weights", 0), -1, "metrics.metrics[1].weights[0]"),
    (("results", "logged"), 5, "results.logged: expected a dict, got 5"),
    (("hyper_parameters",), 5, "hyper_parameters: expected a dict, got 5"),
    (("models", 0, "trained"), 5, "models[0].trained: expected a dict, got 5"),
    (("models", 0, "fingerprint"), "x", "models[0].fingerprint: expected 64 hexadecimal digits"),
    (("callbacks", "Timer"), 5, "callbacks['Timer']: expected a dict, got 5"),
    (("callbacks", "NonFiniteGuard"), {"skipped_updates": "x"}, "skipped_updates"),
    (("loggers", 0, "state", "last_step"), "x", "loggers[0].state.last_step"),
    (("loggers", 0, "state", "files", "metrics.csv"), 5, "loggers[0].state.files['metrics.csv']: expected a dict"),
]


@pytest.mark.parametrize("place, value, words", ODD, ids=[f"{place[-1]} {value!r}" for place, value, _ in ODD])
def test_odd_values_are_named(place: Place, value: Any, words: str) -> None:
    path = trained()
    write(path, changed(json.loads((path / "state.json").read_text()), place, value))
    module = Net()
    with pytest.raises(CorruptCheckpointError) as caught:
        resumed(path, module)
    assert words in str(caught.value)
    assert all(map(torch.equal, module.state_dict().values(), Net().state_dict().values()))


@pytest.mark.parametrize(
    "place",
    [("metrics",), ("metrics", "objects"), ("results",), ("callbacks",), ("loop", "phase"), ("loop", "position", "epoch"),
     ("optimizers", 0, "class"), ("models",), ("models", 0, "trained"), ("schedulers",), ("metrics", "metrics", 0, "values")],
)  # fmt: skip
def test_a_missing_key_is_named(place: Place) -> None:
    path = trained()
    state = json.loads((path / "state.json").read_text())
    del at(state, place[:-1])[place[-1]]
    write(path, state)
    with pytest.raises(CorruptCheckpointError, match=rf"{place[-1]}: is missing"):
        resumed(path, Net())


def test_the_state_of_a_user_is_refused_by_its_key() -> None:
    """The errors of the user's own `load_state_dict` keep their cause."""

    class Own(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"seen": 1}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.seen = state_dict["seen"] + 1

    Own.__qualname__ = "Own"  # the key of its state
    make_trainer(SaveIn("on_train_batch_end", 2), Own(), max_steps=2).fit(TinyModule(), tiny_loader())
    write(Path("there"), changed(json.loads(Path("there/state.json").read_text()), ("callbacks", "Own", "seen"), "x"))
    with pytest.raises(
        CorruptCheckpointError, match=r"callbacks\['Own'\] cannot be loaded: Own.load_state_dict raised TypeErr"
    ) as error:
        make_trainer(Own(), max_steps=4).fit(TinyModule(), tiny_loader(), ckpt_path="there")
    assert isinstance(error.value.__cause__, TypeError)


def test_the_words_of_the_schema_are_those_of_the_program() -> None:
    assert tuple(one.value for one in Phase) == PHASES
    assert tuple(one.value for one in Scope) == SCOPES


def test_names_do_not_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """A `StateMismatchError` lists names of the checkpoint, and notices print its values."""

    class Odd(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_parameter("odd\x1b[31m\u202e", nn.Parameter(torch.ones(1)))

    trainer().fit(Odd(), tiny_loader(), tiny_loader(8))
    with pytest.raises(StateMismatchError) as caught:
        resumed(Path("saves/step-00000003"), Net())
    assert "odd\\x1b[31m\\u202e" in str(caught.value)
    printed = capsys.readouterr()
    assert "\x1b" not in str(caught.value) + printed.out + printed.err


@pytest.mark.parametrize("contents", [{"module": 5}, {"model": None}, {"resumable": "yes"}])
def test_odd_contents_in_the_manifest(contents: dict[str, Any]) -> None:
    path = trained()
    seal(path, lambda manifest: manifest["contents"].update(contents))
    with pytest.raises(CorruptCheckpointError, match=r"\['contents'\]: expected a JSON object"):
        resumed(path, Net())
