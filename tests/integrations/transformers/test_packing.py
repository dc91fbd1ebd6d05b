"""Packed rows: how they are assigned to sequences, and that losses and gradients are those of the rows one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.runs.text_rows import VOCABULARY, TextModule, causal_model, classifier, random_rows, tokens_loss
from helpers.runs.trainers import make_trainer
from helpers.worlds.worlds import run_world
from hypothesis import given
from hypothesis import strategies as st
from peft import PrefixTuningConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import DataCollatorWithFlattening, FalconConfig, FalconForCausalLM, MambaConfig, MambaForCausalLM

from trainkit.errors import ConfigurationError, DataError
from trainkit.integrations.transformers import TransformersData
from trainkit.integrations.transformers.packing import (
    PackedRows,
    PackingCollator,
    RowPieces,
    check_packing,
    pack_lengths,
    packed_stream,
)

LENGTH = 16


def pieces(long_rows: str = "error", max_length: int = LENGTH) -> RowPieces:
    return RowPieces(max_length, long_rows, None, "training")


def token_rows(count: int) -> list[dict[str, Any]]:
    return [{"input_ids": row["input_ids"]} for row in random_rows(count)]


def packed(rows: list[dict[str, Any]], how: RowPieces | None = None) -> PackedRows:
    return PackedRows(rows, [len(row["input_ids"]) for row in rows], how or pieces())


# ------------------------------------------------------------------------------------------------------- the assignment


def test_each_item_goes_into_the_fullest_bin_that_it_fits_in() -> None:
    assert pack_lengths([3, 7, 5, 2, 2, 1], 10) == [[1, 0], [2, 3, 4, 5]]
    assert pack_lengths([6, 5, 4, 4], 10) == [[0, 2], [1, 3]]  # First fit would be the same; next fit would need three.
    assert pack_lengths([7, 8, 2, 1], 10) == [[1, 2], [0, 3]]  # Worst fit would put 2 next to 7.
    assert pack_lengths([], 10) == []


@given(st.lists(st.integers(1, 20), max_size=60))
def test_each_item_is_in_one_bin(lengths: list[int]) -> None:
    bins = pack_lengths(lengths, 20)
    assert sorted(item for each in bins for item in each) == list(range(len(lengths)))
    sums = [sum(lengths[item] for item in each) for each in bins]
    assert all(0 < total <= 20 for total in sums)
    assert sum(1 for total in sums if total <= 10) <= 1  # Two half-empty bins would be one.


# ---------------------------------------------------------------------------------------- the numbers of packed sequences


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def one_by_one(model: Any, rows: list[dict[str, Any]]) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean loss over all predicted tokens, and its gradient, without packing and padding."""
    tokens = sum(len(row["input_ids"]) - 1 for row in rows)
    model.zero_grad()
    losses = []
    for row in rows:
        ids = torch.tensor([row["input_ids"]])
        loss = tokens_loss(model(input_ids=ids, use_cache=False).logits, ids) / tokens
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum(), gradients(model)


def together(model: Any, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """The same for a batch of packed sequences."""
    batch = dict(batch)
    labels = batch.pop("labels")
    model.zero_grad()
    loss = tokens_loss(model(**batch).logits, labels) / (labels[:, 1:] != -100).sum()
    loss.backward()
    return loss.detach(), gradients(model)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "mistral"])
def test_loss_and_gradient_are_those_of_the_rows_one_by_one(kind: str, attention: str) -> None:
    """In float64, so that a row that sees a little of another one cannot be taken for rounding."""
    model = causal_model(kind, attention).double()
    rows = token_rows(23)
    sequences = packed(rows)
    batch = PackingCollator(LENGTH)([sequences[index] for index in range(len(sequences))])
    loss, grads = together(model, batch)
    expected, expected_grads = one_by_one(model, rows)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for name, grad in expected_grads.items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-8, atol=1e-12, msg=name)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mistral"])
@pytest.mark.parametrize("missing", ["use_cache", "position_ids"])
def test_without_one_of_the_inputs_the_rows_see_each_other(kind: str, missing: str) -> None:
    """So the test above would fail if attention leaked: transformers makes the mask only of both."""
    model = causal_model(kind).double()
    rows = token_rows(23)
    sequences = packed(rows)
    batch = PackingCollator(LENGTH)([sequences[index] for index in range(len(sequences))])
    del batch[missing]
    loss, _ = together(model, batch)
    assert abs(loss - one_by_one(model, rows)[0]) > 1e-3


