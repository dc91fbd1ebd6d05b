"""Notifies `transformers` that parameters are sharded, so that its `generate` keeps the processes synchronized and its
loading code fills the shards.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

__all__ = ["announce_zero3", "shard_transformers_models"]

_MODULE = "transformers.integrations.deepspeed"


class _Stage3:
    """The part of a DeepSpeed configuration that `transformers` reads."""

    config: ClassVar[dict[str, Any]] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}

    def is_zero3(self) -> bool:
        """Always `True`."""
        return True


_STAGE3 = _Stage3()


class _Patch:
    """Patches an attribute of another package's module while it has users, which may end in any order.

    Args:
        name: name of the attribute.

    Attributes:
        users: the current users; the latest is last.
    """

    def __init__(self, name: str) -> None:
        self.users: list[tuple[object, Any]] = []
        self._name, self._before = name, None

    @contextmanager
    def applied(self, module: Any, value: Any, user: Any = None) -> Iterator[None]:
        """Context manager in which the attribute is patched, with the value of its first user."""
        if not self.users:
            self._before = getattr(module, self._name)
            setattr(module, self._name, value)
        mine = object(), user
        self.users.append(mine)
        try:
            yield
        finally:
            self.users.remove(mine)
            if not self.users:
                setattr(module, self._name, self._before)


_config = _Patch("_hf_deepspeed_config_weak_ref")
_init = _Patch("Init")


@contextmanager
def announce_zero3(first: bool = False) -> Iterator[None]:
    """Context manager in which `transformers`, if it is imported, knows that ZeRO-3 is active.

    Args:
        first: import `transformers` first, if it is installed, because the body may import it.
    """
    if first and importlib.util.find_spec("transformers") is not None:
        importlib.import_module(_MODULE)
    module: Any = sys.modules.get(_MODULE)
    if module is None:
        yield
        return
    with _config.applied(module, weakref.ref(_STAGE3)):
        yield


@contextmanager
def shard_transformers_models(zero: Any, building: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Context manager in which `transformers` creates its models inside `building()`. Other modules are not affected.

    Args:
        zero: the module `deepspeed.zero`, whose `Init` `transformers` calls.
        building: context manager that shards layers as they are created. If several are active, the latest is used.
    """
    kind: Any = zero.Init

    class Init(kind):  # type: ignore[misc]
        def __new__(cls, *args: Any, config_dict_or_path: Any = None, **kwargs: Any) -> Any:
            if config_dict_or_path is not _Stage3.config:
                return super().__new__(cls)
            _, latest = _init.users[-1]
            return latest()

    with announce_zero3(first=True), _init.applied(zero, Init, building):
        yield
