"""`trainkit.checkpoint.register`: values of a user's own classes can be saved anywhere in a checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.resume.saving import Adam, saved, saving
from helpers.runs.tiny import tiny_loader
from helpers.support import run_python
from torch import Tensor

from trainkit import Callback
from trainkit.checkpoint import open_checkpoint, register
from trainkit.cli.main import main
from trainkit.errors import CheckpointError, ConfigurationError, CorruptCheckpointError, UnsavableError
from trainkit.tagged_json import codec
from trainkit.tagged_json.codec import dumps, loads

FILE = "state.safetensors"
NAME = re.escape(f"{__name__}.Vocabulary")


@pytest.fixture(autouse=True)
def _none_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "_by_kind", {})
    monkeypatch.setattr(codec, "_by_name", {})


class Vocabulary:
    """A user's own class, which JSON cannot represent."""

    def __init__(self, words: list[str], counts: Tensor, weights: Any = None) -> None:
        self.words, self.counts, self.weights = words, counts, weights

    def to_dict(self) -> dict[str, Any]:
        return {"words": self.words, "counts": self.counts, "weights": self.weights}

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> Vocabulary:
        return cls(**state)


def there_and_back(value: Any) -> Any:
    tensors: dict[str, Tensor] = {}
    return loads(dumps(value, tensors), {FILE: tensors}, "state.json")


def test_registered_values_are_restored_anywhere() -> None:
    register(Vocabulary, Vocabulary.to_dict, Vocabulary.from_dict)
    counts, weights = torch.tensor([3, 1]), np.array([0.5, 0.25])
    value = Vocabulary(["a", "b"], counts, weights)
    back = there_and_back({"deep": [{1: (value, value)}]})["deep"][0][1]
    assert [type(one) for one in back] == [Vocabulary, Vocabulary]
    assert back[0].words == ["a", "b"]
    assert torch.equal(back[0].counts, counts)
    assert isinstance(back[0].weights, np.ndarray)
    assert back[0].weights.tolist() == [0.5, 0.25]
    assert there_and_back(Vocabulary([], counts, Vocabulary(["inner"], counts))).weights.words == ["inner"]


def test_the_name_in_messages_is_available_immediately() -> None:
    done = run_python("import fractions, trainkit; trainkit.checkpoint.register(fractions.Fraction, str, fractions.Fraction)")
    assert done.returncode == 0, done.stderr


def test_registered_values_keep_their_type() -> None:
    @dataclass
    class Size:
        width: int

    assert there_and_back(Size(3)) == {"width": 3}
    register(Size, lambda size: size.width, Size)
    assert there_and_back(Size(3)) == Size(3)

    class Larger(Size): ...

    assert there_and_back(Larger(4)) == {"width": 4}, "a subclass is another type"


def test_a_checkpoint_contains_the_name() -> None:
    register(Vocabulary, Vocabulary.to_dict, Vocabulary.from_dict, name="mine.Words")
    text = dumps(Vocabulary(["a"], torch.zeros(1)), {})
    assert json.loads(text)["$registered"][0] == "mine.Words"

    class Renamed(Vocabulary): ...

    register(Renamed, Renamed.to_dict, Renamed.from_dict, name="mine.Words", replace=True)
    assert type(there_and_back(Renamed(["a"], torch.zeros(1)))) is Renamed
    with pytest.raises(UnsavableError):
        dumps(Vocabulary(["a"], torch.zeros(1)), {})


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: register("Vocabulary", str, str), "expected a class, got 'Vocabulary'. Fix: trainkit.checkpoint.register("),
        (lambda: register(Vocabulary, None, str), "expected a function for encode, got None"),
        (lambda: register(Vocabulary, str, 3), "expected a function for decode, got 3"),
        (lambda: register(Vocabulary, str, str, name=5), "expected a string for name, got 5"),
        (lambda: register(dict, str, str), "dict can be stored without registration. Fix: remove the call"),
        (lambda: register(Tensor, str, str), "Tensor can be stored without registration"),
    ],
)
def test_wrong_arguments(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        call()


def test_registering_twice() -> None:
    """Registering a class or a name twice is an error, except with `replace=True`."""
    register(Vocabulary, Vocabulary.to_dict, Vocabulary.from_dict)
    with pytest.raises(ConfigurationError, match=r"test_registered\.Vocabulary is registered already\. Call register once"):
        register(Vocabulary, str, str)
    with pytest.raises(ConfigurationError, match=rf"is registered already, as '{NAME}'"):
        register(Vocabulary, str, str, name="another")

    class Other: ...

    with pytest.raises(ConfigurationError, match=rf"the name '{NAME}' belongs to another class.*name='\.\.\.'"):
        register(Other, str, str, name=f"{__name__}.Vocabulary")
    register(Vocabulary, lambda value: value.words, lambda words: words, replace=True)
    assert there_and_back(Vocabulary(["a"], torch.zeros(1))) == ["a"]


def test_functions_that_fail() -> None:
    register(Vocabulary, lambda value: 1 / 0, Vocabulary.from_dict)
    with pytest.raises(UnsavableError, match=rf'state\["v"\].*encode, registered for {NAME}, raised Zero'):
        dumps({"v": Vocabulary([], torch.zeros(1))}, {})
    register(Vocabulary, lambda value: {"odd": object()}, Vocabulary.from_dict, replace=True)
    with pytest.raises(UnsavableError, match=r'state\["v"\]\["odd"\] cannot be stored'):
        dumps({"v": Vocabulary([], torch.zeros(1))}, {})
    register(Vocabulary, lambda value: value, Vocabulary.from_dict, replace=True)
    with pytest.raises(UnsavableError, match="it contains itself"):
        dumps(Vocabulary([], torch.zeros(1)), {})
    register(Vocabulary, lambda value: Vocabulary([], torch.zeros(1)), Vocabulary.from_dict, replace=True)
    with pytest.raises(UnsavableError, match="nested more than"):
        dumps(Vocabulary([], torch.zeros(1)), {})
    register(Vocabulary, lambda value: [1, 2], Vocabulary.from_dict, replace=True)
    with pytest.raises(CheckpointError, match=rf"decode, registered for '{NAME}', raised TypeError.*the list"):
        there_and_back(Vocabulary([], torch.zeros(1)))


@pytest.mark.parametrize("payload", ['"x"', "[1, 2]", '["a"]', '["a", 1, 2]'])
def test_damaged_text(payload: str) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"malformed \$registered"):
        loads(f'{{"$registered": {payload}}}'.encode(), {}, "state.json")


