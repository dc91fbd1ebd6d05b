"""`PreparedLoader`: epochs, the random state of each forward pass, transfer to the device, and the accumulation window."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.data.dealt import Alike, joined, prepared, read
from helpers.data.samples import (
    Drawing,
    DrawingStream,
    SizedDrawingStream,
    collate_and_draw,
    draw,
    ids,
    prepare,
    same,
    whole_epoch,
)
from helpers.runs.trainers import make_trainer
from helpers.worlds.worlds import run_world
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from trainkit import Accelerator, Callback, CombinedLoader, Trainer, TrainModule
from trainkit.console import TrainkitWarning
from trainkit.data import PreparedLoader
from trainkit.errors import DataError
from trainkit.micro_batch import MicroBatch
from trainkit.rng import Purpose, Stage, mix, seed_generators

META = torch.device("meta")


def shuffled(length: int = 14, **options: Any) -> DataLoader:
    return DataLoader(Drawing(length), **{"batch_size": 4, "shuffle": True, "collate_fn": collate_and_draw, **options})


def under(key: int) -> list[float]:
    """The first random numbers after seeding with a key."""
    seed_generators(key)
    return draw()


def forward_draws(batches: Iterator[Any]) -> list[list[float]]:
    """Random numbers drawn right after each batch is yielded, as the forward pass would."""
    return [draw() for _ in batches]


# ------------------------------------------------------------------------------------------------------------- epochs


def test_each_iteration_is_the_next_epoch() -> None:
    loader = prepare(shuffled())
    epochs = [list(loader) for _ in range(3)]
    assert [loader.epoch, *(same(epochs[n], whole_epoch(loader, n)) for n in range(3))] == [2, True, True, True]
    assert ids(epochs[0]) != ids(epochs[1])


def test_the_order_of_the_dataset_if_asked_for() -> None:
    assert ids(list(prepare(shuffled(8), sequential=True))) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert ids(list(prepare(shuffled(8)))) != [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_reader_yields_the_batches_to_your_own_training_loop() -> None:
    seen: list[PreparedLoader] = []

    class EveryOther:
        def open_window(self) -> int:
            return 0

        def read(self, loader: PreparedLoader, micro_batches: Iterator[MicroBatch]) -> Iterator[Any]:
            seen.append(loader)
            return (micro.batch for micro in itertools.islice(micro_batches, None, None, 2))

        def count_complete(self, loader: PreparedLoader) -> int:
            return 0

    loader = prepare(shuffled(8), reader=EveryOther())
    assert (len(list(prepare(shuffled(8)))), len(list(loader))) == (2, 1)
    assert seen == [loader]


def test_the_epoch_can_be_set() -> None:
    loader = prepare(shuffled())
    loader.set_epoch(5)
    assert same(list(loader), whole_epoch(loader, 5))
    assert loader.epoch == 5
    assert same(list(loader), whole_epoch(loader, 6)), "and is counted on from there"
    loader.set_epoch(0)
    assert same(list(loader), whole_epoch(loader, 0))


def test_iterating_a_given_epoch_does_not_count() -> None:
    """`iterate(epoch)` does not advance the epoch that the next plain iteration has."""
    loader = prepare(shuffled())
    whole_epoch(loader, 9)
    assert same(list(loader), whole_epoch(prepare(shuffled()), 0))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_that_is_left_early_is_over(workers: int) -> None:
    """After a `break`, the next iteration is the next epoch."""
    loader = prepare(shuffled(num_workers=workers))
    for _ in loader:
        break
    assert same(list(loader), whole_epoch(prepare(shuffled()), 1))
    loader.close()


@pytest.mark.parametrize("window", [None, 1, 2])
@pytest.mark.parametrize("start", [0, 2, 4, 6])
def test_the_end_of_an_epoch_is_the_end_of_the_whole_one(window: int | None, start: int) -> None:
    """An epoch that starts at a later batch has the same batches and random numbers as the end of the whole epoch."""
    loader = prepare(shuffled(), window=window)
    whole, forward = whole_epoch(loader, 3), forward_draws(loader.iterate(3))
    assert same(whole_epoch(loader, 3, start), whole[start:])
    assert forward_draws(loader.iterate(3, start)) == forward[start:]


@pytest.mark.parametrize("window", [None, 2])
def test_nothing_that_is_skipped_is_fetched(window: int | None) -> None:
    source = shuffled()
    loader = prepare(source, window=window, limit=3)
    whole = ids(whole_epoch(loader))
    source.dataset.calls.clear()
    assert ids(whole_epoch(loader, 0, 2)) == whole[2:]
    assert source.dataset.calls == whole[2]


# ---------------------------------------------------------------------------------------------------- length, limit


def test_a_limit_shortens_an_epoch() -> None:
    loader = prepare(shuffled(), limit=2)
    assert (loader.length, len(loader), loader.exact) == (2, 2, True)
    assert same(whole_epoch(loader), whole_epoch(prepare(shuffled()))[:2])
    loader.limit = 9
    assert len(loader) == len(whole_epoch(loader)) == 4
    loader.limit = 0
    assert len(loader) == len(whole_epoch(loader)) == 0


def test_a_length_that_is_not_known() -> None:
    loader = prepare(DataLoader(DrawingStream(9), batch_size=4), limit=2)
    assert (loader.length, loader.exact) == (None, False)
    with pytest.raises(TypeError, match="DataLoader has no length"):
        len(loader)
    assert ids(list(loader)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_what_it_does_not_define_is_the_users() -> None:
    """Other attributes are those of the user's loader."""
    source = shuffled()
    loader = prepare(source)
    assert loader.dataset is source.dataset
    assert loader.batch_size == 4
    with pytest.raises(AttributeError, match="nothing"):
        loader.nothing
    assert copy.copy(loader).source is source


