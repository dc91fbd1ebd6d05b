"""Datasets of every kind in loaders, columns that are removed, default collators, grouping by length, and errors."""

from __future__ import annotations

import copy
from typing import Any

import datasets
import pandas
import pytest
import torch
from helpers.runs.text_rows import TextModule, causal_model, classifier, lines, random_rows, tokenizer
from helpers.runs.trainers import make_trainer
from helpers.worlds.worlds import run_world
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset, IterableDataset
from transformers import BatchEncoding, DataCollatorForLanguageModeling, DataCollatorForTokenClassification

from trainkit import TrainModule
from trainkit.errors import DataError, EmptyLoaderError, MissingMethodError, TrainkitError
from trainkit.integrations.transformers import TransformersData
from trainkit.rng import seed_generators


def classified(count: int) -> list[dict[str, Any]]:
    """Lines of text with their tokens and a label."""
    return [
        {"text": line, "label": number % 3, **tokenizer()(line, truncation=True, max_length=12)}
        for number, line in enumerate(lines()[:count])
    ]


class Mapped(Dataset):
    """A map-style dataset."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


class Noisy(Mapped):
    """Draws a random number for each row."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self.rows[index], "label": int(torch.randint(3, ()))}


class Streamed(IterableDataset):
    """A stream without a state."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


KINDS: dict[str, Any] = {
    "list": lambda rows: rows,
    "BatchEncoding": lambda rows: [BatchEncoding(row) for row in rows],
    "map-style": Mapped,
    "datasets": datasets.Dataset.from_list,
    "datasets, tensors": lambda rows: datasets.Dataset.from_list(rows).with_format("torch"),
    "datasets, transformed": lambda rows: datasets.Dataset.from_list(rows).with_transform(lambda batch: batch),
    "stream": Streamed,
    "datasets, stream": lambda rows: datasets.Dataset.from_list(rows).to_iterable_dataset(),
}


def fit(data: TransformersData, module: Any = None, **arguments: Any) -> Any:
    """The module after a fit."""
    module = TextModule(classifier()) if module is None else module
    options = arguments.pop("fit", {})
    make_trainer(**{"default_root_dir": "runs", **arguments}).fit(module, data, **options)
    return module


def read(loader: Any) -> list[Any]:
    return [batch["input_ids"].tolist() for batch in loader]


# ------------------------------------------------------------------------------------------------------ datasets and columns


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_dataset(kind: str, caplog: Any) -> None:
    """The same batches, without the column that the model does not take."""
    rows = classified(11)
    expected = fit(
        TransformersData(rows, processing_class=tokenizer(), train_batch_size=4, train_sampling_strategy="sequential")
    )
    caplog.clear()
    data = TransformersData(
        KINDS[kind](rows), KINDS[kind](rows[:5]), tokenizer(), train_batch_size=4, train_sampling_strategy="sequential"
    )
    module = fit(data)
    assert module.seen == expected.seen
    assert module.losses == expected.losses
    assert module.keys == {"input_ids", "attention_mask", "labels"}
    assert [len(batch) for _, batch in module.evaluated] == [5]
    assert caplog.text.count("BertForSequenceClassification.forward") == 1


def test_columns_are_told_once(caplog: Any) -> None:
    data = TransformersData(classified(8), None, tokenizer())
    for _ in range(2):
        fit(data, max_epochs=2, reload_dataloaders_every_n_epochs=1)
    assert caplog.text.count("removed from the rows, since") == 1


def test_all_columns_are_kept_if_you_say_so() -> None:
    seen: list[set[str]] = []

    def collate(rows: list[dict[str, Any]]) -> Any:
        seen.extend(set(row) for row in rows)
        return tokenizer().pad([{"input_ids": row["input_ids"], "labels": row["label"]} for row in rows], return_tensors="pt")

    fit(TransformersData(classified(4), None, tokenizer(), data_collator=collate, remove_unused_columns=False))
    assert seen == [{"text", "label", "input_ids", "attention_mask"}] * 4


def test_columns_that_only_later_rows_have_are_removed() -> None:
    rows = [{"input_ids": [3, 4], "label": 1}, *({"input_ids": [3, 4], "label": 1, "extra": number} for number in range(3))]
    assert fit(TransformersData(rows, None, tokenizer(), train_batch_size=1)).keys == {"input_ids", "attention_mask", "labels"}


@pytest.mark.parametrize("kind", ["list", "datasets"])
def test_a_collator_that_needs_a_removed_column(kind: str) -> None:
    """Also where the table of the dataset lacks it; a KeyError of other reasons is the user's."""
    data = TransformersData(KINDS[kind](classified(4)), data_collator=lambda rows: [row["text"] for row in rows])
    with pytest.raises(DataError, match=r"needs the column 'text' of the training set, which was removed.*columns=False"):
        fit(data)
    with pytest.raises(KeyError, match="missing"):
        fit(TransformersData(KINDS[kind](classified(4)), data_collator=lambda rows: [row["missing"] for row in rows]))


