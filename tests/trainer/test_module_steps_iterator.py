"""Steps that take `dataloader_iter`."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import Recorder, make_trainer, parameters_of, same

from trainkit import TrainModule
from trainkit.errors import DataError


class Iterating(TinyModule):
    """Takes the batch from `dataloader_iter`, as Lightning passes it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int, int]] = []

    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        batch, batch_idx, dataloader_idx = next(dataloader_iter)
        self.seen.append(("train", batch_idx, dataloader_idx))
        return super().training_step(batch, batch_idx)

    def validation_step(self, dataloader_iter: Any) -> None:  # type: ignore[override]
        for batch, batch_idx, dataloader_idx in [next(dataloader_iter)]:
            self.seen.append(("val", batch_idx, dataloader_idx))
            super().validation_step(batch, batch_idx)


def test_steps_with_an_iterator_train_the_same() -> None:
    plain, iterating = TinyModule(), Iterating()
    iterating.load_state_dict(plain.state_dict())
    recorder = Recorder()
    make_trainer(max_epochs=2).fit(plain, tiny_loader(8), tiny_loader(4))
    make_trainer(recorder, max_epochs=2).fit(iterating, tiny_loader(8), [tiny_loader(4), tiny_loader(8)])
    assert same(parameters_of(plain), parameters_of(iterating))
    assert recorder.batches == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert iterating.seen == [("train", 0, 0), ("train", 1, 0), ("val", 0, 0), ("val", 0, 1), ("val", 1, 1)] * 2


def test_a_resumed_run_continues_at_its_batch(tmp_path: Any) -> None:
    def fit(**options: Any) -> tuple[Iterating, Any]:
        module = Iterating()
        for parameter in module.parameters():
            parameter.data.fill_(0.5)
        trainer = make_trainer(**options)
        trainer.fit(module, tiny_loader(16, shuffle=True), ckpt_path=trainer.ckpt_path)
        return module, trainer

    whole, _ = fit(max_epochs=2)
    _, trainer = fit(max_steps=3, max_epochs=2)
    trainer.save_checkpoint(tmp_path / "saved")
    resumed = Iterating()
    make_trainer(max_epochs=2).fit(resumed, tiny_loader(16, shuffle=True), ckpt_path=tmp_path / "saved")
    assert same(parameters_of(whole), parameters_of(resumed))
    assert resumed.seen == whole.seen[3:]


def test_a_second_batch_in_one_step() -> None:
    class Greedy(Iterating):
        def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
            next(dataloader_iter)
            next(dataloader_iter)

    with pytest.raises(DataError, match=r"called twice in one step.*accumulate_grad_batches=2"):
        make_trainer().fit(Greedy(), tiny_loader())
    assert issubclass(Greedy, TrainModule)
