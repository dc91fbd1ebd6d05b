"""What one training step has in common with another, as far as it decides which graph is compiled, and what differs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

__all__: list[str] = []

Shapes = tuple[tuple[str, tuple[int, ...], str], ...]
"""Of each tensor of a batch its place (``batch['x']``), shape and dtype."""

_NAMED = 4  # names in a message, at most
_SCALARS = (str, bytes, int, float, type(None))

_SAMPLES = (
    "Each size of a batch is a graph of its own: leave the short batch out, DataLoader(drop_last=True), or have it padded, "
    "XLAStrategy(pad_last_batch=True)."
)
_SIZES = "Each size is a graph of its own: pad to one length in collate_fn, or to a few."
_DTYPES = "Cast to one dtype in the dataset or collate_fn."
_CONTENTS = "Each set of tensors is a graph of its own: let collate_fn give the same ones for all batches."
_MODULES = "Each such change costs a compilation: make it once, or before training starts."
_OPTIONS = "0, 1 and -1 become part of the graph, as do flags: let options change in between, or not at all."


class Step(NamedTuple):
    """What can be had of a training step in microseconds, before it is made.

    Attributes:
        shapes: of the batch.
        first: it is the first micro-batch of its accumulation window: there are no gradients yet.
        full: it is the last of its window: an update is due.
        log_due: its window ends in a log boundary.
        begun: an update has been made before: the optimizer has its state.
        uneven: the processes have different numbers of micro-batches in its window.
    """

    shapes: Shapes
    first: bool
    full: bool
    log_due: bool
    begun: bool
    uneven: bool = False

    @property
    def parts(self) -> tuple[tuple[str, Any], ...]:
        """What may be new in it; a combination of known parts is nothing that the user could look for."""
        return ("shapes", self.shapes), ("place", (self.first, self.full, self.uneven)), ("log", self.log_due)


class State(NamedTuple):
    """What takes a walk through the modules, and is looked at when something has been compiled.

    Attributes:
        trained: the parameters that require gradients.
        training: the modules in train mode.
        options: of the optimizers' groups: how many parameters, and which kind of number each option is.
    """

    trained: frozenset[str]
    training: frozenset[str]
    options: tuple[tuple[str, str], ...]


class Change(NamedTuple):
    """Something that is different.

    Attributes:
        text: for the user, with both values.
        kind: the same for all changes of this thing, whatever the values.
        remedy: what to do about it.
    """

    text: str
    kind: str
    remedy: str


def shapes_of(batch: Any) -> Shapes:
    """Places, shapes and dtypes of the tensors in nested dicts, lists, tuples and dataclasses."""
    return tuple(
        [(path, tuple(leaf.shape), str(leaf.dtype)) for path, leaf in _leaves(batch, "batch") if isinstance(leaf, Tensor)]
    )


def numbers_in(batch: Any) -> list[str]:
    """The Python numbers of a batch, with their places."""
    return [f"{path} = {leaf!r}" for path, leaf in _leaves(batch, "batch", plain=True) if isinstance(leaf, int | float)]


def _leaves(value: Any, path: str, plain: bool = False) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, _SCALARS):
        if plain:
            yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{path}[{key!r}]", plain)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for name, item in zip(value._fields, value, strict=True):
            yield from _leaves(item, f"{path}.{name}", plain)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]", plain)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _leaves(getattr(value, field.name, None), f"{path}.{field.name}", plain)


def shape_changes(new: Shapes, old: Shapes) -> list[Change]:
    """The tensors in which two batches differ."""
    before, after = ({path: (shape, dtype) for path, shape, dtype in shapes} for shapes in (old, new))
    found = []
    for path, (shape, dtype) in after.items():
        if path not in before:
            found.append(Change(f"{path}: {list(shape)}, {_short(dtype)}, is new", f"{path} is new", _CONTENTS))
            continue
        was, of = before[path]
        if shape != was:
            axes = [axis for axis, (one, other) in enumerate(zip(shape, was, strict=False)) if one != other]
            which = f"dimension {', '.join(map(str, axes))}" if len(shape) == len(was) else "number of dimensions"
            remedy = _SAMPLES if axes == [0] and len(shape) == len(was) else _SIZES
            found.append(Change(f"{path}: {list(was)} → {list(shape)}", f"{path} {which}", remedy))
        if dtype != of:
            found.append(Change(f"{path}: {_short(of)} → {_short(dtype)}", f"{path} dtype", _DTYPES))
    found += [Change(f"{path} is no longer there", f"{path} is gone", _CONTENTS) for path in before if path not in after]
    return found


def nearest_shapes(new: Shapes, seen: Iterable[Shapes]) -> list[Change]:
    """The changes against that batch which differs least; of several the latest."""
    choices = [(changes, _distance(new, old)) for old in seen if (changes := shape_changes(new, old))]
    if not choices:
        return []
    return min(reversed(choices), key=lambda choice: (len(choice[0]), choice[1]))[0]


def _distance(new: Shapes, old: Shapes) -> int:
    """The number of sizes that differ."""
    before = {path: shape for path, shape, _ in old}
    return sum(one != other for path, shape, _ in new for one, other in zip(shape, before.get(path, ()), strict=False))


def shorter(new: Shapes, seen: Iterable[Shapes]) -> bool:
    """Whether it is one of those batches with fewer samples: smaller in the first dimension of tensors, and else the same."""
    return any(_shorter(new, old) for old in seen)


def _shorter(new: Shapes, old: Shapes) -> bool:
    if [(path, dtype, shape[1:]) for path, shape, dtype in new] != [(path, dtype, shape[1:]) for path, shape, dtype in old]:
        return False
    pairs = {(a[0], b[0]) for (_, a, _), (_, b, _) in zip(new, old, strict=True) if a[:1] != b[:1]}
    return bool(pairs) and all(after < before for after, before in pairs)


def state_of(module: nn.Module, optimizers: Iterable[Optimizer]) -> State:
    """The state now; takes as long as a walk through all modules."""
    trained = frozenset(name for name, parameter in module.named_parameters() if parameter.requires_grad)
    training = frozenset(name or "the module" for name, part in module.named_modules() if part.training)
    return State(trained, training, tuple(_options(optimizers)))


def _options(optimizers: Iterable[Optimizer]) -> Iterator[tuple[str, str]]:
    several = len(optimizers := list(optimizers)) > 1
    for index, optimizer in enumerate(optimizers):
        whose = f"optimizer {index}, " if several else "the optimizer's "
        yield f"{whose}parameter groups", str(len(optimizer.param_groups))
        for number, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                if name == "params":
                    yield f"{whose}group {number}, parameters", str(len(value))
                elif name not in ("lr", "initial_lr"):  # a rate's value is no part of the graph, whatever it is
                    yield f"{whose}group {number}, {name}", _kind_of(value)


def _kind_of(value: Any) -> str:
    """A number is an input of the graph, whatever its value; but for 0, 1 and -1, which become part of it."""
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_kind_of, value))})"
    if isinstance(value, bool | str | type(None)) or value in (0, 1, -1):
        return str(value)
    return "another number" if isinstance(value, int | float) else type(value).__name__


def state_changes(new: State, old: State) -> list[Change]:
    """In what two states differ."""
    sets: list[tuple[str, Callable[[State], frozenset[str]]]] = [
        ("requires_grad", lambda state: state.trained),
        ("training", lambda state: state.training),
    ]
    found = []
    for name, part in sets:
        for value, names in ((True, part(new) - part(old)), (False, part(old) - part(new))):
            if names:
                found.append(Change(f"{name} is {value} now for {_listed(names)}", f"{name}={value}", _MODULES))
    before, after = dict(old.options), dict(new.options)
    for name in {**before, **after}:
        was, now = before.get(name, "none"), after.get(name, "none")
        if was != now:
            found.append(Change(f"{name}: {was} → {now}", name, _OPTIONS))
    return found


def nearest_state(new: State, seen: Iterable[State]) -> list[Change]:
    """The changes against that state which differs least."""
    return min((state_changes(new, old) for old in seen), key=len, default=[])


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _NAMED} more" if len(ordered) > _NAMED else ""
    return ", ".join(ordered[:_NAMED]) + more


def _short(dtype: str) -> str:
    return dtype.removeprefix("torch.")