def test_closing_reaches_the_source() -> None:
    loader = prepare(shuffled())
    loader.close()
    with pytest.raises(DataError, match="has been closed"):
        next(iter(loader))


# --------------------------------------------------------------------------------------------------- random numbers

SOURCES: dict[str, Any] = {
    "loader": shuffled,
    "workers": lambda: shuffled(num_workers=1),
    "stream": lambda: DataLoader(DrawingStream(14), batch_size=4),
    "ready": lambda: [torch.zeros(4, 1)] * 4,
    "generator": lambda: (torch.rand(4, 1) for _ in range(4)),
    "combined": lambda: CombinedLoader([shuffled(), DataLoader(Drawing(3))], "max_size_cycle"),
}


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("source", SOURCES)
def test_the_work_on_a_batch_has_random_numbers_of_its_own(source: str, window: int | None) -> None:
    """The random numbers of a forward pass depend only on seed, stage, epoch and micro-batch, not on data or earlier draws."""
    loader = prepare(SOURCES[source](), window=window)
    draw()
    expected = [under(mix(7, Stage.TRAIN, Purpose.FORWARD, 2, m)) for m in range(4)]
    assert forward_draws(loader.iterate(2)) == expected


@pytest.mark.parametrize(
    "options, stage",
    [({"stage": Stage.VALIDATE}, 2), ({"stage": Stage.TEST, "index": 3}, 3 + 16 * 3), ({"index": 1}, 1 + 16)],
)
def test_each_stage_and_each_of_its_loaders_has_its_own(options: dict[str, Any], stage: int) -> None:
    """Each stage, and each of several loaders of a stage, has its own order and random numbers."""
    loader = prepare(shuffled(), **options)
    expected = [under(mix(7, stage, Purpose.FORWARD, 0, m)) for m in range(4)]
    assert forward_draws(loader.iterate(0)) == expected
    other = prepare(shuffled())
    assert ids(whole_epoch(loader)) != ids(whole_epoch(other))
    assert not same(whole_epoch(loader)[0]["batch"], whole_epoch(other)[0]["batch"])


def test_seed_changes_order_and_draws() -> None:
    """The order and the random numbers depend on the seed."""
    first, second = prepare(shuffled()), prepare(shuffled(), seed=8)
    assert ids(whole_epoch(first)) != ids(whole_epoch(second))
    assert forward_draws(first.iterate(0)) != forward_draws(second.iterate(0))


def test_what_is_drawn_at_work_does_not_change_what_is_fetched() -> None:
    """Random numbers drawn in the forward pass do not change the next batches."""
    loader = prepare(shuffled())
    expected = whole_epoch(loader)
    found = []
    for micro in loader.iterate(0):
        found.append(micro.batch)
        torch.manual_seed(1)
        draw()
    assert same(found, expected)


@pytest.mark.parametrize("window", [None, 2])
def test_the_generators_of_the_device_are_seeded_too(window: int | None) -> None:
    generator = torch.Generator()
    loader = prepare(shuffled(), generators=(generator,), window=window)
    found = [torch.rand(2, generator=generator) for _ in loader.iterate(1)]
    for m, numbers in enumerate(found):
        generator.manual_seed(mix(7, Stage.TRAIN, Purpose.FORWARD, 1, m))
        assert torch.equal(numbers, torch.rand(2, generator=generator))