class Reading(Adam):
    """A module with a vocabulary in its hyper-parameters, and one in the checkpoint."""

    def __init__(self, vocabulary: Any = None, learning_rate: float = 0.1) -> None:
        super().__init__(learning_rate)
        self.save_hyperparameters()
        self.seen: Any = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["words"] = self.hparams.vocabulary

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint["words"]


class Counting(Callback):
    """A callback with a vocabulary in its state."""

    def __init__(self) -> None:
        self.vocabulary = Vocabulary(["c"], torch.ones(1))

    def state_dict(self) -> dict[str, Any]:
        return {"vocabulary": self.vocabulary}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.vocabulary = state["vocabulary"]


def test_in_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    register(Vocabulary, Vocabulary.to_dict, Vocabulary.from_dict)
    vocabulary = Vocabulary(["a", "b"], torch.tensor([3, 1]))
    trainer = saved(Counting(), module=Reading(vocabulary))
    path = trainer.checkpoint_callback.last_model_path
    module, counting = Reading(vocabulary), Counting()
    counting.vocabulary = None
    saving(counting, max_epochs=2).fit(module, tiny_loader(shuffle=True), ckpt_path=path)
    assert module.seen.words == ["a", "b"]
    assert counting.vocabulary.words == ["c"]
    again = Reading.load_from_checkpoint(path)
    assert type(again.hparams.vocabulary) is Vocabulary
    assert torch.equal(again.hparams.vocabulary.counts, vocabulary.counts)

    codec._by_kind.clear()
    codec._by_name.clear()  # as in a program that has not called register
    said = rf"contains a value of the type '{NAME}', which this program has not registered.*checkpoint\.register\("
    with pytest.raises(CheckpointError, match=said) as caught:
        Reading.load_from_checkpoint(path)
    assert not isinstance(caught.value, CorruptCheckpointError)
    with pytest.raises(CheckpointError, match=said):  # the checkpoint is not damaged, so no older one is used
        saving(max_epochs=2).fit(Reading(vocabulary), tiny_loader(shuffle=True), ckpt_path="auto")
    advised = re.search(r"register\(Vocabulary, encode, decode, name='([^']+)'\)", str(caught.value))
    assert advised is not None
    register(Vocabulary, Vocabulary.to_dict, Vocabulary.from_dict, name=advised[1])
    assert Reading.load_from_checkpoint(path).hparams.vocabulary.words == ["a", "b"]

    codec._by_kind.clear()
    codec._by_name.clear()
    open_checkpoint(path).verify()
    value = open_checkpoint(path).read({"state"}, unregistered=True).state["hyper_parameters"]["vocabulary"]
    assert value[0] == f"{__name__}.Vocabulary"
    assert value[1]["words"] == ["a", "b"]
    other = str(Path("runs/version_0/checkpoints") / "step-00000004")
    capsys.readouterr()
    for command in (["show", path, "--state"], ["show", path, "--json", "--state"], ["verify", path], ["diff", path, other]):
        assert main(["checkpoint", *command]) == 0, capsys.readouterr()
    assert "test_registered.Vocabulary" in capsys.readouterr().out
