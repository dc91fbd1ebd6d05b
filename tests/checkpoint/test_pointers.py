"""Which checkpoint a path means: `last`, and files that were made of one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer

from trainkit.checkpoint import open_checkpoint
from trainkit.checkpoint.ckpt_file import file_of, link_last, write_ckpt
from trainkit.checkpoint.folder import write_pointer
from trainkit.checkpoint.pointers import checkpoint_of, resolve_pointer

FOLDER, FILE = Path("saved"), Path("saved.ckpt")


@pytest.fixture
def saved() -> None:
    trainer = make_trainer(max_steps=2)
    trainer.fit(TinyModule(), tiny_loader())
    trainer.save_checkpoint(FOLDER)


@pytest.mark.parametrize("link", [False, True])
def test_what_opens_a_checkpoint(link: bool, saved: None) -> None:
    write_ckpt(open_checkpoint(FOLDER), FILE)
    link_last(FILE)
    write_pointer(Path(), FOLDER.name, link=link)
    for path in ("saved", "saved.ckpt", "last", "last.ckpt", Path("last").absolute()):
        assert open_checkpoint(path).path == FOLDER.absolute()


def test_the_folder_stands_for_its_file(saved: None) -> None:
    write_ckpt(open_checkpoint(FOLDER), file_of(FOLDER))
    assert checkpoint_of(FILE) == resolve_pointer(FILE) == FOLDER
    link_last(FILE)
    assert os.readlink("last.ckpt") == "saved.ckpt"
    assert resolve_pointer(Path("last.ckpt")) == FOLDER

    value = torch.load(FILE, weights_only=True)
    torch.save(value, FILE)  # by another program, which may have changed the weights
    assert (checkpoint_of(FILE), resolve_pointer(FILE)) == (None, FILE)

    FILE.unlink()
    write_ckpt(open_checkpoint(FOLDER), FILE)
    shutil.rmtree(FOLDER)
    assert checkpoint_of(FILE) is None, "the folder was removed"


def test_names_do_not_matter(saved: None) -> None:
    write_ckpt(open_checkpoint(FOLDER), FILE)
    os.rename(FILE, "best.pt")
    os.rename(FOLDER, "epoch=3")
    os.symlink("epoch=3", "best")
    os.mkdir("links")
    os.symlink("../best.pt", "links/one.pt")
    os.symlink("one.pt", "links/two.pt")
    assert checkpoint_of(Path("best.pt")) == Path("epoch=3"), "not the link to it"
    assert os.path.samefile(checkpoint_of(Path("links/two.pt")) or "", "epoch=3")
    shutil.copytree("epoch=3", "copy")
    shutil.copyfile("best.pt", "copy.pt")
    assert checkpoint_of(Path("copy.pt")) == Path("copy"), "of two copies the one that is named like the file"
    os.mkdir("elsewhere")
    shutil.copyfile("best.pt", "elsewhere/best.pt")
    assert checkpoint_of(Path("elsewhere/best.pt")) is None
