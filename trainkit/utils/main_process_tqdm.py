"""``tqdm``: a progress bar in the main process only."""

from __future__ import annotations

from typing import Any

from tqdm.auto import tqdm as _tqdm

from trainkit.console import speaks
from trainkit.errors import ConfigurationError

__all__ = ["tqdm"]


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """``tqdm.auto.tqdm``, which shows nothing in other processes than the main one. Make the ``Accelerator`` before it.

    Args:
        *args: of tqdm: what is iterated over.
        main_process_only: ``False``: each process shows its own.
        **kwargs: of tqdm.

    Raises:
        ConfigurationError: the first argument is ``True`` or ``False``, as Accelerate had it once.
    """
    if args and isinstance(args[0], bool):
        raise ConfigurationError(f"tqdm({args[0]}, ...): write tqdm(..., main_process_only={args[0]}).")
    hidden = main_process_only and not speaks()
    return _tqdm(*args, **{**kwargs, "disable": True} if hidden else kwargs)
