"""Optimizers by the names that the Hugging Face Trainer has for them, with its settings and its groups of parameters."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer
from transformers.trainer_pt_utils import get_parameter_names

from trainkit.errors import MissingPackageError, OptimizerError, UnknownNameError, nearest
from trainkit.integrations.transformers.model_columns import base_model

__all__ = ["OPTIMIZERS", "UNSUPPORTED", "decay_groups", "make_optimizer", "read_optim_args", "split_matrices"]

# The Trainer's own patterns (`get_decay_parameter_names`): no decay for biases and for layers of normalization.
_NO_DECAY = (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")


@dataclass(frozen=True)
class NamedOptimizer:
    """How an optimizer is created.

    Attributes:
        path: The class.
        arguments: The module's hyper-parameters that it takes.
        fixed: Its settings under this name.
        eight_bit: It keeps 8-bit state, but not for embeddings.
    """

    path: str
    arguments: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    eight_bit: bool = False


_ADAM = ("betas", "eps")
_BLOCKS = {"block_size": 256, "bf16_stochastic_round": False}


def _of_bitsandbytes(kind: str, arguments: tuple[str, ...], bits: int, **fixed: Any) -> NamedOptimizer:
    return NamedOptimizer(f"bitsandbytes.optim.{kind}", arguments, {"optim_bits": bits, **fixed}, eight_bit=bits == 8)


_MIX: dict[str, Any] = {"betas": (0.9, 0.999, 0.9999), "alpha": 5.0}

OPTIMIZERS: dict[str, NamedOptimizer] = {
    "adafactor": NamedOptimizer("transformers.Adafactor", fixed={"scale_parameter": False, "relative_step": False}),
    "adagrad": NamedOptimizer("torch.optim.Adagrad"),
    "adamw_8bit": _of_bitsandbytes("AdamW", _ADAM, 8, is_paged=False),
    "adamw_bnb_8bit": _of_bitsandbytes("AdamW", _ADAM, 8, is_paged=False),
    "adamw_torch": NamedOptimizer("torch.optim.AdamW", _ADAM),
    "adamw_torch_4bit": NamedOptimizer("torchao.optim.AdamW4bit", _ADAM, _BLOCKS),
    "adamw_torch_8bit": NamedOptimizer("torchao.optim.AdamW8bit", _ADAM, _BLOCKS),
    "adamw_torch_fused": NamedOptimizer("torch.optim.AdamW", _ADAM, {"fused": True}),
    "ademamix": _of_bitsandbytes("AdEMAMix", ("eps",), 32, is_paged=False, **_MIX),
    "ademamix_8bit": _of_bitsandbytes("AdEMAMix", ("eps",), 8, is_paged=False, **_MIX),
    "lion": _of_bitsandbytes("Lion", ("betas",), 32, is_paged=False),
    "lion_32bit": _of_bitsandbytes("Lion", ("betas",), 32, is_paged=False),
    "lion_8bit": _of_bitsandbytes("Lion", ("betas",), 8, is_paged=False),
    # This adjustment gives its steps the size of AdamW's, so that both have the same learning rate.
    "muon": NamedOptimizer("torch.optim.Muon", fixed={"adjust_lr_fn": "match_rms_adamw"}),
    "paged_adamw_32bit": _of_bitsandbytes("AdamW", _ADAM, 32, is_paged=True),
    "paged_adamw_8bit": _of_bitsandbytes("AdamW", _ADAM, 8, is_paged=True),
    "paged_ademamix_32bit": _of_bitsandbytes("AdEMAMix", ("eps",), 32, is_paged=True, **_MIX),
    "paged_ademamix_8bit": _of_bitsandbytes("AdEMAMix", ("eps",), 8, is_paged=True, **_MIX),
    "paged_lion_32bit": _of_bitsandbytes("Lion", ("betas",), 32, is_paged=True),
    "paged_lion_8bit": _of_bitsandbytes("Lion", ("betas",), 8, is_paged=True),
    "rmsprop": NamedOptimizer("torch.optim.RMSprop"),
    "rmsprop_bnb": _of_bitsandbytes("RMSprop", (), 32),
    "rmsprop_bnb_32bit": _of_bitsandbytes("RMSprop", (), 32),
    "rmsprop_bnb_8bit": _of_bitsandbytes("RMSprop", (), 8),
    "sgd": NamedOptimizer("torch.optim.SGD"),
}
"""Name → optimizer. Those of transformers' `OptimizerNames`, `lion`, short for `lion_32bit`, and `muon`."""

