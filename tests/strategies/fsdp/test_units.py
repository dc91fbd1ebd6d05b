"""Which modules of a model are units, and what cannot be sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from trainkit.errors import ConfigurationError, ModuleError, UnknownNameError
from trainkit.strategies.fsdp.units import callable_parts, choose_units, find_ignored_parameters, refuse_unshardable, slots


class Block(nn.Module):
    """A block with two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        return self.down(self.up(x))


class Model(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.scale = nn.Parameter(torch.ones(()))


def test_the_default_is_the_repeated_blocks() -> None:
    model = Model()
    assert [*choose_units(model, None)] == [*choose_units(model, True)] == ["blocks.0", "blocks.1"]
    assert choose_units(model, False) == {}


def test_choices() -> None:
    model = Model()
    assert [*choose_units(model, Block)] == [*choose_units(model, "Block")] == ["blocks.0", "blocks.1"]
    assert {*choose_units(model, [Block, "head"])} == {"blocks.0", "blocks.1", "head"}
    assert {*choose_units(model, "blocks.*.up")} == {"blocks.0.up", "blocks.1.up"}
    assert {*choose_units(model, lambda name, module: name.endswith("down"))} == {"blocks.0.down", "blocks.1.down"}
    with pytest.raises(UnknownNameError, match="wrap='Blok' matches no module"):
        choose_units(model, "Blok")


def test_a_size() -> None:
    """The smallest modules of at least this size; a container has no forward."""
    model = Model()
    assert {*choose_units(model, 36)} == {"blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"}
    assert {*choose_units(model, 70)} == {"blocks.0", "blocks.1"}
    assert choose_units(model, 1000) == {}
    with pytest.raises(ConfigurationError, match=r"wrap=0: expected a number of parameters > 0"):
        choose_units(model, 0)


def test_a_block_that_shares_a_parameter_is_no_unit() -> None:
    model = Model()
    model.blocks[1].tied = model.head
    assert [*choose_units(model, None)] == ["blocks.0"]
    model.head.weight = model.embedding.weight
    assert "head" not in choose_units(model, ["head", "embedding", "blocks.0"])


def test_modules_that_were_named_and_cannot_be_units(caplog: pytest.LogCaptureFixture) -> None:
    """A notice names them; the default chooses silently."""
    model = Model()
    model.blocks[1].tied = model.head
    assert [*choose_units(model, None)] == ["blocks.0"]
    assert caplog.messages == []
    assert [*choose_units(model, ["blocks", "blocks.0", "blocks.1"])] == ["blocks.0"]
    assert caplog.messages[0].startswith("wrap: 1 ModuleList, 1 Block (blocks, blocks.1) cannot be sharded by itself")


def test_slots_list_each_place_of_a_tied_parameter() -> None:
    model = Model()
    model.head.weight = model.embedding.weight
    places = [(type(owner).__name__, name) for owner, name in slots(model)]
    assert places.count(("Embedding", "weight")) == 1
    assert len(places) == len(set(slots(model))) == 11
    inside = slots(model, lambda part: isinstance(part, Block))
    assert {name for owner, name in inside} == {"scale", "weight"}


def test_parts_that_are_called_by_themselves() -> None:
    """A list is not called, its elements are."""
    model = Model()
    assert [*callable_parts(model)] == [model.embedding, model.head, *model.blocks]


def test_scalars_and_ignored_modules_stay_whole() -> None:
    model = Model()
    assert find_ignored_parameters(model, None) == {model.scale}
    assert find_ignored_parameters(model, "head") == {model.scale, model.head.weight}
    with pytest.raises(UnknownNameError, match="ignored_modules='heat' matches no module"):
        find_ignored_parameters(model, "heat")


def test_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.13 shards them, earlier versions cannot."""
    model = Model()
    model.table = nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
    monkeypatch.setattr(FSDPModule, "set_reduce_scatter_unused_params", None, raising=False)
    refuse_unshardable({"": model}, {model.scale})
    monkeypatch.delattr(FSDPModule, "set_reduce_scatter_unused_params")
    with pytest.raises(ModuleError, match=r"table is a parameter of integers.*register_buffer"):
        refuse_unshardable({"": model}, {model.scale})
    refuse_unshardable({"": model}, {model.scale, model.table})


def test_what_cannot_be_sharded() -> None:
    model = Model()
    model.head.half()
    with pytest.raises(ModuleError, match=r"the model has trained parameters of several dtypes \(1 of float32, 1 of float16\)"):
        refuse_unshardable({"blocks.0": model.blocks[0], "blocks.1": model.blocks[1], "": model}, {model.scale})
    refuse_unshardable({"": model}, {*model.head.parameters()})
    model.head.requires_grad_(False)
    refuse_unshardable({"": model}, set())
    model.embedding.sparse = True
    with pytest.raises(ModuleError, match="embedding is an embedding with sparse gradients"):
        refuse_unshardable({"": model}, set())
    refuse_unshardable({"": model}, {model.embedding.weight})
