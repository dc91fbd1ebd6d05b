"""`Fabric` of Lightning, over an `Accelerator`: its verbs with its meanings. The loop itself counts and divides losses."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, IterableDataset

from trainkit.accelerator.accelerator import Accelerator
from trainkit.accelerator.checkpointing import VerbGroup
from trainkit.accelerator.prepared_models import user_model
from trainkit.checkpoint.plain_files import write_object
from trainkit.checkpoint.ranks import run_on_all_ranks
from trainkit.checkpoint.torch_file import write_torch_file
from trainkit.compat.fabric_files import UserState, read_on_each_rank
from trainkit.compat.fabric_loaders import FabricLoader, shard
from trainkit.console import notice
from trainkit.distributed.requested_devices import RequestedDevices, find_device
from trainkit.errors import (
    CheckpointWriteError,
    ConfigurationError,
    NonFiniteError,
    StateMismatchError,
    UnsupportedArgumentError,
    nearest,
)
from trainkit.launch.strategy_choice import choose_strategy, read_devices
from trainkit.loggers.base import Logger
from trainkit.loggers.logger_setup import attach, make_logger
from trainkit.loggers.trackers import LoggerTracker, tracker_of
from trainkit.paths import local_path
from trainkit.precision import Precision
from trainkit.registry import adapt
from trainkit.rng import resolve_seed, seed_everything, seed_was_given
from trainkit.strategy import Strategy

__all__ = ["Fabric"]

State = MutableMapping[str, Any]


class Fabric:
    """Runs your own training loop with the verbs of Lightning's Fabric, on an `Accelerator`.

    Args:
        accelerator: `"auto"`, `"cpu"`, `"gpu"`, `"cuda"`, `"mps"` or `"tpu"`.
        strategy: `"auto"`, `"ddp"`, `"fsdp"`, `"zero1"` to `"zero3"`, `"deepspeed_stage_2"`, …, or a `Strategy`.
        devices: Number of processes on each node, or the GPU of a single process: `[1]`. `"auto"`: the processes that a
            launcher has started, otherwise one.
        num_nodes: Number of nodes.
        precision: A name or object of `Precision`, such as `"bf16-mixed"`.
        plugins: Only `None`.
        callbacks: Objects whose methods `call` calls.
        loggers: A `Logger`, a name such as `"csv"`, or a list.

    Attributes:
        accelerator: The `Accelerator`.
        loggers: The loggers.

    Raises:
        ConfigurationError: An argument is wrong, or there are not as many processes as `devices` says; the message has the
            command that starts them.

    Example:
        ```python
        fabric = Fabric(precision="bf16-mixed")
        fabric.launch()
        model, optimizer = fabric.setup(model, optimizer)
        loader = fabric.setup_dataloaders(loader)
        for index, (x, y) in enumerate(loader, start=1):
            with fabric.no_backward_sync(model, enabled=index % 4 != 0):
                fabric.backward(F.cross_entropy(model(x), y) / 4)
            if index % 4 == 0:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
        fabric.save("model.ckpt", {"model": model, "optimizer": optimizer, "index": index})
        ```
    """

    def __init__(
        self,
        *,
        accelerator: str = "auto",
        strategy: str | Strategy = "auto",
        devices: list[int] | str | int = "auto",
        num_nodes: int = 1,
        precision: str | int | Precision | None = None,
        plugins: Any = None,
        callbacks: Any = None,
        loggers: Any = None,
    ) -> None:
        if plugins:
            raise UnsupportedArgumentError(
                "Fabric(plugins=...) is not supported: pass precision=Precision(...) or strategy=..., a Strategy object; "
                "clusters such as SLURM are recognized."
            )
        requested = read_devices(accelerator, devices, num_nodes)
        chosen = _strategy(strategy, requested)
        cpu = requested.accelerator == "cpu"
        self.accelerator = Accelerator(cpu=cpu, strategy=chosen, precision=precision, gradient_accumulation_steps=1)
        _check_processes(self.accelerator, requested, devices)
        self._models: list[nn.Module] = []
        self._callbacks: list[Any] = _as_list(callbacks)
        self.loggers: list[Logger] = [_logger(one) for one in _as_list(loggers)]
        attach(self.loggers, "trainkit_runs", self.global_rank)
        self._trackers: list[LoggerTracker] = [tracker_of(logger) for logger in self.loggers]
        self._said: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        known = [one for one in dir(type(self)) if not one.startswith("_")]
        raise AttributeError(f"a Fabric has no {name!r}.{nearest(name, known)}", name=name, obj=None)

    # ------------------------------------------------------------------------------------------------------------- processes

    strategy = property(lambda self: self.accelerator.strategy, doc="The strategy.")
    device = property(lambda self: self.accelerator.device, doc="The device of this process.")
    global_rank = property(lambda self: self.accelerator.process_index, doc="The rank of this process.")
    local_rank = property(lambda self: self.accelerator.local_process_index, doc="Its rank on its node.")
    node_rank = property(lambda self: self.accelerator.world.node, doc="The index of its node.")
    world_size = property(lambda self: self.accelerator.num_processes, doc="Number of processes.")
    is_global_zero = property(lambda self: self.accelerator.is_main_process, doc="Whether this is the main process.")
    logger = property(lambda self: self.loggers[0], doc="The first logger.")

    def launch(self, function: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Return at once: the processes are there. With a function, return the result of `function(fabric, *args)`."""
        return None if function is None else function(self, *args, **kwargs)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the first process of each node."""
        self.accelerator.print(*args, **kwargs)

    def barrier(self, name: str | None = None) -> None:
        """Wait until all processes have called it.

        Args:
            name: No effect: an error names the line.
        """
        self.accelerator.wait_for_everyone()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object that process `src` has, on all processes."""
        return self.strategy.broadcast(obj, src)

    def all_gather(self, data: Any, group: None = None, sync_grads: bool = False) -> Any:
        """Return the tensors of all processes, stacked in a new first dimension; with one process the tensors unchanged."""
        return self.strategy.all_gather(self._as_tensors("all_gather", data, group), sync_grads=sync_grads)

    def all_reduce(self, data: Any, group: None = None, reduce_op: Any = "mean") -> Any:
        """Return the mean, sum, maximum or minimum of tensors over the processes, in new tensors."""
        return self.strategy.reduce(self._as_tensors("all_reduce", data, group), reduce_op=reduce_op)

    def rank_zero_first(self, local: bool = False) -> AbstractContextManager[None]:
        """A context whose body runs on the main process first; with `local` on the first process of each node."""
        return self.accelerator.local_main_process_first() if local else self.accelerator.main_process_first()

    def _as_tensors(self, verb: str, data: Any, group: Any) -> Any:
        if group is not None:
            raise UnsupportedArgumentError(f"Fabric.{verb}(group=...) is not supported: all processes take part. Remove it.")
        if isinstance(data, Mapping):
            return {key: self._as_tensors(verb, value, None) for key, value in data.items()}
        if isinstance(data, list | tuple):
            return type(data)(self._as_tensors(verb, value, None) for value in data)
        return torch.as_tensor(data, device=self.device)

    # ----------------------------------------------------------------------------------------------------------------- set up

    def setup(self, module: nn.Module, *optimizers: Optimizer, scheduler: Any = None, move_to_device: bool = True) -> Any:
        """Set up a model and its optimizers; returns the model, or with optimizers a tuple. With a scheduler it is the last."""
        prepared = self._prepare(module, *optimizers, moved=move_to_device)
        returned = prepared if optimizers else (prepared,)
        self._models.append(user_model(returned[0], self.strategy))
        for optimizer in returned[1:]:
            self._call_after_step(optimizer)
        self.call("on_after_setup", fabric=self, module=returned[0])
        return returned[0] if not optimizers else returned if scheduler is None else (*returned, scheduler)

    def setup_module(self, module: nn.Module, move_to_device: bool = True) -> nn.Module:
        """Set up a model, before the optimizers that are created from its parameters."""
        model: nn.Module = self.setup(module, move_to_device=move_to_device)
        return model

    def setup_optimizers(self, *optimizers: Optimizer) -> Any:
        """Set up the optimizers of models that were set up; returns one, or a tuple."""
        prepared = self._prepare(*optimizers)
        for optimizer in prepared if len(optimizers) > 1 else [prepared]:
            self._call_after_step(optimizer)
        return prepared

    def setup_dataloaders(
        self, *dataloaders: DataLoader[Any], use_distributed_sampler: bool = True, move_to_device: bool = True
    ) -> Any:
        """Let loaders yield batches on the device, and each process its part; returns one loader, or a list.

        With several processes torch's `DistributedSampler` shards the samples, which repeats some in the last batches. The
        order is that of a plain loop: `accelerator.prepare(loader)` is the loader of trainkit, which resumes exactly.

        Raises:
            ConfigurationError: Not a `DataLoader`, or one with a sampler that cannot be sharded.
        """
        loaders = [self._loader(one, use_distributed_sampler, move_to_device) for one in dataloaders]
        return loaders[0] if len(loaders) == 1 else loaders

    def to_device(self, obj: Any) -> Any:
        """Move a module, a tensor or tensors in containers to the device."""
        return obj.to(self.device) if isinstance(obj, nn.Module) else self.strategy.move(obj)

    @contextmanager
    def init_module(self, empty_init: bool | None = None) -> Iterator[None]:
        """A context in which a model is created: on the device, or as shards where the strategy can.

        With `empty_init` parameters are not initialized, to save time; load or set all of them.
        """
        with ExitStack() as contexts:
            contexts.enter_context(self.strategy.building())
            if not self.strategy.shards_parameters:
                contexts.enter_context(self.device)
            if empty_init:
                contexts.enter_context(_NoInit())
            yield

    def init_tensor(self) -> AbstractContextManager[Any]:
        """A context in which tensors are created on the device."""
        return self.device  # type: ignore[no-any-return]

    def _prepare(self, *objects: Any, moved: bool = True) -> Any:
        return self.accelerator.prepare(*objects, device_placement=[moved] * len(objects))

    def _call_after_step(self, optimizer: Any) -> None:
        if any(hasattr(one, "on_after_optimizer_step") for one in self._callbacks):
            optimizer.optimizer.register_step_post_hook(
                lambda of, args, kwargs: self.call("on_after_optimizer_step", strategy=self.strategy, optimizer=of)
            )

    def _loader(self, loader: Any, distributed: bool, moved: bool) -> FabricLoader:
        if not isinstance(loader, DataLoader):
            raise ConfigurationError(f"setup_dataloaders needs DataLoader objects of torch, not {type(loader).__name__}.")
        if self.world_size > 1 and distributed and not isinstance(loader.dataset, IterableDataset):
            seed = self.accelerator.world.from_main(resolve_seed(None) if seed_was_given(None) else 0)
            loader = shard(loader, self.strategy.data_world.rank, self.world_size, seed)
        return FabricLoader(loader, self.strategy.move if moved else None)

    # --------------------------------------------------------------------------------------------------------------- the loop

    def backward(self, tensor: Tensor, *args: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        """Run the backward pass. The loss is not divided: with accumulation you divide it yourself.

        Args:
            tensor: The loss.
            args: Its gradient, as for `Tensor.backward`.
            model: No effect: the loss belongs to the model that computed it.
            kwargs: Those of `Tensor.backward`.
        """
        self.accelerator.backward(tensor, **({"gradient": args[0]} if args else {}), **kwargs)

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[None]:
        """A context in which gradients accumulate and are not averaged over the processes. Call `step` outside of it."""
        if not any(user_model(module, self.strategy) is one for one in self._models):
            raise ConfigurationError("no_backward_sync needs a model that was set up: model = fabric.setup(model)")
        alone = self.accelerator.world.size == 1 and not self.strategy.accumulates_in_engine
        return nullcontext() if alone or not enabled else self.accelerator.no_sync(module)

    def clip_gradients(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        clip_val: float | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor | None:
        """Clip the gradients of an optimizer's parameters to a value, or to a norm; returns the norm before.

        Args:
            module: No effect: the optimizer has the parameters.
            optimizer: The optimizer, as `setup` has returned it.
            clip_val: Largest absolute value of a gradient.
            max_norm: Largest norm of all gradients.
            norm_type: The order of the norm.
            error_if_nonfinite: Raise an error if the norm is not finite.

        Raises:
            ConfigurationError: Neither `clip_val` nor `max_norm` is given, or both.
            NonFiniteError: The norm is not finite, with `error_if_nonfinite` and without a loss scale, which skips such steps.
        """
        if (clip_val is None) is (max_norm is None):
            raise ConfigurationError("clip_gradients needs clip_val= or max_norm=, and not both.")
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if max_norm is None:
            self.accelerator.clip_grad_value_(parameters, float(clip_val or 0.0))
            return None
        norm = self.accelerator.clip_grad_norm_(parameters, max_norm, norm_type)
        if error_if_nonfinite and norm is not None and self.strategy.precision.scaler is None and not norm.isfinite():
            raise NonFiniteError(
                f"clip_gradients: the norm of the gradients is {norm.item()}. To continue anyway: "
                "fabric.clip_gradients(..., error_if_nonfinite=False)"
            )
        return norm

    def autocast(self) -> AbstractContextManager[Any]:
        """A context that computes in the precision of the run. A model that was set up does so by itself."""
        return self.accelerator.autocast()

    # ------------------------------------------------------------------------------------------------------------------ files

    def save(
        self,
        path: str | PathLike[str],
        state: Mapping[str, Any],
        filter: Mapping[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Save a dict of models, optimizers, objects with `state_dict`, and values, to one file. All processes call it.

        The file has torch's format, with plain values only, so that other programs read it with `torch.load(path)`; with a
        name that ends in `.safetensors` or `.json` it is safetensors with JSON, which can store more, such as sets.
        `fabric.load(path)` and `trainkit.utils.load(path)` read both. It is complete or does not exist. Weights have the
        user's names, under any strategy and number of processes.

        Args:
            path: The file.
            state: The dict.
            filter: Key of a model or a dict → a function of name and value: whether to save it.

        Raises:
            UnsavableError: A value cannot be stored; the message names the path to it.
            CheckpointWriteError: The file cannot be written; an existing file is unchanged.
        """
        file, group = Path(local_path(path, "path")), VerbGroup(self.accelerator.world, "save")
        for key, keep in (filter or {}).items():
            if isinstance(state.get(key), Optimizer) or not callable(keep) or key not in state:
                raise ConfigurationError(f"save(filter=): {key!r} must name a model or dict of the state, with a function.")
        group.wait()
        content = UserState(self.strategy, self._models, state).content()
        for key, keep in (filter or {}).items():
            content[key] = {name: value for name, value in content[key].items() if keep(name, value)}

        def write() -> None:
            if self.is_global_zero:
                (write_object if file.suffix in (".safetensors", ".json") else write_torch_file)(file, content)

        run_on_all_ranks(group, write, CheckpointWriteError)

    def load(
        self, path: str | PathLike[str], state: State | None = None, strict: bool = True, *, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a file of `save` into the objects of a dict; its other values are replaced. All processes call it.

        Args:
            path: The file.
            state: Key → model, optimizer, object with `load_state_dict`, or any value, which is replaced. `None`: load nothing.
            strict: Missing keys, and names that differ in a model, are an error.
            weights_only: No effect: a file contains no code.

        Returns:
            What `state` does not have.

        Raises:
            CheckpointError: The file is missing or damaged, or does not fit; then nothing was changed.
        """
        file = Path(local_path(path, "path"))
        saved = read_on_each_rank(VerbGroup(self.accelerator.world, "load"), file)
        if not isinstance(saved, dict):
            raise StateMismatchError(f"{file}: expected a dict, as Fabric.save writes it, found {type(saved).__name__}.")
        if state is None:
            return saved
        UserState(self.strategy, self._models, state).plan(saved, str(file), strict)()
        for key in [key for key in state if key in saved]:
            if not hasattr(state[key], "load_state_dict"):
                state[key] = saved[key]
        return {key: value for key, value in saved.items() if key not in state}

    def load_raw(
        self, path: str | PathLike[str], obj: nn.Module, strict: bool = True, *, weights_only: bool | None = None
    ) -> None:
        """Load a file that is the state dict of a model, such as a safetensors file. All processes call it.

        Args:
            path: The file.
            obj: The model.
            strict: Names that differ are an error.
            weights_only: No effect: a file contains no code.
        """
        if not isinstance(obj, nn.Module):
            raise UnsupportedArgumentError(
                "load_raw loads models. For an optimizer: fabric.load(path, {'optimizer': optimizer})"
            )
        file = Path(local_path(path, "path"))
        saved = read_on_each_rank(VerbGroup(self.accelerator.world, "load_raw"), file)
        for text in UserState(self.strategy, self._models, {}).plan_of_model(obj, saved, str(file), strict)():
            notice(text)

    # -------------------------------------------------------------------------------------------------- callbacks and logging

    def call(self, hook_name: str, *args: Any, **kwargs: Any) -> None:
        """Call the method of this name of each callback that has one, with the keywords that it takes."""
        for callback in self._callbacks:
            method = getattr(callback, hook_name, None)
            if callable(method):
                parameters = inspect.signature(method).parameters
                whole = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
                method(*args, **{name: value for name, value in kwargs.items() if whole or name in parameters})

    def log(self, name: str, value: Any, step: int | None = None) -> None:
        """Log a value with all loggers."""
        self.log_dict({name: value}, step)

    def log_dict(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log values with all loggers; the main process's values are logged.

        In CSV and JSON lines the column "step" is the step: a metric of that name is skipped there, with a notice.
        """
        for tracker in self._trackers if self.is_global_zero else ():
            values = dict(metrics)
            if step is not None and tracker.name in ("csv", "jsonl") and values.pop("step", step) != step:
                self._say_once(f"log_dict: {tracker.name} has the column 'step' for step=, so the metric 'step' is skipped.")
            tracker.log(values, step)

    @staticmethod
    def seed_everything(seed: int | None = None, workers: bool | None = None, verbose: bool = True) -> int:
        """Seed torch, numpy and `random`; returns the seed. Loader workers are seeded by torch, from it and the rank.

        Args:
            seed: The seed; `None` draws one.
            workers: No effect: loader workers have different seeds on each process.
            verbose: Print the seed.
        """
        return seed_everything(seed, verbose=verbose)

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            notice(text)


class _NoInit(TorchFunctionMode):
    """Within it the functions of `torch.nn.init` do nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _logger(logger: Any) -> Logger:
    if isinstance(logger, str):
        return make_logger(logger)
    logger = adapt(logger)
    if not isinstance(logger, Logger):
        raise ConfigurationError(
            f"Fabric(loggers=) needs a logger of trainkit.loggers or its name, not {logger!r}. For example: loggers='csv'"
        )
    return logger


def _strategy(strategy: str | Strategy, requested: RequestedDevices) -> str | Strategy | None:
    """The `strategy` of the `Accelerator`; `None`: that of the launch configuration, or by the number of processes."""
    if requested.accelerator in ("cuda", "mps"):
        find_device(requested.accelerator)  # raises if there is none
    if strategy != "auto":
        return strategy
    if requested.indices is not None and len(requested.indices) == 1:
        return Strategy(find_device(f"cuda:{requested.indices[0]}"))
    return None if requested.accelerator in ("auto", "cpu", "cuda", "mps") else choose_strategy(strategy, requested)


def _check_processes(accelerator: Accelerator, requested: RequestedDevices, devices: Any) -> None:
    """Refuse a number of processes other than the requested one, and say if a single process leaves GPUs unused."""
    there, gpus = accelerator.num_processes, torch.cuda.device_count()
    each = gpus if requested.per_node == -1 else requested.per_node
    script = sys.argv[0] or "train.py"
    nodes = requested.nodes or 1
    if each and each * nodes != there:
        more = f"--nnodes {nodes} " if nodes > 1 else ""
        raise ConfigurationError(
            f"Fabric(devices={devices!r}, num_nodes={nodes}) needs {each * nodes} processes, found {there}. Start them: "
            f"trainkit launch {more}--nproc-per-node {each} {script}"
        )
    if each is None and there == 1 and gpus > 1 and accelerator.device.type == "cuda":
        notice(f"Fabric uses one of {gpus} GPUs. To use all: trainkit launch --nproc-per-node {gpus} {script}")
