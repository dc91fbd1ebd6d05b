"""`XLAStrategy`: TPUs, and XLA's CPU runtime for tests, with torch_xla."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from os import PathLike
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.data.micro_batches import WHOLE_WINDOW, MicroBatch
from trainkit.distributed.requested_devices import RequestedDevices
from trainkit.distributed.world import World
from trainkit.errors import ConfigurationError, LossError
from trainkit.metrics.values import TO_HOST
from trainkit.precision import Precision
from trainkit.strategies._collectives import Buffers, check_modules_match
from trainkit.strategies._processes import duration
from trainkit.strategies.xla import INFO
from trainkit.strategies.xla.runtime import (
    BatchSharding,
    XLAGenerator,
    choose_runtime,
    compilation_hints,
    compilations,
    count_devices,
    import_torch_xla,
    load_ahead,
    read_on_all_ranks,
    refuse_late_runtime,
    require,
    set_compilation_cache,
    to_xla,
)
from trainkit.strategies.xla.threads import ThreadWorld
from trainkit.strategies.xla.xla_replicas import (
    Replicas,
    SPMDModel,
    batch_axes,
    host_world,
    launch,
    make_mesh,
    replica_world,
    resolve_mode,
    shard_footprint,
    shard_state,
)
from trainkit.strategy import Contents, Footprint, Strategy

__all__ = ["Rate", "XLAStrategy", "steady_rates"]


class XLAStrategy(Strategy):
    """Training on one or all XLA devices of a host, such as the cores of a TPU. `strategy="xla"` creates it.

    Tensors are lazy: operations are recorded, compiled to one graph per step, and run at the end of the step. So a step
    must not read values (`.item()`, `print(loss)`, `if loss > 1`). Log them instead: they are read after the step.

    With several devices, one process uses them all (SPMD). The batches of all devices, of `batch_size` samples each, form
    one tensor that is sharded over the devices. The results are those of DDP with as many processes; `BatchNorm` uses the
    statistics of all devices. With several hosts, start the script once on each; each host reads all of the data.

    Args:
        mode: `"spmd"`, or `"replicas"`: one process for each device, started by `launch` or `notebook_launcher`. Every
            `training_step` must then return a loss and use the same parameters on all replicas.
        mesh: A `torch_xla.distributed.spmd.Mesh`, or a dict of axis sizes. Batches are sharded over "data" and "fsdp".
        fsdp: Shard parameters, gradients and optimizer state over the axis "fsdp" (FSDPv2 of torch_xla).
        pad_last_batch: Pad the short last batch of an epoch with copies of its last sample, so that it needs no graph of
            its own. The loss must skip the copies with `self.sample_mask`; BatchNorm includes them.
        timeout: Timeout of collectives: a timedelta, or a number of seconds.
        compilation_cache: Folder in which TPUs keep compiled graphs for later runs.
        device: `"auto"` or `"xla"`. `"cpu"` is XLA's CPU runtime, for tests.
        precision: `"32-true"`, `"bf16-mixed"`, `"bf16-true"` or `"64-true"` (slow on TPUs, which have no float64).

    Raises:
        ConfigurationError: An argument is wrong, or contradicts another.
        MissingPackageError: The package torch_xla is not installed, or does not work with this torch.

    Example:
        ```python
        trainer = Trainer(strategy=XLAStrategy(mesh={"data": 2, "fsdp": 4}, fsdp=True), precision="bf16-mixed")
        ```
    """

    name: ClassVar[str] = "xla"
    info = INFO
    averages_in_step: ClassVar[bool] = True
    can_sync_batchnorm: ClassVar[bool] = True  # With SPMD, BatchNorm uses the batches of all devices anyway.
    compiles: ClassVar[bool] = False
    keeps_placement: ClassVar[bool] = False
    lazy_tensors: ClassVar[bool] = True
    supported_precisions: ClassVar[tuple[str, ...]] = ("32-true", "64-true", "bf16-mixed", "bf16-true")

    def __init__(
        self,
        *,
        mode: str | None = None,
        mesh: Any = None,
        fsdp: bool = False,
        pad_last_batch: bool = False,
        timeout: timedelta | float = timedelta(minutes=30),
        compilation_cache: str | PathLike[str] | None = None,
        device: str | torch.device = "auto",
        precision: Precision | str | int | None = None,
    ) -> None:
        mode = resolve_mode(mode)
        if mode == "replicas" and (fsdp or mesh is not None or pad_last_batch):
            raise ConfigurationError(
                "mesh, fsdp and pad_last_batch do not work with mode='replicas', where models are separate. Use mode='spmd'."
            )
        self.mode = mode
        self.fsdp = fsdp
        self.pad_last_batch = pad_last_batch
        self._accelerator = str(device)
        self._mesh_argument = mesh
        self._compilation_cache = compilation_cache
        self._timeout = duration(timeout)
        super().__init__(device, precision)
        self._data_world: World | None = None
        self._replicas: Replicas | None = None
        self.mesh: Any = None
        self._xla: Any = None
        self._generators: tuple[Any, ...] = ()
        self._sharding: BatchSharding | None = None
        self._reset()

    def _reset(self) -> None:
        self._models: dict[int, SPMDModel] = {}  # Id of the user's module → its model.
        self._any_loss = False
        self._pending = False  # Whether operations may have been recorded since the last sync.
        self._buffers = Buffers()

    @property
    def data_world(self) -> World:
        """See `trainkit.Strategy.data_world`. With SPMD each process reads all of the data, for all devices."""
        return self.world if self._data_world is None else self._data_world

    def resolve_device(self, device: str | torch.device) -> torch.device:
        """See `trainkit.Strategy.resolve_device`. The runtime selects the device later, when it starts."""
        if str(device) not in ("auto", "xla", "cpu"):
            raise ConfigurationError(f"XLAStrategy does not run on {str(device)!r}. Use device='xla', or 'cpu' for tests.")
        return torch.device("xla")

    @property
    def where(self) -> str:
        """The devices and their runtime, which shows whether a run uses the CPU instead of a TPU."""
        count, kind = self.data_world.devices, os.environ.get("PJRT_DEVICE", "")
        return f"{self.device} ({kind})" if count == 1 else f"{count} XLA devices ({kind})"

    def accepts(self, accelerator: str) -> bool:
        return accelerator in ("auto", "xla", "cpu")

    def join(self, wanted: RequestedDevices) -> None:
        """See `trainkit.Strategy.join`. Starts the runtime."""
        if wanted.accelerator == "auto" and self._accelerator != "auto":
            wanted = replace(wanted, accelerator=self._accelerator)
        require()
        choose_runtime(wanted)
        self._xla = import_torch_xla()
        xr: Any = importlib.import_module("torch_xla.runtime")
        if self._compilation_cache is not None:
            set_compilation_cache(self._compilation_cache, xr)
        if self.mode == "replicas":
            if self.sync_batchnorm:
                raise ConfigurationError("sync_batchnorm=True needs mode='spmd', not mode='replicas'. Remove one of them.")
            self.world = replica_world(wanted, xr, self._timeout)
            self.device = self._xla.device()
            if self.world.size > 1:
                self._replicas = Replicas(self.world, self.device, self._xla.sync)
        else:
            self._join_mesh(wanted, xr)
        self._generators = (XLAGenerator(self.device),)
        TO_HOST["xla"] = read_on_all_ranks
        self.joined = True

    def _join_mesh(self, requested: RequestedDevices, xr: Any) -> None:
        count = count_devices(requested, xr)
        self.world = host_world(requested, xr, self._timeout)
        if count > 1 or self._mesh_argument is not None or self.fsdp:
            mesh = make_mesh(self._mesh_argument, count, self.fsdp)  # may raise; SPMD cannot be turned off later
            if not xr.is_spmd():
                xr.use_spmd()
            self.mesh = mesh
            self._sharding = BatchSharding(self.mesh, batch_axes(self.mesh))
            count = self._sharding.parts
        elif xr.is_spmd():
            raise ConfigurationError(
                "devices=1, but SPMD is on in this process and uses all devices of the runtime. Remove devices=1, or use a new "
                "process."
            )
        self.device = self._xla.device()
        self._data_world = World(devices=count)

    @staticmethod
    def launch(
        function: Callable[..., Any], args: tuple[Any, ...] = (), devices: int | None = None, start_method: str = "spawn"
    ) -> None:
        """Run a function in one replica per device, with `torch_xla.launch`. Use it to start `mode="replicas"`.

        On a TPU, a replica is a process. On XLA's CPU runtime it is a thread, for tests: threads run one at a time.

        Args:
            function: Called with the number of the replica and `args`. It creates the Trainer. Processes must be able to
                import it.
            args: More arguments of the function.
            devices: Number of devices of this host, as the runtime has them. Default: all; on a CPU `CPU_NUM_DEVICES`, or 1.
            start_method: Start method of `multiprocessing`.
        """
        launch(function, args, devices, {"start_method": start_method})

    def generators(self) -> tuple[Any, ...]:
        """XLA's random number generator, with the methods of `torch.Generator`."""
        return self._generators

    @property
    def compilations(self) -> int:
        return compilations()

    def compilation_hints(self) -> Mapping[str, int]:
        """See `trainkit.Strategy.compilation_hints`. Empty for threads, whose counts are not separate."""
        return {} if isinstance(self.world, ThreadWorld) else compilation_hints()

    def sync(self) -> None:
        """Run the recorded operations."""
        self._xla.sync()
        self._pending = False

    def _sync_together(self) -> None:
        """Run the recorded operations of all replicas, with their collectives."""
        if self._replicas is None:
            self.sync()
            return
        self._replicas.from_main(self._buffers.present())
        self._replicas.sync()
        self._pending = False

    def _sync_pending(self) -> None:
        if self._pending:
            self.sync()
        self._pending = True

    # ------------------------------------------------------------------ models and optimizers

    def prepare_module(self, module: nn.Module) -> nn.Module:
        """Move the module to the device. Its parameters stay the same objects, so tied parameters stay tied."""
        module = super().prepare_module(module)
        if self.fsdp:
            self._models[id(module)] = SPMDModel(module, self.mesh)
        if self._replicas is not None:
            check_modules_match(module, self.world, "XLA")
            self._buffers.add(module, self.world)
            self._replicas.from_main(module.parameters())
        self._sync_together()
        return module

    def wrap(self, module: nn.Module) -> nn.Module:
        return self._models.get(id(module), module)

    def unwrap(self, module: nn.Module) -> nn.Module:
        return module.module if isinstance(module, SPMDModel) else super().unwrap(module)

    def prepare_optimizer(self, optimizer: Optimizer, module: nn.Module | None) -> Optimizer:
        """See `trainkit.Strategy.prepare_optimizer`.

        Raises:
            ConfigurationError: The optimizer uses kernels that XLA does not have.
        """
        wrong = [name for name in ("fused", "capturable") if any(group.get(name) for group in optimizer.param_groups)]
        if wrong:
            options = " and ".join(f"{name}=True" for name in wrong)
            raise ConfigurationError(
                f"{type(optimizer).__name__}({options}) does not work on XLA devices, which have no such kernel: a step is "
                f"always one graph. Remove {options}."
            )
        return super().prepare_optimizer(optimizer, module)

    def step_function(
        self, wrapped: nn.Module, module: nn.Module, name: str, compiler: Callable[..., Any] | None = None
    ) -> Callable[..., Any]:
        """See `trainkit.Strategy.step_function`.

        Raises:
            ConfigurationError: The module comes from `torch.compile`.
        """
        if compiler is not None:
            raise ConfigurationError("torch.compile does not work with strategy='xla', which compiles every step. Remove it.")
        step = super().step_function(wrapped, module, name)
        sharded = self._models.get(id(module))
        if sharded is not None:
            sharded.shard_children_outputs()
            step = partial(sharded.run, step)
        if name == "training_step":
            return step

        def step_and_sync(*args: Any) -> Any:
            outputs = step(*args)
            self.sync()
            return outputs

        return step_and_sync

    def restored(self, optimizers: Iterable[Optimizer]) -> None:
        """See `trainkit.Strategy.restored`. Shards loaded optimizer state like its parameters."""
        if self.mesh is not None:
            shard_state(optimizers)
        self.sync()

    # ------------------------------------------------------------------ a step

    @property
    def ahead(self) -> Callable[..., Iterator[Any]]:
        return partial(load_ahead, device=self.device, sharding=self._sharding, before=self._sync_pending)

    def move(self, batch: Any) -> Any:
        return to_xla(batch, self.device, self._sharding)

    def backward(self, loss: Tensor | None, micro: MicroBatch = WHOLE_WINDOW, **kwargs: Any) -> None:
        """See `trainkit.Strategy.backward`. Syncs, except at the end of a window.

        Raises:
            ConfigurationError: A backward pass ran in this process before XLA's runtime started.
        """
        try:
            super().backward(loss, micro, **kwargs)
        except RuntimeError as error:
            refuse_late_runtime(error)
            raise
        if self._replicas is not None and loss is not None:
            self._replicas.had_loss = True
        if not (micro.last and micro.alike):
            self.sync()

    def skip_backward(self, loss: Tensor | None, micro: MicroBatch = WHOLE_WINDOW) -> None:
        """See `trainkit.Strategy.skip_backward`.

        Raises:
            LossError: A replica has no loss in a window in which all must run the same graph.
        """
        if self._replicas is None:
            return
        if micro.alike:
            raise LossError(
                "training_step returned no loss, or its batch has weight 0, but with mode='replicas' all replicas must run the "
                "same graph. Return a loss in every step, or use mode='spmd'."
            )
        self._replicas.had_loss = self._replicas.had_loss or loss is not None
        self.sync()

    def reduce_gradients(self, parameters: Iterable[Tensor], micro: MicroBatch = WHOLE_WINDOW) -> None:
        """See `trainkit.Strategy.reduce_gradients`. Part of the step's graph if all replicas run the same one."""
        if self._replicas is not None:
            self._any_loss = self._replicas.average(parameters, micro.alike)

    def any_loss(self, had_loss: bool) -> bool:
        """See `trainkit.Strategy.any_loss`. Call it after the gradients have been averaged."""
        return had_loss or (self._replicas is not None and self._any_loss)

    def mean(self, value: Tensor) -> Tensor:
        if self._replicas is None:
            return value
        return torch.tensor(self.world.sums([float(value)])[0] / self.world.size, dtype=value.dtype, device=value.device)

    def all_gather(self, data: Any, sync_grads: bool = False, alike: bool = False) -> Any:
        """See `trainkit.Strategy.all_gather`. With SPMD tensors already contain the data of all devices.

        Raises:
            ConfigurationError: Replicas pass different shapes or dtypes, or `sync_grads=True`.
        """
        if self._replicas is None:
            return data
        if sync_grads:
            raise ConfigurationError("all_gather(sync_grads=True) is not supported with mode='replicas'. Use mode='spmd'.")
        return self._replicas.gather(data)

    def sync_buffers(self) -> None:
        """See `trainkit.Strategy.sync_buffers`. Syncs, for a window without an optimizer step."""
        self._sync_together()

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Update the parameters, and run the recorded step."""
        with steady_rates(optimizer, closure):
            updated = super().optimizer_step(optimizer, closure)
        self._sync_together()
        return updated

    def footprint(self, contents: Contents, processes: int) -> Footprint:
        """See `trainkit.Strategy.footprint`. `processes` counts devices; `fsdp` shards everything but buffers."""
        whole = super().footprint(contents, processes)
        return shard_footprint(whole, contents, processes) if self.fsdp else whole

    def teardown(self) -> None:
        """Release the models and their hooks."""
        for sharded in self._models.values():
            sharded.close()
        self._reset()
        if isinstance(self.world, ThreadWorld):
            self.world.leave_run()


# ------------------------------------------------------------------------------------------------------- learning rates


_SMALLEST = math.ulp(0.0)
_BELOW_ONE = math.nextafter(1.0, 0.0)
_DENORMAL = 2.0**-149  # the smallest float32 above 0; XLA treats it as 0

TensorCache = dict[tuple[float, torch.dtype, torch.device], Tensor]


class Rate(float):
    """A learning rate, or a value computed from one.

    Args:
        value: The exact value.
        group: Number of the parameter group, so that equal rates of two groups do not become one input.
        cache: The tensors created from values of the group in this step.
    """

    exact: float
    group: int
    cache: TensorCache

    def __new__(cls, value: float, group: int, cache: TensorCache) -> Rate:
        made = super().__new__(cls, _avoid_constants(value, group))
        made.exact = value
        made.group = group
        made.cache = cache
        return made

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Replace rates in the positional arguments of a tensor operation by tensors, and in the others by exact floats."""
        like = next((arg for arg in args if isinstance(arg, Tensor) and arg.is_floating_point()), None)
        others = {name: value.exact if isinstance(value, Rate) else value for name, value in (kwargs or {}).items()}
        return function(*[arg._for(like) if isinstance(arg, Rate) else arg for arg in args], **others)

    def _for(self, like: Tensor | None) -> Tensor | float:
        if like is None or like.device.type != "xla":
            return self.exact
        dtype = torch.float64 if like.dtype is torch.float64 else torch.float32
        key = (self.exact, dtype, like.device)
        if key not in self.cache:
            xm: Any = importlib.import_module("torch_xla.core.xla_model")
            # torch.tensor(value, device=…) would become a constant too
            (self.cache[key],) = xm.send_cpu_data_to_device([torch.tensor(self.exact, dtype=dtype)], like.device)
        return self.cache[key]


