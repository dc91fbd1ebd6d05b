"""The `.ckpt` next to a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer, same

from trainkit.checkpoint import open_checkpoint, register
from trainkit.checkpoint.ckpt_file import folder_for, lightning_form, link_last, remove_file_of, write_ckpt
from trainkit.checkpoint.pointers import checkpoint_of, resolve_pointer
from trainkit.errors import CheckpointWriteError

FOLDER, FILE = Path("saved"), Path("saved.ckpt")


class Words:
    def __init__(self, words: list[str]) -> None:
        self.words = words


register(Words, encode=lambda words: words.words, decode=Words, name="test_ckpt_file.Words")


class Configured(TinyModule):
    def __init__(self, width: int = 3, root: Path = Path("data")) -> None:
        super().__init__()
        self.save_hyperparameters()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["vocabulary"] = {"size": 7, "seen": torch.ones(2)}
        checkpoint["words"] = Words(["a"])


@pytest.fixture
def saved() -> Configured:
    module = Configured()
    trainer = make_trainer(max_steps=2)
    trainer.fit(module, tiny_loader())
    trainer.save_checkpoint(FOLDER)
    return module


def test_the_content(saved: Configured) -> None:
    omitted = write_ckpt(open_checkpoint(FOLDER), FILE)
    found = torch.load(FILE, weights_only=True)
    assert same(found.pop("state_dict"), saved.state_dict())
    assert torch.equal(found["vocabulary"].pop("seen"), torch.ones(2))
    assert found == {
        "hyper_parameters": {"width": 3},
        "epoch": 0,
        "global_step": 2,
        "pytorch-lightning_version": "2.6.6",
        "vocabulary": {"size": 7},
    }
    found_in = [text.partition(" cannot")[0] for text in omitted]
    assert found_in == ["omitted: hyper_parameters['root']", "omitted: checkpoint['words']"]


def test_the_folder_for_a_file(saved: Configured) -> None:
    """It replaces a checkpoint only if that is not the one of another file."""
    assert folder_for(Path("new.pt")) == Path("new")
    assert folder_for(FILE) == folder_for(Path("saved.pt")) == FOLDER
    write_ckpt(open_checkpoint(FOLDER), FILE)
    assert (folder_for(FILE), folder_for(Path("saved.pt"))) == (FOLDER, Path("saved.pt.folder"))
    assert folder_for(Path("model.pth.tar")) == Path("model.pth.tar.folder"), "model.pth is the name of another file"
    Path("notes").write_text("mine")
    assert folder_for(Path("notes.bin")) == Path("notes.bin.folder")


def test_another_checkpoint_of_the_same_name(saved: Configured, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "trainkit")
    write_ckpt(open_checkpoint(FOLDER), FILE)
    trainer = make_trainer(max_steps=3)
    trainer.fit(saved, tiny_loader(), ckpt_path=FOLDER)
    trainer.save_checkpoint(FOLDER)
    assert (checkpoint_of(FILE), resolve_pointer(FILE)) == (None, FILE)
    assert "saved.ckpt was not made of the checkpoint saved next to it" in caplog.messages[-1]
    write_ckpt(open_checkpoint(FOLDER), FILE)
    assert checkpoint_of(FILE) == FOLDER


def test_a_file_of_the_users_is_not_touched(saved: Configured) -> None:
    torch.save({"mine": 1}, FILE)
    with pytest.raises(CheckpointWriteError, match="saved.ckpt exists, and was not made of a checkpoint"):
        write_ckpt(open_checkpoint(FOLDER), FILE)
    remove_file_of(FOLDER)
    assert torch.load(FILE) == {"mine": 1}
    torch.save({"mine": 2}, "last.ckpt")
    with pytest.raises(CheckpointWriteError, match="last.ckpt exists"):
        link_last(FILE)
    FILE.write_bytes(b"")  # as tempfile creates it
    write_ckpt(open_checkpoint(FOLDER), FILE)
    assert checkpoint_of(FILE) == FOLDER
    os.remove("last.ckpt")
    link_last(FILE)
    remove_file_of(FOLDER)
    assert not FILE.exists()
    assert not os.path.lexists("last.ckpt"), "a link to it"
    remove_file_of(FOLDER)


def test_other_content_does_not_stand_for_the_folder(saved: Configured) -> None:
    checkpoint = open_checkpoint(FOLDER)
    content, _ = lightning_form(checkpoint)
    write_ckpt(checkpoint, FILE, {**content, "state_dict": {}})
    assert checkpoint_of(FILE) is None
    write_ckpt(checkpoint, FILE)  # it may be replaced


class OfItems(TinyModule):
    def __init__(self, items: Any, weights: Any) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_arrays_in_hyper_parameters() -> None:
    """The folder gives them back as they are; its file has what `torch.load(weights_only=True)` reads, and says so."""
    items, weights = np.array(["PAD", 101], object), np.array([0.5, 0.25])
    trainer = make_trainer(max_steps=1)
    trainer.fit(OfItems(items, weights), tiny_loader())
    trainer.save_checkpoint(FOLDER)
    loaded = OfItems.load_from_checkpoint(FOLDER).hparams
    assert (loaded["items"].dtype, loaded["items"].tolist()) == (items.dtype, items.tolist())
    assert (loaded["weights"].dtype, loaded["weights"].tolist()) == (weights.dtype, weights.tolist())

    notes = write_ckpt(open_checkpoint(FOLDER), FILE)
    found = torch.load(FILE, weights_only=True)["hyper_parameters"]
    assert found["items"] == ["PAD", 101]
    assert torch.equal(found["weights"], torch.tensor([0.5, 0.25], dtype=torch.float64))
    starts = [text.partition(":")[0] for text in notes]
    assert starts == [
        f"hyper_parameters['{n}'] is stored as a {kind}" for n, kind in (("items", "list"), ("weights", "tensor"))
    ]


class WithAdam(TinyModule):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


@pytest.mark.parametrize("steps, epochs", [(8, (2, 2)), (6, (1, 2))])
def test_a_file_that_a_run_resumes_from(steps: int, epochs: tuple[int, int]) -> None:
    """Its optimizer states are those of torch, and it says whether an epoch has begun."""
    trainer = make_trainer(max_epochs=2, max_steps=steps)
    module = WithAdam()
    trainer.fit(module, tiny_loader())
    trainer.save_checkpoint(FOLDER)
    write_ckpt(open_checkpoint(FOLDER), FILE, resumable=True)
    found = torch.load(FILE, weights_only=True)
    (state,) = found["optimizer_states"]
    (group,) = state["param_groups"]
    assert group.pop("param_names") == [name for name, _ in module.named_parameters()]
    expected = trainer.optimizers[0].state_dict()
    assert state["param_groups"] == expected["param_groups"]
    assert state["state"].keys() == expected["state"].keys() == {0, 1}
    assert all(same(state["state"][number], slots) for number, slots in expected["state"].items())
    current = found["loops"]["fit_loop"]["epoch_progress"]["current"]
    assert (current["completed"], current["ready"]) == epochs
