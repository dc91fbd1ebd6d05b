"""``Trainer.validate``, ``test`` and ``predict``: a loop over batches outside a fit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from trainkit.console import printable
from trainkit.errors import ConfigurationError
from trainkit.module.data_module import DataModule
from trainkit.trainer.eval_loop import evaluate, gather_predictions
from trainkit.trainer.explain import results_table
from trainkit.trainer.lifecycle import build_hooks, plan_evaluation, refuse_evaluation, running
from trainkit.trainer.resume import check_restore, load_weights
from trainkit.trainer.trainer_state import TrainerState
from trainkit.unsupported import refuse_unknown

if TYPE_CHECKING:
    from trainkit.module.train_module import TrainModule
    from trainkit.trainer.trainer import Trainer

__all__ = ["Evaluating"]


_KNOWN = ("model", "dataloaders", "ckpt_path", "verbose", "datamodule", "strict")  # of validate and test


class Evaluating(TrainerState):
    """The verbs of :class:`trainkit.Trainer` that do not train."""

    def validate(
        self,
        model: TrainModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
        *,
        strict: bool = True,
        **unknown: Any,
    ) -> list[dict[str, float]]:
        """Run the validation loop once.

        Args:
            model: default: the one that this trainer ran last.
            dataloaders: one loader, a list, or a ``DataModule``.
            ckpt_path: with the weights of a checkpoint: a path, ``"best"``, ``"last"`` or ``"auto"``, as in :meth:`fit`.
                Default: the weights as they are.
            verbose: print the metrics.
            datamodule: instead of loaders.
            strict: names that are missing in the checkpoint or in the model are an error; ``False``: a notice lists them.

        Returns:
            The metrics of each loader.
        """
        refuse_unknown("Trainer.validate", unknown, _KNOWN)
        _check_switch("verbose", verbose)
        return _run(cast("Trainer", self), "validate", "validation", model, dataloaders, datamodule, verbose, ckpt_path, strict)

    def test(
        self,
        model: TrainModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
        *,
        strict: bool = True,
        **unknown: Any,
    ) -> list[dict[str, float]]:
        """Run the test loop once; arguments and result as of :meth:`validate`."""
        refuse_unknown("Trainer.test", unknown, _KNOWN)
        _check_switch("verbose", verbose)
        return _run(cast("Trainer", self), "test", "test", model, dataloaders, datamodule, verbose, ckpt_path, strict)

    def predict(
        self,
        model: TrainModule | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        return_predictions: bool | None = True,
        ckpt_path: str | Path | None = None,
        *,
        strict: bool = True,
        **unknown: Any,
    ) -> list[Any] | None:
        """What ``predict_step`` returns for each batch; with several loaders, a list of that for each.

        Over several processes every one of them returns the whole list, in the order of the batches. What is not made of
        tensors must be picklable then.

        Args:
            model: default: the one that this trainer ran last.
            dataloaders: one loader, a list, or a ``DataModule``.
            datamodule: instead of loaders.
            return_predictions: ``False`` keeps and gathers nothing, for callbacks that write the predictions:
                ``trainkit.callbacks.PredictionWriter``. ``None`` is ``True``.
            ckpt_path: as in :meth:`validate`.
            strict: as in :meth:`validate`.
        """
        known = ["model", "dataloaders", "datamodule", "return_predictions", "ckpt_path", "strict"]
        refuse_unknown("Trainer.predict", unknown, known)
        return_predictions = return_predictions is None or return_predictions
        _check_switch("return_predictions", return_predictions)
        self._keep_predictions = return_predictions
        _run(cast("Trainer", self), "predict", "predict", model, dataloaders, datamodule, False, ckpt_path, strict)
        plan = self._plans.get("predict")
        if not return_predictions or plan is None:
            return None
        outputs, plan.outputs = plan.outputs, []
        return outputs[0] if len(outputs) == 1 else outputs


def _check_switch(name: str, value: Any) -> None:
    """Refuse what is no switch, most likely an argument that was given by position in another order."""
    if isinstance(value, str) or value not in (True, False):
        raise ConfigurationError(
            f"{name} must be True or False, not {value!r}. If another argument is meant, give it by name, such as "
            "ckpt_path='last' or datamodule=data."
        )


def _run(
    trainer: Trainer,
    stage: str,
    name: str,
    module: TrainModule | None,
    dataloaders: Any,
    datamodule: DataModule | None,
    verbose: bool,
    ckpt_path: str | Path | None,
    strict: bool,
) -> list[dict[str, float]]:
    check_restore(ckpt_path, None, None, strict)
    module = trainer.lightning_module if module is None else module
    if isinstance(dataloaders, DataModule) and datamodule is None:
        dataloaders, datamodule = None, dataloaders
    with running(trainer, stage, module, datamodule, dataloaders):
        plan = plan_evaluation(trainer, name, dataloaders)
        if plan is None:
            refuse_evaluation(trainer, stage, name)
            return []
        plan.keeps = name == "predict" and trainer._keep_predictions
        build_hooks(trainer)
        check_restore(ckpt_path, None, None, strict)
        if ckpt_path is not None:
            load_weights(trainer, ckpt_path, strict)
        trainer.validating = stage == "validate"
        results = evaluate(trainer, plan)
        if plan.keeps:
            plan.outputs = gather_predictions(trainer.strategy.data_world, plan.outputs, trainer.device)
        if verbose and trainer.is_global_zero:
            trainer.print(printable(results_table(stage, results), sys.stdout))
        return results