_LAYERS = "it projects the gradients of layers that its own argument chooses"
_MODES = "its weights must be exchanged before each evaluation and save"
_IN_BACKWARD = "it steps inside of the backward pass, without accumulation, clipping and gradient scaling"

UNSUPPORTED: dict[str, str] = {
    "adalomo": _IN_BACKWARD,
    "adamw_anyprecision": "torchdistx, which has it, is not maintained any more",
    "adamw_torch_npu_fused": "it needs an NPU, which trainkit does not support",
    "adamw_torch_xla": "torch_xla's own AdamW is made for float16 overflows; adamw_torch runs on a TPU",
    "apollo_adamw": _LAYERS,
    "apollo_adamw_layerwise": _LAYERS,
    "galore_adafactor": _LAYERS,
    "galore_adafactor_layerwise": _LAYERS,
    "galore_adamw": _LAYERS,
    "galore_adamw_8bit": _LAYERS,
    "galore_adamw_8bit_layerwise": _LAYERS,
    "galore_adamw_layerwise": _LAYERS,
    "grokadamw": "it reads the training loss in its step",
    "lomo": _IN_BACKWARD,
    "schedule_free_adamw": _MODES,
    "schedule_free_radam": _MODES,
    "schedule_free_sgd": _MODES,
    "stable_adamw": "its package torch-optimi is not tested here",
}
"""Name in transformers' `OptimizerNames` → why it is not in `OPTIMIZERS`."""


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The parameter groups of the Hugging Face Trainer: one with weight decay, one with all biases and norms without it.

    Args:
        model: Its trainable parameters. A group without parameters is omitted.
        weight_decay: Of the first group.

    Raises:
        OptimizerError: All parameters are frozen.
    """
    decayed = set(get_parameter_names(model, [nn.LayerNorm], list(_NO_DECAY)))
    trained = [(name in decayed, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for decays, parameter in trained if decays], "weight_decay": weight_decay},
        {"params": [parameter for decays, parameter in trained if not decays], "weight_decay": 0.0},
    ]
    if not trained:
        raise OptimizerError(
            f"{type(model).__name__} has no parameter to train: all have requires_grad=False. Train some of them: "
            "model.requires_grad_(True); or adapters: peft.get_peft_model(model, peft.LoraConfig(...))"
        )
    return [group for group in groups if group["params"]]


def split_matrices(model: nn.Module, groups: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Split parameter groups into those of the hidden matrices, which Muon is for, and those of all other parameters.

    Hidden matrices have two dimensions, and are neither embeddings nor in the head. Source: Jordan et al., Muon: An optimizer
    for hidden layers in neural networks, 2024; with AdamW's learning rate: Liu et al., Muon is Scalable for LLM Training, 2025.

    Args:
        model: A model of transformers or PEFT.
        groups: Of its parameters.

    Returns:
        The groups of the matrices, and the others.

    Raises:
        OptimizerError: There is no trainable hidden matrix.
    """
    hidden = _hidden_matrices(base_model(model))
    both = []
    for inside in (True, False):
        chosen = [{**group, "params": [p for p in group["params"] if (id(p) in hidden) is inside]} for group in groups]
        both.append([group for group in chosen if group["params"]])
    if not both[0]:
        raise OptimizerError(
            "optim='muon' needs trainable matrices in hidden layers, and the model has none. Use 'adamw_torch'."
        )
    return both[0], both[1]


