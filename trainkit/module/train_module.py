"""`TrainModule`: the base class of users' modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from typing import IO, TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.checks import choice
from trainkit.console import echo, warn
from trainkit.errors import (
    ConfigurationError,
    MetricError,
    MissingMethodError,
    MissingPackageError,
    NotAvailableError,
    UnknownNameError,
    UnsupportedArgumentError,
    nearest,
)
from trainkit.metrics.values import check_group
from trainkit.module.hparams import HyperparametersMixin
from trainkit.module.overridable_hooks import ModuleHooks
from trainkit.optim.optimizer_gradients import toggle, untoggle
from trainkit.optim.prepared import PreparedOptimizer

if TYPE_CHECKING:
    from trainkit.trainer.trainer import Trainer

__all__ = ["LightningModule", "TrainModule"]


M = TypeVar("M", bound="TrainModule")


class TrainModule(HyperparametersMixin, ModuleHooks, nn.Module):
    """A `torch.nn.Module` that also defines how it is trained. Define at least `training_step` and `configure_optimizers`.

    Attributes:
        automatic_optimization: Set it to `False` in `__init__` for manual optimization: `training_step` then calls
            `self.manual_backward(loss)` and `self.optimizers().step()`. Required for several optimizers that step in turns.
        example_input_array: An input of `forward`, for `ModelSummary` and `to_onnx`.
        CHECKPOINT_HYPER_PARAMS_KEY: Where `on_save_checkpoint` finds the hyperparameters in the checkpoint.
        strict_loading: `False`: a checkpoint is loaded as with `strict=False` of `Trainer.fit` and the other methods.
        pretrained_attribute: The name of an attribute that is a `transformers` or PEFT model, such as `"model"`. Checkpoints
            are then folders that `from_pretrained` opens: with the weights of that model by its own names, and its
            configuration. Default: `None`, and `from_pretrained` raises an error for a checkpoint.
        processing_class: With `pretrained_attribute`, a tokenizer or processor whose files are part of each checkpoint.

    Example:
        ```python
        class Classifier(TrainModule):
            def __init__(self):
                super().__init__()
                self.net = nn.Linear(64, 10)

            def training_step(self, batch, batch_idx):
                x, y = batch
                loss = F.cross_entropy(self.net(x), y)
                self.log("train_loss", loss)
                return loss

            def configure_optimizers(self):
                return torch.optim.AdamW(self.parameters(), lr=1e-3)
        ```
    """

    automatic_optimization: bool = True
    strict_loading: bool = True
    pretrained_attribute: str | None = None
    processing_class: Any = None
    example_input_array: Any = None
    CHECKPOINT_HYPER_PARAMS_KEY = "hyper_parameters"
    # Lightning's, for Fabric and for strategies with a device mesh; a Trainer sets neither.
    fabric: None = None
    device_mesh: None = None
    if TYPE_CHECKING:
        _trainer: Trainer | None
    else:
        _trainer = None  # torch.jit.script could not resolve an annotation.

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | Mapping[str, Any] | None:
        """Return the **mean** loss over the batch, a scalar; or a dict with it under `"loss"`.

        `None` skips this micro-batch: its gradient is zero. Under manual optimization the result may be any object. A batch
        that is `None` is skipped without calling this method.
        """
        raise NotImplementedError

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """Evaluate a validation batch; log metrics with `self.log`. Takes `dataloader_idx` too with several loaders."""
        raise NotImplementedError

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        """Evaluate a test batch; log metrics with `self.log`. Takes `dataloader_idx` too with several loaders."""
        raise NotImplementedError

    def predict_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the prediction for a batch, for `Trainer.predict`; by default `self(batch)`.

        Define it as `predict_step(self, batch, batch_idx)` or `predict_step(self, batch, batch_idx, dataloader_idx=0)`.
        """
        return self(batch)

    def configure_optimizers(self) -> Any:
        """Return the optimizers and learning-rate schedulers.

        One of: an optimizer; a list of optimizers; a tuple (optimizers, schedulers); a dict with `"optimizer"` and
        `"lr_scheduler"`, which is a scheduler or a dict with `scheduler`, `interval` ("epoch" or "step"), `frequency`,
        `monitor`, `strict` and `name`; a list or tuple of such dicts; or `None` to train without an optimizer.
        """
        raise NotImplementedError

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[..., Any] = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Log a metric: to the loggers, the progress bar and `trainer.callback_metrics`.

        Args:
            name: Name of the metric; with both `on_step` and `on_epoch`, `name_step` and `name_epoch` are logged. In the
                loggers, `"epoch"` replaces the epoch of a row, and `"step"` its step.
            value: A number, a tensor of one element, or a torchmetrics `Metric`. Tensors stay on the device.
            prog_bar: Show it in the progress bar.
            logger: Pass it to the loggers. Default: `True`.
            on_step: Log the value of the step, every `log_every_n_steps` optimizer steps: of all micro-batches of its window,
                reduced as `reduce_fx` says. Default: in training batches.
            on_epoch: Log the value reduced over the epoch. Default: everywhere except in training batches.
            reduce_fx: `"mean"` or `"avg"` (weighted by samples, in float64), `"sum"`, `"min"`, `"max"`, torch's functions of
                these names, or another function of the tensor of all values of the epoch or the window.
            enable_graph: Keep the autograd graph of the value.
            sync_dist: No effect: values are always reduced over all ranks.
            sync_dist_group: Only `None` or `torch.distributed.group.WORLD`.
            add_dataloader_idx: Append `/dataloader_idx_N` to the name if there are several evaluation loaders.
            batch_size: Weight of the value in a mean: its number of samples. Default: the first dimension of the batch's
                first tensor; in training, what `batch_weight` returned if the module defines it.
            metric_attribute: No effect: a torchmetrics `Metric` is found without it.
            rank_zero_only: Log the value of the main process only.

        Raises:
            MetricError: The value is not a number, the group is not all ranks, or this hook cannot log.
        """
        if self._trainer is None:
            warn(f"log({name!r}) outside a Trainer does nothing.")
            return
        if sync_dist_group is not None:
            check_group(name, sync_dist_group)
        self._trainer._run.metrics.log(
            name,
            value,
            prog_bar,
            logger,
            on_step,
            on_epoch,
            reduce_fx,
            enable_graph,
            add_dataloader_idx,
            batch_size,
            rank_zero_only,
        )

    def log_dict(self, dictionary: Mapping[str, Any], **options: Any) -> None:
        """Log each entry of a dict, all with the same options of `log`.

        Raises:
            MetricError: The argument is not a dict, or an entry is not a metric.
            UnknownNameError: `log` does not have this option.
        """
        if not hasattr(dictionary, "items"):
            raise MetricError(
                f"log_dict expected a dict of names and values, received {type(dictionary).__name__}. "
                "For example: self.log_dict({'loss': loss, 'accuracy': accuracy})"
            )
        known = TrainModule.log.__annotations__
        for option in options:
            if option not in known:
                raise UnknownNameError(f"log_dict has no argument {option!r}.{nearest(option, known)}")
        for name, value in dictionary.items():
            self.log(name, value, **options)

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the optimizer, or the list of optimizers, for manual optimization.

        Typed `Any`, so that `first, second = self.optimizers()` and `self.optimizers().step()` both pass a type checker.

        Args:
            use_pl_optimizer: Lightning's name. `False` returns torch's own objects, whose steps are not counted.

        Raises:
            ConfigurationError: Torch's own objects are requested for manual optimization on several processes.
        """
        prepared = self.trainer._run.optimizers
        if not (use_pl_optimizer or self.automatic_optimization) and self.trainer.strategy.data_world.size > 1:
            raise ConfigurationError(
                "self.optimizers(use_pl_optimizer=False): torch's own step would not average the gradients over "
                "the processes. Use self.optimizers()."
            )
        chosen: list[Any] = list(prepared) if use_pl_optimizer else [optimizer.optimizer for optimizer in prepared]
        return chosen[0] if len(chosen) == 1 else chosen

    @property
    def sample_mask(self) -> Tensor:
        """Which samples of the current batch are real: bool, [batch], on the device.

        All of them, unless the strategy pads short batches, as `XLAStrategy(pad_last_batch=True)` does. This loss is correct
        in both cases:

        ```python
        mask = self.sample_mask
        loss = (F.cross_entropy(logits, labels, reduction="none") * mask).sum() / mask.sum()
        ```
        """
        return self.trainer.sample_mask

    def lr_schedulers(self) -> Any:
        """Return the learning-rate scheduler, the list of schedulers, or `None`, for manual optimization."""
        schedulers = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        if not schedulers:
            return None
        return schedulers[0] if len(schedulers) == 1 else schedulers

    def manual_backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run the backward pass under manual optimization, instead of `loss.backward()`.

        Args:
            loss: A scalar.
            **kwargs: Arguments of `Tensor.backward`, such as `retain_graph=True`.

        Raises:
            ConfigurationError: The module uses automatic optimization, which runs the backward pass itself.
        """
        if self.automatic_optimization:
            raise ConfigurationError(
                "manual_backward needs manual optimization. Set self.automatic_optimization = False in __init__, or return the "
                "loss from training_step and leave the backward pass to the Trainer."
            )
        self.trainer._run.manual_backward(loss, **kwargs)

    def toggle_optimizer(self, optimizer: Optimizer | PreparedOptimizer) -> None:
        """Compute gradients only for this optimizer's parameters, until `untoggle_optimizer` or the next toggle."""
        self.untoggle_optimizer(optimizer)
        self.__dict__["_toggled"] = toggle(optimizer, self.trainer.optimizers)

    def untoggle_optimizer(self, optimizer: Optimizer | PreparedOptimizer) -> None:
        """Undo `toggle_optimizer`.

        Args:
            optimizer: No effect: only one is toggled at a time.
        """
        untoggle(self.__dict__.pop("_toggled", {}))

    @contextmanager
    def toggled_optimizer(self, optimizer: Optimizer | PreparedOptimizer) -> Iterator[None]:
        """A context in which gradients are computed only for this optimizer's parameters."""
        self.toggle_optimizer(optimizer)
        try:
            yield
        finally:
            self.untoggle_optimizer(optimizer)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> Tensor | None:
        """Clip the gradients before an optimizer step; override it to clip in another way.

        Returns:
            The norm before clipping if it was computed, which is logged as `grad_norm`.
        """
        return self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> Tensor | None:
        """Clip the gradients of an optimizer's parameters.

        Args:
            optimizer: The optimizer.
            gradient_clip_val: The largest norm or absolute value; 0 does nothing. Default: that of the `Trainer`, if any.
            gradient_clip_algorithm: `"norm"` or `"value"`. Default: that of the `Trainer`, or `"norm"`.

        Returns:
            The norm before clipping for `"norm"`, else `None`.

        Raises:
            ConfigurationError: The `Trainer` has another value or algorithm, or there is no such algorithm.
        """
        value = self._clip_argument("gradient_clip_val", gradient_clip_val)
        algorithm = self._clip_argument("gradient_clip_algorithm", gradient_clip_algorithm) or "norm"
        choice(algorithm, "clip_gradients(gradient_clip_algorithm=)", ("norm", "value"))
        if not value:
            return None
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        engine = self.trainer.accelerator
        if algorithm == "norm":
            return engine.clip_grad_norm_(parameters, value)
        engine.clip_grad_value_(parameters, value)
        return None

    def _clip_argument(self, name: str, value: Any) -> Any:
        """What `clip_gradients` uses: the argument, which must not contradict that of the trainer, or that of the trainer."""
        of_trainer = getattr(self.trainer, name)
        if value is None or of_trainer is None or value == of_trainer:
            return of_trainer if value is None else value
        raise ConfigurationError(
            f"Trainer({name}={of_trainer!r}) and clip_gradients({name}={value!r}) are both given, and differ. Give one of them."
        )

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Return the tensors of all ranks, stacked along a new first dimension; with one process the tensors unchanged.

        Args:
            data: A tensor, or tensors in containers.
            group: Only `None`, all ranks.
            sync_grads: Let gradients flow back through the gather.

        Raises:
            ConfigurationError: A group is given; or it is called in a step or batch hook of an evaluation in which ranks
                have, or may have, different numbers of batches.
        """
        if group is not None:
            raise ConfigurationError(
                f"all_gather: expected group=None, got {group!r}: a run gathers over all its ranks. Remove it: "
                "self.all_gather(data)"
            )
        evaluation = self.trainer._run.evaluation
        if evaluation is not None and evaluation.uneven:
            name = evaluation.name
            raise ConfigurationError(
                f"all_gather in a batch of {name}: ranks may have different numbers of batches, so some would wait. Use "
                f"self.log, which reduces over all ranks; or collect values and gather them in on_{name}_epoch_end."
            )
        return self.trainer.strategy.all_gather(data, sync_grads=sync_grads)

    @classmethod
    def load_from_checkpoint(
        cls: type[M],
        checkpoint_path: str | PathLike[str] | IO[bytes],
        map_location: torch.device | str | int | Mapping[str, str] | Callable[..., Any] | None = None,
        hparams_file: None = None,
        strict: bool | None = None,
        *,
        trust: Iterable[str] = (),
        **overrides: Any,
    ) -> M:
        """Build a module with the hyper-parameters and weights of a checkpoint.

        Nothing that the checkpoint names is imported. For the checkpoint of a command line, an argument that is a class, a
        function or an object is the default of `__init__` if it was that, or you pass it.

        Args:
            checkpoint_path: The folder of the checkpoint; the suffix `.ckpt` of Lightning may follow. Or an open file of
                Lightning or `torch.save`.
            map_location: The device to move the module to, or a dict or function as for `torch.load`, for which all tensors
                are on the CPU. Default: the module stays where `__init__` put it.
            hparams_file: Lightning's argument, which must be `None`: pass the hyper-parameters themselves.
            strict: A missing or unexpected name is an error. Different shapes are always one. Default: `strict_loading`.
            trust: Packages whose classes and functions the checkpoint may name, each with a dot at its end: `["mypackage."]`.
                They are imported, and created with the saved arguments. Name a package only if you trust the checkpoint with
                all that is in it.
            **overrides: Arguments of `__init__` that differ from the saved ones, or were not saved.

        Raises:
            CheckpointError: It is missing or damaged, or an argument of `__init__` is neither saved nor passed.
            StateMismatchError: The weights do not fit.
            ConfigurationError: `trust` is no list of packages.

        Warns:
            TrainkitWarning: `__init__` uses its default for an argument whose value could not be stored.
        """
        from trainkit.module.from_checkpoint import Trust, build_from_checkpoint

        if hparams_file is not None:
            overrides["hparams_file"] = hparams_file
        return build_from_checkpoint(cls, checkpoint_path, map_location, strict, Trust(trust), overrides)

    def freeze(self: M) -> M:
        """Freeze all parameters and set eval mode; returns the module."""
        return self.requires_grad_(False).eval()

    def unfreeze(self: M) -> M:
        """Make all parameters trainable and set training mode; returns the module."""
        return self.requires_grad_(True).train()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the prediction; define it if you call the module itself."""
        raise MissingMethodError(f"{type(self).__name__} was called, but has no forward. Define: def forward(self, x): ...")

    # -------------------------------------------------------------------------------------- the run that it is attached to

    if not TYPE_CHECKING:  # type checkers report unknown attributes themselves

        def __getattr__(self, name: str) -> Any:
            modules = self.__dict__.get("_modules")
            if modules is not None and name in modules:  # the usual case in a step, without another call
                return modules[name]
            try:
                return super().__getattr__(name)
            except AttributeError:
                if isinstance(getattr(type(self), name, None), property):
                    return object.__getattribute__(self, name)  # it has raised an AttributeError: show that
                raise

    @property
    def trainer(self) -> Trainer:
        """The trainer that runs this module; before the first run, a `NotAvailableError`.

        Assign it only in tests of your module: a run sets it.
        """
        if self._trainer is None:
            raise NotAvailableError(f"{type(self).__name__} is not attached to a Trainer yet. Call trainer.fit(module) first.")
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: Trainer | None) -> None:
        for module in self.modules():
            if isinstance(module, TrainModule):
                module._trainer = trainer

    @property
    def loggers(self) -> list[Any]:
        """The loggers of the trainer; empty without a trainer."""
        return [] if self._trainer is None else self._trainer.loggers

    @property
    def logger(self) -> Any | None:
        """The first logger, or `None`."""
        return self.loggers[0] if self.loggers else None

    @property
    def device(self) -> torch.device:
        """The device of the module's parameters."""
        tensor: Tensor | None = next(self.parameters(), None)
        if tensor is None:
            tensor = next(self.buffers(), None)
        if tensor is not None:
            return tensor.device
        return torch.device("cpu") if self._trainer is None else self._trainer.strategy.device

    @property
    def on_gpu(self) -> bool:
        """Whether the module's parameters are on a CUDA device."""
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the module's floating-point parameters in the forward; between forwards they may be master weights."""
        trainer = self._trainer
        if trainer is not None and trainer.stage is not None and trainer.strategy.owns_masters:
            return trainer.strategy.precision.parameter_dtype
        return next((p.dtype for p in self.parameters() if p.is_floating_point()), torch.get_default_dtype())

    @property
    def global_step(self) -> int:
        """Number of optimizer steps so far."""
        return 0 if self._trainer is None else self._trainer.global_step

    @property
    def current_epoch(self) -> int:
        """Index of the current epoch, from 0."""
        return 0 if self._trainer is None else self._trainer.current_epoch

    @property
    def global_rank(self) -> int:
        """The rank of this process."""
        return 0 if self._trainer is None else self._trainer.strategy.rank

    @property
    def local_rank(self) -> int:
        """The rank of this process on its node."""
        return 0 if self._trainer is None else self._trainer.strategy.local_rank

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the main process only, above the progress bar; the arguments are those of `print`."""
        if self._trainer is None:
            echo(*args, **kwargs)
        else:
            self._trainer.print(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        # A copy, or a worker process, needs the module without its run.
        return {**self.__dict__, "_trainer": None}

    # -------------------------------------------------------------------------------------------------------------- export

    def to_onnx(
        self, file_path: str | PathLike[str] | None = None, input_sample: Any = None, **kwargs: Any
    ) -> torch.onnx.ONNXProgram | None:
        """Export `forward` to ONNX with `torch.onnx.export`, in eval mode.

        It needs the packages onnx and onnxscript. `torch.export.export(module.eval(), (x,))` needs none, and exports for
        other programs that use PyTorch.

        Args:
            file_path: The file to write. Default: write none.
            input_sample: An input of `forward`: a tensor, or a tuple of its arguments. Default: `example_input_array`.
            **kwargs: Arguments of `torch.onnx.export`, such as `dynamic_shapes`.

        Returns:
            The program; `None` with `dynamo=False`.

        Raises:
            ConfigurationError: There is no input.
            MissingPackageError: A package is missing.

        Example:
            ```python
            module.to_onnx("model.onnx", torch.randn(1, 64))
            ```
        """
        sample = self.example_input_array if input_sample is None else input_sample
        if sample is None:
            raise ConfigurationError(
                f"{type(self).__name__}.to_onnx needs an input of forward. Pass it: module.to_onnx('model.onnx', "
                "torch.randn(1, 64)); or set self.example_input_array in __init__."
            )
        modes = {module: module.training for module in self.modules()}
        self.eval()
        try:
            with torch.no_grad():
                return torch.onnx.export(self, sample if isinstance(sample, tuple) else (sample,), file_path, **kwargs)
        except ModuleNotFoundError as error:
            if error.name not in ("onnx", "onnxscript", "onnx_ir"):
                raise
            raise MissingPackageError(
                f"to_onnx needs the package {error.name!r}, which is not installed. Install what torch.onnx needs: "
                "pip install onnx onnxscript"
            ) from error
        finally:
            for module, mode in modes.items():
                module.training = mode

    def to_torchscript(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Lightning's name; PyTorch has deprecated TorchScript.

        Args:
            *args: No effect.
            **kwargs: No effect.

        Raises:
            UnsupportedArgumentError: Always; it names what to use.
        """
        raise UnsupportedArgumentError(
            "to_torchscript is not supported: PyTorch has deprecated TorchScript. Use torch.export: "
            "torch.export.save(torch.export.export(module.eval(), (x,)), 'model.pt2')"
        )

    def to_tensorrt(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Lightning's name; the package torch_tensorrt compiles a module itself.

        Args:
            *args: No effect.
            **kwargs: No effect.

        Raises:
            UnsupportedArgumentError: Always; it names what to use.
        """
        raise UnsupportedArgumentError(
            "to_tensorrt is not supported. Use the package torch_tensorrt: torch_tensorrt.compile(module.eval(), inputs=[x])"
        )


# torch.jit.script compiles the other properties of a module.
TrainModule.__jit_unused_properties__ = [name for name in dir(TrainModule) if isinstance(getattr(TrainModule, name), property)]  # type: ignore[attr-defined]

LightningModule = TrainModule