# ----------------------------------------------------------------------------------------------------------- transfer


@pytest.mark.parametrize("window", [None, 2])
def test_batches_are_given_on_the_device(window: int | None) -> None:
    source = DataLoader(TensorDataset(torch.zeros(6, 2), torch.zeros(6)), batch_size=4)
    loader = PreparedLoader(source, seed=0, device=META, window=window)
    for batch in loader:
        assert [tensor.device for tensor in batch] == [META, META]


@pytest.mark.parametrize("window", [None, 1, 2])
def test_transfer_and_finish_are_called_for_each_batch(window: int | None) -> None:
    calls: list[tuple[str, int]] = []
    numbers: list[list[float]] = []

    def transfer(batch: Tensor, m: int) -> Tensor:
        calls.append(("transfer", m))
        draw()
        return batch + 10 * m

    def finish(batch: Tensor) -> Tensor:
        calls.append(("finish", int(batch[0])))
        numbers.append(draw())
        return -batch

    window_of_loader = window
    loader = prepare([torch.zeros(2)] * 4, transfer=transfer, finish=finish, window=window_of_loader)
    assert [int(micro.batch[0]) for micro in loader.iterate(1, 2)] == [-20, -30]
    assert calls == [("transfer", 2), ("finish", 20), ("transfer", 3), ("finish", 30)]
    assert numbers == [under(mix(7, 1, Purpose.FORWARD, 1, m)) for m in (2, 3)], "finish is part of the work on the batch"


# ------------------------------------------------------------------------------------------------------------- window


def states(loader: PreparedLoader, epoch: int = 0, start: int = 0) -> list[tuple[bool, bool, float]]:
    return [micro[2:5] for micro in loader.iterate(epoch, start)]


def test_each_micro_batch_has_its_place_in_a_window() -> None:
    # 4 micro-batches in windows of 3: (first, last, share) of each, also when the epoch starts at the second window.
    window = 3
    loader = prepare(shuffled(), window=window)
    expected = [(True, False, 1 / 3), (False, False, 1 / 3), (False, True, 1 / 3), (True, True, 1.0)]
    assert states(loader) == expected
    assert states(loader, 1, 3) == expected[3:]


def test_an_epoch_completes_the_window_that_was_left_open() -> None:
    """With `taken=2`, the first of 4 micro-batches completes a window of 3 that began in the previous epoch."""
    loader = prepare(shuffled(16), window=3)
    last = [micro.last for micro in loader.next_epoch(taken=2)]
    assert last == [micro.last for micro in loader.iterate(0, taken=2)] == [True, False, False, True]
    assert [micro.last for micro in loader.next_epoch()] == [False, False, True, True]


def test_a_short_last_batch_counts_less() -> None:
    window = 2
    assert states(prepare(shuffled(), window=window))[2:] == [(True, False, 4 / 6), (False, True, 2 / 6)]
    dropped = prepare(shuffled(drop_last=True), window=window)
    assert states(dropped)[2:] == [(True, True, 1.0)]


def test_a_limit_that_leaves_the_short_batch_out() -> None:
    """If a limit skips the short last batch, all shares of the last window are equal."""
    window = 2
    assert states(prepare(shuffled(), window=window, limit=3))[2:] == [(True, True, 1.0)]
    assert states(prepare(shuffled(), window=window, limit=2)) == [(True, False, 0.5), (False, True, 0.5)]
    assert states(prepare(shuffled(length=13), window=window, limit=4))[2:] == [(True, False, 0.8), (False, True, 0.2)]


def test_a_generator_of_the_users_has_no_effect_and_a_notice_says_so(caplog: pytest.LogCaptureFixture) -> None:
    def order(**options: Any) -> list[Any]:
        return [micro.batch.tolist() for micro in prepare(DataLoader(Drawing(13), batch_size=4, **options)).iterate(0)]

    plain = order(shuffle=True)
    assert not caplog.records
    assert order(shuffle=True, generator=torch.Generator().manual_seed(5)) == plain
    (record,) = caplog.records
    assert "the generator of this DataLoader has no effect on its order" in record.getMessage()
    assert "trainkit.set_seed(n)" in record.getMessage()
    order(generator=torch.Generator())
    assert len(caplog.records) == 1, "nothing is shuffled"


