"""Plans a checkpoint on all ranks. It takes each tensor from one rank, so all ranks must have the same values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from trainkit.checkpoint.checkpoint_plan import CheckpointContent, CheckpointPlan
from trainkit.checkpoint.ranks import Group, run_on_all_ranks
from trainkit.distributed.world import World
from trainkit.errors import CheckpointError, CheckpointWriteError, UnsavableError
from trainkit.tagged_json.codec import unsavable
from trainkit.tagged_json.tensors import is_sharded_tensor

__all__ = ["checksums", "compare_ranks", "plan_checkpoint"]

_WORD_BYTES = 8  # bytes
_BLOCK_WORDS = 512  # words
_PARTS_PER_TENSOR = 16  # A save reads one part of each large tensor.
# On other devices, such as XLA's, reading values would compile and run a graph of its own.
_READ_AT_ONCE = ("cpu", "cuda")


def plan_checkpoint(world: World, content: CheckpointContent) -> CheckpointPlan:
    """Create the plan of a checkpoint. Collective: an error on one rank is raised on all.

    Raises:
        UnsavableError: A value cannot be stored; names the path to it.
        CheckpointWriteError: The position of a logger in its files is not known.
        CheckpointError: Ranks have different values of a parameter, or of the state of an optimizer.
    """
    plans: list[CheckpointPlan] = []
    own_sums: dict[str, int] = {}

    def create() -> list[Any]:
        for logger in content.state.get("loggers", ()):
            if isinstance(logger["state"], OSError):
                raise CheckpointWriteError(
                    f"the position of {logger['kind']} in its log cannot be read, so a resumed run could not continue it: "
                    f"{logger['state']}"
                ) from logger["state"]
        try:
            plan = CheckpointPlan(content, rank=world.rank, ranks=world.size)
        except UnsavableError as error:
            hook_error = _check_hook_values(content.state)
            if hook_error is None:
                raise
            raise hook_error from error
        plans.append(plan)
        if world.size > 1:
            own_sums.update(checksums(content))
        return [plan.layout, sum(own_sums.values())]

    layout, total = run_on_all_ranks(world, create)
    other_plan, other_sums = world.largest([layout != plans[0].layout, total != sum(own_sums.values())])
    if other_sums and not other_plan:  # otherwise `commit` says what differs
        compare_ranks(world, own_sums)
    return plans[0]


def _check_hook_values(state: Mapping[str, Any]) -> UnsavableError | None:
    """One error for all values that `on_save_checkpoint` added and that cannot be stored; `None` if all can be."""
    added = {f'checkpoint["{name}"]': value for name, value in state.get("user", {}).items()}
    hparams = state.get("hyper_parameters", {})  # Contains those that can be stored and those that a hook has added.
    added |= {f'checkpoint["hyper_parameters"][{name!r}]': value for name, value in hparams.items()}
    problems = {name: problem for name, value in added.items() if (problem := unsavable(value, name)) is not None}
    if not problems:
        return None
    name, (_, kind) = next(iter(problems.items()))
    return UnsavableError(
        "on_save_checkpoint added values to the checkpoint that cannot be stored:\n  "
        + "\n  ".join(text for text, _ in problems.values())
        + "\nA checkpoint can store numbers, strings, tensors, numpy arrays, lists and dicts, but no code. Fix, one of:\n"
        f"  1. store its state, and load it in on_load_checkpoint: {name} = self.thing.state_dict()\n"
        "  2. register its type once, where it is defined: "
        f"trainkit.checkpoint.register({kind.__name__}, encode, decode)\n"
        f"  3. remove the line {name} = ..., and create the object again in setup or on_load_checkpoint\n"
        f"  4. if the code is not yours: Trainer(omit_from_checkpoint={[_switch(one) for one in problems]})"
    )


def _switch(name: str) -> str:
    """A value as `Trainer(omit_from_checkpoint=...)` names it."""
    return ".".join(re.findall(r"[\"']([^\"']+)[\"']", name))


def checksums(content: CheckpointContent) -> dict[str, int]:
    """A checksum of each parameter and of each tensor of the optimizers, by name; of those that each rank has as a whole.

    Buffers are skipped: a strategy may let each rank have its own until the end of a step. A checksum is a sum of 64-bit
    words, with one wait for a device. The first save of a run reads all words. Later ones read a sixteenth of each tensor of
    more than 64 KiB, each time another one: reading all words takes about a tenth of the time of a save on a CPU.
    """
    counter = int(content.about["save_counter"])
    part = None if counter == 1 else counter % _PARTS_PER_TENSOR
    tensors = {name: tensor for name, tensor in _select_compared(content).items() if tensor.device.type in _READ_AT_ONCE}
    if not tensors:
        return {}
    sums = [_sum_of_words(tensor, part) for tensor in tensors.values()]
    together = torch.stack([value.to(sums[0].device, non_blocking=True) for value in sums])
    return dict(zip(tensors, together.tolist(), strict=True))


def compare_ranks(group: Group, checksums: Mapping[str, int]) -> NoReturn:
    """Name a tensor whose checksum is not the same on all ranks. Collective.

    Args:
        group: The ranks.
        checksums: The `checksums` of this rank.

    Raises:
        CheckpointError: Always; names the first tensor and the ranks.
    """
    by_rank = group.exchange(checksums)
    differing = {
        name: [str(rank) for rank, sums in enumerate(by_rank) if sums.get(name) != first]
        for name, first in by_rank[0].items()
        if any(sums.get(name) != first for sums in by_rank)
    }
    name, ranks = next(iter(differing.items()))
    raise CheckpointError(
        f"{name!r} has other values on rank {', '.join(ranks)} than on rank 0 ({len(differing)} of {len(checksums)} parameters "
        "and optimizer states differ). A checkpoint takes each tensor from one rank, so it would mix the models of several "
        "ranks. Expected: all ranks have the same parameters and optimizer state. Fix: if your strategy averages only now and "
        "then, average before each save, in a callback: def on_save_checkpoint(self, trainer, module, checkpoint): "
        "for p in module.parameters(): p.data.copy_(trainer.strategy.mean(p.data)), and the same for the tensors in the "
        "optimizer's state. With another strategy, change parameters on all ranks and not only on some."
    )


def _select_compared(content: CheckpointContent) -> dict[str, Tensor]:
    models = content.state["models"]
    compared: dict[str, Tensor] = {}
    for stem, tensors in content.tensors.items():
        first, _, number = stem.partition("_")
        parameters = models[int(number or 0)]["trained"] if first == "model" else tensors
        prefix = "" if stem == "model" else f"{stem}: "
        compared |= {
            f"{prefix}{name}": tensor
            for name, tensor in tensors.items()
            if name in parameters and not is_sharded_tensor(tensor)
        }
    return compared


def _sum_of_words(tensor: Tensor, part: int | None) -> Tensor:
    """The sum of a tensor's words; of a large tensor only of those of a part, unless that is `None`."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if data.storage_offset() % _WORD_BYTES:  # a view into a larger tensor, which cannot be read as words
        data = data.clone()
    whole = data.numel() // _WORD_BYTES * _WORD_BYTES
    words, rest = data[:whole].view(torch.int64), data[whole:].sum(dtype=torch.int64)
    blocks = words.numel() // _BLOCK_WORDS
    if part is None or blocks < _PARTS_PER_TENSOR:
        return words.sum() + rest
    end = blocks * _BLOCK_WORDS
    return words[:end].view(blocks, _BLOCK_WORDS)[part::_PARTS_PER_TENSOR].sum() + words[end:].sum() + rest
