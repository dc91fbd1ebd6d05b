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


class _Change:
    """An attribute of somebody else's module that is another for as long as anybody wants it, in whatever order they end.

    Args:
        name: of the attribute.

    Attributes:
        users: who want it, the one that began last as the last.
    """

    def __init__(self, name: str) -> None:
        self.users: list[tuple[object, Any]] = []
        self._name, self._before = name, None

    @contextmanager
    def wanted(self, room: Any, value: Any, user: Any = None) -> Iterator[None]:
        """Within it the module has this value, or that of one who began before."""
        if not self.users:
            self._before = getattr(room, self._name)
            setattr(room, self._name, value)
        mine = object(), user
        self.users.append(mine)
        try:
            yield
        finally:
            self.users.remove(mine)
            if not self.users:
                setattr(room, self._name, self._before)


_told = _Change("_hf_deepspeed_config_weak_ref")
_divided = _Change("Init")


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
    with _told.wanted(room, weakref.ref(_STAGE3)):
        yield


@contextmanager
def divided_by(zero: Any, building: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Within it ``transformers`` makes its models within ``building()``, and other modules are made as ever.

    Args:
        zero: ``deepspeed.zero``, of which it asks that by ``Init``.
        building: divides layers as they are made; of several that of the one who asked for it last.
    """
    kind: Any = zero.Init

    class Init(kind):  # type: ignore[misc]
        def __new__(cls, *args: Any, config_dict_or_path: Any = None, **kwargs: Any) -> Any:
            if config_dict_or_path is not _Stage3.config:
                return super().__new__(cls)
            _, latest = _divided.users[-1]
            return latest()

    with told_transformers(first=True), _divided.wanted(zero, Init, building):
        yield