def test_the_batch_of_a_sequence() -> None:
    rows = [{"input_ids": [3, 4, 5], "token_type_ids": [0, 1, 1]}, {"input_ids": [6, 7], "token_type_ids": [1, 0]}]
    batch = PackingCollator(7)([packed(rows, pieces(max_length=7))[0]])
    assert {name: value.tolist() for name, value in batch.items() if isinstance(value, Tensor)} == {
        "input_ids": [[3, 4, 5, 6, 7, 7, 7]],
        "token_type_ids": [[0, 1, 1, 1, 0, 0, 0]],
        "labels": [[-100, 4, 5, -100, 7, -100, -100]],
        "position_ids": [[0, 1, 2, 0, 1, 0, 0]],
    }
    assert batch["use_cache"] is False
    assert "attention_mask" not in batch


def test_labels_of_the_rows_are_kept_and_padding_is_removed() -> None:
    rows = [{"input_ids": [3, 4, 5, 0, 0], "attention_mask": [1, 1, 1, 0, 0], "labels": [3, -100, 5, -100, -100]}]
    how = pieces(max_length=3)
    assert PackedRows(rows, [3], how)[0] == [{"input_ids": [3, 4, 5], "labels": [-100, -100, 5]}]


def test_a_sequence_longer_than_the_model_knows_positions() -> None:
    """What fills a sequence has no position that its rows do not have: here 64 are known, of a sequence of 200."""
    model, rows = causal_model("gpt2").double(), token_rows(5)
    dataset = packed(rows, pieces(max_length=200))
    loss, _ = together(model, PackingCollator(200)([dataset[0]]))
    torch.testing.assert_close(loss, one_by_one(model, rows)[0], rtol=1e-12, atol=0)


def test_flash_attention_gets_the_ends_of_the_rows() -> None:
    """The names and values are those of transformers' own collator for the same rows, here over two sequences."""
    rows = [{"input_ids": [3] * length} for length in (5, 3, 6, 2)]
    sequences = packed(rows, pieces(max_length=8))
    batch = PackingCollator(8, flash=True)([sequences[0], sequences[1]])
    flat = [piece for index in (0, 1) for piece in sequences[index]]
    theirs = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(flat)
    assert batch["input_ids"].shape == (2, 8)
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        assert batch[name].dtype == theirs[name].dtype
        assert batch[name].tolist() == theirs[name].tolist()
    assert (batch["max_length_q"], batch["max_length_k"]) == (theirs["max_length_q"], theirs["max_length_k"])
    assert batch["position_ids"].flatten().tolist() == theirs["position_ids"].flatten().tolist()


# -------------------------------------------------------------------------------------------- rows that do not fit, or change


@pytest.mark.parametrize(
    "long_rows, expected",
    [("truncate", [[2, 3, 4], [8, 9]]), ("split", [[2, 3, 4], [5, 6, 7], [8, 9]])],
)
def test_rows_that_are_too_long(long_rows: str, expected: list[list[int]], caplog: Any) -> None:
    rows = [{"input_ids": [2, 3, 4, 5, 6, 7]}, {"input_ids": [8, 9]}]
    dataset = packed(rows, pieces(long_rows, 3))
    found = [piece for index in range(len(dataset)) for piece in dataset[index]]
    assert [piece["input_ids"] for piece in found] == expected
    assert all(piece["labels"] == [-100, *piece["input_ids"][1:]] for piece in found)
    done = {"truncate": "truncated", "split": "split"}[long_rows]
    assert f"1 row of 2 in the training set, longer than max_length=3, will be {done}" in caplog.text


def test_a_row_that_is_too_long_is_an_error_by_default() -> None:
    with pytest.raises(DataError, match=r"row 1 of the training set has 17 tokens.*long_rows='truncate'.*long_rows='split'"):
        packed([{"input_ids": [2] * 3}, {"input_ids": [2] * 17}])


def test_a_row_that_has_changed_is_an_error() -> None:
    rows = token_rows(5)
    dataset = packed(rows)
    rows[2]["input_ids"] = [*rows[2]["input_ids"], 7]
    with pytest.raises(DataError, match=r"row 2 of the training set has \d+ tokens, but had"):
        [dataset[index] for index in range(len(dataset))]