def _hidden_matrices(model: Any) -> set[int]:
    """Their identities. The head lies outside of `base_model`, or is what `get_output_embeddings` returns."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    outer: list[Any] = [part for part in model.modules() if isinstance(part, nn.Embedding) or part is head]
    excluded = {id(p) for part in outer for p in part.parameters()}
    body = getattr(model, "base_model", model)
    return {id(p) for p in body.parameters() if p.dim() == 2 and id(p) not in excluded}


def read_optim_args(value: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """`optim_args` as a dict: from a dict, or from transformers' text "momentum=0.9,nesterov=True".

    Raises:
        OptimizerError: A part of the text is no `name=value`.
    """
    if not isinstance(value, str):
        return dict(value or {})
    found: dict[str, Any] = {}
    for part in filter(None, value.replace(" ", "").split(",")):
        name, equals, text = part.partition("=")
        if not name or not equals:
            raise OptimizerError(
                f"optim_args: expected name=value, separated by commas, got {part!r} in {value!r}. For example: "
                "optim_args='momentum=0.9,nesterov=True'"
            )
        found[name] = _plain_value(text)
    return found


def _plain_value(text: str) -> Any:
    words = {"true": True, "yes": True, "false": False, "no": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def make_optimizer(
    name: str,
    groups: Sequence[Mapping[str, Any]],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    options: Mapping[str, Any],
    model: nn.Module,
) -> Optimizer:
    """An optimizer by its name.

    Args:
        name: A key of `OPTIMIZERS`.
        groups: The parameter groups.
        lr: The learning rate.
        betas: Of Adam and its relatives.
        eps: Of Adam and its relatives.
        options: More arguments of its class; they replace the settings of the name.
        model: Whose embeddings keep 32-bit state in an 8-bit optimizer of bitsandbytes.

    Raises:
        OptimizerError: There is no such optimizer, or its class has no such option.
        MissingPackageError: The package that has it is not installed.
    """
    known = check_optimizer(name)
    kind = _class_of(name, known.path)
    ours = {"betas": betas, "eps": eps}
    settings: dict[str, Any] = {key: ours[key] for key in known.arguments} | dict(known.fixed)
    if known.path.endswith(".AdEMAMix"):
        settings["betas"] = (*betas, settings["betas"][2])
    for option in options:
        accepted = [key for key in inspect.signature(kind).parameters if key not in ("params", "lr")]
        if option not in accepted:
            raise UnknownNameError(
                f"optim_args: {kind.__name__} ({name!r}) has no argument {option!r}; it has {', '.join(accepted)}."
                f"{nearest(option, accepted)}"
            )
    optimizer: Optimizer = kind([dict(group) for group in groups], **{"lr": lr, **settings, **options})
    if known.eight_bit:
        _keep_embeddings_whole(model)
    return optimizer


def check_optimizer(name: str) -> NamedOptimizer:
    """The entry of a name in `OPTIMIZERS`.

    Raises:
        OptimizerError: There is none.
    """
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    if name in UNSUPPORTED:
        raise OptimizerError(
            f"optim={name!r} is not supported: {UNSUPPORTED[name]}. Override configure_optimizers to use it. Known: "
            f"{', '.join(OPTIMIZERS)}."
        )
    raise OptimizerError(
        f"There is no optimizer {name!r}; known: {', '.join(OPTIMIZERS)}.{nearest(name, OPTIMIZERS)} To use another one, "
        "override configure_optimizers."
    )


def _class_of(name: str, path: str) -> Any:
    module, _, kind = path.rpartition(".")
    package = module.partition(".")[0]
    try:
        return getattr(importlib.import_module(module), kind)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise MissingPackageError(
            f"optim={name!r} is in the package {package!r}, which is not installed. Install it: pip install {package}"
        ) from error


def _keep_embeddings_whole(model: nn.Module) -> None:
    """As the Trainer of transformers does: 8-bit state is too coarse for the rare rows of an embedding."""
    manager = importlib.import_module("bitsandbytes").optim.GlobalOptimManager.get_instance()
    for part in model.modules():
        if isinstance(part, nn.Embedding):
            manager.register_module_override(part, "weight", {"optim_bits": 32})
