"""`TransformersModule`: a model of `transformers` or PEFT with the training step, evaluation and optimizer of the Hugging Face
`Trainer`.
"""

from __future__ import annotations

import copy
import inspect
import tempfile
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from transformers.integrations.neftune import activate_neftune, deactivate_neftune
from transformers.trainer_utils import (
    EvalPrediction,
    align_special_tokens,
    denumpify_detensorize,
    validate_quantization_for_training,
)
from transformers.utils import can_return_loss, find_labels

from trainkit.checks import KnownKeywords, choice, function, real_number
from trainkit.console import notice, warn
from trainkit.errors import ConfigurationError, DataError, LossError, MetricError, OptimizerError
from trainkit.integrations.transformers.model_columns import base_model
from trainkit.integrations.transformers.named_optimizers import (
    check_optimizer,
    decay_groups,
    make_optimizer,
    read_optim_args,
    split_matrices,
)
from trainkit.integrations.transformers.predictions import Predictions
from trainkit.integrations.transformers.token_loss import LabelCount, smoothed_loss
from trainkit.module.hook_checks import check_names
from trainkit.module.train_module import TrainModule
from trainkit.names import advice

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from trainkit.integrations.transformers.transformers_data import TransformersData
    from trainkit.trainer.trainer import Trainer

__all__ = ["TransformersModule"]

_NOT_SAVED = ("model", "processing_class", "compute_metrics", "compute_loss_func", "preprocess_logits_for_metrics")
_FOR_METRICS = ("inputs", "loss")
_Plain = str | int | float | bool | None
# Methods that users override in a subclass of the Hugging Face Trainer, which nothing calls in a subclass of this module.
_OF_THEIR_TRAINER = {
    name: f"{advice('trainer', name)}, or a subclass of Trainer of trainkit.integrations.transformers,"
    for name in ("compute_loss", "create_optimizer", "create_optimizer_and_scheduler", "create_scheduler", "prediction_step")
}


