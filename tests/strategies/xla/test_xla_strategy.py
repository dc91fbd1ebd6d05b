"""`XLAStrategy`: the same counts, samples and learning rates as DDP; short last batches; tied parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.worlds.worlds import WorldError, run_world
from helpers.xla.xla_cases import (
    FEW,
    GPT,
    KINDS,
    SIZE,
    Masked,
    Net,
    Notes,
    Numbers,
    Text,
    Trained,
    by_hand,
    close,
    limit,
    loader,
    quiet,
    train,
    under,
)
from torch.utils.data import DataLoader

from trainkit import Callback
from trainkit.checkpoint import open_checkpoint

pytestmark = pytest.mark.xla


# ------------------------------------------------------------------------------------------ the arithmetic of DDP


def falling(step: int) -> float:
    return 0.9**step


def dealt(kind: str, samples: int, window: int) -> dict[str, Any]:
    """Train on batches of two samples per device, shuffled and augmented; returns counts, learning rates and samples."""
    notes, net, data = Notes(), Net("sgd", falling), DataLoader(Numbers(samples, noise=True), 2, shuffle=True)
    trainer = quiet(kind, notes, max_epochs=2, global_batch_size=8 * window)
    trainer.fit(net, data, DataLoader(Numbers(5), 2))
    mine = notes.trained
    found: dict[str, Any] = {name: getattr(trainer, name) for name in ("world_size", "num_training_batches", "global_step")}
    found |= {"window": trainer.accumulate_grad_batches, "rank": trainer.global_rank, "val": trainer.num_val_batches}
    found["rates"] = mine.rates
    found["updates"] = dict(zip(mine.places, mine.updates, strict=True))
    found["ids"], found["seen"] = (dict(zip(mine.places, what, strict=True)) for what in (mine.ids, mine.seen))
    return found


def values_of_all_ranks(found: list[dict[str, Any]], what: str) -> dict[tuple[int, int], list[Any]]:
    """The values of all processes for each micro-batch, in rank order."""
    return {place: [x for own in found for x in own[what].get(place, [])] for place in found[0][what]}


@pytest.mark.parametrize("samples, window", [(77, 1), (77, 2), (71, 3)])
def test_the_arithmetic_of_ddp(samples: int, window: int) -> None:
    """World size, numbers of batches and steps, learning rates and augmented samples of each micro-batch equal those of DDP."""
    theirs = run_world(4, dealt, "ddp", samples, window)
    for kind in ("spmd", "mesh"):
        mine = under(kind, dealt, samples, window)
        for name in ("world_size", "num_training_batches", "global_step", "window", "rates", "val"):
            assert mine[name] == theirs[0][name], name
        assert (mine["world_size"], mine["window"]) == (4, window)
        assert mine["updates"] == theirs[0]["updates"]
        assert mine["ids"] == values_of_all_ranks(theirs, "ids")
        assert mine["seen"] == values_of_all_ranks(theirs, "seen")


def test_one_device_is_one_process() -> None:
    (theirs,) = run_world(1, dealt, "auto", 37, 1)
    assert under("one", dealt, 37, 1) == theirs
    assert theirs["world_size"] == 1


# -------------------------------------------------------------------------------------------------- short batches


def last_batch(kind: str, samples: int, make: type[Net], options: dict[str, Any]) -> tuple[Trained, Trained, list[int]]:
    """Train two epochs with the Trainer and by hand; also returns the sizes of the batches that the callback sees."""
    net, sizes = make("sgd"), []

    class Sizes(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            sizes.append(len(batch["x"]))

    mine = train(kind, net, loader(kind, Numbers(samples)), Sizes(), max_epochs=2, options=options, accumulate_grad_batches=2)
    return mine, by_hand(Net("sgd"), Numbers(samples), 2, window=2), sizes


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("samples, left", [(25, 1), (27, 3), (37, 5)])
@pytest.mark.parametrize("pad", [False, True])
def test_the_short_last_batch(kind: str, samples: int, left: int, pad: bool) -> None:
    """Its gradient depends only on its samples, with and without padding, also on more devices than it has samples."""
    mine, theirs, sizes = under(kind, last_batch, samples, Masked if pad else Net, {"pad_last_batch": pad})
    full = [SIZE] * (samples // SIZE)
    assert sizes == 2 * [*full, SIZE if pad else left]
    assert [len(ids) for ids in mine.ids] == sizes
    close(mine.losses, theirs.losses, limit())
    for name, value in theirs.parameters.items():
        assert torch.allclose(mine.parameters[name], value, rtol=2.5 * limit(), atol=limit()), name


def test_the_sample_mask_without_padding() -> None:
    mine, theirs, _ = under("spmd", last_batch, 27, Masked, {})
    close(mine.losses, theirs.losses, limit())


@pytest.mark.parametrize("samples", [24, 27])
def test_a_loss_that_does_not_skip_the_padding(samples: int) -> None:
    with pytest.raises(WorldError, match="ModuleError: pad_last_batch=True pads short batches .*mask = self.sample_mask"):
        under("spmd", last_batch, samples, Net, {"pad_last_batch": True})


# ----------------------------------------------------------------------------------------------------------- ties


def tied(kind: str, folder: Path) -> dict[str, Any]:
    module = GPT()
    parameter = module.head.weight
    trainer = quiet(kind, max_epochs=1)
    trainer.fit(module, loader(kind, Text(24)))
    trainer.save_checkpoint(folder)
    again = GPT()
    second = quiet(kind, Notes(), max_epochs=2)
    second.fit(again, loader(kind, Text(24)), ckpt_path=folder)
    return {
        "same": [m.head.weight is m.embedding.weight for m in (module, again)],
        "kept": parameter is module.head.weight,
        "names": [name for name, _ in module.named_parameters()],
        "devices": {str(p.device).split(":")[0] for p in module.parameters()},
        "weights": [m.head.weight.detach().cpu() for m in (module, again)],
    }


@pytest.mark.parametrize("kind", FEW)
def test_tied_parameters(kind: str, run_dir: Path) -> None:
    """A parameter that two layers share is one tensor on the device and in the checkpoint."""
    found = under(kind, tied, run_dir / "saved")
    assert found["same"] == [True, True]
    assert found["kept"]
    assert "head.weight" not in found["names"]
    assert found["devices"] in ({"xla"}, {"cpu"})
    model = open_checkpoint(run_dir / "saved").read(["model"]).tensors["model"]
    assert torch.equal(model["embedding.weight"], found["weights"][0])
    assert "head.weight" not in model
    assert open_checkpoint(run_dir / "saved").manifest.aliases == {"model": {"head.weight": "embedding.weight"}}
    assert not torch.equal(*found["weights"])
