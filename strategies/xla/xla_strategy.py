"""``XLAStrategy``: TPUs, and XLA's CPU runtime for trials, by torch_xla."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from os import PathLike
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.distributed.requested_devices import RequestedDevices
from trainkit.distributed.world import World
from trainkit.errors import ConfigurationError, LossError
from trainkit.footprint import Contents, Footprint
from trainkit.metrics.values import TO_HOST
from trainkit.micro_batch import WHOLE_WINDOW, MicroBatch
from trainkit.precision import Precision
from trainkit.strategies._copies import Buffers, refuse_unlike
from trainkit.strategies._membership import duration
from trainkit.strategies.xla.info import INFO
from trainkit.strategies.xla.rates import steady_rates
from trainkit.strategies.xla.runtime import (
    XLAGenerator,
    choose_runtime,
    compilation_hints,
    compilations,
    count_devices,
    imported,
    keep_compilations,
    read_on_all_ranks,
    refuse_late_runtime,
    require,
)
from trainkit.strategies.xla.spmd import SPMDModel, divide_state, divided, make_mesh, share_of
from trainkit.strategies.xla.threads import ThreadWorld
from trainkit.strategies.xla.transfer import BatchSharding, loaded_ahead, to_xla
from trainkit.strategies.xla.xla_replicas import Replicas, host_world, launch, mode_here, replica_world
from trainkit.strategy import Strategy

__all__ = ["XLAStrategy"]


class XLAStrategy(Strategy):
    """Training on XLA devices: one, or all of the host's at once.

    Tensors are lazy: operations are recorded, compiled to one graph per step and run when the step is complete. So a step must
    not read values (``.item()``, ``print(loss)``, ``if loss > 1``): log them, and they are read after it.

    With several devices one process drives them all (SPMD): the batches of all of them, ``batch_size`` samples each, are one
    tensor that is divided over the devices, and the numbers are those of DDP on as many processes. ``BatchNorm`` takes its
    statistics over all of them. Several hosts run the script once each; each reads all of the data.

    Args:
        mode: ``"spmd"``, or ``"replicas"``: a process for each device with a copy of the model, started by :meth:`launch` or
            ``notebook_launcher``, in which it is the default. Every ``training_step`` must then return a loss and use the same
            parameters on all of them.
        mesh: how the devices are laid out: a ``torch_xla.distributed.spmd.Mesh``, or sizes by axis, such as
            ``{"data": 2, "fsdp": 4}``. Batches are divided over "data" and "fsdp". Default: one axis of all devices.
        fsdp: divide parameters, gradients and optimizer state over the devices of the axis "fsdp" (torch_xla's FSDPv2).
        pad_last_batch: fill the short last batch of an epoch up with copies of its last sample, for losses that leave out what
            ``self.sample_mask`` says. It then is the same graph as the others; otherwise it is compiled once in a run.
            BatchNorm sees the copies.
        timeout: how long processes wait for each other: a timedelta, or seconds.
        compilation_cache: a folder in which compiled graphs are kept from run to run, on TPUs.
        device: ``"auto"`` or ``"xla"``; ``"cpu"`` is XLA's CPU runtime, for trials.
        precision: ``"32-true"``, ``"bf16-mixed"``, ``"bf16-true"`` or ``"64-true"`` (slow on TPUs, which have no float64).

    Raises:
        ConfigurationError: an argument that is wrong or contradicts another.
        MissingPackageError: torch_xla is not installed, or not with the torch that it loads with.
    """

    name: ClassVar[str] = "xla"
    info = INFO
    averages_in_step: ClassVar[bool] = True
    can_sync_batchnorm: ClassVar[bool] = True  # under SPMD BatchNorm sees the batches of all devices anyway
    compiles: ClassVar[bool] = False
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
        mode = mode_here(mode)
        if mode == "replicas" and (fsdp or mesh is not None or pad_last_batch):
            raise ConfigurationError(
                "mesh, fsdp and pad_last_batch go with mode='spmd': replicas have models of their own. Leave mode out."
            )
        self.mode, self.fsdp, self.pad_last_batch = mode, fsdp, pad_last_batch
        self._accelerator, self._mesh_wanted = str(device), mesh
        self._compilation_cache, self._timeout = compilation_cache, duration(timeout)
        super().__init__(device, precision)
        self._data_world: World | None = None
        self._replicas: Replicas | None = None
        self.mesh: Any = None
        self._xla: Any = None
        self._generators: tuple[Any, ...] = ()
        self._sharding: BatchSharding | None = None
        self._begin()

    def _begin(self) -> None:
        self._models: dict[int, SPMDModel] = {}  # by the id of the user's
        self._any_loss = False
        self._pending = False  # something has been recorded since the last sync, or may have been
        self._buffers = Buffers()

    @property
    def data_world(self) -> World:
        """See :attr:`trainkit.Strategy.data_world`: under SPMD every process reads all, for all devices at once."""
        return self.world if self._data_world is None else self._data_world

    def resolve_device(self, device: str | torch.device) -> torch.device:
        """See :meth:`trainkit.Strategy.resolve_device`: which it is says the runtime, which has not begun."""
        if str(device) not in ("auto", "xla", "cpu"):
            raise ConfigurationError(f"strategy='xla' runs on a TPU, or for trials on the CPU, not on {str(device)!r}.")
        return torch.device("xla")

    @property
    def where(self) -> str:
        """The devices, and of which runtime: a CPU that stands in for a TPU must not go unnoticed."""
        count, kind = self.data_world.devices, os.environ.get("PJRT_DEVICE", "")
        return f"{self.device} ({kind})" if count == 1 else f"{count} XLA devices ({kind})"

    def accepts(self, accelerator: str) -> bool:
        """See :meth:`trainkit.Strategy.accepts`."""
        return accelerator in ("auto", "xla", "cpu")

    def join(self, wanted: RequestedDevices) -> None:
        """See :meth:`trainkit.Strategy.join`: the runtime begins here."""
        if wanted.accelerator == "auto" and self._accelerator != "auto":
            wanted = replace(wanted, accelerator=self._accelerator)
        require()
        choose_runtime(wanted)
        self._xla = imported()
        xr: Any = importlib.import_module("torch_xla.runtime")
        if self._compilation_cache is not None:
            keep_compilations(self._compilation_cache, xr)
        if self.mode == "replicas":
            if self.sync_batchnorm:
                raise ConfigurationError("sync_batchnorm=True goes with mode='spmd', not with replicas. Leave one of them out.")
            self.world = replica_world(wanted, xr, self._timeout)
            self.device = self._xla.device()
            if self.world.size > 1:
                self._replicas = Replicas(self.world, self.device, self._xla.sync)
        else:
            self._join_mesh(wanted, xr)
        self._generators = (XLAGenerator(self.device),)
        TO_HOST["xla"] = read_on_all_ranks
        self.joined = True

    def _join_mesh(self, wanted: RequestedDevices, xr: Any) -> None:
        count = count_devices(wanted, xr)
        self.world = host_world(wanted, xr, self._timeout)
        if count > 1 or self._mesh_wanted is not None or self.fsdp:
            mesh = make_mesh(self._mesh_wanted, count, self.fsdp)  # which may be refused: there is no way back from SPMD
            if not xr.is_spmd():
                xr.use_spmd()
            self.mesh = mesh
            self._sharding = BatchSharding(self.mesh, share_of(self.mesh))
            count = self._sharding.parts
        elif xr.is_spmd():
            raise ConfigurationError(
                "devices=1, but SPMD is on in this process, for all devices of the runtime. Leave devices out, or run in "
                "another process."
            )
        self.device = self._xla.device()
        self._data_world = World(devices=count)

    @staticmethod
    def launch(
        function: Callable[..., Any], args: tuple[Any, ...] = (), devices: int | None = None, start_method: str = "spawn"
    ) -> None:
        """Run a function in a replica for each device, by ``torch_xla.launch``: the way to start ``mode="replicas"``.

        On a TPU a replica is a process. On XLA's CPU runtime it is a thread, and this sees to what threads need; they run one
        at a time, so this is for trials.

        Args:
            function: called with the number of the replica and ``args``; it makes the Trainer. For processes it must be one
                that can be imported.
            args: the other arguments.
            devices: of the host; another number than the runtime has is an error. Default: all; of a CPU
                ``CPU_NUM_DEVICES`` in the environment, or 1.
            start_method: of ``multiprocessing``.
        """
        launch(function, args, devices, {"start_method": start_method})

    def generators(self) -> tuple[Any, ...]:
        """XLA's random generator, with the methods of torch's."""
        return self._generators

    @property
    def compilations(self) -> int:
        """See :attr:`trainkit.Strategy.compilations`."""
        return compilations()

    def compilation_hints(self) -> Mapping[str, int]:
        """See :meth:`trainkit.Strategy.compilation_hints`: of threads nobody knows which of them has done what."""
        return {} if isinstance(self.world, ThreadWorld) else compilation_hints()

    def sync(self) -> None:
        """Run what has been recorded."""
        self._xla.sync()
        self._pending = False

    def _sync_together(self) -> None:
        """Run what all replicas have recorded, with what they do together in it."""
        if self._replicas is None:
            self.sync()
            return
        self._replicas.from_main(self._buffers.present())
        self._replicas.sync()
        self._pending = False

    def _settle(self) -> None:
        if self._pending:
            self.sync()
        self._pending = True

    # ------------------------------------------------------------------ models and optimizers

    def prepare_module(self, module: nn.Module) -> nn.Module:
        """The module on the device; its parameters stay the objects that they are, so that ties hold."""
        module = super().prepare_module(module)
        if self.fsdp:
            self._models[id(module)] = SPMDModel(module, self.mesh)
        if self._replicas is not None:
            refuse_unlike(module, self.world, "XLA")
            self._buffers.add(module, self.world)
            self._replicas.from_main(module.parameters())
        self._sync_together()
        return module

    def wrap(self, module: nn.Module) -> nn.Module:
        """See :meth:`trainkit.Strategy.wrap`."""
        return self._models.get(id(module), module)

    def unwrap(self, module: nn.Module) -> nn.Module:
        """See :meth:`trainkit.Strategy.unwrap`."""
        return module.module if isinstance(module, SPMDModel) else super().unwrap(module)

    def prepare_optimizer(self, optimizer: Optimizer, module: nn.Module | None) -> Optimizer:
        """See :meth:`trainkit.Strategy.prepare_optimizer`.

        Raises:
            ConfigurationError: it has options for kernels that XLA has not.
        """
        wrong = [name for name in ("fused", "capturable") if any(group.get(name) for group in optimizer.param_groups)]
        if wrong:
            options = " and ".join(f"{name}=True" for name in wrong)
            raise ConfigurationError(
                f"{type(optimizer).__name__}({options}): there is no such kernel on XLA devices, where all of a step is one "
                "graph anyway. Leave it out."
            )
        return super().prepare_optimizer(optimizer, module)

    def step_function(
        self, wrapped: nn.Module, module: nn.Module, name: str, compiler: Callable[..., Any] | None = None
    ) -> Callable[..., Any]:
        """See :meth:`trainkit.Strategy.step_function`.

        Raises:
            ConfigurationError: the module is out of ``torch.compile``.
        """
        if compiler is not None:
            raise ConfigurationError("torch.compile has no part in strategy='xla', which compiles every step. Leave it out.")
        step = super().step_function(wrapped, module, name)
        sharded = self._models.get(id(module))
        if sharded is not None:
            sharded.mark_parts()
            step = partial(sharded.run, step)
        if name == "training_step":
            return step

        def synced(*args: Any) -> Any:
            outputs = step(*args)
            self.sync()
            return outputs

        return synced

    def restored(self, optimizers: Iterable[Optimizer]) -> None:
        """See :meth:`trainkit.Strategy.restored`: loaded tensors are divided as the parameters that they belong to."""
        if self.mesh is not None:
            divide_state(optimizers)
        self.sync()

    # ------------------------------------------------------------------ a step

    @property
    def ahead(self) -> Callable[..., Iterator[Any]]:
        """See :attr:`trainkit.Strategy.ahead`."""
        return partial(loaded_ahead, device=self.device, sharding=self._sharding, before=self._settle)

    def move(self, batch: Any) -> Any:
        """See :meth:`trainkit.Strategy.move`."""
        return to_xla(batch, self.device, self._sharding)

    def backward(self, loss: Tensor | None, micro: MicroBatch = WHOLE_WINDOW, **kwargs: Any) -> None:
        """See :meth:`trainkit.Strategy.backward`; inside a window the micro-batch ends here.

        Raises:
            ConfigurationError: torch cannot, since it has done a backward pass before XLA's runtime began.
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
        """See :meth:`trainkit.Strategy.skip_backward`.

        Raises:
            LossError: one of several replicas has no loss, in a window in which all must run the same graph.
        """
        if self._replicas is None:
            return
        if micro.alike:
            raise LossError(
                "training_step returned None, or its batch has weight 0, and under mode='replicas' every replica must run the "
                "same graph. Return a loss at every step, or use mode='spmd'."
            )
        self._replicas.had_loss = self._replicas.had_loss or loss is not None
        self.sync()

    def reduce_gradients(self, parameters: Iterable[Tensor], micro: MicroBatch = WHOLE_WINDOW) -> None:
        """See :meth:`trainkit.Strategy.reduce_gradients`: within the step's graph, where all replicas run the same."""
        if self._replicas is not None:
            self._any_loss = self._replicas.average(parameters, micro.alike)

    def any_loss(self, had_loss: bool) -> bool:
        """See :meth:`trainkit.Strategy.any_loss`; to be asked after the gradients have been averaged."""
        return had_loss or (self._replicas is not None and self._any_loss)

    def mean(self, value: Tensor) -> Tensor:
        """See :meth:`trainkit.Strategy.mean`."""
        if self._replicas is None:
            return value
        return torch.tensor(self.world.sums([float(value)])[0] / self.world.size, dtype=value.dtype, device=value.device)

    def all_gather(self, data: Any, sync_grads: bool = False, alike: bool = False) -> Any:
        """See :meth:`trainkit.Strategy.all_gather`; under SPMD tensors are those of all devices as they are.

        Raises:
            ConfigurationError: replicas give other shapes, or are to get gradients back.
        """
        if self._replicas is None:
            return data
        if sync_grads:
            raise ConfigurationError("all_gather(sync_grads=True) is not offered for mode='replicas'. Use mode='spmd'.")
        return self._replicas.gathered(data)

    def barrier(self) -> None:
        """See :meth:`trainkit.Strategy.barrier`."""
        self.world.barrier()

    def sync_buffers(self) -> None:
        """See :meth:`trainkit.Strategy.sync_buffers`; a window ends here that has had no update."""
        self._sync_together()

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Update the parameters, and run the step."""
        with steady_rates(optimizer, closure):
            updated = super().optimizer_step(optimizer, closure)
        self._sync_together()
        return updated

    def footprint(self, contents: Contents, processes: int) -> Footprint:
        """See :meth:`trainkit.Strategy.footprint`; ``processes`` are devices, over which ``fsdp`` divides all but buffers."""
        whole = super().footprint(contents, processes)
        return divided(whole, contents, processes) if self.fsdp else whole

    def teardown(self) -> None:
        """Forget the models."""
        for sharded in self._models.values():
            sharded.close()
        self._begin()
        if isinstance(self.world, ThreadWorld):
            self.world.rest()