def test_rows_that_are_no_dicts_are_for_a_collator_of_the_user() -> None:
    def collate(rows: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
        tokens, labels = torch.tensor(rows).unbind(1)
        return {"input_ids": tokens[:, None], "labels": labels}

    data = TransformersData([(3, 0), (4, 1)], data_collator=collate, train_sampling_strategy="sequential")
    assert fit(data).seen == [[[3], [4]]]


@pytest.mark.parametrize("strategy", ["random", "group_by_length"])
@pytest.mark.parametrize("make", [list, lambda: datasets.Dataset.from_list([])])
def test_a_dataset_without_rows(make: Any, strategy: Any) -> None:
    with pytest.raises(EmptyLoaderError, match="the training loader has no batch: its dataset is empty"):
        fit(TransformersData(make(), None, tokenizer(), train_sampling_strategy=strategy))


def test_label_names_are_kept() -> None:
    rows = [{**row, "weight": 1.0, "score": 2.0} for row in classified(4)]
    seen: set[str] = set()

    def collate(batch: list[dict[str, Any]]) -> Any:
        seen.update(batch[0])
        kept = [{"input_ids": row["input_ids"], "labels": row["label"]} for row in batch]
        return tokenizer().pad(kept, return_tensors="pt")

    fit(TransformersData(rows, None, tokenizer(), data_collator=collate, label_names=["weight"]))
    assert seen == {"label", "weight", "input_ids", "attention_mask"}


def test_the_columns_of_a_peft_model_are_those_of_its_base() -> None:
    with pytest.warns(FutureWarning, match="is_gradient_checkpointing"):  # PEFT uses the old name.
        model = get_peft_model(classifier(), LoraConfig(task_type="SEQ_CLS", target_modules=["query"], r=2))
    module = fit(TransformersData(classified(6), None, tokenizer()), TextModule(model))
    assert module.keys == {"input_ids", "attention_mask", "labels"}


@pytest.mark.parametrize("make", [lambda: TextModule(classifier(), name="network"), lambda: TextModule(torch.nn.Linear(2, 2))])
def test_without_a_model_of_transformers_nothing_is_removed(make: Any) -> None:
    """Then the columns are the business of the module."""

    def training_step(batch: Any, batch_idx: int) -> Any:
        keys.append(set(batch))
        return next(module.parameters()).sum()

    keys: list[set[str]] = []
    module = make()
    module.training_step = training_step
    rows = [{"input_ids": [1, 2], "extra": 1.0}]
    fit(TransformersData(rows), module)
    assert keys == [{"input_ids", "extra"}]


@pytest.mark.parametrize("kind", ["list", "datasets", "stream"])
def test_rows_without_an_input_of_the_model(kind: str) -> None:
    rows = KINDS[kind]([{"text": "a", "label": 1}])
    with pytest.raises(
        DataError, match=r"no input of BertForSequenceClassification: its columns are text, label.*takes input_ids.*tokenizer\("
    ):
        fit(TransformersData(rows, None, tokenizer()))


def test_a_look_at_the_first_row_draws_no_random_numbers() -> None:
    """Else the data would differ from a run in which nothing is removed."""
    rows = [{"input_ids": [3, 4], "text": "a"}, {"input_ids": [5, 6], "text": "b"}]
    data = TransformersData(Noisy(rows))
    data.trainer = make_trainer()
    seed_generators(3)
    before = torch.get_rng_state()
    data.train_sampling_strategy = "group_by_length"
    data.train_dataloader()
    assert torch.equal(torch.get_rng_state(), before)


def test_loaders_without_a_trainer() -> None:
    """For a training loop of your own; there is no model, so nothing is removed."""
    rows = [{"input_ids": [3, 4]}, {"input_ids": [5, 6]}]
    data = TransformersData(rows, rows, train_batch_size=1, train_sampling_strategy="sequential")
    assert read(data.train_dataloader()) == [[[3, 4]], [[5, 6]]]
    assert read(data.val_dataloader()) == [[[3, 4], [5, 6]]]


# ------------------------------------------------------------------------------------------------------------------ collators


def test_a_tokenizer_pads() -> None:
    loader = TransformersData([{"input_ids": [3, 4, 5]}, {"input_ids": [6]}], None, tokenizer()).train_dataloader()
    (batch,) = loader
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (2, 3)
    assert batch["attention_mask"].sum() == 4


def test_a_collator_of_the_user_is_called() -> None:
    collator = DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    module = fit(TransformersData(random_rows(6), None, tokenizer(), data_collator=collator), TextModule(causal_model()))
    assert module.keys == {"input_ids", "attention_mask", "labels"}


LABELED = [{"input_ids": [3, 4, 5], "labels": [1, 2, 0]}, {"input_ids": [6], "labels": [1]}]


@pytest.mark.parametrize(
    "rows, processor, message",
    [
        (LABELED, True, "DataCollatorForTokenClassification.*DataCollatorForSeq2Seq.*DataCollatorForLanguageModeling"),
        ([{"input_ids": [3, 4]}, {"input_ids": [6]}], False, r"different lengths in the columns input_ids.*Pass the tokenizer"),
        ([{"input_ids": [3], "label": "yes"}], True, "column 'label', are texts, such as 'yes'.*class_encode_column"),
        ([{"input_ids": [3], "label": "an answer"}], False, "column 'label', are texts.*text_target="),
        ([{"input_ids": [3], "text": "a"}], True, "the columns text of the training set have texts"),
        ([([3], 1)], False, "makes batches of dicts, but a row of the training set is tuple"),
    ],
)
def test_rows_that_a_default_collator_cannot_make_a_batch_of(rows: Any, processor: bool, message: str) -> None:
    data = TransformersData(rows, None, tokenizer() if processor else None)
    with pytest.raises(DataError, match=message):
        next(iter(data.train_dataloader()))


def test_the_collator_that_the_error_names_works() -> None:
    data = TransformersData(LABELED, data_collator=DataCollatorForTokenClassification(tokenizer()))
    (batch,) = data.train_dataloader()
    assert batch["labels"].shape == (2, 3)


def test_an_error_of_the_users_collator_is_theirs() -> None:
    def collate(rows: list[Any]) -> Any:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="^mine$"):
        next(iter(TransformersData(LABELED, data_collator=collate).train_dataloader()))


