"""Telling ``transformers`` that parameters are divided: then its ``generate`` keeps the processes in step, and what it loads
goes where it belongs.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

__all__ = ["divided_by", "told_transformers"]

_ROOM = "transformers.integrations.deepspeed"


class _Stage3:
    """What ``transformers`` asks of a configuration of DeepSpeed."""

    config: ClassVar[dict[str, Any]] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}

    def is_zero3(self) -> bool:
        """Yes."""
        return True


_STAGE3 = _Stage3()


@contextmanager
def told_transformers(first: bool = False) -> Iterator[None]:
    """Within it ``transformers`` knows of stage 3, if it has been imported.

    Args:
        first: it may be imported within, so it is now, if it is installed.
    """
    if first and importlib.util.find_spec("transformers") is not None:
        importlib.import_module(_ROOM)
    room: Any = sys.modules.get(_ROOM)
    if room is None:
        yield
        return
    before = room._hf_deepspeed_config_weak_ref
    room._hf_deepspeed_config_weak_ref = weakref.ref(_STAGE3)
    try:
        yield
    finally:
        room._hf_deepspeed_config_weak_ref = before


@contextmanager
def divided_by(zero: Any, building: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Within it ``transformers`` makes its models within ``building()``, and other modules are made as ever.

    Args:
        zero: ``deepspeed.zero``, of which it asks that by ``Init``.
        building: divides layers as they are made.
    """
    kind: Any = zero.Init

    class Init(kind):  # type: ignore[misc]
        def __new__(cls, *args: Any, config_dict_or_path: Any = None, **kwargs: Any) -> Any:
            return building() if config_dict_or_path is _Stage3.config else super().__new__(cls)

    with told_transformers(first=True):
        zero.Init = Init
        try:
            yield
        finally:
            zero.Init = kind
