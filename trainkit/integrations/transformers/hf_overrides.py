"""What a user may override or assign in transformers' `Trainer`, and what to do about the rest, which a run would ignore.

A file of its own, because it is read when a name is added to transformers' class, and knows nothing of how a run works.
"""

from __future__ import annotations

from typing import Any

import transformers
from transformers import TrainingArguments

from trainkit.errors import UnsupportedArgumentError, nearest

__all__ = ["missing_attribute", "refuse_assignment", "refuse_overrides"]

_INSTEAD = {
    "training_step": "override compute_loss; backward and the optimizer step are trainkit's",
    "prediction_step": "override compute_loss, or use preprocess_logits_for_metrics",
    "evaluation_loop": "use compute_metrics, or a TransformersModule of your own",
    "_get_train_sampler": "override get_train_dataloader",
    "_get_eval_sampler": "override get_eval_dataloader",
    "_save_checkpoint": "use a callback with on_save",
    "_save": "use a callback with on_save",
    "_maybe_log_save_evaluate": "use a callback with on_log, on_evaluate or on_save",
    "get_decay_parameter_names": "override create_optimizer",
    "get_optimizer_cls_and_kwargs": "pass optimizer_cls_and_kwargs, or override create_optimizer",
}
_OTHERWISE = "override compute_loss or a loader, use a callback, or write a TrainModule"
# Attributes of an object, which transformers' class does not have.
_ATTRIBUTES = {
    "accelerator": "trainer.trainer, which has device, strategy and precision",
    "can_return_loss": "TrainingArguments(label_names=[...])",
    "hyperparameter_search": "a loop around train with model_init=..., or Optuna: docs/how-to/optuna-hydra-dvclive.md",
    "label_names": "TrainingArguments(label_names=[...])",
    "label_smoother": "TrainingArguments(label_smoothing_factor=0.1), or override compute_loss",
    "model_wrapped": "trainer.model",
    "neftune_noise_alpha": "TrainingArguments(neftune_noise_alpha=5.0)",
    "tokenizer": "trainer.processing_class",
}
# The gradient is the mean over the counted labels, whatever they say.
_WITHOUT_EFFECT = ("loss_is_scaled_for_ga", "model_accepts_loss_kwargs")


def refuse_overrides(trainer: Any, base: type, args: TrainingArguments) -> None:
    """Refuse methods of a subclass that a run would not call.

    Args:
        trainer: An object of the subclass.
        base: The class of trainkit.
        args: The arguments of the run.

    Raises:
        UnsupportedArgumentError: There are some.
    """
    kinds = type(trainer).__mro__
    ours = next(kind for kind in kinds if kind.__module__ == base.__module__)
    own = sorted({name for kind in kinds[: kinds.index(ours)] for name in vars(kind)})
    refused = {name: fix for name in own if (fix := _fix(name, base, args)) is not None}
    if refused:
        lines = "\n".join(f"- {name}: {fix}" for name, fix in refused.items())
        raise UnsupportedArgumentError(
            f"{type(trainer).__name__} overrides methods of transformers' Trainer that would never be called:\n{lines}"
        )


def refuse_assignment(trainer: Any, name: str, base: type, args: TrainingArguments | None) -> None:
    """Refuse to assign an attribute that a run would not read, or a method that it would not call.

    Raises:
        UnsupportedArgumentError: It is one.
    """
    if name in _ATTRIBUTES:
        raise UnsupportedArgumentError(f"{type(trainer).__name__}: {name} = ... would have no effect. Use {_ATTRIBUTES[name]}.")
    if args is not None and (fix := _fix(name, base, args)) is not None:
        raise UnsupportedArgumentError(f"{type(trainer).__name__}: {name} = ... would never be called: {fix}.")


def missing_attribute(trainer: Any, name: str) -> AttributeError:
    """The error for an attribute that a trainer does not have."""
    fix = nearest(name, dir(type(trainer)))
    if name in _ATTRIBUTES:
        fix = f" Use {_ATTRIBUTES[name]}."
    elif hasattr(transformers.Trainer, name):
        fix = " trainkit's own objects are trainer.trainer, trainer.module and trainer.data."
    return AttributeError(f"{type(trainer).__name__} of trainkit has no {name!r}.{fix}", name=name, obj=None)


def _fix(name: str, base: type, args: TrainingArguments) -> str | None:
    """What to do instead of defining something of this name; `None` if a run uses it, or if it is the user's own."""
    if name == "evaluate" and args.eval_strategy != "no":
        return "a run evaluates by itself. Use compute_metrics, or a callback with on_evaluate"
    if name == "save_model" and args.save_strategy != "no":
        return "a run saves checkpoints by itself. Use a callback with on_save"
    if name in _INSTEAD:
        return _INSTEAD[name]
    used = hasattr(base, name) or name in _WITHOUT_EFFECT or name.startswith("__")
    return None if used or not hasattr(transformers.Trainer, name) else _OTHERWISE