def test_a_window_of_one_says_so_once() -> None:
    """Without accumulation, each micro-batch is first and last in its window and has the share 1."""
    window = 1
    assert states(prepare(shuffled(), window=window)) == [(True, True, 1.0)] * 4


@pytest.mark.parametrize("size", [1, 2])
def test_weights_are_those_of_the_user(size: int) -> None:
    """Shares are computed from the user's `batch_weight`. Without accumulation, they are 1, or 0 for a weight of 0."""
    window = size
    batches = [torch.tensor([weight]) for weight in (3.0, 1.0, 0.0, 0.0)]
    loader = prepare(batches, window=window, weigh=lambda batch: float(batch))
    micros = list(loader.iterate(0))
    shares = [micro.share for micro in micros]
    assert shares == ([1.0, 1.0, 0.0, 0.0] if size == 1 else [0.75, 0.25, 0.0, 0.0])
    assert micros[-1].empty


def test_weights_are_asked_for_on_the_cpu_before_the_transfer() -> None:
    """`batch_weight` gets the batch before it is moved to the device."""
    seen: list[str] = []

    def weigh(batch: Tensor) -> float:
        seen.append(batch.device.type)
        return 1.0

    list(PreparedLoader([torch.zeros(2)] * 3, seed=0, device=META, window=2, weigh=weigh))
    assert seen == ["cpu"] * 3


def test_a_combined_batch_counts_by_all_its_samples() -> None:
    window = 2
    loader = prepare(CombinedLoader([shuffled(8), DataLoader(Drawing(5), batch_size=3)], "max_size_cycle"), window=window)
    assert [share for _, _, share in states(loader)] == [7 / 13, 6 / 13]


def test_a_stream_counts_the_samples_that_came() -> None:
    window = 2
    loader = prepare(DataLoader(DrawingStream(6), batch_size=4), window=window)
    assert [share for _, _, share in states(loader)] == [4 / 6, 2 / 6]


def test_a_sampler_that_is_wrong_about_its_length_does_no_harm() -> None:
    # If a sampler yields more than its `len`, the epoch and its last window end there.

    class Short(list):
        def __len__(self) -> int:
            return 6

    window = 2
    loader = prepare(DataLoader(Drawing(9), batch_size=2, sampler=Short(range(9))), window=window)
    assert [full for _, full, _ in states(loader)] == [False, True, True]


# ------------------------------------------------------------------------ used by the Trainer and your own training loop


class Counting(TrainModule):
    """Records the samples that it is trained and validated on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.trained: list[int] = []
        self.validated: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.trained += batch[:, 0].int().tolist()
        return self.layer(batch[:, :1].float()).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.validated += batch[:, 0].int().tolist()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(module: Counting, *loaders: Any, **options: Any) -> None:
    quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    Trainer(**{"max_epochs": 1, "num_sanity_val_steps": 0, **quiet, **options}).fit(module, *loaders)


def test_a_stream_of_workers_is_read_to_its_last_sample() -> None:
    """Two workers yield 4 batches although `len` is 3, because each has a short batch. All samples are read."""
    module = Counting()
    loader = DataLoader(SizedDrawingStream(10), batch_size=4, num_workers=2)
    fit(module, loader, loader)
    assert sorted(module.trained) == sorted(module.validated) == list(range(10))


def test_a_stream_that_is_shorter_than_it_says_is_validated_after() -> None:
    """Two workers yield 2 batches although `len` is 3, because each drops its short batch. Validation still runs after them."""
    module = Counting()
    fit(module, DataLoader(SizedDrawingStream(14), batch_size=4, num_workers=2, drop_last=True), shuffled(collate_fn=None))
    assert (len(module.trained), len(module.validated)) == (8, 14)


def test_a_limit_still_cuts_a_stream() -> None:
    module = Counting()
    loader = DataLoader(SizedDrawingStream(20), batch_size=4)
    fit(module, loader, loader, limit_train_batches=2, limit_val_batches=0.4)
    assert (len(module.trained), len(module.validated)) == (8, 8)


def test_the_sanity_check_does_not_eat_an_iterator(caplog: pytest.LogCaptureFixture) -> None:
    """The sanity check is skipped for an iterator, so that validation gets all of its batches."""
    module = Counting()
    fit(module, shuffled(collate_fn=None), (torch.full((2, 1), n) for n in range(5)), num_sanity_val_steps=2)
    assert module.validated == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert "no sanity check" in caplog.text


def test_loaders_that_are_read_side_by_side_are_not_alike() -> None:
    """Two equal loaders have different orders and random numbers, so that zipping them does not pair equal samples."""
    first, second = Accelerator().prepare(shuffled(), shuffled())
    pairs = list(zip(first, second, strict=True))
    assert ids([a for a, _ in pairs]) != ids([b for _, b in pairs])
    assert not any(same(a["batch"], b["batch"]) for a, b in pairs)


# ----------------------------------------------------------------------------------------------- lengths that change


class Growing(Drawing):
    """Has 8 samples, and 4 more in each epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.length = 8 + 4 * epoch


