"""`get_init_args` returns what a constructor got."""

from __future__ import annotations

import inspect
from typing import Any

from trainkit.utilities.parsing import get_init_args


class Base:
    def __init__(self, width: int, /, depth: int = 2, *, bias: bool = True, **others: Any) -> None:
        extra = width * 2  # a local variable is not an argument
        frame = inspect.currentframe()
        assert frame is not None
        self.found, self.extra = get_init_args(frame), extra


def test_all_arguments_without_self() -> None:
    assert Base(3, bias=False, dropout=0.1).found == {"width": 3, "depth": 2, "bias": False, "dropout": 0.1}