# ------------------------------------------------------------------------------------------------------------------ the order


def spread(batches: list[Any], lengths: dict[int, int]) -> int:
    """How much rows differ in length within batches, summed."""
    sizes = [[lengths[row[0]] for row in batch] for batch in batches]
    return sum(max(each) - min(each) for each in sizes)


def numbered(count: int) -> tuple[list[dict[str, Any]], dict[int, int]]:
    """Rows of different lengths whose first token is their number, and the length of each."""
    rows = [{"input_ids": [row["number"], *row["input_ids"]]} for row in random_rows(count, longest=30)]
    return rows, {row["input_ids"][0]: len(row["input_ids"]) for row in rows}


@pytest.mark.parametrize("kind", ["list", "map-style", "datasets", "datasets, transformed"])
def test_rows_are_grouped_by_length(kind: str) -> None:
    rows, lengths = numbered(64)
    options = {"processing_class": tokenizer(), "train_batch_size": 4}
    collate = DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    grouped, shuffled = (
        fit(
            TransformersData(KINDS[kind](rows), data_collator=collate, train_sampling_strategy=strategy, **options),
            TextModule(causal_model()),
        ).seen
        for strategy in ("group_by_length", "random")
    )
    for seen in (grouped, shuffled):
        assert sorted(row[0] for batch in seen for row in batch) == list(range(64))
    assert spread(grouped, lengths) < spread(shuffled, lengths) / 2


@pytest.mark.parametrize("kind", ["list", "datasets"])
def test_lengths_can_be_a_column(kind: str) -> None:
    """It is preferred to the main input; here it says the opposite."""
    rows = [{"input_ids": [number] * (number + 1), "size": 20 - number} for number in range(16)]
    data = TransformersData(
        KINDS[kind](rows),
        None,
        tokenizer(),
        train_batch_size=16,
        train_sampling_strategy="group_by_length",
        length_column_name="size",
    )
    (batch,) = data.train_dataloader()
    assert batch["input_ids"][:, 0].tolist() == list(range(16))  # The largest size comes first.