@pytest.mark.parametrize(
    "row, message",
    [
        ({"text": "a"}, "expects rows with input_ids.*columns text.*tokenizer"),
        ({"input_ids": [3, 4], "score": 0.5}, r"score of the training set.*remove_columns\(\['score'\]\)"),
        ({"input_ids": [3, 4], "labels": [3]}, "labels of the training set"),
        ({"input_ids": [3.0, 4.0]}, "input_ids of the training set has other values"),
    ],
)
def test_rows_that_cannot_be_packed(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        pieces().tokens(row)


def test_rows_without_tokens() -> None:
    with pytest.raises(DataError, match="the training set has no tokens"):
        packed([{"input_ids": []}])


# -------------------------------------------------------------------------------------- models that cannot have packed rows


def falcon() -> Any:
    """Its forward has position_ids, but does not make the mask of them in all versions of transformers."""
    return FalconForCausalLM(FalconConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2))


def mamba() -> Any:
    return MambaForCausalLM(MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, state_size=4))


def with_prefix() -> Any:
    """A prefix is a cache, with which transformers makes no mask from position ids."""
    return get_peft_model(causal_model(), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))


def unknown_attention() -> Any:
    model = causal_model()
    model.config._attn_implementation_internal = "paged|mine"
    return model


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT uses the old name.
@pytest.mark.parametrize(
    "make, message",
    [
        (falcon, "FalconForCausalLM cannot be trained on packed rows, as its rows see each other"),
        (classifier, "BertForSequenceClassification cannot be trained on packed rows"),
        (mamba, "MambaForCausalLM cannot be trained on packed rows, as its recurrent layers"),
        (with_prefix, "PeftModelForCausalLM cannot be trained on packed rows"),
        (unknown_attention, "attn_implementation='sdpa'"),
    ],
)
def test_a_model_that_cannot_have_packed_rows_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_packing(make())


def test_the_check_leaves_the_model_as_it_was() -> None:
    model = causal_model("gpt2")
    model.train()
    model.transformer.h[0].eval()
    before = {name: module.training for name, module in model.named_modules()}
    state = torch.get_rng_state()
    check_packing(model)
    assert {name: module.training for name, module in model.named_modules()} == before
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_check_runs_in_bfloat16() -> None:
    check_packing(causal_model().bfloat16())
    with pytest.raises(ConfigurationError, match="rows see each other"):
        check_packing(falcon().bfloat16())


# ----------------------------------------------------------------------------------------------------------------- streams


class Lines(IterableDataset):
    """A stream of rows."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


class Continuing(Lines):
    """A stream that continues where it stopped, and has a state."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        super().__init__(rows)
        self.position = 0

    def __iter__(self) -> Any:
        while self.position < len(self.rows):
            self.position += 1
            yield self.rows[self.position - 1]
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.position = state_dict["position"]


def test_a_stream_is_packed_in_its_order() -> None:
    rows = [{"input_ids": [9] * length} for length in (3, 4, 2, 9, 1)]
    stream = packed_stream(Lines(rows), pieces("split", 7))
    lengths = [[len(piece["input_ids"]) for piece in sequence] for sequence in stream]
    assert lengths == [[3, 4], [2], [7], [2, 1]]
    assert not hasattr(stream, "state_dict")


@pytest.mark.parametrize("stop", range(9))
def test_a_stream_resumes_from_its_state(stop: int) -> None:
    """Also between the parts of a row that was split."""
    rows = [{"input_ids": [9] * length} for length in (3, 4, 2, 30, 1, 20, 5)]
    whole = list(packed_stream(Continuing(rows), pieces("split", 7)))
    first = packed_stream(Continuing(rows), pieces("split", 7))
    reading = iter(first)
    for _ in range(stop):
        next(reading)
    state = first.state_dict()
    second = packed_stream(Continuing(rows), pieces("split", 7))
    second.load_state_dict(state)
    assert len(whole) > 8
    assert list(second) == whole[stop:]
    assert list(second) == whole  # the next epoch


def test_an_epoch_that_ends_early_loses_no_row() -> None:
    """A stream that continues in the next epoch has given rows that are in no sequence yet; one that begins again repeats."""
    rows = token_rows(12)
    for kind, again in ((Continuing, False), (Lines, True)):
        stream = packed_stream(kind(rows), pieces())
        reading = iter(stream)
        first = [next(reading), next(reading)]
        reading.close()
        rest = list(stream)
        tokens = [one for sequence in ([] if again else first) + rest for piece in sequence for one in piece["input_ids"]]
        assert tokens == [one for row in rows for one in row["input_ids"]]


