"""`BaseFinetuning`: train a part of the model first, and more of it from a later epoch on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from trainkit.callbacks._freezing import Freezing, parameters_of
from trainkit.console import warn
from trainkit.errors import MissingMethodError, OptimizerError
from trainkit.optim.parameter_names import clean_paths

if TYPE_CHECKING:
    from trainkit.module.train_module import TrainModule
    from trainkit.trainer.trainer import Trainer

__all__ = ["BATCH_NORMS", "BaseFinetuning", "new_to"]

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

Modules = nn.Module | Iterable[Any]

# What the state of a scheduler contains if it has a rule for each group that the optimizer had when it was created:
# CosineAnnealingWarmRestarts; OneCycleLR; LambdaLR and MultiplicativeLR; CyclicLR.
_PER_GROUP = ("T_mult", "_schedule_phases", "lr_lambdas", "max_lrs")


class BaseFinetuning(Freezing):
    """Base class of callbacks that freeze layers before training, and unfreeze them at the start of later epochs.

    A subclass overrides `freeze_before_training` and `finetune_function`. `configure_optimizers` must pass only parameters
    that are not frozen to the optimizer; `finetune_function` adds a parameter group for the others.

    A checkpoint contains which parameters are frozen, and the optimizer's groups: a resumed run continues with the same
    ones. As opposed to Lightning, `finetune_function` is not called again when a run resumes in the middle of an epoch.
    Under DDP the buckets are rebuilt when parameters are frozen or unfrozen. ZeRO is refused: it shards the optimizer over
    the processes before training starts.

    Raises:
        ConfigurationError: The strategy shards the optimizer state.
        OptimizerError: A parameter group was added to an optimizer whose scheduler has a rule for each group that was there
            at the start, such as `LambdaLR` and `OneCycleLR`.

    Example:
        ```python
        class UnfreezeEncoder(BaseFinetuning):
            def freeze_before_training(self, module):
                self.freeze(module.encoder)

            def finetune_function(self, module, epoch, optimizer):
                if epoch == 5:
                    self.unfreeze_and_add_param_group(module.encoder, optimizer, lr=1e-5)

        trainer = Trainer(callbacks=[UnfreezeEncoder()])
        ```
    """

    def __init__(self) -> None:
        super().__init__()
        self._fixed: list[str] = []  # the BatchNorm layers with fixed statistics at the end of the last run

    def freeze_before_training(self, pl_module: TrainModule) -> None:
        """Freeze what is not trained from the start; override it. Called in `setup`, before `configure_optimizers`."""
        raise MissingMethodError(
            f"{type(self).__name__} has no freeze_before_training. Define: def freeze_before_training(self, module): "
            "self.freeze(module.backbone)"
        )

    def finetune_function(self, pl_module: TrainModule, epoch: int, optimizer: Optimizer) -> None:
        """Unfreeze what is trained from this epoch on; override it. Called for each optimizer at the start of each epoch.

        Args:
            pl_module: The module.
            epoch: Index of the epoch that starts; the first one is 0.
            optimizer: Add parameter groups to it with `unfreeze_and_add_param_group`.
        """
        raise MissingMethodError(
            f"{type(self).__name__} has no finetune_function. Define: def finetune_function(self, module, epoch, optimizer): "
            "if epoch == 5: self.unfreeze_and_add_param_group(module.backbone, optimizer)"
        )

    @staticmethod
    def flatten_modules(modules: Modules) -> list[nn.Module]:
        """Return the modules without children, and those that have parameters of their own.

        Args:
            modules: A module, or modules in lists and dicts of modules of any depth.
        """
        if not isinstance(modules, nn.Module):
            return list(chain.from_iterable(map(BaseFinetuning.flatten_modules, modules)))
        return [part for part in modules.modules() if not any(part.children()) or any(True for _ in _own_parameters(part))]

    @staticmethod
    def filter_params(modules: Modules, train_bn: bool = True, requires_grad: bool = True) -> Iterator[nn.Parameter]:
        """Yield each trainable or each frozen parameter once.

        Args:
            modules: As for `flatten_modules`.
            train_bn: Include the parameters of BatchNorm layers.
            requires_grad: Yield trainable parameters; `False`: frozen ones.
        """
        parts = [p for p in BaseFinetuning.flatten_modules(modules) if train_bn or not isinstance(p, BATCH_NORMS)]
        parameters = {id(p): p for part in parts for p in _own_parameters(part) if p.requires_grad == requires_grad}
        yield from parameters.values()

    @staticmethod
    def make_trainable(modules: Modules) -> None:
        """Unfreeze all parameters. BatchNorm layers update their running statistics again.

        Args:
            modules: As for `flatten_modules`.
        """
        for part in BaseFinetuning.flatten_modules(modules):
            if isinstance(part, BATCH_NORMS):
                part.track_running_stats = True
            for parameter in _own_parameters(part):
                parameter.requires_grad = True

    @staticmethod
    def freeze_module(module: nn.Module) -> None:
        """Freeze the parameters of a module, but not those of its children.

        A BatchNorm layer stops updating its running statistics; in training it normalizes by those of the batch.
        """
        if isinstance(module, BATCH_NORMS):
            module.track_running_stats = False
        for parameter in _own_parameters(module):
            parameter.requires_grad = False

    @staticmethod
    def freeze(modules: Modules, train_bn: bool = True) -> None:
        """Freeze all parameters.

        Args:
            modules: As for `flatten_modules`.
            train_bn: Except those of BatchNorm layers, which are made trainable.
        """
        for part in BaseFinetuning.flatten_modules(modules):
            if train_bn and isinstance(part, BATCH_NORMS):
                BaseFinetuning.make_trainable(part)
            else:
                BaseFinetuning.freeze_module(part)

    @staticmethod
    def filter_on_optimizer(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return the parameters that the optimizer does not have; a warning says if there are others."""
        params = list(params)
        new = new_to(optimizer, params)
        if len(new) < len(params):
            _warn_of_known(optimizer, "of those that are added now")
        return new

    @staticmethod
    def unfreeze_and_add_param_group(
        modules: Modules,
        optimizer: Optimizer,
        lr: float | None = None,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
    ) -> None:
        """Unfreeze modules, and add the parameters that the optimizer does not have to it as one new group.

        Args:
            modules: As for `flatten_modules`.
            optimizer: The optimizer.
            lr: Learning rate of the group. Default: that of the first group, divided by `initial_denom_lr`.
            initial_denom_lr: See `lr`.
            train_bn: Add the parameters of BatchNorm layers too. `False`: they are unfrozen too, as in Lightning, and stay out
                of the group; to keep one frozen, call `freeze_module(norm)` afterwards.
        """
        frozen = list(BaseFinetuning.filter_params(modules, requires_grad=False))
        if len(new_to(optimizer, frozen)) < len(frozen):
            _warn_of_known(optimizer, "that are unfrozen now")
        BaseFinetuning.make_trainable(modules)
        rate = optimizer.param_groups[0]["lr"] / initial_denom_lr if lr is None else float(lr)
        new = new_to(optimizer, BaseFinetuning.filter_params(modules, train_bn=train_bn))
        if new:
            optimizer.add_param_group({"params": new, "lr": rate})

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        super().setup(trainer, module, stage)
        if stage == "fit":
            self.freeze_before_training(module)

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        epoch = trainer.current_epoch
        if epoch == self._applied:
            return  # the run has resumed in this epoch
        for optimizer in trainer.optimizers:
            before = len(optimizer.param_groups)
            self.finetune_function(module, epoch, optimizer)
            if len(optimizer.param_groups) > before:
                self._refuse_schedulers(trainer, optimizer)
                for scheduler in _schedulers_of(trainer, optimizer):
                    _add_base_rates(scheduler, optimizer)
        self._applied = epoch

    def _refuse_schedulers(self, trainer: Trainer, optimizer: Optimizer) -> None:
        """Refuse schedulers of the optimizer that do not work with a new parameter group."""
        for scheduler in _schedulers_of(trainer, optimizer):
            if any(key in part for part in _parts(scheduler.state_dict()) for key in _PER_GROUP):
                raise OptimizerError(
                    f"{type(self).__name__} adds a parameter group during training, but {type(scheduler).__name__} has a rule "
                    "for each group that the optimizer had when the scheduler was created. Use a scheduler that changes the "
                    "learning rates of all groups, such as StepLR, LinearLR or CosineAnnealingLR; or pass all parameters in "
                    "configure_optimizers, and unfreeze without a new group: LayerFreezing({0: ['head'], 5: ['*']})"
                )

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if stage == "fit":
            self._fixed = _with_fixed_statistics(module)

    def state_dict(self) -> dict[str, Any]:
        fixed = self._fixed if self._module is None else _with_fixed_statistics(self._module)
        return {"epoch": self._applied, "fixed_statistics": fixed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._applied = int(state_dict["epoch"])
        for name, norm in _batch_norms(self._get_module()).items():
            norm.track_running_stats = name not in state_dict["fixed_statistics"]


def new_to(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """The parameters that an optimizer does not have."""
    known = parameters_of([optimizer])
    return [p for p in params if id(p) not in known]


def _warn_of_known(optimizer: Optimizer, which: str) -> None:
    kind = type(optimizer).__name__
    warn(
        f"{kind} already has parameters {which}. They stay in their group, with its learning rate. To give them a group of "
        "their own, pass only trainable parameters in configure_optimizers: "
        f"{kind}(filter(lambda p: p.requires_grad, self.parameters()))"
    )


def _schedulers_of(trainer: Trainer, optimizer: Optimizer) -> list[Any]:
    return [c.scheduler for c in trainer.lr_scheduler_configs if getattr(c.scheduler, "optimizer", None) is optimizer]


def _parts(state: dict[str, Any]) -> list[dict[str, Any]]:
    """The states of a scheduler and of those that it consists of, as `SequentialLR` does."""
    return [state, *chain.from_iterable(map(_parts, state.get("_schedulers", ())))]


def _add_base_rates(scheduler: Any, optimizer: Optimizer) -> None:
    """Give a scheduler the learning rates that the schedule of new groups would have begun with.

    As many times that of the first group as their learning rates are now. `CosineAnnealingLR` needs one for each group.
    """
    state = scheduler.state_dict()
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    for part in _parts(state):
        if base := part.get("base_lrs"):
            base += [base[0] * rate / rates[0] if rates[0] else rate for rate in rates[len(base) :]]
    scheduler.load_state_dict(state)


def _own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    return module.parameters(recurse=False)


def _with_fixed_statistics(module: nn.Module) -> list[str]:
    """The names of the BatchNorm layers that do not update their running statistics."""
    return [name for name, norm in _batch_norms(module).items() if not norm.track_running_stats]


def _batch_norms(module: nn.Module) -> dict[str, Any]:
    """The BatchNorm layers by name."""
    layers = {name: part for name, part in module.named_modules() if isinstance(part, BATCH_NORMS)}
    return {clean: layers[name] for name, clean in clean_paths(module, layers).items()}
