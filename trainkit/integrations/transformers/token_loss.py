"""The loss of a batch as a mean, and how many labels it is the mean of.

Both must count the same labels: the gradient of a window is the mean over all its counted labels only if each micro-batch's
loss is a mean, weighted by its count. A file of its own because these rules are read apart from how a model is run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from trainkit.errors import ConfigurationError
from trainkit.integrations.transformers.model_columns import base_model
from trainkit.nested import batch_size

__all__ = ["IGNORED", "LabelCount", "smoothed_loss"]

IGNORED = -100
"""The label that no loss of transformers counts."""

# Their losses are means over samples, each divided by its own number of labels.
_MEANS_OF_SAMPLES = ("ForCTC", "ForRNNT", "ForTDT")


class LabelCount:
    """Counts the labels that the loss of a batch is the mean of.

    These are the labels other than -100. A causal model predicts each label from the tokens before it, so the first label of a
    row is never predicted. A class is causal if `transformers` lists it as one, or if its loss is the causal one. A batch
    without integer labels, as in regression and in tagging with several classes, counts its samples.

    Args:
        model: A model of transformers or PEFT.
        names: The batch's keys of labels. Several, as `start_positions` and `end_positions`: a batch counts its samples.

    Attributes:
        shifts: Each label is predicted from the tokens before it.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        base = base_model(model)
        kind = type(base).__name__
        self.shifts = _is_causal(base, kind)
        self._name = names[0] if len(names) == 1 and not kind.endswith(_MEANS_OF_SAMPLES) else None

    def __call__(self, batch: Mapping[str, Any]) -> int:
        """The number of counted labels of a batch."""
        labels = None if self._name is None else batch.get(self._name)
        if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() == 0:
            return batch_size(batch)
        if self.shifts:
            labels = labels[..., 1:]
        return int((labels != IGNORED).sum())


def _is_causal(model: nn.Module, kind: str) -> bool:
    if kind in _causal_classes() or kind.endswith("ForCausalLM"):
        return True
    # A decoder that sees images or sound has the loss of causal models, but not their name.
    encodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return getattr(model, "loss_type", None) == "ForConditionalGeneration" and not encodes


def _causal_classes() -> set[str]:
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return {kind for entry in names for kind in ((entry,) if isinstance(entry, str) else entry)}


def smoothed_loss(logits: Tensor, labels: Tensor, epsilon: float, shifts: bool) -> Tensor:
    """Cross-entropy with label smoothing, the mean over the counted labels.

    A label's loss is (1 - ε) times its negative log-likelihood, plus ε times the mean of that of all classes. Source: Szegedy
    et al., Rethinking the Inception Architecture for Computer Vision, CVPR 2016.

    Args:
        logits: [..., classes].
        labels: Integers, of the shape of `logits` without its last dimension; -100 is not counted.
        epsilon: From 0 to 1.
        shifts: Each label is predicted from the tokens before it.

    Raises:
        ConfigurationError: The labels are no classes.
    """
    if labels.is_floating_point():
        raise ConfigurationError(
            f"label_smoothing_factor={epsilon} needs labels that are classes (integers), but these are {labels.dtype}. "
            "Remove it: label_smoothing_factor=0.0"
        )
    if shifts:
        logits, labels = logits[..., :-1, :], labels[..., 1:]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, label_smoothing=epsilon)