# ----------------------------------------------------------------------------------------------------------- runs of a Trainer


def data_of(kind: str, workers: int = 0) -> TransformersData:
    rows = random_rows(40)
    dataset: Any = {"rows": lambda: rows, "stream": lambda: Lines(rows), "continuing": lambda: Continuing(rows)}[kind]()
    return TransformersData(dataset, rows[:9], train_batch_size=2, packing=True, max_length=LENGTH, num_workers=workers)


def train(kind: str, workers: int = 0, **arguments: Any) -> TextModule:
    """The module after a fit of two epochs."""
    module = TextModule(causal_model("gpt2", resid_pdrop=0.1))
    fit = arguments.pop("fit", {})
    trainer = make_trainer(**{"max_epochs": 2, "default_root_dir": "runs", **arguments})
    trainer.fit(module, data_of(kind, workers), **fit)
    return module


@pytest.mark.parametrize("kind, workers", [("rows", 0), ("rows", 2), ("stream", 0), ("continuing", 0)])
def test_a_run_resumes_exactly(kind: str, workers: int) -> None:
    whole = train(kind, workers)
    steps = len(whole.losses)
    for stop in (3, steps // 2, steps // 2 + 2):
        root = f"runs{stop}"
        first = train(kind, workers, max_steps=stop, enable_checkpointing=True, default_root_dir=root)
        second = train(kind, workers, enable_checkpointing=True, default_root_dir=root, fit={"ckpt_path": "last"})
        assert len(first.losses) == stop
        assert first.seen + second.seen == whole.seen
        assert first.losses + second.losses == whole.losses


def on_a_rank(kind: str) -> TextModule:
    module = train(kind, strategy="ddp")
    return module.seen  # type: ignore[return-value]


@pytest.mark.parametrize("kind", ["rows", "stream"])
def test_two_processes_share_the_sequences(kind: str) -> None:
    """Rank r has micro-batches r, r + 2, … of the same order."""
    alone = train(kind).seen
    shared = run_world(2, on_a_rank, kind)
    epoch = len(alone) // 2
    expected: list[list[Any]] = [[], []]
    for number, batch in enumerate(alone):
        expected[number % epoch % 2].append(batch)
    assert shared == expected


def test_evaluation_is_packed_too() -> None:
    """The loss of all tokens is the same; rows without labels are labeled by their tokens."""
    module = train("rows")
    sequences = [sequence for _, batch in module.evaluated for sequence in batch]
    assert {"input_ids", "labels", "position_ids", "use_cache"} == module.keys
    assert {len(sequence) for sequence in sequences} == {LENGTH}
    assert len(sequences) < 2 * 9


def test_what_to_predict_on_is_not_packed() -> None:
    rows = token_rows(3)
    loader = TransformersData(predict=rows, packing=True, max_length=LENGTH, eval_batch_size=1).predict_dataloader()
    assert [batch["input_ids"].tolist() for batch in loader] == [[row["input_ids"]] for row in rows]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"max_length": None}, "max_length=1024"),
        ({"data_collator": list}, "data_collator is not used"),
        ({"train_sampling_strategy": "group_by_length"}, "packed sequences have one length"),
    ],
)
def test_arguments_that_contradict_packing(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        TransformersData(random_rows(4), packing=True, **{"max_length": 8, **arguments})


class Later(TextModule):
    """Makes its model in `configure_model`, as large models are made under FSDP."""

    def __init__(self, make: Any) -> None:
        super().__init__(None)
        self.make = make

    def configure_model(self) -> None:
        if self.model is None:
            self.model = self.make()


def test_a_model_that_comes_later(caplog: Any) -> None:
    """Where there are no weights in setup, the check with tokens is not possible, which a notice says; the others are made."""
    make_trainer().fit(Later(causal_model), data_of("rows"))
    assert "LlamaForCausalLM has no weights in setup" in caplog.text
    with pytest.raises(ConfigurationError, match="its recurrent layers"):
        make_trainer().fit(Later(mamba), data_of("rows"))


def test_the_model_is_checked_before_it_is_trained() -> None:
    module = TextModule(falcon())
    with pytest.raises(ConfigurationError, match="rows see each other"):
        make_trainer().fit(module, data_of("rows"))
    assert not module.losses
