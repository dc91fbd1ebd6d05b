"""Packing: several rows of token ids in one sequence, each attending to itself only.

`TransformersData(packing=True)` uses it. Rows are assigned to sequences by best-fit decreasing (D. S. Johnson, "Near-optimal
bin packing algorithms", 1973; for language models: Ding et al., "Fewer Truncations Improve Language Modeling", 2024). The
assignment is a function of the lengths of the rows alone, so a sequence is an item of a dataset like any other: it is
shuffled, sharded and resumed like one.
"""

from __future__ import annotations

import inspect
from bisect import bisect_left, insort
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, chain, compress, takewhile
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from trainkit.console import notice, quantity
from trainkit.data.stream_sharder import has_state
from trainkit.errors import ConfigurationError, DataError
from trainkit.integrations.transformers.model_columns import base_model
from trainkit.integrations.transformers.token_loss import IGNORED

__all__ = [
    "LONG_ROWS",
    "PackedRows",
    "PackedStream",
    "PackingCollator",
    "RowPieces",
    "check_packing",
    "has_weights",
    "is_flash",
    "pack_lengths",
    "packed_stream",
    "refuse_unpackable",
]

LONG_ROWS = ("error", "truncate", "split")
"""What can be done with a row that is longer than a sequence."""

_MASKS_ITSELF = ("eager", "sdpa", "flex_attention")  # transformers makes the mask of these from the position ids.


class Piece(NamedTuple):
    """Tokens of one row: `[start, stop)` of row number `row`."""

    row: int
    start: int
    stop: int


