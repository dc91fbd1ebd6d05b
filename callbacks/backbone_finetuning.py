"""`BackboneFinetuning`: train a pretrained backbone from a later epoch on, with a learning rate of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from trainkit.callbacks.base_finetuning import BATCH_NORMS, BaseFinetuning, new_to
from trainkit.checks import function, real_number, whole_number
from trainkit.console import notice
from trainkit.errors import ModuleError

if TYPE_CHECKING:
    from trainkit.module.train_module import TrainModule
    from trainkit.trainer.trainer import Trainer

__all__ = ["BackboneFinetuning"]


def multiplicative(epoch: int) -> float:
    """The default of `lambda_func`."""
    return 2.0


class BackboneFinetuning(BaseFinetuning):
    """Freezes `module.backbone`, and trains it from a later epoch on with a learning rate that grows toward that of the rest.

    When the backbone is unfrozen, its parameters become a new group of the optimizer. At the start of each later epoch
    its learning rate is multiplied by `lambda_func(epoch + 1)`. What a scheduler does to the groups comes in addition. See
    `BaseFinetuning` for `configure_optimizers`, schedulers and strategies.

    Args:
        unfreeze_backbone_at_epoch: Epoch at whose start the backbone is unfrozen; the first one is 0.
        lambda_func: Called with `epoch + 1`; returns the factor for the learning rate of the backbone. Default: always 2.
        backbone_initial_ratio_lr: Initial learning rate of the backbone, as a fraction of that of the first group.
        backbone_initial_lr: Initial learning rate of the backbone, instead of the fraction.
        should_align: The learning rate of the backbone does not exceed that of the first group.
        initial_denom_lr: No effect, as in Lightning: `backbone_initial_ratio_lr` or `backbone_initial_lr` is used.
        train_bn: Train the BatchNorm layers of the backbone. They are then never frozen: until the backbone is unfrozen, they
            are trained if `configure_optimizers` passes them to the optimizer, and then in the new group. `False`: their
            parameters and running statistics stay as they are in the whole run. Unlike in Lightning, whose `False` only
            keeps them out of the new group.
        verbose: Print both learning rates at the start of each epoch from `unfreeze_backbone_at_epoch` on.
        rounding: Number of decimals that `verbose` prints.

    Raises:
        ModuleError: The module has no attribute `backbone` that is a module after `__init__`, or has several optimizers.
        OptimizerError: A scheduler does not work with a new group, see `BaseFinetuning`. Raised before training.

    Example:
        ```python
        finetuning = BackboneFinetuning(unfreeze_backbone_at_epoch=5, lambda_func=lambda epoch: 1.5)
        trainer = Trainer(callbacks=[finetuning])
        ```
    """

    def __init__(
        self,
        unfreeze_backbone_at_epoch: int = 10,
        lambda_func: Callable[[int], float] = multiplicative,
        backbone_initial_ratio_lr: float = 0.1,
        backbone_initial_lr: float | None = None,
        should_align: bool = True,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
        verbose: bool = False,
        rounding: int = 12,
    ) -> None:
        super().__init__()
        name = "BackboneFinetuning"
        whole_number(unfreeze_backbone_at_epoch, f"{name}(unfreeze_backbone_at_epoch=)", 0)
        function(lambda_func, f"{name}(lambda_func=)", "lambda epoch: 1.5")
        real_number(backbone_initial_ratio_lr, f"{name}(backbone_initial_ratio_lr=)", least=0, example=0.1)
        real_number(backbone_initial_lr, f"{name}(backbone_initial_lr=)", least=0, example=1e-5, optional=True)
        whole_number(rounding, f"{name}(rounding=)", 0)
        self.unfreeze_backbone_at_epoch = unfreeze_backbone_at_epoch
        self.lambda_func = lambda_func
        self.backbone_initial_ratio_lr = backbone_initial_ratio_lr
        self.backbone_initial_lr = backbone_initial_lr
        self.should_align = should_align
        self.initial_denom_lr = initial_denom_lr
        self.train_bn = train_bn
        self.verbose = verbose
        self.rounding = rounding
        self.previous_backbone_lr: float | None = None
        self._group: int | None = None  # index of the backbone's group

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if stage == "fit":
            self.previous_backbone_lr = self._group = None
        super().setup(trainer, module, stage)

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        if len(trainer.optimizers) > 1:
            raise ModuleError(
                f"BackboneFinetuning adds the backbone to the optimizer, but there are {len(trainer.optimizers)} optimizers. "
                "Write a subclass of BaseFinetuning whose finetune_function chooses one of them."
            )
        last = trainer.max_epochs
        frozen = list(self.filter_params(module.backbone, train_bn=self.train_bn, requires_grad=False))
        if last is None or last < 0 or self.unfreeze_backbone_at_epoch < last:
            for optimizer in trainer.optimizers:
                if new_to(optimizer, frozen):
                    self._refuse_schedulers(trainer, optimizer)

    def freeze_before_training(self, pl_module: TrainModule) -> None:
        if not isinstance(getattr(pl_module, "backbone", None), nn.Module):
            raise ModuleError(
                f"BackboneFinetuning freezes module.backbone, but {type(pl_module).__name__} has no such layer when it is set "
                "up. Create it in __init__: self.backbone = ...   For layers with another name: BaseFinetuning or LayerFreezing"
            )
        self.freeze(pl_module.backbone, train_bn=self.train_bn)

    def finetune_function(self, pl_module: TrainModule, epoch: int, optimizer: Optimizer) -> None:
        rate = float(optimizer.param_groups[0]["lr"])
        if epoch >= self.unfreeze_backbone_at_epoch and self.previous_backbone_lr is None:
            initial_rate, groups = self.backbone_initial_lr, len(optimizer.param_groups)
            backbone_rate = rate * self.backbone_initial_ratio_lr if initial_rate is None else initial_rate
            self.unfreeze_and_add_param_group(
                pl_module.backbone, optimizer, backbone_rate, initial_denom_lr=self.initial_denom_lr, train_bn=self.train_bn
            )
            if not self.train_bn:  # As in Lightning, unfreezing has also unfrozen the BatchNorm layers.
                self.freeze(
                    [part for part in self.flatten_modules(pl_module.backbone) if isinstance(part, BATCH_NORMS)], train_bn=False
                )
            self._group = groups if len(optimizer.param_groups) > groups else None
        elif self._group is not None and self.previous_backbone_lr is not None:
            backbone_rate = self.lambda_func(epoch + 1) * self.previous_backbone_lr
            backbone_rate = rate if self.should_align and backbone_rate > rate else backbone_rate
            optimizer.param_groups[self._group]["lr"] = backbone_rate
        else:
            return
        self.previous_backbone_lr = backbone_rate
        if self.verbose:
            digits = self.rounding
            notice(f"epoch {epoch}: learning rate {round(rate, digits)}, of the backbone {round(backbone_rate, digits)}.")

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "previous_backbone_lr": self.previous_backbone_lr, "group": self._group}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.previous_backbone_lr, self._group = state_dict["previous_backbone_lr"], state_dict["group"]
