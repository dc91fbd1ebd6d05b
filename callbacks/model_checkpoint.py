"""`ModelCheckpoint`: saves checkpoints while training, and keeps the best and the newest."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from trainkit.callbacks._checkpoint_history import (
    COUNTERS,
    DEFAULT_TEMPLATE,
    CheckpointHistory,
    Save,
    absolute,
    check_folder,
    check_interval,
    check_kept,
    check_subclass,
    check_template,
    default_name,
    fill,
    missing,
    names_in,
    score_of,
)
from trainkit.checkpoint.checksum import check_checksum
from trainkit.checks import choice, whole_number
from trainkit.console import notice, warn
from trainkit.errors import ConfigurationError, Preempted, nearest
from trainkit.names.doors import is_open
from trainkit.state.pretrained import has_adapters

if TYPE_CHECKING:
    from trainkit.module.train_module import TrainModule
    from trainkit.trainer.trainer import Trainer

__all__ = ["ModelCheckpoint"]

_DEFAULT_INTERVAL = timedelta(minutes=30)
_NEVER = (0.0, False)  # value of a metric that was never logged, and whether it is of this step
_ENDINGS = ("end", "exception")  # reasons for a save; the others are "steps", "time", "validation" and "epoch"


class ModelCheckpoint(CheckpointHistory):
    """Saves checkpoints, and deletes old ones. `Trainer` adds `ModelCheckpoint()` by default.

    A checkpoint is a folder `<dirpath>/<filename>` with everything that a run needs to resume exactly. It saves every
    `every_n_train_steps` optimizer steps, every `every_n_epochs` epochs and every `train_time_interval`; if none of them
    is given, every epoch and every 30 minutes. 0 or None turns one off. It also saves at the end of training, on SIGTERM, on
    Ctrl-C and on an error. Training continues while a checkpoint is written. `fast_dev_run` and the sanity check save nothing.

    It keeps the `save_top_k` best by `monitor`, and the `keep_last` newest of the others. It deletes older ones when a
    newer one is complete, but only those that it has saved in this run. A checkpoint is ranked only by a value of its own step.
    One whose parameters are not finite (`manifest.finite` is False), or whose metric is NaN, is never one of the best. Such
    parameters never make it delete or replace the newest checkpoint with finite ones; under a name that is taken, the new one
    is saved as `<name>-nonfinite`.

    Args:
        dirpath: The folder; default: `checkpoints` in the folder of the run's logger (`<save_dir>/<name>/version_N`), or
            in `<default_root_dir>/version_N` without one; set when training starts. The same for all processes.
        filename: Name of a checkpoint, with metrics, `epoch` (from 0) and `step` in braces:
            `"{epoch:02d}-{val_loss:.2f}"`. Default: `"step-{step:08d}"`, also if a metric in it is not of this step or, for a
            name without braces and with a `monitor`, if this is not one of the best. A `/` becomes `_`. A checkpoint of the
            same name is replaced if the new one takes its place among the best or, without a `monitor`, if it is the one before
            and not all are kept; else `-v1`, `-v2`, … is appended.
        monitor: The metric, as passed to `self.log`, that ranks checkpoints; also `"step"` or `"epoch"`.
        verbose: Print each save.
        save_last: True: a file `last` in the folder contains the name of the newest checkpoint. `"link"`: `last` is a symbolic
            link to it, or a file where links cannot be created. Nothing is copied.
        save_top_k: Number of best checkpoints to keep; -1 keeps all checkpoints, 0 ranks none. Needs `monitor`, except -1.
        save_on_exception: Save the last complete step on an error; on SIGTERM and Ctrl-C it is always saved. An error on one
            of several processes saves nothing, because the others are in the middle of a step.
        save_weights_only: Save only the model, from which no run can resume.
        mode: `"min"` if smaller is better, `"max"` if larger is better.
        auto_insert_metric_name: Insert names before values: `epoch=02-val_loss=0.31`.
        every_n_train_steps: Number of optimizer steps between two saves.
        train_time_interval: Time between two saves; `timedelta(0)`: save after every optimizer step.
        every_n_epochs: Number of epochs between two saves.
        save_on_train_epoch_end: When to save by epochs. True: at the end of the training epoch, False: after each validation
            in it. None: after each validation if `monitor` is a metric logged by then, else at the end of the epoch.
        enable_version_counter: False: a checkpoint replaces one of the same name, unless that is one of the best and remains
            so.
        keep_last: Number of the newest checkpoints to keep that are not among the best; -1: all. 0: save only the best. Other
            numbers are replaced by `Trainer(save_total_limit=)`, which counts the best ones too.
        save: `"all"` of the model, or `"trainable"`: trained parameters, buffers and a fingerprint of the others; of a PEFT
            model whose vocabulary was resized also the embeddings. None: `"trainable"` for a model with PEFT adapters.
        checksum: How its files are checked: `"xxh3-128"` finds damage; `"sha256"`, slower, also what someone replaces.
            None: `Trainer(checksum=)`.
        also: `"ckpt"`: keep a file `<filename>.ckpt` next to each checkpoint, for programs that read weights with
            `torch.load(path)["state_dict"]`: Lightning's keys, without optimizers. It is written when the checkpoint is
            complete, and removed with it; with `save_last`, `last.ckpt` is a link to the newest. Wherever trainkit is given the
            file, it uses the folder. In the file a numpy array is a tensor or a list, and a notice says so, unless the program
            has called `torch.serialization.add_safe_globals` with what the notice names. None: `"ckpt"` where
            `import lightning` gives trainkit's names, and there the paths of the callback name the files; else False.

    Attributes:
        current_score: The value of `monitor` that ranks the newest; None if it is not ranked.
        CHECKPOINT_EQUALS_CHAR: Text between the name and the value of a metric in `filename`. Change it in a subclass.
        CHECKPOINT_JOIN_CHAR, CHECKPOINT_NAME_LAST, FILE_EXTENSION, STARTING_VERSION: As names are formed; not to be changed.

    Raises:
        ConfigurationError: An argument out of its range.
        UnsupportedArgumentError: A constant of the class was changed that must not be; when the fit starts.
        MissingMetricError: `monitor`, or a metric in `filename`, was never logged; while training.

    Example:
        ```python
        best = ModelCheckpoint(monitor="val_loss", filename="{epoch}-{val_loss:.3f}", save_top_k=3)
        Trainer(callbacks=[best]).fit(module)
        print(best.best_model_path, float(best.best_model_score))
        ```
    """

    runs_last = True

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | Literal["link"] | None = None,
        save_top_k: int = 1,
        save_on_exception: bool = True,
        save_weights_only: bool = False,
        mode: str = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
        keep_last: int = 2,
        save: Literal["all", "trainable"] | None = None,
        checksum: str | None = None,
        also: Literal["ckpt", False] | None = None,
    ) -> None:
        super().__init__()
        if also not in ("ckpt", False, None):
            raise ConfigurationError(f"ModelCheckpoint(also=) must be 'ckpt', False or None, not {also!r}.")
        choice(mode, "ModelCheckpoint(mode=)", ("min", "max"))
        choice(save, "ModelCheckpoint(save=)", ("all", "trainable"), optional=True)
        check_checksum(checksum, "ModelCheckpoint(checksum=)", optional=True)
        every_n_train_steps = whole_number(every_n_train_steps, "ModelCheckpoint(every_n_train_steps=)", 0, optional=True)
        every_n_epochs = whole_number(every_n_epochs, "ModelCheckpoint(every_n_epochs=)", 0, optional=True)
        check_folder(dirpath)
        if filename is not None:
            check_template(filename)
        check_kept(monitor, save_top_k, keep_last, save_last)
        nothing_given = every_n_train_steps is None and every_n_epochs is None and train_time_interval is None
        self.dirpath = None if dirpath is None else absolute(dirpath)
        self.filename = filename
        self.monitor = monitor
        self.verbose = verbose
        self.save_last = save_last
        self.save_top_k = save_top_k
        self.save_on_exception = save_on_exception
        self.save_weights_only = save_weights_only
        self.mode = mode
        self.auto_insert_metric_name = auto_insert_metric_name
        self.every_n_train_steps = every_n_train_steps or 0
        self.train_time_interval = _DEFAULT_INTERVAL if nothing_given else check_interval(train_time_interval)
        self.every_n_epochs = 1 if nothing_given else every_n_epochs or 0
        self.save_on_train_epoch_end = save_on_train_epoch_end
        self.enable_version_counter = enable_version_counter
        self.keep_last = keep_last
        self.save = save
        self.checksum = checksum
        self._names_files = also is None and is_open("lightning")
        self.also: Literal["ckpt", False] = "ckpt" if self._names_files else also or False

        self._default_dirpath = dirpath is None
        self._default_triggers = nothing_given
        self._start_over()

    def _start_over(self) -> None:
        self._start_history()
        self._saved: tuple[Any, ...] | None = None  # position of the newest checkpoint
        self._postponed: str | None = None  # why a save is due at the end of the epoch
        self._epoch = 0  # the last one that began
        # These count from the start of this fit, without the sanity check.
        self._begun = self._validates = self._validated = self._epoch_ended = False
        self._at_train_epoch_end = self._decided = False
        self._content = self.save
        self._limit = None

    @property
    def state_key(self) -> str:
        """The key of its state and of its checkpoints; two instances need different triggers or metrics."""
        names = ("monitor", "mode", "every_n_train_steps", "every_n_epochs", "train_time_interval")
        return f"ModelCheckpoint{ {name: getattr(self, name) for name in names} }"

    # ------------------------------------------------------------------------------------------------ when one is due

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if stage != "fit":
            return
        check_subclass(self)
        self._start_over()  # each fit is a new run; a resumed one loads its state after this
        same = [one for one in trainer.callbacks if isinstance(one, ModelCheckpoint) and one.state_key == self.state_key]
        if any(one is not self and one.user_dirpath == self.user_dirpath for one in same):
            raise ConfigurationError(
                f"two callbacks are {self.state_key} and save to {self.user_dirpath or 'the folder of the run'}: each would "
                "delete checkpoints of the other. Fix: give one of them another dirpath, monitor or every_n_train_steps"
            )
        if self._default_dirpath:  # A fast_dev_run saves nothing, but a script may build a path from dirpath.
            self.dirpath = os.path.join(trainer.default_root_dir, "checkpoints") if trainer.fast_dev_run else None
        if trainer.fast_dev_run:
            return
        self._limit = trainer._save_policy.total_limit
        if self.dirpath is None:
            trainer._save_policy.save_folders.use_of_run(self._use_folder)
        else:
            trainer._save_policy.use_folder(Path(self.dirpath))

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._epoch = trainer.current_epoch
        self._validates = any(count > 0 for count in trainer.num_val_batches)
        at_end = self.save_on_train_epoch_end
        self._at_train_epoch_end = not self._validates or (self.monitor in (None, *COUNTERS) if at_end is None else at_end)
        self._decided = at_end is not None or self._at_train_epoch_end
        if trainer.fast_dev_run:
            return
        if self.save is None and has_adapters(module):
            self._content = "trainable"
            self._notice_once(
                "ModelCheckpoint: the model has PEFT adapters, so it saves only trained parameters, with a fingerprint of the "
                "others. To save all of them: ModelCheckpoint(save='all')"
            )
        checkpointing = trainer._save_policy
        if self.also and trainer.is_global_zero:
            self._write_missing_files()
        self._begun = True
        self._saved = checkpointing.position  # Nothing has changed yet.
        checkpointing.reserve(weights_only=self.save_weights_only, save=self._content)
        if self.every_n_train_steps:
            checkpointing.safe_points.every_n_steps(self.every_n_train_steps, partial(self._due, trainer, "steps"))
        if self.train_time_interval is not None:
            checkpointing.safe_points.every(self.train_time_interval, partial(self._due, trainer, "time"))

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._epoch = trainer.current_epoch

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.sanity_checking or trainer.stage != "fit":
            return
        self._validated = True
        if trainer.fast_dev_run or self._at_train_epoch_end:
            return
        if not self._decided and self.monitor is not None:
            values = self._values(trainer)
            if not values.get(self.monitor, _NEVER)[1]:
                self._notice_once(
                    f"ModelCheckpoint: {self.monitor!r} was not logged before the end of validation, so it is looked for "
                    f"at the end of the training epoch.{nearest(self.monitor, values)}"
                )
                return
            self._decided = True
        if self._counts(trainer):
            self._request(trainer, "validation")

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._epoch_ended = True
        if trainer.fast_dev_run:
            return
        if not self._decided:  # decided now, because validation did not log the metric
            self._at_train_epoch_end = self._decided = self._validated
        why, self._postponed = self._postponed, None
        if self._at_train_epoch_end and self._counts(trainer):
            why = "epoch"
        if why is not None:
            trainer._save_policy.safe_points.request(partial(self._save, trainer, why))

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        if not trainer.fast_dev_run:
            trainer._save_policy.wait()  # a save in flight may still fail
            self._save(trainer, "end")
            if self.also:
                trainer.strategy.world.from_main(None)  # the main process has written the file before any other opens it
        if self.monitor is not None and self._all_logged:
            values = self._values(trainer)
            if self.monitor not in values:
                raise missing(trainer, self.monitor, values)  # training ended before a check

    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        if trainer.stage != "fit" or not self._begun or not self._saves_at(trainer, exception):
            return
        reason = trainer._save_policy.why_not_savable(exception)
        if reason is None or trainer.strategy.world.size == 1:
            trainer._save_policy.wait()
        if reason is None:
            self._save(trainer, "exception")
        # with several processes, a checkpoint being written may never be complete
        path = self.last_model_path if reason is None else trainer._save_policy.newest
        newest = f"the newest checkpoint is {path}" if path else "this run has saved no checkpoint"
        why = "" if reason is None else f"nothing was saved, because {reason}; "
        notice(f"ModelCheckpoint, after {type(exception).__name__}: {why}{newest}")

    def _saves_at(self, trainer: Trainer, exception: BaseException) -> bool:
        """Whether this is the first callback that would save a checkpoint to resume from: one is enough."""
        always = isinstance(exception, Preempted | KeyboardInterrupt)
        able = (one for one in trainer.callbacks if isinstance(one, ModelCheckpoint) and not one.save_weights_only)
        return next((one for one in able if always or one.save_on_exception), None) is self

    def _due(self, trainer: Trainer, why: str) -> None:
        """Called at a safe point. After the last batch of an epoch, wait for its end and save one checkpoint, not two."""
        if trainer.is_last_batch:
            self._postponed = why if self._postponed in (None, "time") else self._postponed
        else:
            self._save(trainer, why)

    def _request(self, trainer: Trainer, why: str) -> None:
        """Save at the next safe point; after the last batch of an epoch, at its end. Called in a hook."""
        if trainer.is_last_batch:
            self._postponed = why
        else:
            trainer._save_policy.safe_points.request(partial(self._save, trainer, why))

    def _counts(self, trainer: Trainer) -> bool:
        """Whether the epoch is one of every `every_n_epochs`."""
        return self.every_n_epochs > 0 and (trainer.current_epoch + 1) % self.every_n_epochs == 0

    # -------------------------------------------------------------------------------------------------------- saving

    def _save(self, trainer: Trainer, why: str) -> None:
        checkpointing, from_main = trainer._save_policy, trainer.strategy.world.from_main
        save = Save(checkpointing.position, None)
        if save.position == self._saved:
            return
        values = self._values(trainer)
        save.score = self._score(trainer, why, values)
        if self.keep_last == 0 and self.monitor and why != "exception" and not from_main("" in self._best_with("", save.score)):
            return
        checkpointing.wait()  # if the previous save fails, undo it before recording this one
        folder = Path(self.dirpath or "")
        name, replace = self._reuse(folder, self._name(trainer, why, values, save.score), save.score, checkpointing.run_id)
        try:
            path = checkpointing.save(
                folder,
                name,
                weights_only=self.save_weights_only,
                save=self._content,
                saved_by=self.state_key,
                metrics={metric: value for metric, (value, present) in values.items() if present},
                replace=replace,
                blocking=why in _ENDINGS,
                checksum=self.checksum,
                before_capture=partial(self._on_commit, save),
                committed=partial(self._complete, save, checkpointing, trainer.is_global_zero),
                failed=partial(self._on_failure, save),
            )
        except BaseException:
            self._on_failure(save)
            raise
        if self.verbose and save.path:
            score, best = save.score, self.best_model_score
            value = "" if score is None else f", {self.monitor} = {float(score):.6g}"
            value += "" if best is None else f" (best: {float(best):.6g})"
            notice(f"epoch {self._epoch}, step {trainer.global_step}{value}: saving to {path}")

    def _values(self, trainer: Trainer) -> dict[str, tuple[float, bool]]:
        """All metrics, with the counter that is the monitor, unless a metric of this name was logged."""
        values = trainer._save_policy.metrics()
        if self.monitor in COUNTERS:
            values.setdefault(self.monitor, (float(self._epoch if self.monitor == "epoch" else trainer.global_step), True))
        return values

    def _on_commit(self, save: Save, path: Path) -> None:
        self._add(save, path)
        self._saved = save.position

    def _on_failure(self, save: Save, *_: Exception) -> None:
        if self._undo(save) and self._saved == save.position:
            self._saved = None  # the next save tries again

    @property
    def _all_logged(self) -> bool:
        """Whether all metrics have been logged: an epoch has ended, and a validation if there are any."""
        return self._epoch_ended and (self._validated or not self._validates)

    def _score(self, trainer: Trainer, why: str, values: Mapping[str, tuple[float, bool]]) -> Tensor | None:
        """The value of the monitor in the step that is saved; None if it has no value."""
        if self.monitor is None:
            return None
        if self.monitor not in values:
            if why in _ENDINGS or not self._all_logged:
                return None
            raise missing(trainer, self.monitor, values)
        value, present = values[self.monitor]
        if present:
            if math.isnan(value):
                self._notice_once(
                    f"ModelCheckpoint: {self.monitor!r} is NaN. Such a checkpoint is not ranked; keep_last={self.keep_last} "
                    "decides how long it is kept."
                )
            return score_of(value)
        if why not in _ENDINGS and not (why == "time" and self._default_triggers) and "stale" not in self._reported:
            self._reported.add("stale")
            warn(
                f"ModelCheckpoint: {self.monitor!r} was logged before step {trainer.global_step}, which is saved now. "
                "Such a checkpoint is not ranked; keep_last decides how long it is kept. Fix: save when the metric is logged, "
                "with every_n_epochs=1 after each validation, or with save_on_train_epoch_end=True at the end of each training "
                "epoch; or validate when you save, Trainer(val_every_n_steps=...)"
            )
        return None

    def _name(self, trainer: Trainer, why: str, metrics: Mapping[str, tuple[float, bool]], score: Tensor | None) -> str:
        known = {**metrics, "epoch": (self._epoch, True), "step": (trainer.global_step, True)}
        template = self.filename or DEFAULT_TEMPLATE
        if self._would_mislead(names_in(template), why, known, score):
            template = DEFAULT_TEMPLATE
        insert = template is self.filename and self.auto_insert_metric_name
        numbers = {name: value for name, (value, _) in known.items()}
        return fill(template, numbers, insert=insert, equals=self.CHECKPOINT_EQUALS_CHAR)

    def _would_mislead(self, used: list[str], why: str, known: Mapping[str, tuple[float, bool]], score: Tensor | None) -> bool:
        """Whether a name with these values would lack one, have that of an earlier step, or name another than the best."""
        unknown = [name for name in used if name not in known]
        if unknown and (why in _ENDINGS or not self._all_logged):
            if why != "exception" or not self._all_logged:  # The exception itself may be that a metric is missing.
                self._notice_once(default_name(unknown, self._all_logged, self._validates))
            return True
        if used:
            return any(name in known and not known[name][1] for name in used)
        return self.monitor is not None and self.save_top_k != 0 and "" not in self._best_with("", score)