def pack_lengths(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Assign items to bins by best-fit decreasing: each item, longest first, to the fullest bin that it fits in.

    Args:
        lengths: The length of each item, at most `capacity`.
        capacity: The largest sum of lengths in a bin.

    Returns:
        The indices of the items in each bin. Items of equal length keep their order.
    """
    bins: list[list[int]] = []
    with_space: dict[int, list[int]] = {}  # free space → bins that have it
    spaces: list[int] = []  # its keys, sorted
    for item in np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable").tolist():
        at = bisect_left(spaces, lengths[item])
        if at == len(spaces):
            number, space = len(bins), capacity
            bins.append([])
        else:
            space = spaces[at]
            number = with_space[space].pop()
            if not with_space[space]:
                del with_space[space], spaces[at]
        bins[number].append(item)
        left = space - lengths[item]
        if left:
            if left not in with_space:
                with_space[left] = []
                insort(spaces, left)
            with_space[left].append(number)
    return bins


class RowPieces:
    """How rows become pieces of sequences.

    Args:
        max_length: Number of tokens in a sequence.
        long_rows: One of `LONG_ROWS`.
        columns: The columns that the model takes; `None`: all.
        name: The set of the rows, for messages.
    """

    def __init__(self, max_length: int, long_rows: str, columns: Container[str] | None, name: str) -> None:
        self.max_length = max_length
        self.long_rows = long_rows
        self.columns = columns
        self.name = name

    def spans(self, length: int, where: str = "") -> list[tuple[int, int]]:
        """The parts of a row of `length` tokens that become pieces.

        Raises:
            DataError: It is longer than a sequence, and `long_rows` is "error".
        """
        limit = self.max_length
        if length <= limit:
            return [(0, length)] if length else []
        if self.long_rows == "error":
            raise DataError(
                f"packing=True, max_length={limit}: {where or 'a row'} of the {self.name} set has {length} tokens. Increase "
                "max_length, or choose what happens to longer rows: TransformersData(long_rows='truncate') drops their ends, "
                "long_rows='split' makes several rows of each."
            )
        if self.long_rows == "truncate":
            return [(0, limit)]
        return [(start, min(start + limit, length)) for start in range(0, length, limit)]

    def tokens(self, row: Any) -> dict[str, list[int]]:
        """The columns of a row that have one number for each token, without padding.

        Raises:
            DataError: It has no `input_ids`, or a column that cannot be packed.
        """
        self._check(row)
        size, columns, odd = len(row["input_ids"]), dict[str, list[int]](), []
        for name in filter(self._takes, row):
            value = _numbers(row[name], size)
            if value is None:
                odd.append(name)
            else:
                columns[name] = value
        if odd:
            raise DataError(
                f"packing=True expects one integer for each token in every column, but {', '.join(odd)} of the {self.name} set "
                f"has other values. Remove the column: dataset.remove_columns({odd})"
            )
        mask = columns.pop("attention_mask", [])
        return columns if all(mask) else {name: list(compress(value, mask)) for name, value in columns.items()}

    def _takes(self, column: str) -> bool:
        """Whether the model takes a column, and the collator does not make it."""
        return column != "position_ids" and (self.columns is None or column in self.columns)

    def _check(self, row: Any) -> None:
        if not isinstance(row, Mapping) or "input_ids" not in row:
            has = f"the columns {', '.join(map(str, row))}" if isinstance(row, Mapping) else f"type {type(row).__name__}"
            raise DataError(
                f"packing=True expects rows with input_ids, but a row of the {self.name} set has {has}. Tokenize the texts: "
                "dataset.map(lambda row: tokenizer(row['text']))"
            )

    def cut(self, tokens: dict[str, list[int]], start: int, stop: int) -> dict[str, list[int]]:
        """A piece of a row. The label of its first token is -100: nothing before it predicts it."""
        piece = {name: value[start:stop] for name, value in tokens.items()}
        piece["labels"] = [IGNORED, *piece.get("labels", piece["input_ids"])[1:]]
        return piece

    def tell(self, long: int, rows: int) -> None:
        """Say how many rows were truncated or split."""
        if long:
            done = "truncated" if self.long_rows == "truncate" else "split"
            notice(
                f"packing: {quantity(long, 'row')} of {rows:,} in the {self.name} set, longer than max_length="
                f"{self.max_length}, will be {done}."
            )


def _numbers(value: Any, size: int) -> list[int] | None:
    """The integers in a list, array or tensor of one dimension; `None` if it is not `size` integers."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, list | tuple) or len(value) != size or not all(isinstance(one, int) for one in value):
        return None
    return list(value)


class PackedRows(Dataset[list[dict[str, list[int]]]]):
    """Rows in sequences of at most `max_length` tokens; an item is a list of the pieces in a sequence.

    Args:
        rows: A map-style dataset.
        lengths: Number of tokens of each row, without padding.
        how: How rows become pieces.

    Raises:
        DataError: A row is too long, or there is no token.
    """

    def __init__(self, rows: Any, lengths: Sequence[int], how: RowPieces) -> None:
        self.rows = rows
        self._how = how
        self._lengths = np.asarray(lengths, dtype=np.int64)
        pieces = [Piece(row, *span) for row, length in enumerate(lengths) for span in how.spans(length, f"row {row}")]
        how.tell(sum(length > how.max_length for length in lengths), len(lengths))
        if not pieces:
            raise DataError(f"packing=True: the {how.name} set has no tokens. Pass rows with input_ids that are not empty.")
        bins = pack_lengths([piece.stop - piece.start for piece in pieces], how.max_length)
        # Arrays, not lists of tuples: worker processes share their memory.
        self._ends: npt.NDArray[np.int64] = np.cumsum([len(each) for each in bins], dtype=np.int64)
        self._pieces: npt.NDArray[np.int64] = np.array([pieces[item] for each in bins for item in each], dtype=np.int64)
        notice(
            f"packing: {quantity(len(lengths), 'row')} of the {how.name} set in {quantity(len(bins), 'sequence')} of "
            f"{how.max_length} tokens, {self.tokens / (len(bins) * how.max_length):.1%} full. A batch size counts sequences."
        )

    @property
    def tokens(self) -> int:
        """Number of tokens in all sequences, without padding."""
        return int((self._pieces[:, 2] - self._pieces[:, 1]).sum())

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> list[dict[str, list[int]]]:
        end = self._ends[index]
        begin = self._ends[index - 1] if index % len(self) else 0
        pieces = [Piece(*piece) for piece in self._pieces[begin:end].tolist()]
        numbers = [piece.row for piece in pieces]
        fetch_many = getattr(self.rows, "__getitems__", None)
        rows = fetch_many(numbers) if fetch_many else [self.rows[number] for number in numbers]
        return [self._cut(row, piece) for row, piece in zip(rows, pieces, strict=True)]

    def _cut(self, row: Any, piece: Piece) -> dict[str, list[int]]:
        tokens = self._how.tokens(row)
        length, planned = len(tokens["input_ids"]), self._lengths[piece.row]
        if length != planned:
            raise DataError(
                f"packing=True: row {piece.row} of the {self._how.name} set has {length} tokens, but had {planned} when they "
                "were packed. Return the same tokens each time, without random cropping, or make the dataset iterable."
            )
        return self._how.cut(tokens, piece.start, piece.stop)


class PackedStream(IterableDataset[list[dict[str, list[int]]]]):
    """Rows of a stream in sequences, in their order: a sequence ends before the row that it has no space for.

    If an epoch ends early, by a limit, the rows that were read and are in no sequence yet begin the next one if the dataset
    continues where it stopped. One of `datasets` begins again.

    Args:
        rows: An iterable dataset.
        how: How rows become pieces.
    """

    def __init__(self, rows: Any, how: RowPieces) -> None:
        self.rows = rows
        self._how = how
        self._told = False
        self._pending: list[dict[str, list[int]]] = []  # Read, and not in a sequence yet.
        self._continues = has_state(rows) and not type(rows).__module__.startswith("datasets.")
        self._begins_again = not self._continues

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch to the dataset, if it has `set_epoch`."""
        if hasattr(self.rows, "set_epoch"):
            self.rows.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[dict[str, list[int]]]]:
        if self._begins_again:
            self._pending = []
        self._begins_again = not self._continues
        rows = iter(self.rows)
        while True:
            ends = accumulate(len(piece["input_ids"]) for piece in self._pending)
            count = sum(1 for _ in takewhile(lambda end: end <= self._how.max_length, ends))
            if count == len(self._pending):
                try:
                    row = next(rows)
                except StopIteration:
                    break
                self._pending += self._pieces(row)
            else:
                complete, self._pending = self._pending[:count], self._pending[count:]
                yield complete
        complete, self._pending = self._pending, []
        if complete:
            yield complete

    def _pieces(self, row: Any) -> list[dict[str, list[int]]]:
        tokens, how = self._how.tokens(row), self._how
        length = len(tokens["input_ids"])
        spans = how.spans(length)
        if length > how.max_length and not self._told:
            self._told = True
            done = "truncated" if how.long_rows == "truncate" else "split"
            notice(f"packing: rows of the {how.name} set that are longer than max_length={how.max_length} are {done}.")
        return [how.cut(tokens, *span) for span in spans]


class StatefulPackedStream(PackedStream):
    """A `PackedStream` of a dataset with a state: its own state is that and the rows that are read and not in a sequence."""

    def state_dict(self) -> dict[str, Any]:
        """The state after the last sequence."""
        return {"rows": self.rows.state_dict(), "pending": list(self._pending)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the sequence at which `state_dict` was called."""
        self.rows.load_state_dict(state_dict["rows"])
        self._pending = list(state_dict["pending"])
        self._begins_again = False


def packed_stream(rows: Any, how: RowPieces) -> PackedStream:
    """The sequences of a stream, with a state if its dataset has one."""
    return StatefulPackedStream(rows, how) if has_state(rows) else PackedStream(rows, how)


class PackingCollator:
    """Makes a batch of sequences: `input_ids`, `labels`, `position_ids` [batch, max_length] and what the attention needs.

    Position ids restart at each row. There is no attention mask and no cache, so that transformers makes the mask from the
    position ids: each row attends to itself only. For flash attention, which needs it for more than one sequence, the batch
    has the ends of the rows too, by the names of `transformers.DataCollatorWithFlattening`.

    A sequence that is not full ends with rows of one token each, its last one, whose labels are -100. Their position is 0: a
    position that no row has could be outside of the model's table of positions, or change how it scales all of them.

    Args:
        max_length: Number of tokens in a sequence.
        flash: The model uses flash attention.
    """

    def __init__(self, max_length: int, flash: bool = False) -> None:
        self.max_length = max_length
        self.flash = flash

    def __call__(self, sequences: Sequence[list[dict[str, list[int]]]]) -> dict[str, Any]:
        """The batch of some sequences, each a list of pieces."""
        filled = [[*pieces, *self._padding(pieces)] for pieces in sequences]
        batch: dict[str, Any] = {
            name: torch.tensor([list(chain.from_iterable(piece[name] for piece in pieces)) for pieces in filled])
            for name in filled[0][0]
        }
        lengths = [[len(piece["input_ids"]) for piece in pieces] for pieces in filled]
        batch["position_ids"] = torch.tensor([list(chain.from_iterable(map(range, row))) for row in lengths])
        batch["use_cache"] = False
        if self.flash:
            flat = list(chain.from_iterable(lengths))
            ends = torch.tensor([0, *accumulate(flat)], dtype=torch.int32)
            batch |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": max(flat), "max_length_k": max(flat)}
        return batch

    def _padding(self, pieces: list[dict[str, list[int]]]) -> list[dict[str, list[int]]]:
        missing = self.max_length - sum(len(piece["input_ids"]) for piece in pieces)
        return [{name: [IGNORED if name == "labels" else value[-1]] for name, value in pieces[-1].items()}] * missing


def check_packing(model: Any) -> None:
    """Check with a few tokens that the model computes packed rows as it does one by one.

    It runs the model twice, on the device where it is, without gradients and in evaluation mode.

    Raises:
        ConfigurationError: The model cannot be used with packed rows.
    """
    name = type(model).__name__
    refuse_unpackable(model)
    implementation = model.config._attn_implementation
    with _evaluating(model, implementation):
        device = model.device
        a, changed, b = [1, 2, 3, 4], [5, 6, 5, 7], [4, 3, 2, 1]
        top = model.get_input_embeddings().weight.shape[0] - 1

        def forward(*sequences: list[list[int]]) -> Tensor:
            pieces = [[{"input_ids": [min(one, top) for one in row], "labels": row} for row in rows] for rows in sequences]
            batch = PackingCollator(sum(map(len, sequences[0])))(pieces)
            del batch["labels"]
            inputs = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}
            logits: Tensor = model(**inputs).logits
            if logits.shape[:2] != inputs["input_ids"].shape:
                raise _unpackable(name, "it has no logits for each token")
            return logits.double().cpu()

        packed = forward([a, b], [changed, b], [a, [*b[:-1], 5]])
        alone = forward([a], [b])
    size = alone.abs().max()
    coarse = torch.finfo(model.dtype).bits < 32
    first, second = packed[:, : len(a)], packed[:, len(a) :]
    leak = max((second[1] - second[0]).abs().max(), (packed[2, :-1] - packed[0, :-1]).abs().max())
    if leak > size * (2 * torch.finfo(model.dtype).eps if coarse else 1e-5):
        raise _unpackable(
            name, f"its rows see each other: with attention {implementation!r} it makes no mask from their position ids"
        )
    error = max((first[0] - alone[0]).abs().max(), (second[0] - alone[1]).abs().max())
    if error > size * (5e-2 if coarse else 1e-3):
        raise _unpackable(name, "a row that is packed gives other logits than the same row alone")


