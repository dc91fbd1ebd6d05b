"""Why a graph was compiled, in words, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from trainkit.callbacks._step_signature import Change

__all__: list[str] = []

_NAMED = 6  # changes, numbers or operations in a message, at most


class Cause(NamedTuple):
    """A cause.

    Attributes:
        kind: a few words, the same for all compilations that have this cause.
        text: for the user: what it is, and the fix.
    """

    kind: str
    text: str


def combined(changes: Sequence[Change]) -> Cause:
    """What has changed, at least one thing."""
    named = "; ".join(change.text for change in changes[:_NAMED])
    more = f"; and {len(changes) - _NAMED} more" if len(changes) > _NAMED else ""
    remedies = dict.fromkeys(change.remedy for change in changes)
    return Cause(", ".join(sorted(change.kind for change in changes)[:_NAMED]), f"{named}{more}. {' '.join(remedies)}")


def first_cause(part: str, changes: Sequence[Change]) -> str:
    """Why a graph was to be expected.

    Args:
        part: what is new: "short", "place" or "log".
        changes: of shapes, if it is "short".
    """
    if part == "short":
        return f"the short last batch, {'; '.join(change.text for change in changes[:_NAMED])}. {changes[0].remedy}"
    if part == "place":
        return "no step before had this place in its accumulation window; an epoch's last window may have fewer micro-batches."
    return "the first step at a log boundary: what is logged there, and not in other steps, is a part of the graph."


def in_graphs(grown: Mapping[str, int]) -> Cause:
    """A step was run in several graphs."""
    operations = _operations(grown)
    if operations:
        return Cause("operations left to the host", _left_to_the_host(operations))
    how = ".item(), int(), float(), bool() or if" if grown.get("reads") else "print, .cpu(), .tolist() or .numpy()"
    return Cause(
        "values read in a step",
        f"A value was read before the step was complete, by {how}, in training_step or a hook: what comes before it and what "
        "comes after it are graphs of their own. Log it instead, self.log('name', value): it is read after the step.",
    )


def unseen_cause(grown: Mapping[str, int], numbers: Sequence[str]) -> Cause:
    """Nothing has changed that can be seen.

    Args:
        grown: what the strategy has counted in the step.
        numbers: the Python numbers of the batch, with their places.
    """
    text = (
        "Neither the batch's shapes and dtypes nor the place in the window, the parameters and modules or the optimizer's "
        "options have changed. "
    )
    operations = _operations(grown)
    if operations:
        return Cause("operations left to the host", text + _left_to_the_host(operations))
    if grown.get("reads"):
        return Cause(
            "numbers read in a step",
            f"{text}But values were read in the step, {grown['reads']} of them, by .item(), int(), float(), bool() "
            "or if. A number so read that goes into a shape or a slice, or decides what is computed, makes another graph: "
            "leave it a tensor, and choose by torch.where.",
        )
    held = f" The batch has such numbers: {', '.join(numbers[:_NAMED])}." if numbers else ""
    return Cause(
        "a change that is not visible",
        f"{text}Look for a Python number that changes from step to step and is used in a shape, a slice or an index, or is at "
        f"times 0, 1 or -1: make it a tensor, torch.tensor(number) in the batch.{held} A callback before this one in the list "
        "may also have computed something in a hook of the batch.",
    )


def between_cause(without_loss: bool) -> Cause:
    """Something was compiled outside of steps and evaluations."""
    if without_loss:
        return Cause(
            "steps without a loss",
            "training_step has returned None: what it has computed until then is a graph of its own. Decide it by the batch "
            "before anything is computed, or give such batches no weight: def batch_weight(self, batch).",
        )
    return Cause(
        "between steps",
        "A hook, a callback or a logger has computed with tensors of the device, or read what was not computed. Compute it "
        "in training_step and log it: self.log('name', value); trainer.callback_metrics has it afterwards.",
    )


def _operations(grown: Mapping[str, int]) -> list[str]:
    return [name for name in grown if name not in ("graphs", "reads")]


def _left_to_the_host(operations: Sequence[str]) -> str:
    return (
        f"Operations that the device does not have were left to the host: {', '.join(operations[:_NAMED])}. The step is cut in "
        "two there, and what follows may have another shape each time. In the stead of x[mask] or nonzero(): "
        "torch.where(mask, x, 0)."
    )
