"""The arguments of `TrainingArguments` that cannot be mapped, in one error."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import TrainingArguments

from trainkit.console import notice
from trainkit.errors import UnsupportedArgumentError
from trainkit.names import table

__all__ = ["Refusals", "is_default"]


class Refusals:
    """The arguments that cannot be mapped, collected so that one error has all of them.

    Args:
        args: what was given. Arguments with the answer "refused" in the table are collected at once.
    """

    def __init__(self, args: TrainingArguments) -> None:
        self._found: list[str] = []
        answers: dict[str, list[str]] = table("hugging_face")["training_arguments"]
        others = []
        for field in dataclasses.fields(args):
            if is_default(args, field):
                continue
            if field.name not in answers:
                others.append(field.name)
            elif answers[field.name][0] == "refused":
                self.add(field.name, getattr(args, field.name), answers[field.name][1])
        known = {
            field.name
            for kind in type(args).__mro__
            if kind.__module__.startswith("transformers.") and dataclasses.is_dataclass(kind)
            for field in dataclasses.fields(kind)
        }
        for name in others:
            if name in known:
                self.add(name, getattr(args, name), "this version of trainkit does not know it. Remove it")
        if ours := [name for name in others if name not in known]:
            notice(f"from_arguments does not read {', '.join(ours)}, which {type(args).__name__} adds to TrainingArguments.")

    def add(self, name: str, value: Any, why: str) -> None:
        """An argument that cannot be mapped, and what to do."""
        self._found.append(f"{name}={value!r}: {why}")

    def raise_all(self) -> None:
        """Raise if there are any."""
        if self._found:
            lines = "\n".join(f"- {one}" for one in self._found)
            raise UnsupportedArgumentError(f"TrainingArguments has what trainkit does not do:\n{lines}")


def is_default(args: TrainingArguments, field: dataclasses.Field[Any]) -> bool:
    """Whether an argument has the value of a run that was not given it, as `__post_init__` leaves it."""
    value = getattr(args, field.name)
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if field.name == "accelerator_config":  # The dataclass makes an object of it.
        return value is None or not (
            value.split_batches or value.dispatch_batches or (value.gradient_accumulation_kwargs or {}).get("num_steps", 1) != 1
        )
    if field.name == "data_seed":
        return value in (None, args.seed)
    return bool(value == default)