def _avoid_constants(value: float, group: int) -> float:
    """Returns the value, or a number next to it if XLA would make it a constant of the graph."""
    if value == 0.0:
        return math.copysign(group * _DENORMAL or _SMALLEST, value)
    if abs(value) == 1.0:
        return math.copysign(_BELOW_ONE, value)
    return value


def _operator(name: str) -> Callable[..., Any]:
    """Returns a method of `float` that computes with the exact values and returns a `Rate`."""
    plain = getattr(float, name)

    def operation(self: Rate, *others: Any) -> Any:
        result = plain(self.exact, *[other.exact if isinstance(other, Rate) else other for other in others])
        return Rate(result, self.group, self.cache) if isinstance(result, float) else result

    operation.__name__ = name
    return operation


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "neg", "pos", "abs"):
    setattr(Rate, f"__{_name}__", _operator(f"__{_name}__"))


class _Beta(float):
    """A decay rate of Adam's moments. Its powers approach 0, so the bias corrections 1 - beta**step approach 1."""

    group: int
    cache: TensorCache

    def __new__(cls, value: float, group: int, cache: TensorCache) -> _Beta:
        made = super().__new__(cls, value)
        made.group = group
        made.cache = cache
        return made

    def __pow__(self, exponent: Any, modulo: None = None) -> Any:
        result = float(self) ** exponent
        return Rate(result, self.group, self.cache) if isinstance(result, float) else result


@contextmanager
def steady_rates(optimizer: Optimizer, closure: object = None) -> Iterator[None]:
    """A context in which the optimizer's step is the same graph for all values of its learning rates.

    Does nothing if there is a closure: LBFGS would keep values computed from the rates, and runs several graphs anyway.
    """
    if closure is not None:
        yield
        return
    plain: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for number, group in enumerate(optimizer.param_groups):
        rate, betas, cache = group.get("lr"), group.get("betas"), TensorCache()
        if not isinstance(rate, float | int):
            continue
        plain.append((group, {"lr": rate}))
        group["lr"] = Rate(rate, number, cache)
        if isinstance(betas, tuple) and all(isinstance(beta, float) for beta in betas):
            plain[-1][1]["betas"] = betas
            group["betas"] = tuple(_Beta(beta, number, cache) for beta in betas)
    try:
        yield
    finally:
        for group, options in plain:
            group.update(options)