def grow_in_a_hook(dataset: Drawing) -> Callback:
    callback = Callback()
    callback.on_train_epoch_start = lambda trainer, module: setattr(dataset, "length", 8 + 4 * trainer.current_epoch)  # type: ignore[method-assign]
    return callback


@pytest.mark.parametrize("limit, batches", [(1.0, [4, 6, 8]), (0.5, [2, 3, 4]), (5, [4, 5, 5])])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("hook", [True, False])
def test_a_dataset_that_grows(hook: bool, workers: int, limit: Any, batches: list[int]) -> None:
    """Its length, and what limits and intervals make of it, is that at the start of each epoch, in workers that last too."""
    dataset = Drawing(8) if hook else Growing(8)
    loader = DataLoader(dataset, batch_size=2, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
    recorder = Epochs()
    trainer = make_trainer(
        *([grow_in_a_hook(dataset), recorder] if hook else [recorder]),
        accelerator="cpu",
        max_epochs=3,
        limit_train_batches=limit,
        val_check_interval=0.5,
        num_sanity_val_steps=0,
    )
    trainer.fit(Counting(), loader, [torch.zeros(1, 4)])
    assert recorder.batches == batches
    ends = [max(1, count // 2) for count in batches]
    assert recorder.validations == [count // end for count, end in zip(batches, ends, strict=True)]


class Epochs(Callback):
    """Counts the training batches and the validations of each epoch."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.validations: list[int] = []

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.batches.append(0)
        self.validations.append(0)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches[-1] += 1

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.validations[-1] += 1


def growing_on_two() -> list[list[int]]:
    """The samples of each epoch of an own loop; only the dataset of rank 1 grows by itself, as after a hook on one rank."""
    dataset = Drawing(8)
    loader = prepared(DataLoader(dataset, batch_size=2, shuffle=True), joined())
    found = []
    for epoch in range(3):
        dataset.length = 8 + 4 * epoch
        found.append([number for one in read(loader, epoch) for number in one.ids])
    return found


def test_a_dataset_that_grows_on_two_processes() -> None:
    first, second = run_world(2, growing_on_two)
    for epoch in range(3):
        assert sorted(first[epoch] + second[epoch]) == list(range(8 + 4 * epoch))


def test_a_list_that_grows() -> None:
    batches = [torch.zeros(1)] * 3
    loader = prepare(batches)
    assert len(list(loader)) == 3
    batches.append(torch.zeros(1))
    assert (len(list(loader)), len(loader)) == (4, 4)


def test_a_sampler_whose_length_raises() -> None:
    """As the batch sampler of PyG that does not know it: the length is unknown, with one warning."""

    class Unknown:
        def __len__(self) -> int:
            raise ValueError("the number of steps is ambiguous")

        def __iter__(self) -> Iterator[list[int]]:
            return iter([[0, 1], [2, 3]])

    module = Counting()
    with pytest.warns(TrainkitWarning, match=r"len\(\) of Unknown failed") as caught:
        fit(module, DataLoader(Drawing(4), batch_sampler=Unknown()))
    assert len(module.trained) == 4
    assert len(caught) == 1


def test_samplers_of_torchdata() -> None:
    """The samplers of torchdata's StatefulDataLoader only add a state, which is not needed: they count as torch's."""
    sampler = type(
        "DistributedSampler",
        (DistributedSampler,),
        {"__iter__": lambda self: iter(()), "__module__": "torchdata.stateful_dataloader.sampler"},
    )
    own = sampler(Drawing(23), num_replicas=2, rank=0, shuffle=False)
    parts = [
        [number for one in read(prepared(DataLoader(Drawing(23), 2, sampler=own), Alike(rank, 2))) for number in one.ids]
        for rank in range(2)
    ]
    assert sorted(parts[0] + parts[1]) == list(range(23)), "nothing is repeated"
