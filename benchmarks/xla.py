"""What a training step on XLA devices costs, compared with a torch_xla loop written by hand.

    python benchmarks/xla.py [--only mlp gpt] [--repeats 5] [--chunks 16] [--json FILE]

A multilayer perceptron with 10 million parameters, and the byte-level GPT of `trainkit demo`; AdamW, float32. The loop by hand
is that of torch_xla's documentation: `MpDeviceLoader`, one `torch_xla.sync()` per step; on several devices SPMD with a
`ShardingSpec` for the batch, and `SpmdFullyShardedDataParallel`. `Trainer` gets the same dataset in a plain `DataLoader`,
without logger, progress bar and checkpoints. A batch on one device is as large as on four devices together.

A world is one process, which drives all its devices; on a CPU, four devices share its cores. `pairs.py` explains how it is
measured, except for the clock: it is read at the start of each step, and waits for the devices at the end of a chunk.

Needs an environment with torch_xla (`make test-xla` creates one). Runs on `PJRT_DEVICE`, by default the CPU. Returns 1 if a
ratio of wall-clock times is above 1.05.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Sized
from functools import partial
from typing import Any

import numpy as np
import torch
from pairs import (
    BATCH,
    ROOT,
    STEPS,
    Clock,
    Contender,
    adamw,
    argument_parser,
    compare,
    loss_of,
    make_module,
    make_samples,
    train_module,
)
from report import Report
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(ROOT))

LIMIT = 1.05
DEVICES = 4
M_ARENA_MAX = -8  # of glibc's mallopt
AFTER = 30  # steps after the last chunk: batches that MpDeviceLoader reads in advance


class Ready(Dataset[Any]):
    """Ready samples, repeated up to the given length."""

    def __init__(self, samples: list[Any], length: int) -> None:
        self._samples, self._length = samples, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self._samples[index % len(self._samples)]


def wait_for_devices() -> None:
    import torch_xla.core.xla_model as xm

    xm.wait_device_ops()


def by_hand(kind: str, model: str, clock: Any) -> None:
    """The loop of torch_xla's documentation."""
    import torch_xla
    import torch_xla.distributed.parallel_loader as pl
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr
    from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel

    options: dict[str, Any] = {}
    module: nn.Module = make_module(model)
    if kind != "one":
        xr.use_spmd()
        axis = "fsdp" if kind == "fsdp" else "data"
        mesh = xs.Mesh(np.arange(DEVICES), (DEVICES,), (axis,))
        xs.set_global_mesh(mesh)
        options["input_sharding"] = xs.ShardingSpec(mesh, (axis, None)) if model == "gpt" else _Both(mesh, axis)
    device = torch_xla.device()
    module.to(device)
    if kind == "fsdp":
        module = SpmdFullyShardedDataParallel(module, mesh=mesh)
    optimizer = adamw(module)
    for batch in pl.MpDeviceLoader(_loader(model, clock, 1), device, batches_per_execution=1 << 62, **options):
        clock.step()
        optimizer.zero_grad()
        loss_of(model, module, batch).backward()
        optimizer.step()
        torch_xla.sync()


class _Both:
    """A `ShardingSpec` for inputs of two dimensions and labels of one."""

    minibatch = False

    def __init__(self, mesh: Any, axis: str) -> None:
        import torch_xla.distributed.spmd as xs

        self._specs = {1: xs.ShardingSpec(mesh, (axis,)), 2: xs.ShardingSpec(mesh, (axis, None))}

    def can_apply(self, tensor: Tensor) -> bool:
        return tensor.ndim in self._specs

    def xla_spec(self, tensor: Tensor) -> Any:
        return self._specs[tensor.ndim].xla_spec(tensor)


def trainer(kind: str, model: str, clock: Any) -> None:
    from trainkit import Callback, Trainer
    from trainkit.strategies import XLAStrategy

    class Clocked(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            clock.step()

    devices = 1 if kind == "one" else DEVICES
    Trainer(
        strategy=XLAStrategy(fsdp=kind == "fsdp"),
        devices=devices,
        max_epochs=1,
        callbacks=[Clocked()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    ).fit(train_module(model), _loader(model, clock, devices))


def own_loop(kind: str, model: str, clock: Any) -> None:
    from trainkit import Accelerator
    from trainkit.strategies import XLAStrategy

    accelerator = Accelerator(strategy=XLAStrategy(fsdp=kind == "fsdp"))
    module = make_module(model)
    net, optimizer, loader = accelerator.prepare(module, adamw(module), _loader(model, clock, 1 if kind == "one" else DEVICES))
    for batch in loader:
        clock.step()
        with accelerator.accumulate(net):
            accelerator.backward(loss_of(model, net, batch))
            optimizer.step()
            optimizer.zero_grad()


def _loader(model: str, clock: Any, devices: int) -> Any:
    size = BATCH[model]
    data: Dataset[Any] = Ready(make_samples(model), clock.batches * size)
    assert isinstance(data, Sized)
    return DataLoader(data, size // devices, shuffle=True)


_KINDS = {"one": "1 device", "spmd": f"{DEVICES} devices", "fsdp": f"{DEVICES} devices, FSDPv2"}
_LOOPS: dict[str, tuple[str, Callable[..., None], float | None]] = {
    "hand": ("the loop by hand / itself", by_hand, None),
    "trainer": ("Trainer", trainer, LIMIT),
    "own_loop": ("Accelerator", own_loop, LIMIT),
}
CONTENDERS = {
    f"{loop}_{kind}": Contender(f"{title}, {said}", partial(train, kind), f"hand_{kind}", limit)
    for kind, said in _KINDS.items()
    for loop, (title, train, limit) in _LOOPS.items()
}


def main() -> int:
    """Measure, print, and return 1 if the limit is exceeded."""
    arguments = argument_parser(__doc__, list(CONTENDERS)).parse_args()
    if not arguments.work:
        report = Report()
        compare(report, __file__, arguments, CONTENDERS, [name for name in CONTENDERS if name.startswith("hand")], ranks=1)
        return report.finish(arguments.json)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)  # set by pairs.py, but here a world is one process
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    one = arguments.work.endswith("_one")
    os.environ["CPU_NUM_DEVICES"] = "1" if one else str(DEVICES)
    if one:  # in some processes glibc returns its threads' arenas and requests them again at every step, 20 ms of 56
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    torch.set_num_threads(1)
    steps, descriptors = STEPS[arguments.model], (arguments.turns, arguments.reports)
    clock = Clock(steps, arguments.chunks, *descriptors, wait=wait_for_devices, after=AFTER)
    CONTENDERS[arguments.work].train(arguments.model, clock)
    return 0


if __name__ == "__main__":
    sys.exit(main())
