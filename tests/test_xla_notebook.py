"""`notebook_launcher` on XLA: XLA's runtime starts the processes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from helpers.support import run_python

pytestmark = pytest.mark.xla

SCRIPT = """
import json, os
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from trainkit import Accelerator, Trainer, notebook_launcher, set_seed

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x))

def train(model, data):
    accelerator = Accelerator()
    world = accelerator.strategy.world
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(TensorDataset(data), batch_size=16 // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for (x,) in loader:
        loss = model(x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    inner = accelerator.unwrap_model(model)
    print(f"rank {world.rank} of {accelerator.num_processes}")
    kept = inner.first.weight is inner.second.weight and inner.first.weight.device.type == "xla"
    return accelerator.strategy.name, accelerator.strategy.mode, kept, loss, inner

def fails():
    accelerator = Accelerator()
    if not accelerator.is_main_process:
        raise KeyError("an unlikely thing")
    accelerator.strategy.world.barrier()

set_seed(2)
model, data, count = Tied(), torch.randn(16, 4), int(os.environ["DEVICES"]) or None
name, mode, kept, loss, trained = notebook_launcher(train, (model, data), count)
optimizer = torch.optim.SGD(model.parameters(), 0.1)            # the same step by plain torch
model(data).square().mean().backward()
optimizer.step()
same = torch.allclose(model.first.weight, trained.first.weight, atol=1e-5)
tied = trained.first.weight is trained.second.weight
try:
    notebook_launcher(fails, (), count)
except RuntimeError as error:
    said = str(error)
print(json.dumps([name, mode, kept, tied, same, loss.device.type, said, "PJRT_CPU_ASYNC_CLIENT" in os.environ]))
"""


def test_replicas(run_dir: Path) -> None:
    """Each process of XLA's runtime is one rank for `Accelerator()`.

    Tied weights stay tied when a model is sent, moved to the device and returned. If a process raises an error, the error of
    `notebook_launcher` names it.
    """
    (run_dir / "script.py").write_text(SCRIPT)
    kind = os.environ.get("PJRT_DEVICE", "CPU")
    done = run_python("-u", "script.py", cwd=run_dir, env={"PJRT_DEVICE": kind, "DEVICES": "2" if kind == "CPU" else "0"})
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    name, mode, kept, tied, same, device, said, set_here = json.loads(last)
    assert (name, mode, kept, tied, same, device, set_here) == ("xla", "replicas", True, True, True, "cpu", False)
    assert said.endswith("failed: KeyError: 'an unlikely thing'. Its traceback is in the output.")
    assert 'raise KeyError("an unlikely thing")' in done.stderr
    assert done.stderr.count("Traceback") == 1 or kind != "CPU"
    assert "launch/notebook.py" not in done.stderr
    if kind == "CPU":
        assert lines.count("Launching training on 2 devices of the XLA CPU runtime.") == 2
        assert sorted(line for line in lines if line.startswith("rank")) == ["rank 0 of 2", "rank 1 of 2"]
