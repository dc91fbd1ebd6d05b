"""Parameters that torch or a wrapper has given other names, such as `weight_orig` and `weight_mask` for a pruned `weight`."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from trainkit.console import shortened

__all__ = ["explain_names", "folded"]

_WRAPPERS = {
    "_orig_mod": "torch.compile",
    "_checkpoint_wrapped_module": "checkpoint_wrapper",
    "module": "DataParallel or DistributedDataParallel",
}


@dataclass(frozen=True)
class _Renaming:
    """Something that renames parameters.

    Attributes:
        by: what it is, for messages.
        find: the original name of a parameter from one of its new names; `None`: it was not renamed by this. The second
            argument has all names.
        apply: how to do it to a layer before loading; empty for a wrapper.
    """

    by: str
    find: Callable[[str, Collection[str]], str | None]
    apply: str


def _with(suffix: str, other: str) -> Callable[[str, Collection[str]], str | None]:
    """Finds `X` from `X<suffix>` if there is also `X<other>`."""

    def find(name: str, names: Collection[str]) -> str | None:
        plain = name.removesuffix(suffix)
        return plain if plain != name and f"{plain}{other}" in names else None

    return find


def _parametrized(name: str, _: Collection[str]) -> str | None:
    found = re.fullmatch(r"(.*\.|)parametrizations\.([^.]+)\.original\d*", name)
    return found and f"{found[1]}{found[2]}"


def _inside(part: str) -> Callable[[str, Collection[str]], str | None]:
    """Finds the name without a part that a wrapper has added."""

    def find(name: str, _: Collection[str]) -> str | None:
        plain = ".".join(one for one in name.split(".") if one != part)
        return plain if plain != name else None

    return find


_RENAMINGS = (
    _Renaming(
        "torch.nn.utils.prune",
        _with("_orig", "_mask"),
        "torch.nn.utils.prune.identity(layer, {attribute!r}); a callback does so in on_load_checkpoint. Or load only the "
        "pruned weights: restore={{'model'}}",
    ),
    _Renaming(
        "torch.nn.utils.parametrize (which torch.nn.utils.parametrizations uses)",
        _parametrized,
        "for example torch.nn.utils.parametrizations.weight_norm(layer, {attribute!r})",
    ),
    _Renaming("torch.nn.utils.weight_norm", _with("_g", "_v"), "torch.nn.utils.weight_norm(layer, {attribute!r})"),
    _Renaming("torch.nn.utils.spectral_norm", _with("_orig", "_u"), "torch.nn.utils.spectral_norm(layer, {attribute!r})"),
    _Renaming(
        "an adapter of PEFT, such as LoRA", _inside("base_layer"), "for example peft.inject_adapter_in_model(config, model)"
    ),
    *(_Renaming(by, _inside(part), "") for part, by in _WRAPPERS.items()),
)

_QUANTIZED = re.compile(r"fake_quant|activation_post_process")  # buffers next to the parameters of a layer


def folded(sources: Mapping[str, Tensor], here: Collection[str]) -> tuple[dict[str, Tensor], list[str]]:
    """The stored tensors, with the product for parameters that were pruned when they were saved, but are not in this model.

    Args:
        sources: the stored tensors by name.
        here: the names in the model.

    Returns:
        The tensors, and notices for the user.
    """
    found = dict(sources)
    pruned = [
        plain
        for plain in (name.removesuffix("_mask") for name in sources if name.endswith("_mask"))
        if f"{plain}_orig" in sources and plain in here and plain not in sources and f"{plain}_mask" not in here
    ]
    for plain in pruned:
        found[plain] = found.pop(f"{plain}_orig") * found.pop(f"{plain}_mask")
    if not pruned:
        return found, []
    return found, [f"loaded <name>_orig × <name>_mask of the checkpoint, without the mask, as: {shortened(pruned)}"]


def explain_names(missing: Collection[str], unexpected: Collection[str]) -> Iterator[str]:
    """What names mean that only the model (`missing`) or only the checkpoint (`unexpected`) has, a paragraph each."""
    for names, others, saved in ((unexpected, missing, True), (missing, unexpected, False)):
        known, rest = set(names), set(others)
        for renaming in _RENAMINGS:
            found = ((name, renaming.find(name, known)) for name in names)
            for name, plain in ((name, plain) for name, plain in found if plain is not None and plain in rest):
                yield _explained(renaming, name, plain, saved)
                break
        added = next((name for name in names if _QUANTIZED.search(name)), None)
        if added is not None:
            fix = _fix(saved, "torch.ao.quantization.prepare_qat(model)")
            yield f"{added!r} is only in the {'checkpoint' if saved else 'model'}, added by torch.ao.quantization. {fix}"


def _explained(renaming: _Renaming, new: str, plain: str, saved: bool) -> str:
    where, other = ("checkpoint", "model") if saved else ("model", "checkpoint")
    text = f"{new!r} in the {where} is {plain!r} in the {other}, renamed by {renaming.by}."
    if not renaming.apply:
        return f"{text} Fix: remove the part from the names before you save or load them."
    return f"{text} {_fix(saved, renaming.apply.format(attribute=plain.rpartition('.')[2]))}"


def _fix(saved: bool, apply: str) -> str:
    """What to do if it was applied to the model that was saved, or to the one that is here."""
    if saved:
        return f"Fix: apply it to the same layers before loading, in __init__ or configure_model: {apply}"
    return "Fix: load the weights into the model before you apply it."
