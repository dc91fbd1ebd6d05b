"""`tqdm`: a progress bar in the main process only."""

from __future__ import annotations

from typing import Any

from tqdm.auto import tqdm as _tqdm

from trainkit.console import prints_here
from trainkit.errors import ConfigurationError

__all__ = ["tqdm"]


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """`tqdm.auto.tqdm`, shown in the main process only. Create the `Accelerator` first.

    Args:
        *args: The arguments of `tqdm.auto.tqdm`.
        main_process_only: `False`: each process shows its own bar.
        **kwargs: The arguments of `tqdm.auto.tqdm`.

    Raises:
        ConfigurationError: The first argument is `True` or `False`, as in old versions of Accelerate.
    """
    if args and isinstance(args[0], bool):
        raise ConfigurationError(f"tqdm({args[0]}, ...): write tqdm(..., main_process_only={args[0]}).")
    hidden = main_process_only and not prints_here()
    return _tqdm(*args, **{**kwargs, "disable": True} if hidden else kwargs)
