"""transformers' `Trainer` over trainkit's: its constructor and its verbs, for a script that only changes an import."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from transformers import (
    Seq2SeqTrainingArguments,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers.modelcard import TrainingSummary
from transformers.trainer_pt_utils import log_metrics, metrics_format, save_metrics, save_state
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction, PredictionOutput, TrainOutput, speed_metrics

from trainkit.callback import Callback
from trainkit.errors import CheckpointNotFoundError, ConfigurationError, UnsupportedArgumentError
from trainkit.integrations.transformers.from_arguments import make_data, make_run, of_transformers
from trainkit.integrations.transformers.hf_callbacks import HuggingFaceEvents
from trainkit.integrations.transformers.hf_overrides import missing_attribute, refuse_assignment, refuse_overrides
from trainkit.integrations.transformers.transformers_data import TransformersData, default_collator
from trainkit.integrations.transformers.transformers_module import TransformersModule
from trainkit.registry import accepts_keyword

__all__ = [
    "HuggingFaceSeq2SeqTrainer",
    "HuggingFaceTrainer",
    "Seq2SeqTrainer",
    "Seq2SeqTrainingArguments",
    "Trainer",
    "TrainingArguments",
]

_IGNORED_PUSH = ("_*", "checkpoint-*")


class HuggingFaceTrainer:
    """transformers' `Trainer` with its constructor and its verbs, over trainkit's: exact losses, resume and evaluation.

    Import it as `from trainkit.integrations.transformers import Trainer`. It makes a `TransformersModule`, a `TransformersData`
    and a `trainkit.Trainer` from the arguments, see `TransformersModule.from_arguments`.

    **Subclasses** may override `compute_loss`, `create_optimizer`, `create_scheduler`, `create_optimizer_and_scheduler`,
    `get_train_dataloader`, `get_eval_dataloader`, `get_test_dataloader` and `log`; with `eval_strategy="no"` also `evaluate`,
    and with `save_strategy="no"` also `save_model`, which a run does not call. To override another method of transformers'
    `Trainer` is an error of the constructor, since it would not be called; to assign one later is an error too.

    `compute_loss` returns the mean over its batch: `num_items_in_batch` is the number of counted labels of this batch, and the
    gradient is weighted by it. `loss_is_scaled_for_ga` and `model_accepts_loss_kwargs` have no effect.

    **Attributes.** The arguments of the constructor are attributes, as are the values of `args`. What a script assigns to them
    acts from the next call of `train`, `evaluate` or `predict`.

    Args:
        model: The model.
        args: `TrainingArguments`; default: those with `output_dir="tmp_trainer"`.
        data_collator: Makes a batch of a list of rows.
        train_dataset: The training dataset.
        eval_dataset: The validation dataset, or a dict of them.
        processing_class: The tokenizer, or another processor.
        model_init: Makes the model, instead of `model`; each `train` begins with a new one.
        compute_loss_func: Called with (outputs, labels, num_items_in_batch=).
        compute_metrics: Called with an `EvalPrediction`; returns a dict of numbers.
        callbacks: Callbacks of transformers, objects or classes, and of trainkit.
        optimizers: An optimizer and a scheduler, instead of those of the arguments; each may be `None`.
        optimizer_cls_and_kwargs: The class of the optimizer and its arguments.
        preprocess_logits_for_metrics: Called with (logits, labels); returns what to keep of the logits.

    Attributes:
        args: The arguments.
        model: The model.
        events: Calls the callbacks of transformers, and has the state.
        module: The `TransformersModule`.
        data: The `TransformersData`.
        trainer: The `trainkit.Trainer`.
        optimizer: The optimizer, once it exists.
        lr_scheduler: The scheduler, if the user has made it.
        hub_model_id: The repository that `push_to_hub` uploads to.

    Raises:
        UnsupportedArgumentError: An argument, or a method of the subclass, is not supported. The message names all of them.

    Example:
        ```python
        from trainkit.integrations.transformers import Trainer

        trainer = Trainer(model=model, args=args, train_dataset=train, eval_dataset=val, compute_metrics=accuracy)
        trainer.train(resume_from_checkpoint=True)
        trainer.save_model()
        ```
    """

    log_metrics = log_metrics
    metrics_format = metrics_format
    save_metrics = save_metrics
    save_state = save_state

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[[], nn.Module] | None = None,
        compute_loss_func: Callable[..., Tensor] | None = None,
        compute_metrics: Callable[[EvalPrediction], Mapping[str, Any]] | None = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Optimizer | None, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        self.args = TrainingArguments(output_dir="tmp_trainer") if args is None else args
        refuse_overrides(self, HuggingFaceTrainer, self.args)
        if (model is None) == (model_init is None):
            raise ConfigurationError("Trainer needs a model or a model_init, and not both. For example: model=model, args=args")
        if optimizer_cls_and_kwargs is not None and optimizers[0] is not None:
            raise ConfigurationError("optimizers and optimizer_cls_and_kwargs both make the optimizer. Give one of them.")
        set_seed(self.args.seed)
        self.model_init = model_init
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.processing_class = processing_class
        self.data_collator = default_collator(processing_class) if data_collator is None else data_collator
        self._default_collator = None if data_collator is not None else self.data_collator
        self.compute_metrics = compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.compute_loss_func = compute_loss_func
        self.optimizer, self.lr_scheduler = optimizers
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        self.hub_model_id: str | None = None
        given = of_transformers(callbacks)
        if self.args.push_to_hub and str(self.args.hub_strategy.value) == "every_save":
            given = [*given, UploadOnSave(self)]
        self.events = HuggingFaceEvents(self.args, given, processing_class=processing_class)
        self.events.write_log = lambda logs: self.log(logs)  # as it is then
        self._callbacks = [callback for callback in callbacks or () if isinstance(callback, Callback)]
        self._trained = False
        self.model: Any = model if model_init is None else model_init()
        self._make()
        self.events.attach(self.model)

    def _make(self) -> None:
        self.module: HuggingFaceModule
        self.events.args = self.args
        module, data, self.trainer = make_run(
            HuggingFaceModule,
            self.model,
            self.args,
            self.events,
            self._callbacks,
            data=self._of_data(),
            module={"processing_class": self.processing_class},
            pushes=True,
        )
        assert isinstance(module, HuggingFaceModule)
        self.module = module
        module.belong_to(self)
        self.data = HuggingFaceData(self, data)
        self._made_of = self._parts()

    def _of_data(self) -> dict[str, Any]:
        collator = None if self.data_collator is self._default_collator else self.data_collator
        return {"train": self.train_dataset, "val": self.eval_dataset, "data_collator": collator}

    def _parts(self) -> list[Any]:
        return [str(self.args.to_dict()), self.model, self.train_dataset, self.eval_dataset, self.data_collator]

    def _read_attributes(self, trains: bool) -> None:
        """Use what the script has assigned since the last run."""
        (values, *parts), (old_values, *old_parts) = self._parts(), self._made_of
        changed = values != old_values or any(one is not old for one, old in zip(parts, old_parts, strict=True))
        if changed and trains:
            self._make()
        elif changed:
            data = make_data(self.args, processing_class=self.processing_class, **self._of_data())
            self.data = HuggingFaceData(self, data)
        module = self.module
        module.processing_class = self.events.handler.processing_class = self.processing_class
        module.compute_metrics = None if self.args.prediction_loss_only else self.compute_metrics
        module.preprocess_logits_for_metrics = self.preprocess_logits_for_metrics
        module.compute_loss_func = self.compute_loss_func

    if not TYPE_CHECKING:  # Type checkers report unknown attributes themselves.

        def __getattr__(self, name: str) -> Any:
            raise missing_attribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        refuse_assignment(self, name, HuggingFaceTrainer, vars(self).get("args"))
        super().__setattr__(name, value)

    # --------------------------------------------------------------------------------------------------------- what it shows

    @property
    def state(self) -> TrainerState:
        """The `transformers.TrainerState`: steps, epoch, log history, best metric and checkpoint."""
        return self.events.state

    @property
    def control(self) -> TrainerControl:
        """The flags of the callbacks, which a subclass assigns after it has called them itself."""
        return self.events.control

    @control.setter
    def control(self, control: TrainerControl) -> None:
        self.events.control = control

    @property
    def callback_handler(self) -> Any:
        """The `CallbackHandler` of transformers."""
        return self.events.handler

    def is_world_process_zero(self) -> bool:
        """Whether this is the main process."""
        return self.trainer.is_global_zero

    def is_local_process_zero(self) -> bool:
        """Whether this is the first process of its node."""
        return self.trainer.local_rank == 0

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """Number of rows of the dataset of a loader."""
        return len(dataloader.dataset)  # type: ignore[arg-type]  # a dataset without a length raises

    def add_callback(self, callback: Any) -> None:
        """Add a callback of transformers, an object or a class."""
        self.events.handler.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback of transformers, an object or a class, and return it."""
        return self.events.handler.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback of transformers, an object or a class."""
        self.events.handler.remove_callback(callback)

    # -------------------------------------------------------------------------------------------------- what users override

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The loader of the training dataset; trainkit shards it over the processes."""
        loader: DataLoader[Any] = self.data.own_loader("train")
        return loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """The loader of a validation dataset.

        Args:
            eval_dataset: The dataset, or the name of one of several; default: that of the constructor.
        """
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        return self.data.own_loader("val", self.eval_dataset if eval_dataset is None else eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """The loader of a dataset to predict on."""
        return self.data.own_loader("test", test_dataset)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The mean loss over the counted labels of a batch; with `return_outputs` also the outputs of the model.

        Args:
            model: No effect: it is the model of the constructor.
            inputs: The batch.
            return_outputs: Return `(loss, outputs)`.
            num_items_in_batch: No effect: the labels of the batch are counted. An override gets their number.
        """
        loss, outputs = self.module.loss_and_outputs(inputs)
        return (loss, outputs) if return_outputs else loss

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Call `create_optimizer` and `create_scheduler`."""
        self.create_optimizer()
        self.create_scheduler(num_training_steps, self.optimizer)

    def create_optimizer(self) -> Optimizer:
        """Create `self.optimizer` from the arguments, unless it exists."""
        if self.optimizer is None and self.optimizer_cls_and_kwargs is not None:
            kind, options = self.optimizer_cls_and_kwargs
            self.optimizer = kind(self.module.parameter_groups(), **options)
        elif self.optimizer is None:
            self.optimizer = self.module.own_optimizer()
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> Any:
        """Return `self.lr_scheduler`. If it is `None`, trainkit makes the schedule of the arguments.

        Args:
            num_training_steps: No effect: the schedule knows them. An override gets their number.
            optimizer: No effect: it is `self.optimizer`.
        """
        return self.lr_scheduler

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add an entry to `state.log_history`, and call `on_log`; the loggers of the run get their values by themselves.

        Args:
            logs: The entry.
            start_time: No effect: speed is measured once, at the end of training.
        """
        self.events.add_to_log(logs)

    # --------------------------------------------------------------------------------------------------------------- verbs

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train the model.

        Args:
            resume_from_checkpoint: Resume from this checkpoint of trainkit; `True`: the newest valid one in `output_dir`.
            trial: Only `None`.
            ignore_keys_for_eval: Outputs of the model that are no predictions.

        Returns:
            `(global_step, training_loss, metrics)`.

        Raises:
            UnsupportedArgumentError: `trial` is given.
            CheckpointError: There is no such checkpoint.
        """
        if trial is not None:
            raise UnsupportedArgumentError(
                "train(trial=...) is not supported. Run a study of Optuna around it: docs/how-to/optuna-hydra-dvclive.md"
            )
        if self._trained and self.model_init is not None:
            set_seed(self.args.seed)
            self.model, self.optimizer, self.lr_scheduler = self.model_init(), None, None
        self._read_attributes(trains=True)
        self._trained = True
        path = "last" if resume_from_checkpoint is True else resume_from_checkpoint or None
        with self._ignoring(ignore_keys_for_eval):
            try:
                self.trainer.fit(self.module, datamodule=self.data, ckpt_path=path)
            except CheckpointNotFoundError as error:
                if path != "last":
                    raise
                raise CheckpointNotFoundError(
                    f"resume_from_checkpoint=True: there is no checkpoint of trainkit in output_dir={self.args.output_dir!r}. "
                    "To start from the beginning: train()"
                ) from error
        self.optimizer = next(iter(self.trainer.optimizers), self.optimizer)
        return TrainOutput(self.state.global_step, self.events.training_loss, dict(self.events.train_metrics))

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate the model, and return the metrics, each with the prefix.

        Args:
            eval_dataset: The dataset, or a dict of them; default: that of the constructor.
            ignore_keys: Outputs of the model that are no predictions.
            metric_key_prefix: What the names of metrics begin with.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = self.eval_dataset[dataset]
        if dataset is None:
            raise ConfigurationError("evaluate needs a dataset. Pass it: evaluate(eval_dataset), or to the constructor")
        if self.trainer.stage is not None:
            raise UnsupportedArgumentError(
                "evaluate cannot be called within train. Pass all datasets to the constructor, and the metrics of each are "
                "logged: eval_dataset={'validation': validation, 'train': train}"
            )
        if isinstance(dataset, dict):
            found: dict[str, float] = {}
            for name, one in dataset.items():
                found |= self.evaluate(one, ignore_keys, f"{metric_key_prefix}_{name}")
            return found
        start = time.time()
        self._read_attributes(trains=False)
        with self._ignoring(ignore_keys):
            results = self.trainer.validate(self.module, datamodule=self.data.with_dataset("val", dataset), verbose=False)
        metrics = _renamed(results, "eval", metric_key_prefix) | self._speed(metric_key_prefix, start, dataset)
        self.log(metrics)
        self.events.evaluated(metrics)
        return metrics

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Predict, and compute the metrics if the dataset has labels.

        Args:
            test_dataset: The dataset.
            ignore_keys: Outputs of the model that are no predictions.
            metric_key_prefix: What the names of metrics begin with.

        Returns:
            `(predictions, label_ids, metrics)` as numpy arrays, on every process; `label_ids` is `None` without labels.
        """
        start = time.time()
        self._read_attributes(trains=False)
        loader = self.get_test_dataloader(test_dataset)
        found = self.evaluation_loop(loader, "Prediction", None, ignore_keys, metric_key_prefix)
        metrics = {**(found.metrics or {}), **self._speed(metric_key_prefix, start, test_dataset)}
        self.events.predicted(metrics)
        return PredictionOutput(found.predictions, found.label_ids, metrics)

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Predict for all batches of a loader, for a subclass that overrides `evaluate` or `predict`. It may not be overridden.

        Args:
            dataloader: The loader, such as that of `get_eval_dataloader`.
            description: No effect.
            prediction_loss_only: Compute the loss only; default: as the arguments say.
            ignore_keys: Outputs of the model that are no predictions.
            metric_key_prefix: What the names of metrics begin with.

        Returns:
            `(predictions, label_ids, metrics, num_samples)`: numpy arrays on every process, or `None`; the metrics are the loss
            and those of `self.compute_metrics`.
        """
        self._read_attributes(trains=False)
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        with self._ignoring(ignore_keys), self.module.keeping(not loss_only) as kept:
            results = self.trainer.test(self.module, dataloaders=dataloader, verbose=False)
        # Each process of the script works on them.
        predictions, labels = self.trainer.strategy.world.broadcast_user_object(kept or (None, None))
        first = predictions[0] if isinstance(predictions, tuple) else predictions
        dataset: Any = dataloader.dataset
        rows = len(dataset) if hasattr(dataset, "__len__") else None if first is None else len(first)
        return EvalLoopOutput(predictions, labels, _renamed(results, "test", metric_key_prefix), rows)

    def _speed(self, prefix: str, start: float, dataset: Any) -> dict[str, float]:
        rows = len(dataset) if hasattr(dataset, "__len__") else 0
        steps = -(-rows // (self.args.per_device_eval_batch_size * self.trainer.world_size))
        found: dict[str, float] = speed_metrics(prefix, start, num_samples=rows or None, num_steps=steps or None)
        return found

    @contextmanager
    def _ignoring(self, keys: list[str] | None) -> Iterator[None]:
        """Within it these outputs of the model are no predictions."""
        config = getattr(self.model, "config", None)
        if keys is None or config is None:
            yield
            return
        name = "keys_to_ignore_at_inference"
        before = getattr(config, name, None)
        setattr(config, name, keys)
        try:
            yield
        finally:
            delattr(config, name) if before is None else setattr(config, name, before)

    # -------------------------------------------------------------------------------------------------------------- saving

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model and the files of the processing class, as `from_pretrained` opens them. All processes call it.

        With `push_to_hub=True` in the arguments, it is uploaded too.

        Args:
            output_dir: The folder; default: that of the arguments.
            _internal_call: Do not upload; an override may pass it on.
        """
        self._save_pretrained(output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save")

    def _save_pretrained(self, output_dir: str | None) -> None:
        self.module.save_pretrained(output_dir or self.args.output_dir)

    def create_model_card(self, **options: Any) -> None:
        """Write `README.md` into the output folder: arguments and results, by `transformers.modelcard.TrainingSummary`.

        Args:
            options: `language`, `license`, `tags`, `model_name`, `finetuned_from`, `tasks`, `dataset_tags`, `dataset` and
                `dataset_args`.
        """
        if self.is_world_process_zero():
            card = TrainingSummary.from_trainer(self, **options).to_model_card()
            path = Path(self.args.output_dir) / "README.md"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(card, encoding="utf-8")

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **options: Any,
    ) -> str | None:
        """Write the model and its card to the output folder, and upload that without its checkpoints. All processes call it.

        Args:
            commit_message: Of the commit.
            blocking: Only `True`: the upload is complete when it returns.
            token: The access token; default: that of the arguments, or of `hf auth login`.
            revision: The branch; default: that of the arguments, or `main`.
            private: Create a private repository; default: as the arguments say.
            options: Those of `create_model_card`.

        Returns:
            The address of the commit; `None` on other processes.
        """
        from huggingface_hub import HfApi

        if not blocking:
            raise UnsupportedArgumentError("push_to_hub(blocking=False) is not supported. Remove it: the upload is waited for.")
        self.events.push_begins()
        self._save_pretrained(None)
        self.create_model_card(**options)
        address, error = None, None
        if self.is_world_process_zero():
            args = self.args
            api = HfApi(token=token or args.hub_token)
            try:
                name = args.hub_model_id or Path(args.output_dir).absolute().name
                private = args.hub_private_repo if private is None else private
                self.hub_model_id = api.create_repo(name, private=private, exist_ok=True).repo_id
                revision = revision or args.hub_revision
                if revision is not None:
                    api.create_branch(self.hub_model_id, branch=revision, exist_ok=True)
                address = str(
                    api.upload_folder(
                        repo_id=self.hub_model_id,
                        folder_path=args.output_dir,
                        commit_message=commit_message,
                        revision=revision,
                        ignore_patterns=list(_IGNORED_PUSH),
                    )
                )
            except Exception as failure:
                error = failure
        failed = self.trainer.strategy.world.agree(error)
        if error is not None:
            raise error
        if failed is not None:
            raise ConfigurationError(f"push_to_hub failed on {failed}")
        return address


class HuggingFaceSeq2SeqTrainer(HuggingFaceTrainer):
    """transformers' `Seq2SeqTrainer`: `evaluate` and `predict` accept `max_length`, `max_new_tokens` and `num_beams`.

    Import it as `from trainkit.integrations.transformers import Seq2SeqTrainer`. With `predict_with_generate=True` in the
    `Seq2SeqTrainingArguments`, predictions are what the model generates.
    """

    _gen_kwargs: Mapping[str, Any] = MappingProxyType({})  # transformers' name, which a subclass may assign to

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        **generation: Any,
    ) -> dict[str, float]:
        """See `HuggingFaceTrainer.evaluate`.

        Args:
            eval_dataset: The dataset, or a dict of them; default: that of the constructor.
            ignore_keys: Outputs of the model that are no predictions.
            metric_key_prefix: What the names of metrics begin with.
            generation: Arguments of `generate`.
        """
        with self._generating(generation):
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
        **generation: Any,
    ) -> PredictionOutput:
        """See `HuggingFaceTrainer.predict`.

        Args:
            test_dataset: The dataset.
            ignore_keys: Outputs of the model that are no predictions.
            metric_key_prefix: What the names of metrics begin with.
            generation: Arguments of `generate`.
        """
        self._gen_kwargs = generation
        return super().predict(test_dataset, ignore_keys, metric_key_prefix)

    def evaluation_loop(self, *args: Any, **options: Any) -> EvalLoopOutput:
        """See `HuggingFaceTrainer.evaluation_loop`; it generates with the arguments in `self._gen_kwargs`."""
        with self._generating(self._gen_kwargs):
            return super().evaluation_loop(*args, **options)

    @contextmanager
    def _generating(self, options: Mapping[str, Any]) -> Iterator[None]:
        """Within it the model generates with these options instead of those of the arguments and its generation config."""
        config, hparams = self.model.generation_config, self.module.hparams
        of_arguments = {"max_length": "generation_max_length", "num_beams": "generation_num_beams"}
        before = {name: hparams[name] for name in of_arguments.values()}
        changed = copy.deepcopy(config)
        changed.update(**options)
        for name, ours in of_arguments.items():
            if name in options or (name == "max_length" and "max_new_tokens" in options):
                hparams[ours] = options.get(name)
        self.model.generation_config = changed
        try:
            yield
        finally:
            self.model.generation_config = config
            hparams.update(before)


Trainer, Seq2SeqTrainer = HuggingFaceTrainer, HuggingFaceSeq2SeqTrainer  # transformers' names

# ------------------------------------------------------------------------------------------------------------------- parts


class HuggingFaceModule(TransformersModule):
    """The module of a `HuggingFaceTrainer`, which calls what a subclass of that overrides."""

    _owner: HuggingFaceTrainer
    _kept: list[Any] | None = None

    def belong_to(self, owner: HuggingFaceTrainer) -> None:
        """Call the methods of this trainer."""
        self._owner = owner

    def loss_and_outputs(self, inputs: Mapping[str, Any]) -> tuple[Tensor | None, Any]:
        """The loss of the arguments, and the model's outputs."""
        return super()._evaluate(inputs)

    def _evaluate(self, batch: Mapping[str, Any]) -> tuple[Tensor | None, Any]:
        compute = self._owner.compute_loss
        if getattr(compute, "__func__", None) is HuggingFaceTrainer.compute_loss or not self._has_labels(batch):
            return super()._evaluate(batch)
        options: dict[str, Any] = {}
        if accepts_keyword(compute, "num_items_in_batch"):
            options["num_items_in_batch"] = torch.tensor(self._count(batch), device=self.device)
        if self.trainer.training:
            return compute(self.model, dict(batch), **options), None
        loss, outputs = compute(self.model, dict(batch), return_outputs=True, **options)
        return loss, outputs

    def parameter_groups(self) -> list[dict[str, Any]]:
        """The parameters in groups with and without weight decay."""
        return [
            {"params": group["params"], "weight_decay": group["weight_decay"]} for group in self.own_optimizer().param_groups
        ]

    def own_optimizer(self) -> Optimizer:
        """The optimizer of the arguments."""
        optimizer: Optimizer = super().configure_optimizers()["optimizer"]
        return optimizer

    def configure_optimizers(self) -> Any:
        """What the trainer's methods make."""
        owner = self._owner
        owner.create_optimizer_and_scheduler(int(min(self.trainer.estimated_stepping_batches, 2**62)))
        optimizer, scheduler = owner.optimizer, owner.lr_scheduler
        if optimizer is None:
            raise ConfigurationError(f"{type(owner).__name__}.create_optimizer left self.optimizer at None. Set it there.")
        schedule = self._schedule(optimizer) if scheduler is None else {"scheduler": scheduler, "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    @contextmanager
    def keeping(self, keeps: bool) -> Iterator[list[Any]]:
        """Within it the predictions and labels of an evaluation are copied to a list, on the main process, if `keeps`."""
        kept: list[Any] = []
        function = self.compute_metrics

        def keep(found: EvalPrediction) -> Mapping[str, Any]:
            labels = found.label_ids
            without = isinstance(labels, np.ndarray) and labels.ndim == 2 and labels.shape[1] == 0
            kept.extend([_copied(found.predictions), None if without else _copied(labels)])
            return {} if function is None or without else function(found)

        self._kept, self.compute_metrics = (kept, keep) if keeps else (None, None)
        try:
            yield kept
        finally:
            self._kept, self.compute_metrics = None, function

    def _tell_without_labels(self, stage: str, batch: Any) -> None:
        if stage != "test":  # `predict` is for rows without labels too
            super()._tell_without_labels(stage, batch)

    def _evaluation_step(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        result = super()._evaluation_step(batch)
        if self._kept is not None and "predictions" not in result:
            generates = self.hparams.predict_with_generate
            predictions = self._generate(batch) if generates else self._logits(super()._evaluate(batch)[1], batch)
            if self.preprocess_logits_for_metrics is not None:
                predictions = self.preprocess_logits_for_metrics(predictions, None)
            first = predictions[0] if isinstance(predictions, tuple) else predictions
            result |= {"predictions": predictions, "label_ids": first.new_empty((len(first), 0))}
        return result


class HuggingFaceData(TransformersData):
    """The data of a `HuggingFaceTrainer`, whose loaders are those of its methods.

    Args:
        owner: The trainer.
        data: What its loaders are made of.
    """

    def __init__(self, owner: HuggingFaceTrainer, data: TransformersData) -> None:
        vars(self).update(vars(data))
        self._owner = owner

    def with_dataset(self, stage: str, dataset: Any) -> HuggingFaceData:
        """This data with another dataset for a stage, "val" or "test"."""
        data = copy.copy(self)
        data.datasets = {**self.datasets, stage: dataset}
        names = tuple(dataset) if isinstance(dataset, Mapping) else ()
        setattr(data, f"{stage}_names", names)
        return data

    def own_loader(self, stage: str, dataset: Any = None) -> Any:
        """The loader that the arguments make, for "train", "val" or "test"."""
        if stage == "train":
            return super().train_dataloader()
        return self.with_dataset(stage, dataset)._evaluation(stage)

    def train_dataloader(self) -> DataLoader[Any]:
        """The loader that the trainer's method makes."""
        return self._owner.get_train_dataloader()

    def val_dataloader(self) -> Any:
        """The loaders that the trainer's method makes."""
        return self._made("val", self._owner.get_eval_dataloader)

    def test_dataloader(self) -> Any:
        """The loaders that the trainer's method makes."""
        return self._made("test", self._owner.get_test_dataloader)

    def _made(self, stage: str, make: Callable[[Any], Any]) -> Any:
        dataset = self.datasets[stage]
        if dataset is None:
            return None
        return [make(one) for one in dataset.values()] if isinstance(dataset, Mapping) else make(dataset)

    def _find_model(self) -> Any:
        return self._owner.model


class UploadOnSave(TrainerCallback):  # type: ignore[misc]  # transformers has no types here
    """Uploads the model after each checkpoint, for `hub_strategy="every_save"`.

    Args:
        trainer: What uploads.
    """

    def __init__(self, trainer: HuggingFaceTrainer) -> None:
        self._trainer = trainer

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Upload, and wait until that is done."""
        self._trainer.push_to_hub(commit_message=f"Training in progress, step {state.global_step}")


def _renamed(results: Sequence[Mapping[str, float]], stage: str, prefix: str) -> dict[str, float]:
    """The metrics of all loaders, with another prefix."""
    found = {name: float(value) for one in results for name, value in one.items()}
    return {
        f"{prefix}_{name.removeprefix(f'{stage}_')}" if name.startswith(f"{stage}_") else name: value
        for name, value in found.items()
    }


def _copied(value: Any) -> Any:
    """Arrays that stay when the files of the evaluation are removed."""
    if isinstance(value, tuple | list):
        return tuple(_copied(one) for one in value)
    return np.array(value)
