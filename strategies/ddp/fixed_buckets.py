"""`DistributedDataParallel` whose buckets never change, and which averages gradients when the accumulation window ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainkit.console import warn

__all__ = ["FixedDDP"]

_DEFAULT_CAP = 25  # MB, torch's default. Passed to torch as None, so that it also makes the first bucket small


class FixedDDP(DistributedDataParallel):
    """DDP that uses the same buckets in its first step as in all later ones.

    torch starts with one bucket for all parameters, and after the first step rebuilds the buckets in the order in which the
    gradients arrived. With three or more ranks, other buckets add up in another order, so a resumed run would differ in the
    last bit. This class builds the final buckets at the start, from the last parameter to the first.

    Args:
        module: the module that computes the loss. Its parameters must be equal on all ranks already.
        due: returns whether the current forward and backward average gradients. With `static_graph`, create this object only
            when it returns `True`: torch counts all gradient hooks until its first all-reduce.
        bucket_cap_mb: bucket size in MB.
        static_graph: as in `DistributedDataParallel`.
        find_unused_parameters: as in `DistributedDataParallel`.
        **options: other arguments of `DistributedDataParallel`.
    """

    def __init__(
        self,
        module: nn.Module,
        due: Callable[[], bool],
        *,
        bucket_cap_mb: float,
        static_graph: bool = False,
        find_unused_parameters: bool = False,
        **options: Any,
    ) -> None:
        self._due = due
        self._fixed = static_graph or not find_unused_parameters  # torch would rebuild the buckets after the first step
        cap: Any = None if bucket_cap_mb == _DEFAULT_CAP else bucket_cap_mb
        super().__init__(
            module,
            bucket_cap_mb=cap,
            static_graph=static_graph,
            find_unused_parameters=find_unused_parameters,
            init_sync=False,
            **options,
        )
        self.broadcast_buffers = False  # some versions of torch warn if it is passed as an argument
        if self._fixed:
            self._build_buckets()

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether gradients are averaged now. torch reads this before and after each forward."""
        return self._due()

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, wanted: bool) -> None:
        """Ignore the value that torch's `__init__` sets."""

    @property
    def watches_outputs(self) -> bool:
        """Whether torch searches the graph of each forward's outputs for unused parameters."""
        return bool(self.find_unused_parameters and not self.static_graph)

    def prepare_backward(self, roots: Sequence[Tensor]) -> None:
        """Prepare for a backward pass that starts at `roots` instead of the outputs of the forward."""
        self.reducer.prepare_for_backward(list(roots) if self.watches_outputs else [])

    def forget_backward(self) -> None:
        """Forget the backward passes whose gradients were averaged without DDP.

        torch has recorded which parameters they used, and would count these as used in the next all-reduce too.
        """
        if self.watches_outputs:
            self.reducer._reset_state()

    def _build_buckets(self) -> None:
        """Build the final buckets, as torch does after the first step."""
        try:
            self.reducer._push_all_rebuilt_params()
            made = self.reducer._rebuild_buckets()
        except AttributeError:
            made = False
        if not made:
            warn(
                f"DDP of torch {torch.__version__} rebuilds its buckets after the first step, which trainkit cannot prevent in "
                "this version. With three or more processes, a resumed run may differ in the last bit from an uninterrupted "
                "one. Use torch 2.9 to 2.13, which are known to work."
            )

    def _build_params_for_reducer(self) -> tuple[list[Tensor], list[bool]]:
        # Fixed buckets are reduced in the order of this list. The gradients of the last layers are ready first, so they come
        # first. Buckets that torch rebuilds are reversed by torch.
        parameters, sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        return (parameters[::-1], sparse[::-1]) if self._fixed else (parameters, sparse)

    def _post_forward(self, output: Any) -> Any:
        if torch.is_grad_enabled() and self._due():
            return super()._post_forward(output)  # type: ignore[no-untyped-call]
        return output  # torch would still search for unused parameters, and with static_graph all-reduce in the first step
