"""The arguments of `ModelCheckpoint` and its history: which checkpoints are the best or the newest, and which can be removed.

A name is filled from a template: `"{epoch:02d}-{val_loss:.2f}"`.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Any, Literal

import torch
import yaml
from torch import Tensor

from trainkit.callbacks.checkpoint import Checkpoint
from trainkit.checkpoint.ckpt_file import file_of, is_of_others, link_last, remove_file_of, write_ckpt
from trainkit.checkpoint.commit import CommitResult
from trainkit.checkpoint.folder import ListedCheckpoint, list_checkpoints, remove, write_pointer
from trainkit.checkpoint.manifest import Manifest, checkpoint_identity, is_checkpoint
from trainkit.checkpoint.pointers import POINTER, checkpoint_of, resolve_pointer
from trainkit.checkpoint.reader import inspect_checkpoint, open_checkpoint
from trainkit.checkpoint.urls import RemoteCheckpoint, remote_sync
from trainkit.checks import whole_number
from trainkit.console import notice, prints_here
from trainkit.errors import CheckpointError, ConfigurationError, MissingMetricError, UnsupportedArgumentError, nearest
from trainkit.module.monitors import how_to_log, not_logged
from trainkit.paths import local_path

if TYPE_CHECKING:
    from trainkit.trainer.trainer import Trainer

__all__: list[str] = []

COUNTERS = ("epoch", "step")
DEFAULT_TEMPLATE = "step-{step:08d}"
EQUALS = "="
# Methods of Lightning's class that subclasses of other packages override.
_PRIVATE = (
    *("_save_checkpoint", "_remove_checkpoint", "_update_best_and_save", "_save_topk_checkpoint", "_save_last_checkpoint"),
    *("_save_none_monitor_checkpoint", "_save_monitor_checkpoint", "_monitor_candidates", "_should_skip_saving_checkpoint"),
)
_FIX = "Fix: ModelCheckpoint(filename='{epoch:02d}-{val_loss:.2f}')"


def check_template(template: Any) -> None:
    """Check that `template` can be filled, and that the result is a plain file name."""
    if not isinstance(template, str) or not template:
        raise ConfigurationError(f"ModelCheckpoint(filename=...) expected a template or None, got {template!r}. {_FIX}")
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise ConfigurationError(f"ModelCheckpoint(filename={template!r}): {error}. {_FIX}") from error
    for literal, name, spec, conversion in parts:
        if "/" in literal or "\\" in literal or ".." in literal:
            raise ConfigurationError(
                f"ModelCheckpoint(filename={template!r}) expected a plain name, got a path. "
                f"The argument dirpath sets the folder. {_FIX}"
            )
        if name is not None:
            _check_field(template, name, spec or "", conversion)
    sample = fill(template, {name: 0 if name in COUNTERS else 0.5 for name in names_in(template)}, insert=False)
    if sample == "last" or sample.startswith("."):
        reason = "'last' is the pointer of save_last" if sample == "last" else "a name that starts with '.' is hidden"
        raise ConfigurationError(f"ModelCheckpoint(filename={template!r}): {reason}. {_FIX}")


def _check_field(template: str, name: str, spec: str, conversion: str | None) -> None:
    example: int | float = 0 if name in COUNTERS else 0.5
    kind = "a whole number" if name in COUNTERS else "a float"
    try:
        if not name or conversion or "{" in spec:
            raise ValueError("a field is a name and, after a colon, a format")
        format(example, spec)
    except ValueError as error:
        field = name + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
        raise ConfigurationError(
            f"ModelCheckpoint(filename={template!r}): {{{field}}} cannot be filled with {kind}: {error}. {_FIX}"
        ) from error


def names_in(template: str) -> list[str]:
    """The metrics and counters in the template, each once."""
    return list(dict.fromkeys(name for _, name, _, _ in Formatter().parse(template) if name is not None))


def fill(template: str, values: Mapping[str, Any], *, insert: bool, known: Iterable[str] = (), equals: str = EQUALS) -> str:
    """Fill the template.

    Args:
        template: Checked by `check_template`.
        values: Numbers, or tensors of one element, by name.
        insert: Insert `name=` before each value.
        known: Other logged names, for the message.
        equals: The text between name and value.
    """
    text = ""
    for literal, name, spec, _ in Formatter().parse(template):
        text += literal
        if name is None:
            continue
        if name not in values:
            logged = sorted({*values, *known})
            raise MissingMetricError(
                f"ModelCheckpoint(filename={template!r}) needs {name!r}, which was not logged. Known: "
                f"{', '.join(map(repr, logged)) or 'nothing'}.{nearest(name, logged)} Fix: log it, self.log({name!r}, value), "
                "or remove it from filename"
            )
        number = int(values[name]) if name in COUNTERS else float(values[name])
        text += (f"{name}{equals}" if insert else "") + format(number, spec or "")
    return "".join("_" if character in "/\\" or ord(character) < 32 else character for character in text)


def default_name(unknown: list[str], all_logged: bool, validates: bool) -> str:
    """The notice that a name is the default one.

    Args:
        unknown: The metrics in the template that were not logged.
        all_logged: Whether all metrics have been logged.
        validates: Whether the fit has validations.
    """
    text = f"ModelCheckpoint: {', '.join(unknown)} in filename was {'never logged' if all_logged else 'not logged yet'}"
    until = f" It must be logged by the end of the first epoch{' with a validation' if validates else ''}."
    return f"{text}, so the default name is used." + ("" if all_logged else until)


def missing(trainer: Trainer, monitor: str, logged: Iterable[str]) -> MissingMetricError:
    """The error for a monitor that was never logged."""
    return MissingMetricError(f"{not_logged(trainer, 'ModelCheckpoint', monitor, logged)} {how_to_log(monitor)}.")


def absolute(path: str | os.PathLike[str]) -> str:
    """The absolute path of a folder, or of the staging folder of a URL."""
    return os.path.abspath(local_path(path, "dirpath"))


def check_folder(dirpath: Any) -> None:
    """Check that `dirpath` is a folder, a URL or None."""
    is_path = isinstance(dirpath, str | os.PathLike) and os.fspath(dirpath) != ""
    if is_path:
        local_path(dirpath, "dirpath")
    elif dirpath is not None:
        raise ConfigurationError(
            f"ModelCheckpoint(dirpath=...) expected a folder, a URL or None, got {dirpath!r}. "
            "Fix: ModelCheckpoint(dirpath='runs/checkpoints')"
        )


def check_kept(monitor: Any, save_top_k: Any, keep_last: Any, save_last: Any) -> None:
    """Check the arguments that determine which checkpoints to keep."""
    if monitor is not None and (not isinstance(monitor, str) or not monitor):
        raise ConfigurationError(
            f"ModelCheckpoint(monitor=...) expected the name of a logged metric or None, got {monitor!r}. "
            "Fix: ModelCheckpoint(monitor='val_loss'), and in validation_step: self.log('val_loss', loss)"
        )
    whole_number(save_top_k, "ModelCheckpoint(save_top_k=)", -1)
    whole_number(keep_last, "ModelCheckpoint(keep_last=)", -1)
    if save_last not in (None, True, False, "link"):
        raise ConfigurationError(
            f"ModelCheckpoint(save_last=...) expected True, False, 'link' or None, got {save_last!r}. Fix: save_last=True; the "
            "file 'last' then contains the name of the newest checkpoint, and nothing is copied"
        )
    if monitor is None and save_top_k > 1:
        raise ConfigurationError(
            f"ModelCheckpoint(save_top_k={save_top_k}) expected a monitor that ranks checkpoints. Fix: "
            f"monitor='val_loss' or, to keep the newest, keep_last={save_top_k}"
        )
    if keep_last == 0 and (save_top_k == 0 or (monitor is None and save_top_k != -1)):
        raise ConfigurationError(
            "ModelCheckpoint(keep_last=0) keeps only the best checkpoints, which need a monitor and save_top_k. Fix: "
            "keep_last=1 to keep the newest, or monitor='val_loss'"
        )


# Constants of Lightning's ModelCheckpoint that cannot be changed here: the value, and what to do instead.
_FIXED: dict[str, tuple[Any, str]] = {
    "CHECKPOINT_JOIN_CHAR": ("-", "write the characters in filename: filename='{epoch}_{step}'"),
    "CHECKPOINT_NAME_LAST": ("last", "remove it, and resume with ckpt_path='last', whatever the name of the checkpoint"),
    "FILE_EXTENSION": ("", "remove it: a checkpoint is a folder. Or write it in filename: filename='{epoch}.ckpt'"),
    "STARTING_VERSION": (1, "remove it"),
}


def check_subclass(callback: object) -> None:
    """Check that a subclass changes nothing that trainkit cannot follow.

    Raises:
        UnsupportedArgumentError: It has another value of a constant, because checkpoints are found by their names; or it
            overrides a private method of Lightning's class, which is never called.
    """
    kind = type(callback)
    for name, (value, fix) in _FIXED.items():
        now = getattr(callback, name)
        if now != value:
            raise UnsupportedArgumentError(
                f"{kind.__name__}.{name} is {now!r}, but names of checkpoints always have {value!r} here. Fix: {fix}"
            )
    if private := next((name for name in _PRIVATE if hasattr(kind, name)), None):
        raise UnsupportedArgumentError(
            f"{kind.__name__}.{private} would never be called: it overrides a private method of Lightning's class, and "
            "trainkit saves in another way. Fix: use ModelCheckpoint itself, and on_save_checkpoint or "
            "Logger.after_save_checkpoint for what is to happen at a save"
        )


def check_interval(interval: Any) -> timedelta | None:
    """Check `train_time_interval`; 0 is None."""
    if interval is None or (type(interval) is int and interval == 0):
        return None
    if not isinstance(interval, timedelta) or interval < timedelta(0):
        raise ConfigurationError(
            f"ModelCheckpoint(train_time_interval=...) expected a timedelta that is not negative, or None, got {interval!r}. "
            "Fix: ModelCheckpoint(train_time_interval=timedelta(hours=1))"
        )
    return interval


# -------------------------------------------------------------------------------------------------- what has been saved


@dataclass
class Save:
    """One save in progress, and what it has changed in the history, so that this can be undone.

    Attributes:
        position: Of the run.
        score: The monitor's value of that step, None if there is none.
        path: The checkpoint, "" before it is known and after the save has failed.
        committed: It is complete.
    """

    position: tuple[Any, ...]
    score: Tensor | None
    path: str = ""
    committed: bool = False
    best: frozenset[str] = frozenset()  # the best checkpoints, with this one
    displaced: dict[str, Tensor] = field(default_factory=dict)  # Checkpoints that are no longer among the best because of it.
    # the newest before it, its score, and what it displaced
    before: tuple[str, Tensor | None, dict[str, Tensor]] = field(default_factory=lambda: ("", None, {}))
    finite: tuple[str, ...] = ()  # the newest finite ones before it


class CheckpointHistory(Checkpoint):
    """The part of `ModelCheckpoint` that records what has been saved.

    The history is updated before a checkpoint is written, so that the checkpoint contains itself, and the update is undone if
    the save fails. Mappings are replaced, never changed: the writer's thread reads them.

    Attributes:
        best_k_models: Path → score of the best checkpoints, the best first, of equals the older first. One whose score is NaN,
            or whose parameters are not finite, is never one of them.
        last_model_path: The newest checkpoint, complete or being written; "" if there is none.
        current_score: The score of the newest, None if it was not ranked.
    """

    CHECKPOINT_EQUALS_CHAR: str = EQUALS
    CHECKPOINT_JOIN_CHAR: str = "-"
    CHECKPOINT_NAME_LAST: str = POINTER
    FILE_EXTENSION: str = ""
    STARTING_VERSION: int = 1

    dirpath: str | None
    filename: str | None
    auto_insert_metric_name: bool
    monitor: str | None
    mode: str
    save_top_k: int
    save_last: bool | Literal["link"] | None
    keep_last: int
    enable_version_counter: bool
    also: Literal["ckpt", False]
    _default_dirpath: bool
    _names_files: bool
    _limit: int | None  # maximum number of checkpoints in all; None: keep_last decides

    def _start_history(self) -> None:
        self._ranking: dict[str, Tensor] = {}  # path of the folder → value, the best first
        self._newest = ""
        self.current_score: Tensor | None = None
        # the newest that are not known to have parameters that are not finite; the first is not known before it is written
        self._finite: tuple[str, ...] = ()
        self._reported: set[str] = set()  # what was printed once in this fit
        self._displaced: dict[str, Tensor] = {}  # no longer among the best because of the newest

    @property
    def user_dirpath(self) -> str | None:
        """`dirpath` as the user gave it; None: the folder of the run."""
        return None if self._default_dirpath else self.dirpath

    def _use_folder(self, folder: Path) -> None:
        """Save to the folder of the run; called when it is known."""
        self.dirpath = str(folder)

    def _shown(self, folder: str) -> str:
        """The path of a checkpoint for code of the user's: its file where `import lightning` gives trainkit."""
        return str(file_of(Path(folder))) if folder and self._names_files else folder

    @property
    def best_k_models(self) -> dict[str, Tensor]:
        """Path → value of `monitor` of the `save_top_k` best checkpoints, the best first; scalar tensors."""
        return {self._shown(path): score for path, score in self._ranking.items()}

    @best_k_models.setter
    def best_k_models(self, scores: Mapping[str, Tensor]) -> None:
        self._ranking = {str(resolve_pointer(Path(path))): score for path, score in scores.items()}

    @property
    def last_model_path(self) -> str:
        """The newest checkpoint, complete or being written; "" if there is none."""
        return self._shown(self._newest)

    @property
    def best_model_path(self) -> str:
        """The best checkpoint; without `monitor` the newest whose parameters are finite, if any; "" if there is none."""
        if self.monitor is None:
            return self._shown(next(iter(self._finite), self._newest))
        return self._shown(next(iter(self._ranking), ""))

    @property
    def best_model_score(self) -> Tensor | None:
        """The value of `monitor` of the best checkpoint, a scalar float64 tensor; None if there is none."""
        return next(iter(self._ranking.values()), None)

    @property
    def kth_best_model_path(self) -> str:
        """The worst of the `save_top_k` best checkpoints; "" while there are fewer."""
        paths = list(self.best_k_models)
        return paths[-1] if paths and len(paths) >= self.save_top_k else ""

    @property
    def kth_value(self) -> Tensor:
        """The value of `monitor` that a checkpoint must beat to be one of the `save_top_k` best, a scalar float64 tensor.

        That of the worst of them; while there are fewer, infinity, or with `mode="max"` minus infinity.
        """
        path = self.kth_best_model_path
        return self.best_k_models[path] if path else score_of(math.inf if self.mode == "min" else -math.inf)

    def check_monitor_top_k(self, trainer: Trainer, current: Tensor | None = None) -> bool:
        """Whether a checkpoint with a value of `monitor` would be one of the `save_top_k` best. All processes must call it.

        Args:
            current: The value; that of the main process counts. None and NaN are never among the best.
        """
        among = current is not None and "" in self._best_with("", score_of(float(current)))
        return bool(trainer.strategy.world.from_main(among))

    def file_exists(self, filepath: str | os.PathLike[str], trainer: Trainer) -> bool:
        """Whether the main process sees something at a path. All processes must call it, and get the same answer."""
        return bool(trainer.strategy.world.from_main(os.path.lexists(filepath)))

    def to_yaml(self, filepath: str | os.PathLike[str] | None = None) -> None:
        """Write `best_k_models` as YAML, path → value, the best first. Only the main process writes.

        Args:
            filepath: The file. Default: `best_k_models.yaml` in `dirpath`, which is known when training has begun.
        """
        if prints_here():
            best = {path: float(score) for path, score in self.best_k_models.items()}
            Path(filepath or os.path.join(self.dirpath or "", "best_k_models.yaml")).write_text(
                yaml.safe_dump(best, sort_keys=False), "utf-8"
            )

    def format_checkpoint_name(
        self, metrics: Mapping[str, Any], filename: str | None = None, ver: int | None = None, prefix: str | None = None
    ) -> str:
        """The path of a checkpoint.

        Args:
            metrics: By name, including `epoch` and `step`; numbers, or tensors of one element.
            filename: Another template.
            ver: N of `-vN`.
            prefix: A text before the name, with `-` between.

        Raises:
            MissingMetricError: The template needs a metric that is missing. Lightning inserts 0.
        """
        template = filename or self.filename
        insert = template is not None and self.auto_insert_metric_name
        name = fill(template or DEFAULT_TEMPLATE, metrics, insert=insert, equals=self.CHECKPOINT_EQUALS_CHAR)
        name = name if prefix is None else f"{prefix}-{name}"
        return os.path.join(self.dirpath or "", name if ver is None else f"{name}-v{ver}")

    def best_in(self, listed: Sequence[ListedCheckpoint]) -> str:
        """The best of the checkpoints that the newest run of such a callback has saved; "" if there is none.

        Such a callback has the same monitor and mode; when it saves does not matter. It reads only the manifests, so
        weights-only checkpoints count too, and those whose parameters are not finite do not.
        """
        manifests = [(str(one.path), one.manifest) for one in listed if one.manifest is not None and not one.problem]
        manifests = [(path, manifest) for path, manifest in manifests if self._ranks_like(manifest.saved_by)]
        if self.monitor is None:
            return manifests[0][0] if manifests else ""
        run = [(path, m) for path, m in manifests if m.run_id == manifests[0][1].run_id and m.finite is not False]
        scores = {path: score_of(m.metrics[self.monitor]) for path, m in reversed(run) if self.monitor in m.metrics}
        return next(iter(self._best_with("", None, scores)), "")

    def _ranks_like(self, saved_by: str | None) -> bool:
        """Whether a checkpoint was saved by a callback with the same monitor and mode. Without a monitor: by the same one."""
        ranking = f"ModelCheckpoint{ {'monitor': self.monitor, 'mode': self.mode} }"[:-1] + ","
        return saved_by == self.state_key or (self.monitor is not None and (saved_by or "").startswith(ranking))

    def _best_with(self, path: str, score: Tensor | None, others: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The best of `others` (default: the best so far) and of a newer checkpoint, in order."""
        scores = {known: s for known, s in (self._ranking if others is None else others).items() if known != path}
        if score is not None:
            scores[path] = score
        sign = 1.0 if self.mode == "min" else -1.0
        ranked = [item for item in scores.items() if not math.isnan(item[1])]
        ordered = sorted(ranked, key=lambda item: sign * float(item[1]))
        return dict(ordered if self.save_top_k == -1 else ordered[: self.save_top_k])

    def _reuse(self, folder: Path, name: str, score: Tensor | None, run_id: str) -> tuple[str, bool]:
        """The name of a new checkpoint, and whether it replaces the one of that name.

        It takes the name of a checkpoint that it displaces from the best, so that `filename="best"` is the best at any time.
        Without a monitor it takes that of the one before, so that `filename="model"` is the newest. If it turns out that its
        parameters are not finite, `commit` gives it another name. The checkpoint of another run, whose state a run may have
        restored, is never replaced. A name whose file is that of another program is taken.
        """
        name = self._with_free_file(folder, name)
        path, best = str(folder / name), self._best_with("", score)
        if not self.enable_version_counter:  # a worse one must not replace one of the best
            return name, path not in self._ranking or path not in best
        same = re.compile(re.escape(path) + r"(-v\d+)?")
        newest = [*self._finite[:1]] if self.monitor is None and -1 not in (self.save_top_k, self.keep_last) else []
        displaced = [known for known in [*self._ranking, *newest] if known not in best and same.fullmatch(known)]
        if not os.path.lexists(path):
            return name, False
        saved = self._list_saved(folder, run_id)
        if path in saved and saved[path].finite is False:
            return name, True
        return next(((os.path.basename(known), True) for known in displaced if known in saved), (name, False))

    def _with_free_file(self, folder: Path, name: str) -> str:
        """`name`, or the first of `name-v1`, … whose file can be written, since paths may name the file."""
        number, free = 0, name
        while self.also and is_of_others(file_of(folder / free)):
            number += 1
            free = f"{name}-v{number}"
        return free

    def _list_saved(self, folder: Path, run_id: str) -> dict[str, Manifest]:
        """The good checkpoints of this run and callback in a folder: path → manifest."""
        return {
            str(listed.path): listed.manifest
            for listed in list_checkpoints(folder)
            if listed.manifest is not None
            and listed.problem is None
            and (listed.manifest.run_id, listed.manifest.saved_by) == (run_id, self.state_key)
        }

    def _add(self, save: Save, path: Path) -> None:
        """Record a checkpoint that is about to be written to `path`."""
        save.path = str(path)
        save.before = (self._newest, self.current_score, self._displaced)
        save.finite = self._finite
        self._finite = (save.path, *self._finite[:1])
        best = self._best_with(save.path, save.score)
        save.best = frozenset(best)
        save.displaced = {known: s for known, s in self._ranking.items() if known == save.path or known not in best}
        self._displaced = save.displaced
        self._ranking = best
        self._newest = save.path
        self.current_score = save.score

    def _undo(self, save: Save) -> bool:
        """Undo `_add` after a failed save; later checkpoints stay. Returns whether there was anything to undo."""
        path, save.path = save.path, ""
        if not path or save.committed:
            return False
        self._forget(path, save)
        if self._newest == path:
            self._newest, self.current_score, self._displaced = save.before
        return True

    def _forget(self, path: str, save: Save) -> None:
        """Rank the best without a checkpoint that was added, with those that it displaced."""
        back = {known: score for known, score in save.displaced.items() if os.path.isdir(known)}
        others = {known: score for known, score in self._ranking.items() if known != path}
        self._ranking = self._best_with("", None, {**back, **others})
        later = self._finite[: self._finite.index(path)] if path in self._finite else self._finite
        self._finite = tuple(dict.fromkeys((*later, *save.finite)))[:2]

    def _complete(self, save: Save, checkpointing: Any, main: bool, written: CommitResult) -> None:
        """Called in the writer's thread when a checkpoint is complete; the main process removes outdated ones."""
        save.committed = True
        if not written.finite:
            self._forget(save.path, save)
            if self._newest == save.path:
                self._newest = str(written.path)
            save.path = str(written.path)
            save.best = frozenset(self._ranking)
        if not main:
            return
        path, finite = Path(save.path), written.finite
        try:
            if self.also:
                with suppress(CheckpointError, OSError):  # it is tried again below, where there may be more room on the disk
                    self._write_file(path)
            if self.save_last and (finite or not self._finite):  # `last` is for resuming
                self._try(path, self._point_to)
            self._try(path, lambda _: self._remove_outdated(save, checkpointing.run_id, finite))
            if self.also:
                self._write_missing_files()
        finally:
            checkpointing.tell_loggers(self)  # which may read the file, whose path they are given

    def _try(self, path: Path, step: Callable[[Path], None]) -> None:
        """Do what follows a save. If it fails, the checkpoint is saved, and the other steps are done."""
        try:
            step(path)
        except (CheckpointError, OSError) as error:
            self._notice_once(f"ModelCheckpoint: {path} is saved, but: {error}", about=str(error))

    def _notice_once(self, text: str, about: str | None = None) -> None:
        """A notice, once in a fit; `about`: the part of the text that is the same each time, if not all of it is."""
        if (about or text) not in self._reported:
            self._reported.add(about or text)
            notice(text)

    def _point_to(self, path: Path) -> None:
        write_pointer(path.parent, path.name, link=self.save_last == "link")
        self._link_last(path)

    def _link_last(self, path: Path) -> None:
        """Link to the file of a checkpoint if `last` is that checkpoint."""
        if self.also and self.save_last and file_of(path).is_file() and resolve_pointer(path.with_name(POINTER)) == path:
            link_last(file_of(path))

    def _remove_outdated(self, save: Save, run_id: str, finite: bool) -> None:
        for old in self._list_outdated(save, run_id, finite):
            remove_file_of(Path(old))
            remove(Path(old))

    def _write_file(self, path: Path) -> None:
        """Write the file of a checkpoint that is complete; what cannot be in it is said once.

        If it cannot be written, that of a checkpoint which had this name before is removed: it has other weights.
        """
        try:
            notes = write_ckpt(open_checkpoint(path), file_of(path))
        except BaseException:
            remove_file_of(path)
            raise
        for text in notes:
            self._notice_once(f"ModelCheckpoint(also='ckpt'): {file_of(path).name}: {text}", about=text)

    def _write_missing_files(self) -> None:
        """Write the files that paths name and that are missing.

        The disk was full, the run was killed before it wrote them, or it kept none until now.
        """
        for path in map(Path, filter(None, dict.fromkeys((*self._ranking, *self._finite, self._newest)))):
            file = file_of(path)
            if is_checkpoint(path) and checkpoint_of(file) != path and not is_of_others(file):
                self._try(path, self._write_file)
                self._try(path, self._link_last)

    def _list_outdated(self, save: Save, run_id: str, finite: bool) -> list[str]:
        """The checkpoints of this run and callback that `save` makes unnecessary, the oldest first.

        Those whose parameters are not finite go before all others, and never make the newest of the others unnecessary.
        """
        if self.keep_last == -1 or (self.monitor is None and self.save_top_k == -1):
            return []  # `check_best` has refused a limit
        protected = {*save.best, *self._ranking, save.path}
        saved = self._list_saved(Path(save.path).parent, run_id)
        order = sorted((one.finite is not False, one.save_counter, path) for path, one in saved.items())
        rest = [path for _, _, path in order if path not in protected]
        keep = self._number_of_others(save, len(saved) - len(rest))
        newest = order[-1][-1] if order and order[-1][0] and not finite else ""
        return [path for path in rest[: max(0, len(rest) - keep)] if path != newest]

    def _number_of_others(self, save: Save, protected: int) -> int:
        """How many checkpoints to keep in addition to the best and the newest, of which there are `protected`."""
        if self._limit is not None and self.keep_last:
            return max(0, self._limit - protected)
        return self.keep_last if save.path in save.best else max(0, self.keep_last - 1)  # it counts as one of the newest

    def state_dict(self) -> dict[str, Any]:
        return {
            "dirpath": self.dirpath,
            "best_k_models": {self._relative_path(path): float(score) for path, score in self._ranking.items()},
            "displaced": {self._relative_path(path): float(score) for path, score in self._displaced.items()},
            "last_model_path": self._relative_path(self._newest),
            "finite_paths": [self._relative_path(path) for path in self._finite],
            "current_score": None if self.current_score is None else float(self.current_score),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        folders = [folder for folder in (state_dict["dirpath"], self.dirpath) if folder is not None]
        self._newest = _find(state_dict["last_model_path"], folders)
        best = _still_there(state_dict["best_k_models"], folders)
        removed = [name for name in state_dict["best_k_models"] if not _find(name, folders)]
        if removed:
            best = {**self._saved_scores(), **best}
        displaced = _still_there(state_dict.get("displaced", {}), folders)
        if self._newest and not _may_be_best(self._newest):  # the checkpoint itself, which did not know
            best = {**displaced, **best}
        self._ranking = self._best_with("", None, best)
        if removed:
            now = next((f"the best of the others is {path}" for path in self._ranking), "there is no other with a value")
            notice(f"ModelCheckpoint: {', '.join(removed)}, of the best by {self.monitor!r}, no longer exists; {now}.")
        self._displaced = displaced
        finite = [_find(name, folders) for name in state_dict.get("finite_paths", [state_dict["last_model_path"]])]
        self._finite = tuple(path for path in finite if _may_be_best(path))
        self.current_score = None if state_dict["current_score"] is None else score_of(state_dict["current_score"])

    def _saved_scores(self) -> dict[str, Tensor]:
        """The scores of the checkpoints next to the newest that its run has saved until then, the oldest first."""
        newest = inspect_checkpoint(Path(self._newest))[0] if self._newest else None
        if newest is None or self.monitor is None:
            return {}
        saved = self._list_saved(Path(self._newest).parent, newest.run_id).items()
        ranked = sorted(
            (one.save_counter, path, one.metrics[self.monitor])
            for path, one in saved
            if one.finite is not False and one.save_counter <= newest.save_counter and self.monitor in one.metrics
        )
        return {path: score_of(value) for _, path, value in ranked}

    def _relative_path(self, path: str) -> str:
        """Relative to `dirpath` if it is inside, so that the folder can be moved."""
        folder, name = os.path.split(path)
        return name if folder == self.dirpath else path


def score_of(value: float) -> Tensor:
    """A score as a float64 tensor on the CPU, not an inference tensor."""
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=torch.float64, device="cpu")


def _find(name: str, folders: Sequence[str]) -> str:
    """The checkpoint of that name in the earlier folder or, if it was moved or copied, in the current one; else ""."""
    places = [os.path.join(folder, name) for folder in folders if name]
    there = [place for place in dict.fromkeys(places) if os.path.isdir(place) or _at_url(place) is not None]
    identities = [checkpoint_identity(Path(place)) for place in there]
    if len(there) == 2 and identities[0] and identities[0] == identities[1]:
        return there[1]
    return there[0] if there else ""


def _still_there(scores: Mapping[str, Any], folders: Sequence[str]) -> dict[str, Tensor]:
    """The scores of the checkpoints that still exist, by their paths."""
    paths = ((_find(name, folders), score) for name, score in scores.items())
    return {path: score_of(score) for path, score in paths if _may_be_best(path)}


def _may_be_best(path: str) -> bool:
    """Whether a checkpoint exists, and its manifest does not say that its parameters are not finite."""
    manifest = inspect_checkpoint(Path(path))[0] if path else None
    if path and manifest is None and (remote := _at_url(path)) is not None:
        manifest = remote.manifest
    return path != "" and (manifest is None or manifest.finite is not False)


def _at_url(path: str) -> RemoteCheckpoint | None:
    """The checkpoint at the URL of a path, which this machine may not have downloaded."""
    folder, name = os.path.split(path)
    return remote_sync.checkpoints(Path(folder)).get(name)
