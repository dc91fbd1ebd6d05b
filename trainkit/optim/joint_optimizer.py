"""`JointOptimizer`: several optimizers that step together after one backward pass, such as Muon and AdamW."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from trainkit.errors import OptimizerError
from trainkit.optim.optimizer_gradients import clear_gradients
from trainkit.optim.torch_step import step_of

__all__ = ["JointOptimizer", "optimizers_in"]


class JointOptimizer(Optimizer):
    """Several optimizers as one, for the step that they make together: its parameter groups are those of all.

    Under automatic optimization the hooks with an argument `optimizer` receive it if `configure_optimizers` returned several,
    so that one gradient norm is computed, clipped and logged over all parameters. Each optimizer keeps its own groups and
    state, which a checkpoint saves separately.

    Args:
        optimizers: Two or more. No parameter belongs to two of them.

    Attributes:
        optimizers: As above.
        begun: A step has been made, perhaps before the run was resumed.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        # Without Optimizer.__init__, which would create separate groups and state.
        self.optimizers = tuple(optimizers)
        self.begun = False

    def __repr__(self) -> str:
        return f"JointOptimizer({', '.join(map(repr, self.optimizers))})"

    @property
    def names(self) -> str:
        """The class names of the optimizers, for messages: `Muon and AdamW`."""
        return " and ".join(type(optimizer).__name__ for optimizer in self.optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all optimizers, in a new list. The groups themselves are those of the optimizers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Tensor, Any]:  # type: ignore[override]
        """The state of all optimizers, in a new dict."""
        return {parameter: state for optimizer in self.optimizers for parameter, state in optimizer.state.items()}

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Empty: each optimizer has its own."""
        return {}

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step each optimizer.

        Args:
            closure: Must be `None`: no optimizer that needs a closure is accepted among several.
        """
        for optimizer in self.optimizers:
            step_of(optimizer)()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set the gradients of all parameters to zero."""
        for optimizer in self.optimizers:
            if set_to_none:
                clear_gradients(optimizer)
            else:
                optimizer.zero_grad(set_to_none=False)

    def register_step_pre_hook(self, hook: Any) -> RemovableHandle:
        """Call a hook before the first optimizer steps."""
        return self.optimizers[0].register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> RemovableHandle:
        """Call a hook after the last optimizer has stepped."""
        return self.optimizers[-1].register_step_post_hook(hook)

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        """Raises an `OptimizerError`: the group belongs to one of the optimizers."""
        self._refuse("add_param_group(group)")

    def state_dict(self) -> NoReturn:
        """Raises an `OptimizerError`: each optimizer has its own."""
        self._refuse("state_dict()")

    def load_state_dict(self, state_dict: dict[str, Any]) -> NoReturn:
        """Raises an `OptimizerError`: each optimizer has its own."""
        self._refuse("load_state_dict(state)")

    def _refuse(self, call: str) -> NoReturn:
        raise OptimizerError(
            f"{call}: {self.names} step together, and each has its own groups and state. Expected one of them. Fix: "
            f"trainer.optimizers[0].{call}"
        )

    def begin(self, has_gradients: Callable[[Optimizer], bool]) -> None:
        """Before the first step: refuse an optimizer that has trainable parameters but no gradient, and would train nothing.

        Args:
            has_gradients: See `trainkit.Strategy.has_gradients`.

        Raises:
            OptimizerError: Names the optimizer, and manual optimization.
        """
        if self.begun:
            return
        for number, optimizer in enumerate(self.optimizers):
            trained = any(p.requires_grad for group in optimizer.param_groups for p in group["params"])
            if trained and not has_gradients(optimizer):
                raise OptimizerError(
                    f"{type(optimizer).__name__}, optimizer {number} of {len(self.optimizers)} that step together, has no "
                    "gradient in the first step: the loss depends on none of its parameters. Expected one loss whose backward "
                    "pass reaches the parameters of every optimizer. Fix: add its loss to what training_step returns; to step "
                    "the optimizers in turns, as a GAN does: self.automatic_optimization = False, and in training_step "
                    "self.manual_backward(loss) and opt.step() for each opt of self.optimizers()"
                )
        self.begun = True


def optimizers_in(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """The optimizers in a `JointOptimizer`, or the optimizer itself."""
    return optimizer.optimizers if isinstance(optimizer, JointOptimizer) else (optimizer,)