def refuse_unpackable(model: Any) -> None:
    """Refuse a model that certainly cannot compute packed rows.

    Raises:
        ConfigurationError: Its forward has no `position_ids`, it is no decoder, or its attention is unknown.
    """
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise _unpackable(name, "it has an encoder")
    if base_model(model)._is_stateful:
        raise _unpackable(name, "its recurrent layers do not start again at each row")
    if "position_ids" not in inspect.signature(base_model(model).forward).parameters:
        raise _unpackable(name, "its forward has no position_ids")
    implementation = model.config._attn_implementation
    if implementation not in _MASKS_ITSELF and not is_flash(model):
        raise _unpackable(
            name,
            f"its attention is {implementation!r}, for which transformers makes no mask",
            "Load the model with attn_implementation='sdpa'.",
        )


def has_weights(model: nn.Module) -> bool:
    """Whether all parameters have values in this process; not so on the meta device, or where ZeRO has sharded them."""
    return all(parameter.numel() > 0 and not parameter.is_meta for parameter in model.parameters())


def is_flash(model: Any) -> bool:
    """Whether a model uses flash attention."""
    return str(model.config._attn_implementation).startswith("flash_attention")


def _unpackable(name: str, why: str, fix: str = "Remove packing=True, or choose another model.") -> ConfigurationError:
    return ConfigurationError(f"packing=True: {name} cannot be trained on packed rows, as {why}. {fix}")


@contextmanager
def _evaluating(model: nn.Module, implementation: str) -> Iterator[None]:
    """In this context the model is in evaluation mode and without gradients, with an attention that runs on any device."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    replaced = implementation not in ("eager", "sdpa")
    if replaced:
        base_model(model).set_attn_implementation("eager")
    try:
        with torch.no_grad():
            yield
    finally:
        if replaced:
            base_model(model).set_attn_implementation(implementation)
        for module, was in training.items():
            module.training = was