def collated(strategy: str, workers: int) -> TransformersData:
    rows, _ = numbered(37)
    return TransformersData(
        rows,
        None,
        tokenizer(),
        train_batch_size=4,
        data_collator=DataCollatorForLanguageModeling(tokenizer(), mlm=False),
        train_sampling_strategy=strategy,  # type: ignore[arg-type]
        num_workers=workers,
    )


def train(strategy: str, workers: int = 0, **arguments: Any) -> Any:
    module = TextModule(causal_model("gpt2", resid_pdrop=0.1))
    return fit(collated(strategy, workers), module, **{"max_epochs": 2, **arguments})


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("strategy", ["random", "group_by_length"])
def test_a_run_resumes_exactly(strategy: str, workers: int) -> None:
    """In the middle of both epochs and between them: the same rows, losses bit for bit."""
    whole = train(strategy)
    assert len(whole.losses) == 20
    for stop in (3, 10, 14):
        options = {"enable_checkpointing": True, "default_root_dir": f"runs{stop}"}
        first = train(strategy, workers, max_steps=stop, **options)
        second = train(strategy, workers, fit={"ckpt_path": "last"}, **options)
        assert first.seen + second.seen == whole.seen
        assert first.losses + second.losses == whole.losses


def masked(workers: int = 0, **arguments: Any) -> list[Any]:
    """The inputs of a run whose collator has a seed."""
    rows, _ = numbered(23)
    masking = copy.deepcopy(tokenizer())
    masking.mask_token = "<eos>"
    collate = DataCollatorForLanguageModeling(masking, mlm_probability=0.4, seed=7)
    data = TransformersData(rows, None, masking, train_batch_size=4, data_collator=collate, num_workers=workers)
    seen = fit(data, TextModule(causal_model()), **{"max_epochs": 2, **arguments}).seen
    assert collate.seed == 7
    return seen


def test_masks_do_not_depend_on_workers_and_interruptions(caplog: Any) -> None:
    """Also if the collator has a seed: its own generator would continue from batch to batch, in each worker."""
    whole = masked()
    assert caplog.text.count("DataCollatorForLanguageModeling(seed=7) is not used") == 1
    assert masked(workers=2) == whole
    options = {"enable_checkpointing": True, "default_root_dir": "interrupted"}
    first = masked(max_steps=4, **options)
    assert first + masked(fit={"ckpt_path": "last"}, **options) == whole


def masked_on_ranks() -> list[Any]:
    return masked(strategy="ddp")


def test_masks_do_not_depend_on_the_number_of_processes() -> None:
    expected: list[list[Any]] = [[], []]
    for number, batch in enumerate(masked()):
        expected[number % 6 % 2].append(batch)
    assert run_world(2, masked_on_ranks) == expected


def train_on_ranks(kind: str, **arguments: Any) -> Any:
    module = TextModule(causal_model("gpt2", resid_pdrop=0.1))
    return fit(collated(kind, 0), module, max_epochs=2, strategy="ddp", **arguments).seen


@pytest.mark.parametrize("strategy", ["random", "group_by_length"])
def test_two_processes_share_the_same_order(strategy: str) -> None:
    alone = train(strategy).seen
    expected: list[list[Any]] = [[], []]
    for number, batch in enumerate(alone):
        expected[number % 10 % 2].append(batch)
    assert run_world(2, train_on_ranks, strategy) == expected


def first_steps_on_ranks() -> Any:
    return train_on_ranks("group_by_length", max_steps=2, enable_checkpointing=True, default_root_dir="shared")


