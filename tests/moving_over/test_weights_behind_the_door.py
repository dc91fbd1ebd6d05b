"""A project that reads the file of the best checkpoint, saves to a temporary file and loads it again, behind the door."""

from __future__ import annotations

import subprocess
import sys

import pytest

# The names of the imports are those of another package: a Python of its own.
PROJECT = """
import copy, os, pickle, tempfile
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint


class Net(pl.LightningModule):
    def __init__(self, width=4):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(width, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch).pow(2).mean())

    def on_save_checkpoint(self, checkpoint):
        checkpoint["classes"] = ["a", "b"]

    def on_load_checkpoint(self, checkpoint):
        self.classes = checkpoint["classes"]

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-2)


class Model:
    '''A model of a library: pickled as the bytes of a checkpoint.'''

    def __init__(self, trainer):
        self.trainer = trainer

    def __getstate__(self):
        with tempfile.NamedTemporaryFile() as file:
            self.trainer.save_checkpoint(file.name)
            return {"bytes": Path(file.name).read_bytes()}

    def __setstate__(self, state):
        with tempfile.NamedTemporaryFile() as file:
            Path(file.name).write_bytes(state["bytes"])
            self.net = Net.load_from_checkpoint(file.name)
            self.weights = torch.load(file.name, weights_only=True)["state_dict"]


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
data = torch.utils.data.DataLoader(torch.randn(16, 4), 4)
best = ModelCheckpoint(dirpath="saved", monitor="val_loss", filename="{epoch}-best", save_last=True)
trainer, net = pl.Trainer(max_epochs=3, callbacks=[best], **quiet), Net()
trainer.fit(net, data, data)

read = torch.load(best.best_model_path)
net.load_state_dict(read["state_dict"])
assert best.best_model_path == os.path.abspath("saved/epoch=2-best.ckpt"), best.best_model_path
assert list(best.best_k_models) == [best.best_model_path]
assert (read["hyper_parameters"], read["classes"], read["global_step"]) == ({"width": 4}, ["a", "b"], 12)
assert torch.load(best.last_model_path)["epoch"] == torch.load("saved/last.ckpt")["epoch"] == 3
loaded = Net.load_from_checkpoint(best.best_model_path)
assert same(loaded.state_dict(), read["state_dict"]) and loaded.classes == ["a", "b"]
trainer.validate(net, data, ckpt_path="best", verbose=False)
trainer.validate(net, data, ckpt_path=best.best_model_path, verbose=False)

again = pl.Trainer(max_epochs=5, **quiet)  # an exact resume, as the folder is there
again.fit(Net(), data, ckpt_path=best.last_model_path)
assert again.global_step == 20

again.save_checkpoint("kept.ckpt")
assert same(torch.load("kept.ckpt")["state_dict"], again.model.state_dict())
again.save_checkpoint("kept.pt", weights_only=True)
assert same(torch.load("kept.pt")["state_dict"], again.model.state_dict())
assert same(Net.load_from_checkpoint("kept.pt").state_dict(), again.model.state_dict())
again.save_checkpoint("whole.pth")
more = pl.Trainer(max_epochs=6, **quiet)
more.fit(Net(), data, ckpt_path="whole.pth")
assert more.global_step == 24
Path("model.pt").write_text("what a library keeps")
again.save_checkpoint("model.pt.ckpt")
assert Path("model.pt").read_text() == "what a library keeps"
assert pl.Trainer(max_epochs=6, **quiet).fit(Net(), data, ckpt_path="model.pt.ckpt") is None

read = torch.load("kept.ckpt")
read["state_dict"] = {name: torch.zeros_like(tensor) for name, tensor in read["state_dict"].items()}
torch.save(read, "kept.ckpt")  # edited: not the folder next to it any more
assert not any(tensor.any() for tensor in Net.load_from_checkpoint("kept.ckpt").state_dict().values())

model = pickle.loads(pickle.dumps(Model(again)))
assert same(model.weights, again.model.state_dict()) and same(model.net.state_dict(), model.weights)


class Named(Net):
    def __init__(self, items):
        super().__init__()
        self.save_hyperparameters()


items = np.array(["PAD", 7], object)
torch.serialization.add_safe_globals([items.__reduce__()[0], np.ndarray, np.dtype, type(items.dtype)])
first, named = pl.Trainer(max_epochs=2, **quiet), Named(items)
first.fit(named, data)
with tempfile.NamedTemporaryFile() as file:
    first.save_checkpoint(file.name)
    read = torch.load(file.name, weights_only=False)
assert read["hyper_parameters"]["items"].dtype == object and read["hyper_parameters"]["items"].tolist() == ["PAD", 7]
torch.save(read, "named.bin")  # as a library keeps it

second, restored = pl.Trainer(max_epochs=2, **quiet), Named(items)
stub = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.Tensor()))
second.fit(restored, stub, ckpt_path="named.bin")  # no batches: only the checkpoint is restored
assert (second.current_epoch, second.global_step) == (2, 8) and same(restored.state_dict(), named.state_dict())
for trainer, net in ((first, named), (second, restored)):
    trainer.fit_loop.max_epochs = 3
    trainer.fit(net, data)
assert first.global_step == second.global_step == 12 and same(restored.state_dict(), named.state_dict())
print("all is well")
"""


@pytest.mark.parametrize("door", ["import trainkit.compat.lightning\n", ""], ids=["imported", "launched"])
def test_a_project(door: str) -> None:
    with open("project.py", "w") as file:
        file.write(door + PROJECT)
    command = [sys.executable, "project.py"] if door else [sys.executable, "-m", "trainkit", "launch", "--as", "lightning"]
    command += [] if door else ["project.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all is well" in done.stdout
