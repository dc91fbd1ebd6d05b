"""torch's ``DistributedDataParallel`` but its buckets never change, and the window says when it reduces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainkit.console import warn

__all__ = ["FixedDDP"]

_TORCHS_CAP = 25  # MB; given to torch as None, which makes the first bucket small besides


class FixedDDP(DistributedDataParallel):
    """DDP that reduces its first step in the buckets of all later ones.

    torch begins with one bucket for all parameters, and after the first step makes others, in the order in which the gradients
    came. On three and more processes other buckets are sums in another order, so a run that is resumed would differ in the
    last bit. Here the buckets are made once, of the parameters from the last to the first.

    Args:
        module: what computes the loss; its parameters are alike on all processes already.
        due: whether gradients travel in the forward and backward that come now. Under static_graph it must be made when they
            do: torch counts all hooks until it has reduced once.
        bucket_cap_mb: size of a bucket in MB.
        static_graph: as in torch.
        find_unused_parameters: as in torch.
        **options: for torch's class.
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
        self._once = static_graph or not find_unused_parameters  # torch makes other buckets after the first step
        cap: Any = None if bucket_cap_mb == _TORCHS_CAP else bucket_cap_mb
        super().__init__(
            module,
            bucket_cap_mb=cap,
            static_graph=static_graph,
            find_unused_parameters=find_unused_parameters,
            init_sync=False,
            **options,
        )
        self.broadcast_buffers = False  # as an argument it would make some versions of torch warn
        if self._once:
            self._make_buckets()

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether gradients travel now; torch asks before each forward and after it."""
        return self._due()

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, wanted: bool) -> None:
        """torch's __init__ sets it."""

    @property
    def watches_outputs(self) -> bool:
        """Whether torch looks for unused parameters, from the outputs of each forward on."""
        return bool(self.find_unused_parameters and not self.static_graph)

    def expect(self, roots: Sequence[Tensor]) -> None:
        """The backward pass that comes is that of these, not of what the forward returned."""
        self.reducer.prepare_for_backward(list(roots) if self.watches_outputs else [])

    def forget_backward(self) -> None:
        """The gradients of backward passes without reduction have been reduced in another way.

        torch has noted which parameters they have reached, and would count these as used in the next reduction.
        """
        if self.watches_outputs:
            self.reducer._reset_state()

    def _make_buckets(self) -> None:
        """What torch does after the first step."""
        try:
            self.reducer._push_all_rebuilt_params()
            made = self.reducer._rebuild_buckets()
        except AttributeError:
            made = False
        if not made:
            warn(
                f"DDP of torch {torch.__version__} changes its buckets after the first step, and trainkit does not know how to "
                "prevent it: on three and more processes a run that is resumed may differ in the last bit from one that is "
                "not. torch 2.9 to 2.13 are known to work."
            )

    def _build_params_for_reducer(self) -> tuple[list[Tensor], list[bool]]:
        # Buckets that are made once are reduced in the order of this list, so the last layers come first, whose gradients do.
        # The others torch reverses by itself.
        parameters, sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        return (parameters[::-1], sparse[::-1]) if self._once else (parameters, sparse)

    def _post_forward(self, output: Any) -> Any:
        if torch.is_grad_enabled() and self._due():
            return super()._post_forward(output)  # type: ignore[no-untyped-call]
        return output  # torch would look for unused parameters all the same, and reduce in a first step under static_graph