def test_two_processes_continue_on_one() -> None:
    """The same global batches, as the order does not depend on the number of processes."""
    alone = train("group_by_length").seen
    first = run_world(2, first_steps_on_ranks)
    second = train("group_by_length", default_root_dir="shared", accumulate_grad_batches=2, fit={"ckpt_path": "last"}).seen
    assert [first[number % 2][number // 2] for number in range(4)] + second == alone


# ---------------------------------------------------------------------------------------------------------------- evaluation


def test_several_validation_datasets() -> None:
    """One loader each, in the order of the names, read in order and to the end."""
    rows = classified(11)
    data = TransformersData(rows, {"seen": rows[:5], "unseen": rows[5:]}, tokenizer(), eval_batch_size=4, drop_last=True)
    module = fit(data)
    assert data.val_names == ("seen", "unseen")
    assert data.test_names == ()
    assert [(index, len(batch)) for index, batch in module.evaluated] == [(0, 4), (0, 1), (1, 4), (1, 2)]
    assert [len(batch) for batch in module.seen] == [8]  # Only training drops the short batch.


@pytest.mark.parametrize(
    "verb, stage, name", [("validate", "val", "validation"), ("test", "test", "test"), ("predict", "predict", "prediction")]
)
def test_a_dataset_that_is_missing(verb: str, stage: str, name: str) -> None:
    class All(TrainModule):
        def validation_step(self, batch: Any, batch_idx: int) -> None: ...
        def test_step(self, batch: Any, batch_idx: int) -> None: ...
        def predict_step(self, batch: Any, batch_idx: int) -> None: ...

    with pytest.raises(MissingMethodError, match=rf"needs a {name} dataset.*TransformersData\({stage}=dataset\)"):
        getattr(make_trainer(), verb)(All(), TransformersData(random_rows(2)))


def test_fit_needs_training_data() -> None:
    with pytest.raises(MissingMethodError, match=r"TransformersData\(train=dataset\)"):
        fit(TransformersData(None, classified(2), tokenizer()))


# ----------------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"train_batch_size": 0}, "train_batch_size must be an integer"),
        ({"eval_batch_size": 2.5}, "eval_batch_size must be an integer"),
        ({"train_sampling_strategy": "grouped"}, "must be one of 'random', 'sequential', 'group_by_length'"),
        ({"data_collator": 3}, "data_collator must be a function"),
        ({"persistent_workers": True}, "persistent_workers needs worker processes.*num_workers=2"),
        ({"prefetch_factor": 2}, "prefetch_factor needs worker processes"),
        ({"multiprocessing_context": "spawn"}, "multiprocessing_context needs worker processes"),
        ({"multiprocessing_context": "thread", "num_workers": 1}, "must be one of 'fork', 'spawn'"),
        ({"packing": "yes"}, "packing must be True or False"),
        ({"long_rows": "cut"}, "long_rows must be one of"),
        ({"train": {"train": [], "test": []}}, r"dict of 'train', 'test'.*train=datasets\['train'\]"),
        ({"train": datasets.DatasetDict()}, "DatasetDict of nothing"),
        ({"val": {}}, "dict of nothing"),
        ({"val": {"a": 3}}, r"val\['a'\]=\) must be a list of dicts.*not int"),
        ({"train": iter([])}, "A generator: a class of IterableDataset"),
        ({"train": Streamed([]), "train_sampling_strategy": "group_by_length"}, "but it is Streamed"),
        ({"train": pandas.DataFrame({"label": [1]})}, r"a DataFrame of pandas.*datasets\.Dataset\.from_pandas"),
        ({"test": pandas.Series([1])}, "a Series of pandas"),
        ({"num_worker": 4}, "TransformersData has no argument 'num_worker'. Did you mean 'num_workers'"),
        ({"dataloader_num_workers": 4}, r"dataloader_num_workers=...\): .* or TransformersData\(num_workers=...\)"),
        ({"train_dataset": []}, r"train_dataset=...\): .* or TransformersData\(train_dataset, eval_dataset\)"),
        ({"max_steps": 4}, r"max_steps=...\): use Trainer\(max_steps=...\)"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainkitError, match=message):
        TransformersData(**{"train": random_rows(2), **arguments})


def test_rows_without_a_length() -> None:
    data = TransformersData([{"values": [1.0]}], None, tokenizer(), train_sampling_strategy="group_by_length")
    with pytest.raises(DataError, match="row 0 has neither 'input_ids' nor a column of lengths.*length_column_name"):
        data.train_dataloader()


def test_the_options_of_loaders() -> None:
    options = {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 3, "pin_memory": False}
    options["multiprocessing_context"] = "spawn"
    both = {"first": random_rows(5), "second": random_rows(4)}
    sizes = {"train_batch_size": 2, "eval_batch_size": 3}
    data = TransformersData(random_rows(9), random_rows(9), test=both, drop_last=True, **sizes, **options)
    train_loader, val_loader = data.train_dataloader(), data.val_dataloader()
    assert (train_loader.batch_size, val_loader.batch_size) == (2, 3)
    assert [list(loader.dataset) for loader in data.test_dataloader()] == list(both.values())
    assert data.test_names == ("first", "second")
    for loader in (train_loader, val_loader):
        used: Any = loader.multiprocessing_context
        given = {name: getattr(loader, name) for name in options} | {"multiprocessing_context": used.get_start_method()}
        assert given == options
    assert (train_loader.drop_last, val_loader.drop_last) == (True, False)
    assert TransformersData(random_rows(2)).train_dataloader().pin_memory == torch.accelerator.is_available()
