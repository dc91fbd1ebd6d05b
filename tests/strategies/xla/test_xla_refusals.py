"""Errors for what XLA does not support, with what to do instead. Errors before the runtime starts: test_runtime.py."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from helpers.worlds.worlds import WorldError
from helpers.xla.xla_cases import Net, Numbers, loader, quiet
from helpers.xla.xla_runs import run_xla
from torch import nn

from trainkit import Accelerator, Trainer
from trainkit.errors import TrainkitError

pytestmark = pytest.mark.xla


def made(arguments: dict[str, Any], options: dict[str, Any]) -> None:
    """Create a Trainer; returns only if there is no error."""
    from trainkit.strategies import XLAStrategy

    Trainer(**{"strategy": XLAStrategy(**options), **arguments})


@pytest.mark.skipif(os.environ.get("PJRT_DEVICE", "CPU") != "CPU", reason="a TPU has the number of devices that it has")
@pytest.mark.parametrize(
    "arguments, options, message",
    [
        ({"devices": 3}, {}, r"devices=3, but XLA's runtime has 4 on this host. Use devices=4, or set CPU_NUM_DEVICES"),
        ({"devices": [0, 1]}, {}, r"devices=\[0, 1\] does not work with XLA, .*TPU_VISIBLE_CHIPS=0,2"),
        ({"num_nodes": 2}, {}, "num_nodes=2, but XLA's runtime has 1. Start the script on every host"),
        ({}, {"mesh": {"data": 3}}, r"mesh=\{'data': 3\} has 3 devices, but the runtime has 4"),
        ({}, {"mesh": {"data": 4}, "fsdp": True}, "fsdp=True needs an axis 'fsdp' in the mesh, which has data"),
        ({}, {"mesh": {"model": 4}}, r"the mesh has the axes \('model',\), but batches are sharded over axes named 'data'"),
        ({}, {"mesh": [4]}, "mesh must be a torch_xla.distributed.spmd.Mesh or a dict of axis sizes"),
        ({}, {"mesh": {"data": 4.0}}, "mesh must be a torch_xla.distributed.spmd.Mesh or a dict of axis sizes"),
        ({"precision": "16-mixed"}, {}, "16-mixed.*bf16-mixed"),
        ({"precision": "16-true"}, {}, "16-true.*bf16-true"),
        ({"strategy": "ddp", "accelerator": "tpu"}, {}, "accelerator='tpu' works with strategy='xla', not with 'ddp'"),
        ({"accelerator": "gpu"}, {}, "accelerator='cuda' and .* name different devices"),
    ],
)
def test_impossible_arguments(arguments: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(WorldError, match=rf"Error: .*{message}"):
        run_xla(made, arguments, options, devices=4)


def mesh_object(names: tuple[str, ...] | None) -> tuple[int, Any]:
    import numpy as np
    import torch_xla.distributed.spmd as xs

    from trainkit.strategies import XLAStrategy

    mesh = xs.Mesh(np.arange(4), (2, 2), names)
    trainer = Trainer(strategy=XLAStrategy(mesh=mesh), logger=False, enable_checkpointing=False)
    return trainer.world_size, trainer.strategy.mesh is mesh


def test_a_custom_mesh() -> None:
    """Batches are sharded only over axes with certain names, so the axes must have names."""
    assert run_xla(mesh_object, ("data", "fsdp"), devices=4) == (4, True)
    assert run_xla(mesh_object, ("data", "model"), devices=4) == (2, True)
    with pytest.raises(WorldError, match="batches are sharded over axes named 'data' or 'fsdp'. Name an axis"):
        run_xla(mesh_object, None, devices=4)


def one_after_spmd() -> list[str]:
    said = []
    for devices in (None, 1):
        try:
            Trainer(strategy="xla", devices=devices, logger=False, enable_checkpointing=False)
        except TrainkitError as error:
            said.append(str(error))
    return said


def test_one_device_after_several() -> None:
    (said,) = run_xla(one_after_spmd, devices=4)
    assert "devices=1, but SPMD is on in this process" in said


def compiled(what: str) -> None:
    from trainkit.strategies import XLAStrategy

    module = Net()
    if what == "own loop":
        accelerator = Accelerator(strategy=XLAStrategy())
        net = torch.compile(nn.Linear(2, 2), backend="eager")
        accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    elif what == "inner":
        module.net = torch.compile(module.net, backend="eager")
        quiet("one").fit(module, loader("one", Numbers(16)))
    else:
        quiet("one").fit(torch.compile(module, backend="eager"), loader("one", Numbers(16)))


def test_torch_compile() -> None:
    with pytest.raises(
        WorldError, match="torch.compile does not work with strategy='xla', which compiles every step. Remove it"
    ):
        run_xla(compiled, "module")


def held_elsewhere() -> str:
    import weakref

    module = Net()
    kept = [weakref.ref(parameter) for parameter in module.parameters()]
    try:
        quiet("one").fit(module, loader("one", Numbers(16)))
    except TrainkitError as error:
        return f"{error} {len(kept)}"
    return ""


def test_a_parameter_with_other_references() -> None:
    assert "Something refers to this parameter: a weak reference" in run_xla(held_elsewhere)


def trained_on_the_cpu_first() -> str:
    quiet("auto").fit(Net(), loader("auto", Numbers(16)))
    try:
        quiet("one").fit(Net(), loader("one", Numbers(16)))
    except TrainkitError as error:
        return str(error)
    return ""


def test_a_backward_pass_before_the_runtime_begins() -> None:
    """torch's autograd creates its queues in the first backward pass, for the devices that exist then."""
    assert "a backward pass ran in this process before XLA's runtime started" in run_xla(trained_on_the_cpu_first)


def the_other_way_round() -> list[int]:
    trainers = [quiet("one"), quiet("auto"), quiet("one")]
    for trainer in trainers:
        trainer.fit(Net(), loader("one", Numbers(16)))
    return [trainer.global_step for trainer in trainers]


def test_a_backward_pass_on_the_cpu_after_it() -> None:
    assert run_xla(the_other_way_round) == [2, 2, 2]


def ragged(kind: str, uneven: bool) -> None:
    data = [{"id": torch.tensor(i), "x": torch.zeros(4 + (i > 2 and uneven))} for i in range(4)]
    with torch.no_grad():
        for _ in quiet(kind).accelerator.prepare(loader(kind, data, 4)):
            pass


def test_batches_that_cannot_be_concatenated() -> None:
    run_xla(ragged, "spmd", False, devices=4)
    with pytest.raises(WorldError, match=r"DataError: .*concatenated: they contain tensors of the shapes \(1, 4\), \(1, 5\)"):
        run_xla(ragged, "spmd", True, devices=4)


def launched() -> None:
    Trainer(strategy="xla", logger=False, enable_checkpointing=False)


def test_processes_of_another_launcher() -> None:
    """This is an error, since each process would train alone."""
    torchrun = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
    }
    with pytest.raises(
        WorldError, match="ConfigurationError: .* has started 2 processes .* XLA's runtime has 1: each would train"
    ):
        run_xla(launched, env=torchrun)