class TransformersModule(TrainModule, KnownKeywords):
    """A model of `transformers` or PEFT, with the training step, evaluation and optimizer of the Hugging Face `Trainer`.

    The arguments have its names and defaults. What belongs to the run (epochs, precision, accumulation, clipping, saving) is in
    `trainkit.Trainer`.

    **Loss.** Without label smoothing and `compute_loss_func` it is the model's own, with everything that the model adds, such
    as the load balancing of experts. The gradient is the mean over all counted labels of the global batch: over the
    accumulation window and all ranks, however ragged. Counted are the labels other than -100, for a causal model without the
    first of each row; a batch without such labels (regression, question answering) counts its samples. What a model adds is
    weighted the same way. A model's loss that is a sum over samples (`ctc_loss_reduction="sum"`) becomes their mean.

    **Logged.** `train_loss`, and under transformers' name `loss`, the loss whose gradient was applied. `eval_loss`, the mean
    over the counted labels of the whole set, and `eval_<metric>` for each metric of `compute_metrics`; `eval_<name>_loss` and
    so on if the data module names its loaders in `val_names`. `Trainer.test` logs `test_loss` and `test_<metric>`.
    `Trainer.predict` returns the logits of each batch, or generated tokens.

    **Special tokens.** A fit writes the tokens for padding, begin and end that the tokenizer has into the configurations of the
    model, and a warning of transformers names what has changed.

    **Loading.** A checkpoint has the arguments that are plain values. Pass the model and the functions again:
    `TransformersModule.load_from_checkpoint(path, model=model, compute_metrics=accuracy)`. For the model alone:
    `AutoModelForSequenceClassification.from_pretrained(path)`.

    **Metrics.** `compute_metrics` is called once, on the main process, with each sample once and in the order of the data.
    Predictions of different lengths are padded with -100. Above 64 MiB they are in files in Python's temporary folder (set
    `TMPDIR` to choose it), and `compute_metrics` gets memory maps, which are removed when it has returned.

    Args:
        model: The model; it stays available as `module.model`.
        processing_class: The tokenizer, image processor or feature extractor, saved with the model.
        learning_rate: The largest learning rate of the schedule.
        weight_decay: For all parameters but biases and those of normalization layers.
        optim: Name of the optimizer: `adamw_torch`, `adamw_torch_fused`, `adafactor`, `sgd`, `adagrad`, `rmsprop`, through
            torchao `adamw_torch_8bit` and `adamw_torch_4bit`, through bitsandbytes `adamw_8bit`, `lion`, `lion_8bit`,
            `ademamix`, `paged_adamw_8bit` and others. `muon`: Muon for the matrices of hidden layers and AdamW for the rest,
            under one learning rate. To use another one, override `configure_optimizers`.
        optim_args: More arguments of the optimizer's class (of Muon's for `muon`): a dict, or `"momentum=0.9,nesterov=True"`.
        adam_beta1: Of Adam and its relatives.
        adam_beta2: Of Adam and its relatives.
        adam_epsilon: Of Adam and its relatives.
        lr_scheduler_type: Name of the schedule, see `trainkit.optim.make_schedule`; or `reduce_lr_on_plateau`, which follows
            `eval_loss` at the end of each epoch.
        lr_scheduler_kwargs: Options of the schedule. For `reduce_lr_on_plateau`, arguments of torch's `ReduceLROnPlateau`, and
            `monitor` for another metric.
        warmup_steps: Number of optimizer steps of the warm-up; below 1: a fraction of all steps.
        label_smoothing_factor: ε of label smoothing, from 0 to 1. The logged losses are smoothed too.
        label_names: Keys of the labels in a batch. Default: those that the model's `forward` has.
        neftune_noise_alpha: Adds noise to the embeddings in training. Source: Jain et al., NEFTune, ICLR 2024.
        gradient_checkpointing: Recompute activations in the backward pass, by the model's own method.
        gradient_checkpointing_kwargs: Arguments of `torch.utils.checkpoint.checkpoint`.
        compute_metrics: Called with a `transformers.EvalPrediction`: `predictions` and `label_ids` as numpy arrays, or tuples
            of them if the model returns several outputs or has several labels. Returns a dict of numbers.
        compute_loss_func: Called with (outputs, labels, num_items_in_batch=), the last one the number of counted labels of this
            micro-batch. Returns the mean loss.
        preprocess_logits_for_metrics: Called with (logits, labels) of each batch; returns what to keep of the logits.
        include_for_metrics: `"inputs"` and `"loss"`: what `compute_metrics` gets too, as `inputs` and `losses`.
        predict_with_generate: `compute_metrics` and `Trainer.predict` get what `model.generate` returns for a batch without its
            labels, padded with the padding token. For a causal model that begins with the batch's own tokens.
        generation_max_length: Argument `max_length` of `generate`.
        generation_num_beams: Argument `num_beams` of `generate`.
        generation_config: A `GenerationConfig` for the model, or where to load it from.

    Raises:
        ConfigurationError: An argument is out of its range, or the model is no module.
        HookError: A subclass has a method of the Hugging Face Trainer that would not be called, such as `compute_loss`.
        OptimizerError: There is no such optimizer.
        UnsupportedArgumentError: An argument is one of the Hugging Face Trainer that belongs elsewhere; the message says where.

    Example:
        ```python
        model = AutoModelForSequenceClassification.from_pretrained(name)
        module = TransformersModule(model, tokenizer, learning_rate=2e-5, lr_scheduler_type="cosine", warmup_steps=0.1)
        Trainer(max_epochs=3, gradient_clip_val=1.0).fit(module, data)
        module.save_pretrained("out/final")
        ```
    """

    model: Any  # type checkers know less of nn.Module than of a model of transformers

    def __init__(
        self,
        model: nn.Module,
        processing_class: Any = None,
        *,
        learning_rate: float = 5e-5,
        weight_decay: float = 0.0,
        optim: str = "adamw_torch",
        optim_args: str | Mapping[str, Any] | None = None,
        adam_beta1: float = 0.9,
        adam_beta2: float = 0.999,
        adam_epsilon: float = 1e-8,
        lr_scheduler_type: str = "linear",
        lr_scheduler_kwargs: Mapping[str, Any] | None = None,
        warmup_steps: float = 0,
        label_smoothing_factor: float = 0.0,
        label_names: Sequence[str] | None = None,
        neftune_noise_alpha: float | None = None,
        gradient_checkpointing: bool = False,
        gradient_checkpointing_kwargs: Mapping[str, Any] | None = None,
        compute_metrics: Callable[[EvalPrediction], Mapping[str, Any]] | None = None,
        compute_loss_func: Callable[..., Tensor] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        include_for_metrics: Sequence[str] = (),
        predict_with_generate: bool = False,
        generation_max_length: int | None = None,
        generation_num_beams: int | None = None,
        generation_config: Any = None,
    ) -> None:
        super().__init__()
        check_names(self, TransformersModule, (), _OF_THEIR_TRAINER)
        _check_model(model)
        optim, lr_scheduler_type = _text(optim), _text(lr_scheduler_type)  # they may be members of transformers' enumerations
        optim_args, include_for_metrics = read_optim_args(optim_args), tuple(include_for_metrics)
        own = dict(locals())
        _check_arguments(own)
        self.save_hyperparameters(ignore=[*_NOT_SAVED, *(() if isinstance(generation_config, str) else ("generation_config",))])
        self.hparams.update(_checked(self, own))
        self.model, self.processing_class = model, processing_class
        self.compute_metrics = compute_metrics
        self.compute_loss_func = compute_loss_func
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self._base_class = type(base_model(model))
        self.pretrained_attribute = "model" if issubclass(self._base_class, PreTrainedModel) else None
        self._label_names = list(find_labels(self._base_class) if label_names is None else label_names)
        self._count = LabelCount(model, self._label_names)
        self._smoothing = _smoothing(model, label_smoothing_factor)
        self._uncached = _takes_use_cache(model)
        self._noise: Any = None
        self._collected: dict[int, Predictions] = {}
        self._told_without_labels = False
        if generation_config is not None:
            self.model.generation_config = _load_generation_config(generation_config)
        if gradient_checkpointing:
            old = "gradient_checkpointing_enable"  # its name before transformers 5.20
            enable = getattr(model, "activation_checkpointing_enable", None) or getattr(model, old)
            enable(None if gradient_checkpointing_kwargs is None else dict(gradient_checkpointing_kwargs))

    @classmethod
    def from_arguments(
        cls,
        model: nn.Module,
        args: TrainingArguments,
        *,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        processing_class: Any = None,
        compute_metrics: Callable[[EvalPrediction], Mapping[str, Any]] | None = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None),
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        compute_loss_func: Callable[..., Tensor] | None = None,
    ) -> tuple[TransformersModule, TransformersData, Trainer]:
        """Make the parts of a run from `TrainingArguments` of transformers, which is read as it is.

        A process group that the arguments have opened is used, and not closed. What each argument becomes is in
        docs/moving-over/training-arguments.md.

        Args:
            model: The model.
            args: `TrainingArguments` or `Seq2SeqTrainingArguments`.
            train_dataset: The training dataset.
            eval_dataset: The validation dataset, or a dict of them.
            data_collator: Makes a batch of a list of rows, see `TransformersData`.
            processing_class: The tokenizer, or another processor.
            compute_metrics: See above.
            callbacks: Callbacks of transformers, objects or classes, and of trainkit.
            optimizers: An optimizer and a scheduler, instead of those of the arguments; each may be `None`.
            preprocess_logits_for_metrics: See above.
            compute_loss_func: See above.

        Returns:
            The module, the data, and the `Trainer`.

        Raises:
            UnsupportedArgumentError: Arguments have values that trainkit does not support. The message names all of them.
            ConfigurationError: An argument is wrong.

        Example:
            ```python
            args = TrainingArguments("out", num_train_epochs=3, eval_strategy="epoch")
            module, data, trainer = TransformersModule.from_arguments(model, args, train_dataset=train, eval_dataset=val)
            trainer.fit(module, data)
            ```
        """
        from trainkit.integrations.transformers.from_arguments import from_arguments

        return from_arguments(
            cls,
            model,
            args,
            callbacks,
            optimizers,
            data={"train": train_dataset, "val": eval_dataset, "data_collator": data_collator},
            module={
                "processing_class": processing_class,
                "compute_metrics": compute_metrics,
                "preprocess_logits_for_metrics": preprocess_logits_for_metrics,
                "compute_loss_func": compute_loss_func,
            },
        )

    # ------------------------------------------------------------------------------------------------------------ training

    def setup(self, stage: str) -> None:
        """Prepare the model for a fit: training mode, the special tokens of the tokenizer, and the noise of NEFTune."""
        if stage != "fit":
            return
        self._align_special_tokens()
        self.model.train()
        if self.hparams.neftune_noise_alpha is not None:
            self._noise = activate_neftune(self.model, self.hparams.neftune_noise_alpha)

    def _align_special_tokens(self) -> None:
        """Write the tokens for padding, begin and end that the tokenizer has into the configurations of the model.

        Models for sequences read the padding from there, `generate` the end, and both are saved in `config.json`.
        """
        of_transformers = self.pretrained_attribute is not None
        if of_transformers and isinstance(self.processing_class, PreTrainedTokenizerBase | ProcessorMixin):
            align_special_tokens(self.model, self.processing_class)

    def teardown(self, stage: str) -> None:
        """Remove the noise, and the files of an evaluation that an error has ended."""
        if self._noise is not None:
            deactivate_neftune(self.model, self._noise)
            self._noise = None
        self._forget_predictions()

    def batch_weight(self, batch: Any) -> float:
        """The number of counted labels of a batch."""
        return self._count(_as_mapping(batch))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.model(*args, **kwargs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the mean loss over the counted labels of the batch.

        Raises:
            LossError: The model returns no loss for this batch.
        """
        loss, _ = self._evaluate(_as_mapping(batch))
        if loss is None:
            raise self._no_loss(sorted(batch))
        self.log("train_loss", loss, prog_bar=True)
        self.log("loss", loss)
        return loss

    def _evaluate(self, batch: Mapping[str, Any]) -> tuple[Tensor | None, Any]:
        """The mean loss of a batch, `None` without labels, and the model's outputs."""
        inputs = dict(batch)
        if self._uncached:
            inputs.setdefault("use_cache", False)
        if not self._has_labels(batch):
            return None, self.model(**inputs)
        labels = batch.get("labels")
        if not self._passes_labels(batch):
            inputs.pop("labels", None)
        outputs = self.model(**inputs)
        if self.compute_loss_func is not None:
            count = torch.tensor(self._count(batch), device=self.device)
            return self.compute_loss_func(outputs, labels, num_items_in_batch=count), outputs
        if self._smoothing:
            if labels is None:
                raise ConfigurationError(
                    f"label_smoothing_factor={self._smoothing} needs labels under 'labels', but the batch has {sorted(batch)}. "
                    "Remove it: label_smoothing_factor=0.0"
                )
            logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[int("labels" in inputs)]
            return smoothed_loss(logits, labels, self._smoothing, self._count.shifts), outputs
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs[0]
        return (loss / self._count(batch) if self._count.is_sum and loss is not None else loss), outputs

    def _no_loss(self, keys: Sequence[str]) -> LossError:
        return LossError(
            f"{self._base_class.__name__} returned no loss for a batch with the keys {keys}. {self._how_to_add_labels(keys)}"
        )

    def _how_to_add_labels(self, keys: Sequence[str]) -> str:
        """What to do for a batch with these keys, of which the model makes no loss."""
        names, taken = self._label_names, inspect.signature(self._base_class.forward).parameters
        if names and all(name in keys for name in names):
            return f"Its labels have another name: rename {names} to {find_labels(self._base_class)} in the data set."
        if not names and "return_loss" in taken:
            return "It computes one if it is asked to: return {..., 'return_loss': True} from the data_collator."
        fix = (
            f"Expected labels under {' and '.join(map(repr, names or ['labels']))}: rename the column of the data set, "
            "dataset.rename_column('target', 'labels'); or, if the model has another argument for them: label_names=[...]."
        )
        masked = "ForMaskedLM" in self._base_class.__name__
        if self._count.shifts or masked:
            options = "mlm_probability=0.15" if masked else "mlm=False"
            fix += f" To learn the tokens of the rows: data_collator=DataCollatorForLanguageModeling(tokenizer, {options})."
        return fix

    def _has_labels(self, batch: Mapping[str, Any]) -> bool:
        if not self._label_names:
            return bool(batch.get("return_loss", can_return_loss(self._base_class)))
        return all(batch.get(name) is not None for name in self._label_names)

    def _passes_labels(self, batch: Mapping[str, Any]) -> bool:
        """Whether the model gets the labels: for its own loss, or because it makes the decoder's inputs of them."""
        if self.compute_loss_func is None and not self._smoothing:
            return True
        decodes = getattr(getattr(base_model(self.model), "config", None), "is_encoder_decoder", False)
        return decodes and not batch.keys() & {"decoder_input_ids", "decoder_inputs_embeds"}

    # ---------------------------------------------------------------------------------------------------------- evaluation

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        """Return the loss of a batch, and what `compute_metrics` needs of it."""
        return self._evaluation_step(_as_mapping(batch))

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        """See `validation_step`."""
        return self._evaluation_step(_as_mapping(batch))

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        """Return the logits of a batch, or with `predict_with_generate` the generated tokens."""
        batch = _as_mapping(batch)
        return self._generate(batch) if self.hparams.predict_with_generate else self._logits(self._evaluate(batch)[1], batch)

    def _evaluation_step(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        loss, outputs = self._evaluate(batch)
        result: dict[str, Any] = {"loss": None if loss is None else loss.detach()}
        if self.compute_metrics is None or not self._label_names or loss is None:
            return result
        labels = tuple(batch[name] for name in self._label_names)
        result["label_ids"] = labels[0] if len(labels) == 1 else labels
        predictions = self._generate(batch) if self.hparams.predict_with_generate else self._logits(outputs, batch)
        if self.preprocess_logits_for_metrics is not None:
            predictions = self.preprocess_logits_for_metrics(predictions, result["label_ids"])
        result["predictions"] = predictions
        if "inputs" in self.hparams.include_for_metrics:
            result["inputs"] = batch[getattr(base_model(self.model), "main_input_name", "input_ids")]
        if "loss" in self.hparams.include_for_metrics:
            result["losses"] = loss.detach().repeat(len(labels[0]))
        return result

    def _logits(self, outputs: Any, batch: Mapping[str, Any]) -> Any:
        """The model's outputs but for the loss and caches: a tensor, or a tuple of several."""
        if isinstance(outputs, Mapping):
            ignored = getattr(getattr(self.model, "config", None), "keys_to_ignore_at_inference", ["past_key_values"])
            values = tuple(value for key, value in outputs.items() if key != "loss" and key not in ignored)
        else:
            own_loss = self._has_labels(batch) and self._passes_labels(batch)
            values = tuple(outputs[1:] if own_loss else outputs)
        return values[0] if len(values) == 1 else values

    def _generate(self, batch: Mapping[str, Any]) -> Tensor:
        inputs = {key: value for key, value in batch.items() if key not in self._label_names}
        labels = batch.get("labels")
        made = inputs.get("decoder_input_ids")
        if labels is not None and made is not None and labels.shape == made.shape:  # made of the labels: they are the answer
            inputs = {key: value for key, value in inputs.items() if not key.startswith("decoder_")}
        chosen = {"max_length": self.hparams.generation_max_length, "num_beams": self.hparams.generation_num_beams}
        options = {key: value for key, value in chosen.items() if value is not None}
        strategy = self.trainer.strategy
        # Every forward gathers parameters, so a rank whose samples have ended continues until all have.
        together = strategy.shards_parameters and strategy.world.size > 1
        tokens: Tensor = self.model.generate(**inputs, **options, synced_gpus=together)
        return tokens

    @property
    def _padding(self) -> dict[str, int]:
        """What shorter predictions are padded with, if it is not -100."""
        if not self.hparams.predict_with_generate:
            return {}
        pads = (getattr(source, "pad_token_id", None) for source in (self.processing_class, self.model.generation_config))
        ends = (getattr(source, "eos_token_id", None) for source in (self.processing_class, self.model.generation_config))
        token = next((token for token in (*pads, *ends) if isinstance(token, int)), None)
        return {} if token is None else {"predictions": token}

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Record the loss and the predictions of a batch."""
        self._record("eval", outputs, batch, dataloader_idx)

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Record the loss and the predictions of a batch."""
        self._record("test", outputs, batch, dataloader_idx)

    def on_validation_epoch_end(self) -> None:
        """Compute the metrics."""
        self._log_metrics("eval")

    def on_test_epoch_end(self) -> None:
        """Compute the metrics."""
        self._log_metrics("test")

    def _record(self, stage: str, outputs: Mapping[str, Any], batch: Any, index: int) -> None:
        # Not in the step itself: on a rank without data it runs too, for the collectives in its forward.
        loss = outputs["loss"]
        if loss is None:
            self._tell_without_labels(stage, batch)
        else:
            count = self._count(_as_mapping(batch))
            name, named = self._prefix(stage, index)
            mean = loss if count else torch.zeros_like(loss)  # the mean over nothing is NaN
            self.log(f"{name}_loss", mean, prog_bar=True, batch_size=count, add_dataloader_idx=not named)
        kept = {key: value for key, value in outputs.items() if key != "loss"}
        if kept:
            self._collected.setdefault(index, Predictions()).add(kept)

    def _tell_without_labels(self, stage: str, batch: Any) -> None:
        if self._told_without_labels:
            return
        self._told_without_labels = True
        what, keys = {"eval": "validation", "test": "test"}[stage], sorted(batch)
        metrics = f"no {stage}_loss" + (", and compute_metrics is not called" if self.compute_metrics is not None else "")
        notice(f"a batch of the {what} set with the keys {keys} has no labels: {metrics}. {self._how_to_add_labels(keys)}")

    def _prefix(self, stage: str, index: int) -> tuple[str, bool]:
        """What the metrics of a loader begin with, and whether that contains the loader's name."""
        names = getattr(self.trainer.datamodule, "val_names" if stage == "eval" else "test_names", None)
        return (f"{stage}_{names[index]}", True) if names else (stage, False)

    def _log_metrics(self, stage: str) -> None:
        if self.compute_metrics is None:
            return
        world = self.trainer.strategy.world
        (loaders,) = world.largest([max(self._collected, default=-1) + 1])
        try:
            for index in range(loaders):
                prefix, named = self._prefix(stage, index)
                suffix = f"/dataloader_idx_{index}" if loaders > 1 and not named else ""
                for name, value in self._metrics_of(index).items():
                    name = name if name.startswith(f"{prefix}_") else f"{prefix}_{name}"
                    # The ranks have the same value, whose mean could round.
                    self.log(f"{name}{suffix}", value, prog_bar=not suffix, reduce_fx="max")
        finally:
            self._forget_predictions()

    def _metrics_of(self, index: int) -> dict[str, float]:
        """What `compute_metrics` returns for a loader, the same on all ranks. Collective.

        Raises:
            MetricError: It failed on the main process, which raises its error itself; or it returned no numbers.
        """
        strategy, collected = self.trainer.strategy, self._collected.setdefault(index, Predictions())
        arrays = None if strategy.repeats_data else collected.gather(strategy.data_world, self._padding)
        failure: list[Exception] = []

        def answer(_: list[Any]) -> list[Any]:
            try:
                return [_compute(self.compute_metrics, arrays), None]
            except Exception as error:
                failure.append(error)
                return [{}, f"{type(error).__name__}: {error}"]

        # It may take long, so the others wait without a time limit.
        metrics, text = strategy.world.thread_exchange("compute_metrics").collect(None, answer)
        if failure:
            raise failure[0]
        if text is not None:
            raise MetricError(f"compute_metrics failed on the main process: {text}")
        return dict(metrics)

    def _forget_predictions(self) -> None:
        for predictions in self._collected.values():
            predictions.close()
        self._collected = {}

    # ---------------------------------------------------------------------------------------------------------- optimizers

    def configure_optimizers(self) -> Any:
        """Return the optimizer and the schedule of the arguments; for `muon` two, which step together.

        Raises:
            OptimizerError: The schedule is not supported, or there is nothing that Muon could train.
        """
        groups = decay_groups(self.model, self.hparams.weight_decay)
        if self.hparams.optim != "muon":
            return self._optimizer(self.hparams.optim, groups, self.hparams.optim_args)
        matrices, others = split_matrices(self.model, groups)
        muon = self._optimizer("muon", matrices, self.hparams.optim_args)
        return [muon, self._optimizer("adamw_torch", others, {})] if others else muon

    def _optimizer(self, name: str, groups: list[dict[str, Any]], options: Mapping[str, Any]) -> dict[str, Any]:
        """An optimizer with its schedule."""
        h = self.hparams
        optimizer = make_optimizer(
            name,
            groups,
            lr=h.learning_rate,
            betas=(h.adam_beta1, h.adam_beta2),
            eps=h.adam_epsilon,
            options=options,
            model=self.model,
        )
        return {"optimizer": optimizer, "lr_scheduler": self._schedule(optimizer)}

    def _schedule(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        name, options, warmup = (
            self.hparams.lr_scheduler_type,
            dict(self.hparams.lr_scheduler_kwargs or {}),
            self.hparams.warmup_steps,
        )
        if name == "reduce_lr_on_plateau":
            monitor = options.pop("monitor", "eval_loss")
            return {"scheduler": ReduceLROnPlateau(optimizer, **options), "monitor": monitor}
        if name == "greedy":
            raise OptimizerError(
                "lr_scheduler_type='greedy' is not supported: it reads the training loss after each step. Use "
                "'reduce_lr_on_plateau', or override configure_optimizers."
            )
        steps = {"warmup_ratio": warmup} if 0 < warmup < 1 else {"warmup_steps": int(warmup)}
        return {"scheduler": name, **steps, **options}

    # -------------------------------------------------------------------------------------------------------------- saving

    def save_pretrained(self, save_directory: str | PathLike[str], max_shard_size: int | str = "10GB") -> None:
        """Write a folder that `from_pretrained` opens: the weights, `config.json` and the files of the processing class.

        Of a PEFT model, the adapters are written. After a fit and in it, all processes must call it.

        Args:
            save_directory: The folder.
            max_shard_size: Larger weights are written to several files, with an index.

        Raises:
            CheckpointWriteError: The folder cannot be written.
        """
        folder = Path(save_directory)
        if self._trainer is None:
            self.model.save_pretrained(folder, max_shard_size=max_shard_size)
        else:
            self.trainer.accelerator.save_model(self.model, folder, max_shard_size=max_shard_size)
        if self.processing_class is not None and self.global_rank == 0:
            self.processing_class.save_pretrained(folder)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        token: str | bool | None = None,
        private: bool | None = None,
        commit_message: str = "Upload model",
        revision: str | None = None,
    ) -> str:
        """Upload what `save_pretrained` writes to a repository of the Hugging Face Hub, which is created if it is missing.

        After a fit and in it, all processes must call it; the main process uploads.

        Args:
            repo_id: `"user/name"` or `"organization/name"`.
            token: The access token. Default: the one that `hf auth login` has stored.
            private: Create a private repository.
            commit_message: Of the commit.
            revision: The branch, which is created if it is missing. Default: the repository's main branch.

        Returns:
            The address of the commit.
        """
        from huggingface_hub import HfApi

        strategy = None if self._trainer is None else self.trainer.strategy
        with tempfile.TemporaryDirectory(prefix="trainkit-upload-") as own:
            folder = own if strategy is None else strategy.broadcast(own)
            self.save_pretrained(folder)
            address, error = "", None
            if self.global_rank == 0:
                try:
                    api = HfApi(token=token)
                    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
                    if revision is not None:
                        api.create_branch(repo_id, branch=revision, exist_ok=True)
                    address = str(
                        api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=commit_message, revision=revision)
                    )
                except Exception as failure:
                    error = failure
            return _agreed(strategy, address, error)


def _check_arguments(own: Mapping[str, Any]) -> None:
    _check_processing_class(own["processing_class"])
    check_optimizer(own["optim"])
    for name, example in (
        ("learning_rate", 5e-5),
        ("weight_decay", 0.01),
        ("warmup_steps", 100),
        ("label_smoothing_factor", 0.1),
    ):
        real_number(own[name], name, least=0.0, example=example)
    for one in own["include_for_metrics"]:
        choice(one, "include_for_metrics", _FOR_METRICS)
    for name in ("compute_metrics", "compute_loss_func", "preprocess_logits_for_metrics"):
        function(own[name], name, "my_function")


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigurationError(
            f"TransformersModule expected a model, got {model!r}. For example: "
            "TransformersModule(AutoModelForCausalLM.from_pretrained(name))"
        )
    if hasattr(model, "_orig_mod"):  # its class is not the model's, so that labels and files would not be found
        raise ConfigurationError(
            "TransformersModule expected a model, got one that torch.compile has wrapped. Pass the model itself, and let the "
            "Trainer compile it: Trainer(compile=True)"
        )
    try:
        validate_quantization_for_training(model)
    except ValueError as error:
        raise ConfigurationError(
            f"TransformersModule: {error} For example: TransformersModule(peft.get_peft_model(model, peft.LoraConfig(...)))"
        ) from error


def _checked(module: TransformersModule, own: Mapping[str, Any]) -> dict[str, Any]:
    """The hyper-parameters of `TransformersModule`, instead of what its subclass, or a configuration, has for them.

    Raises:
        ConfigurationError: A subclass has passed another value than it got, which would be lost: its own is stored.
    """
    forms: dict[str, Callable[[Any], Any]] = {
        "optim": _text,
        "lr_scheduler_type": _text,
        "optim_args": read_optim_args,
        "include_for_metrics": tuple,
    }
    names = module.hparams.keys() & own.keys()
    for name in names:
        stored, value = module.hparams[name], own[name]
        stored = forms[name](stored) if name in forms else stored
        if stored != value and isinstance(stored, _Plain) and isinstance(value, _Plain):
            raise ConfigurationError(
                f"{type(module).__name__} got {name}={stored!r}, but passes {name}={value!r} to TransformersModule. "
                "load_from_checkpoint needs the former, training the latter, and self.hparams has one of this name. Give the "
                f"argument of {type(module).__name__} another name: def __init__(self, model, my_{name}=...)"
            )
    return {name: own[name] for name in names}


def _check_processing_class(value: Any) -> None:
    """Refuse what could not be saved with the model."""
    if value is None or hasattr(value, "save_pretrained"):
        return
    fix = "TransformersModule(model, AutoTokenizer.from_pretrained(name))"
    if any(kind.__name__ == "TrainingArguments" for kind in type(value).__mro__):  # an import of it needs accelerate
        fix = "module, data, trainer = TransformersModule.from_arguments(model, args, train_dataset=train, eval_dataset=val)"
    raise ConfigurationError(
        f"processing_class must be a tokenizer, an image processor or a feature extractor, not {type(value).__name__}. "
        f"For example: {fix}"
    )


def _agreed(strategy: Any, address: str, error: Exception | None) -> str:
    """The address of the main process on all ranks, or its error."""
    if strategy is not None:
        failed = strategy.world.agree(error)
        address = strategy.world.from_main(address)
        if failed is not None and error is None:
            raise ConfigurationError(f"push_to_hub failed on {failed}")
    if error is not None:
        raise error
    return address


def _text(value: Any) -> str:
    return str(getattr(value, "value", value))


def _as_mapping(batch: Any) -> Mapping[str, Any]:
    if isinstance(batch, Mapping):
        lists = [
            name for name, value in batch.items() if isinstance(value, list) and value and isinstance(value[0], int | list)
        ]
        if lists:
            raise DataError(
                f"TransformersModule expected a batch of tensors, but {', '.join(lists)} of the batch is a list: it looks like "
                "a single row. Make batches of the rows: trainer.fit(module, TransformersData(train, val, tokenizer))"
            )
        return batch
    raise DataError(
        f"TransformersModule expected a batch that is a dict of the arguments of the model's forward, got "
        f"{type(batch).__name__}. Return a dict from the data set or the collate_fn: "
        "{'input_ids': ..., 'labels': ...}"
    )


def _smoothing(model: nn.Module, epsilon: float) -> float:
    if epsilon and getattr(getattr(model, "config", None), "problem_type", None) == "multi_label_classification":
        warn(f"label_smoothing_factor={epsilon} has no effect on a model with problem_type='multi_label_classification'.")
        return 0.0
    return epsilon


def _takes_use_cache(model: nn.Module) -> bool:
    """Whether to switch off the cache of keys and values, which only `generate` and the prompts of some PEFT methods need."""
    prompts = any(getattr(config, "is_prompt_learning", False) for config in getattr(model, "peft_config", {}).values())
    return not prompts and "use_cache" in inspect.signature(base_model(model).forward).parameters


def _load_generation_config(given: Any) -> GenerationConfig:
    if isinstance(given, GenerationConfig):
        return copy.deepcopy(given)
    path = Path(given)
    if path.is_file():
        return GenerationConfig.from_pretrained(path.parent, path.name)
    return GenerationConfig.from_pretrained(given)


def _compute(function: Any, arrays: dict[str, Any] | None) -> dict[str, float]:
    """The metrics of all predictions; none without predictions.

    Raises:
        MetricError: the function returned something else than a dict of numbers.
    """
    if arrays is None:
        return {}
    found = function(EvalPrediction(**arrays))
    numbers = denumpify_detensorize(found)
    if not isinstance(numbers, Mapping) or not all(isinstance(value, int | float) for value in numbers.values()):
        raise MetricError(
            f"compute_metrics must return a dict of names and numbers, not {found!r}. For example: {{'accuracy': 0.5}}"
        )
    for name in ("loss", "eval_loss", "test_loss"):
        if name in numbers:
            raise MetricError(f"compute_metrics returned {name!r}, the name of the loss of the model. Give it another name")
    return {str(name): float(value) for name, value in numbers.items()}
