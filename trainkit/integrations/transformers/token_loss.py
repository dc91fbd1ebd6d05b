"""The loss of a batch as a mean, and how many labels it is the mean of.

Both must count the same labels: the gradient of a window is the mean over all its counted labels only if each micro-batch's
loss is a mean, weighted by its count. A file of its own because these rules are read apart from how a model is run.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from trainkit.errors import ConfigurationError
from trainkit.integrations.transformers.model_columns import base_model
from trainkit.nested import batch_size

__all__ = ["IGNORED", "LabelCount", "smoothed_loss"]

IGNORED = -100
"""The label that no loss of transformers counts."""

# Their losses are means over samples, each divided by its own number of labels.
_MEANS_OF_SAMPLES = ("ForCTC", "ForRNNT", "ForTDT")

# Causal models whose labels have been shifted already: their loss compares the output for a token with the label at its place.
UNSHIFTED = frozenset(
    {
        "BartForCausalLM",
        "BigBirdPegasusForCausalLM",
        "BlenderbotForCausalLM",
        "BlenderbotSmallForCausalLM",
        "CpmAntForCausalLM",
        "FlaubertWithLMHeadModel",
        "MBartForCausalLM",
        "MarianForCausalLM",
        "MusicgenForCausalLM",
        "MusicgenMelodyForCausalLM",
        "MvpForCausalLM",
        "PLBartForCausalLM",
        "PegasusForCausalLM",
        "ProphetNetForCausalLM",
        "TrOCRForCausalLM",
        "WhisperForCausalLM",
        "XLMWithLMHeadModel",
        "XLNetLMHeadModel",
    }
)


class LabelCount:
    """Counts the labels that the loss of a batch is the mean of.

    These are the labels other than -100, or than the label that the configuration of a model for segmentation names. A causal
    model predicts each label from the tokens before it, so the first label of a row is never predicted, unless the labels of
    its class are shifted already (`UNSHIFTED`). A batch without integer labels, as in regression and in tagging with several
    classes, counts its samples.

    Args:
        model: A model of transformers or PEFT.
        names: The batch's keys of labels. Several, as `start_positions` and `end_positions`: a batch counts its samples.

    Attributes:
        shifts: Each label is predicted from the tokens before it.
        is_sum: The model's own loss is the sum over what is counted, not its mean.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        base = base_model(model)
        config, kinds = getattr(base, "config", None), [kind.__name__ for kind in type(base).__mro__]
        of_samples = any(kind.endswith(_MEANS_OF_SAMPLES) for kind in kinds)
        self.shifts = _is_shifted(base, kinds)
        self.is_sum = of_samples and getattr(config, "ctc_loss_reduction", "mean") == "sum"
        self._name = names[0] if len(names) == 1 and not of_samples else None
        self._ignored = _ignored_label(config, kinds)

    def __call__(self, batch: Mapping[str, Any]) -> int:
        """The number of counted labels of a batch."""
        labels = None if self._name is None else batch.get(self._name)
        if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() == 0:
            return batch_size(batch)
        if self.shifts:
            labels = labels[:, 1:] if labels.dim() > 1 else labels[1:]
        return int((labels != self._ignored).sum())


def _is_shifted(model: nn.Module, kinds: Sequence[str]) -> bool:
    """Whether the model's loss compares the output for a token with the label of the next one."""
    config: Any = getattr(model, "config", None)
    if "loss_function" in inspect.unwrap(type(model).forward).__code__.co_names:  # transformers chooses the loss by the class
        return getattr(model, "loss_function", None) is ForCausalLMLoss and not getattr(config, "is_encoder_decoder", False)
    if UNSHIFTED.intersection(kinds):
        return False
    if _causal_classes().intersection(kinds) or any(kind.endswith("ForCausalLM") for kind in kinds):
        return True
    # A decoder that sees images or sound has the loss of causal models, but not their name.
    encodes = getattr(config, "is_encoder_decoder", False)
    return getattr(model, "loss_type", None) == "ForConditionalGeneration" and not encodes


def _ignored_label(config: Any, kinds: Sequence[str]) -> int:
    if not any(kind.endswith("ForSemanticSegmentation") for kind in kinds):
        return IGNORED
    found = [getattr(config, name, None) for name in ("semantic_loss_ignore_index", "loss_ignore_index")]
    return next((label for label in found if label is not None), IGNORED)


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
    if logits.shape[:-1] != labels.shape or logits.shape[-1] == 1:
        raise ConfigurationError(
            f"label_smoothing_factor={epsilon} needs the outputs of the model for all classes of each label, in the last "
            f"dimension. Expected logits of the shape {[*labels.shape, 'classes']}, got {list(logits.shape)}. Remove it: "
            "label_smoothing_factor=0.0"
        )
    if shifts:
        logits, labels = logits[..., :-1, :], labels[..., 1:]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, label_smoothing=epsilon)
