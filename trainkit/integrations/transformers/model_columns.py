"""Which columns of a row a model of transformers takes, and the collator that removes the others."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from trainkit.errors import DataError

__all__ = ["ModelColumns", "RowCollator", "base_model", "find_model"]

_LABELS = ("label", "label_ids")  # The default collators rename them to `labels`.


def base_model(model: Any) -> Any:
    """The model of transformers in a PEFT model; another model is returned unchanged."""
    if not hasattr(model, "peft_config") or not hasattr(model, "base_model"):
        return model
    return model.get_base_model() if hasattr(model, "get_base_model") else model.base_model.model


def find_model(module: Any) -> Any:
    """The attribute `model` of a module if it is a model of transformers, or a PEFT model around one; otherwise `None`."""
    from transformers import PreTrainedModel

    model = getattr(module, "model", None)
    model = getattr(model, "_orig_mod", model)  # torch.compile(model)
    return model if isinstance(model, nn.Module) and isinstance(base_model(model), PreTrainedModel) else None


class ModelColumns:
    """The columns that the forward of a model takes, and those of labels.

    Args:
        model: A model of transformers, or a PEFT model around one.
        label_names: The columns of labels; `None`: what transformers finds in the signature of the model.

    Attributes:
        model_name: The class of the model.
    """

    def __init__(self, model: Any, label_names: Sequence[str] | None) -> None:
        from transformers.utils.generic import find_labels

        model = base_model(model)
        self.model_name = type(model).__name__
        self._taken = dict.fromkeys(inspect.signature(model.forward).parameters)
        labels = find_labels(type(model)) if label_names is None else label_names
        self._labels = {*labels, *_LABELS}

    def __contains__(self, column: object) -> bool:
        return column in self._taken or column in self._labels

    def unused(self, columns: Sequence[str], name: str) -> list[str]:
        """Those of the columns of a dataset that the model does not take.

        Args:
            columns: All columns.
            name: The set, for the message.

        Raises:
            DataError: The model takes none of them, or labels alone.
        """
        unused = [column for column in columns if column not in self]
        if not columns:
            raise DataError(
                f"the {name} set is empty, or its rows are no dicts of columns. Expected rows such as "
                "{'input_ids': [...], 'labels': 0}"
            )
        if self._labels.issuperset(set(columns) - set(unused)):
            raise DataError(
                f"the {name} set has no input of {self.model_name}: its columns are {', '.join(columns) or 'none'}, and the "
                f"forward of the model takes {', '.join(self._taken)}. Tokenize texts: "
                "dataset.map(lambda row: tokenizer(row['text'])); or keep all columns for a data_collator of yours: "
                "TransformersData(remove_unused_columns=False)"
            )
        return unused


class RowCollator:
    """Removes columns of rows, calls the collator, and says what is wrong where it lacks one, or where a default one fails.

    Args:
        collate: The collator.
        columns: The columns to keep; `None`: all.
        removed: The columns that the dataset has no longer.
        name: The set of the rows, for messages.
        explains: The collator is a default one.
    """

    def __init__(
        self,
        collate: Callable[[list[Any]], Any],
        columns: ModelColumns | None,
        removed: Sequence[str],
        name: str,
        explains: bool,
    ) -> None:
        self.collate = collate
        self._columns = columns
        self._removed = removed
        self._name = name
        self._explains = explains

    def __call__(self, rows: list[Any]) -> Any:
        """The batch of some rows."""
        kept = [self._keep(row) for row in rows]
        try:
            return self.collate(kept)
        except (KeyError, ValueError, TypeError) as error:
            explained = self._explain_removed(error) or (_explain(kept, self._name) if self._explains else None)
            if explained is None:
                raise
            raise explained from error

    def _keep(self, row: Any) -> Any:
        if self._columns is None or not isinstance(row, Mapping):
            return row
        unused = self._columns.unused(list(row), self._name)
        return {name: value for name, value in row.items() if name not in unused} if unused else row

    def _explain_removed(self, error: Exception) -> DataError | None:
        column = error.args[0] if isinstance(error, KeyError) and error.args else None
        if self._columns is None or column not in self._removed:
            return None
        return DataError(
            f"the data_collator needs the column {column!r} of the {self._name} set, which was removed, as "
            f"{self._columns.model_name}.forward does not take it. Keep all columns: "
            "TransformersData(remove_unused_columns=False)"
        )


def _explain(rows: list[Any], name: str) -> DataError | None:
    """What is wrong with rows that a default collator cannot make a batch of; `None` if that is not known."""
    if not all(isinstance(row, Mapping) for row in rows):
        return DataError(
            f"the default collator makes batches of dicts, but a row of the {name} set is {type(rows[0]).__name__}. Return a "
            "dict of columns, or pass a collator: TransformersData(data_collator=...)"
        )
    if texts := [column for column, value in rows[0].items() if isinstance(value, str) or _is_list_of(value, str)]:
        return _explain_texts(rows[0], texts, name)
    ragged = [
        column for column in rows[0] if len({len(row[column]) for row in rows if hasattr(row.get(column), "__len__")}) > 1
    ]
    if "labels" in ragged:
        return DataError(
            f"the rows of the {name} set have labels of different lengths, which the default collator does not pad. Pass the "
            "one for the task: TransformersData(data_collator=DataCollatorForTokenClassification(tokenizer)) for one label per "
            "token; DataCollatorForSeq2Seq(tokenizer, model=model) for target texts, and for causal models with labels of your "
            "own; DataCollatorForLanguageModeling(tokenizer, mlm=False) for causal models that learn all tokens"
        )
    if ragged:
        return DataError(
            f"the rows of the {name} set have different lengths in the columns {', '.join(ragged)}, which the default collator "
            "cannot pad. Pass the tokenizer, which can pad its own columns: TransformersData(train, val, tokenizer); or a "
            "collator: TransformersData(data_collator=...). A tokenizer without a padding token needs one: "
            "tokenizer.pad_token = tokenizer.eos_token"
        )
    return None


def _explain_texts(row: Mapping[str, Any], texts: list[str], name: str) -> DataError:
    label = next((column for column in texts if column in ("labels", *_LABELS)), None)
    if label is not None:
        return DataError(
            f"the labels of the {name} set, column {label!r}, are texts, such as {row[label]!r}. Expected numbers from 0: "
            f"dataset.class_encode_column({label!r}); or a dict of yours: dataset.map(lambda row: "
            f"{{{label!r}: model.config.label2id[row[{label!r}]]}}). Target texts are tokenized: tokenizer(text_target=...)"
        )
    return DataError(
        f"the columns {', '.join(texts)} of the {name} set have texts, which are no tensors. Tokenize them: "
        "dataset.map(lambda row: tokenizer(row['text'])); or remove them: dataset.remove_columns(...)"
    )


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], kind)
