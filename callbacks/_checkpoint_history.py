"""The checkpoints that a `ModelCheckpoint` has saved: the best, the newest, and which can be removed."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import yaml
from torch import Tensor

from trainkit.callbacks._checkpoint_arguments import DEFAULT_TEMPLATE, EQUALS, fill
from trainkit.callbacks.checkpoint import Checkpoint
from trainkit.checkpoint.commit import Committed
from trainkit.checkpoint.folder import POINTER, ListedCheckpoint, list_checkpoints, write_pointer
from trainkit.checkpoint.identify import checkpoint_identity
from trainkit.checkpoint.manifest import Manifest
from trainkit.checkpoint.reader import inspect_checkpoint
from trainkit.checkpoint.removal import remove
from trainkit.console import notice, prints_here
from trainkit.errors import CheckpointError

if TYPE_CHECKING:
    from trainkit.trainer.trainer import Trainer

__all__: list[str] = []


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
    displaced: dict[str, Tensor] = field(default_factory=dict)  # those that are no longer among the best because of it
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
    _default_dirpath: bool

    def _start_history(self) -> None:
        self.best_k_models: dict[str, Tensor] = {}
        self.last_model_path = ""
        self.current_score: Tensor | None = None
        # the newest that are not known to have parameters that are not finite; the first is not known before it is written
        self._finite: tuple[str, ...] = ()
        self._displaced: dict[str, Tensor] = {}  # no longer among the best because of the newest

    @property
    def given_dirpath(self) -> str | None:
        """`dirpath` as the user gave it; None: the folder of the run."""
        return None if self._default_dirpath else self.dirpath

    def _use_folder(self, folder: Path) -> None:
        """Save to the folder of the run; called when it is known."""
        self.dirpath = str(folder)

    @property
    def best_model_path(self) -> str:
        """The best checkpoint; without `monitor` the newest whose parameters are finite, if any; "" if there is none."""
        if self.monitor is None:
            return next(iter(self._finite), self.last_model_path)
        return next(iter(self.best_k_models), "")

    @property
    def best_model_score(self) -> Tensor | None:
        """The value of `monitor` of the best checkpoint, a scalar float64 tensor; None if there is none."""
        return next(iter(self.best_k_models.values()), None)

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
            trainer: The trainer.
            current: The value; that of the main process counts. None and NaN are never among the best.
        """
        among = current is not None and "" in self._best_with("", score_of(float(current)))
        return bool(trainer.strategy.world.from_main(among))

    def file_exists(self, filepath: str | os.PathLike[str], trainer: Trainer) -> bool:
        """Whether the main process sees something at a path. All processes must call it, and get the same answer.

        Args:
            filepath: The path.
            trainer: The trainer.
        """
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

    def best_in(self, found: Sequence[ListedCheckpoint]) -> str:
        """The best of the checkpoints that the newest run of such a callback has saved; "" if there is none.

        Such a callback has the same monitor and mode; when it saves does not matter. It reads only the manifests, so
        weights-only checkpoints count too, and those whose parameters are not finite do not.
        """
        manifests = [(str(one.path), one.manifest) for one in found if one.manifest is not None and not one.problem]
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
        scores = {known: s for known, s in (self.best_k_models if others is None else others).items() if known != path}
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
        restored, is never replaced.
        """
        path, best = str(folder / name), self._best_with("", score)
        if not self.enable_version_counter:  # a worse one must not replace one of the best
            return name, path not in self.best_k_models or path not in best
        same = re.compile(re.escape(path) + r"(-v\d+)?")
        newest = [*self._finite[:1]] if self.monitor is None and -1 not in (self.save_top_k, self.keep_last) else []
        displaced = [known for known in [*self.best_k_models, *newest] if known not in best and same.fullmatch(known)]
        if not os.path.lexists(path):
            return name, False
        own = self._saved_in(folder, run_id)
        if path in own and own[path].finite is False:
            return name, True
        return next(((os.path.basename(known), True) for known in displaced if known in own), (name, False))

    def _saved_in(self, folder: Path, run_id: str) -> dict[str, Manifest]:
        """The good checkpoints of this run and callback in a folder: path → manifest."""
        return {
            str(found.path): found.manifest
            for found in list_checkpoints(folder)
            if found.manifest is not None
            and found.problem is None
            and (found.manifest.run_id, found.manifest.saved_by) == (run_id, self.state_key)
        }

    def _add(self, save: Save, path: Path) -> None:
        """Record a checkpoint that is about to be written to `path`."""
        save.path, save.before = str(path), (self.last_model_path, self.current_score, self._displaced)
        save.finite, self._finite = self._finite, (save.path, *self._finite[:1])
        best = self._best_with(save.path, save.score)
        save.best = frozenset(best)
        save.displaced = {known: s for known, s in self.best_k_models.items() if known == save.path or known not in best}
        self._displaced = save.displaced
        self.best_k_models, self.last_model_path, self.current_score = best, save.path, save.score

    def _undo(self, save: Save) -> bool:
        """Undo `_add` after a failed save; later checkpoints stay. Returns whether there was anything to undo."""
        path, save.path = save.path, ""
        if not path or save.committed:
            return False
        self._forget(path, save)
        if self.last_model_path == path:
            self.last_model_path, self.current_score, self._displaced = save.before
        return True

    def _forget(self, path: str, save: Save) -> None:
        """Rank the best without a checkpoint that was added, with those that it displaced."""
        back = {known: score for known, score in save.displaced.items() if os.path.isdir(known)}
        others = {known: score for known, score in self.best_k_models.items() if known != path}
        self.best_k_models = self._best_with("", None, {**back, **others})
        later = self._finite[: self._finite.index(path)] if path in self._finite else self._finite
        self._finite = tuple(dict.fromkeys((*later, *save.finite)))[:2]

    def _complete(self, save: Save, checkpointing: Any, main: bool, written: Committed) -> None:
        """Called in the writer's thread when a checkpoint is complete; the main process removes outdated ones."""
        save.committed = True
        if not written.finite:
            self._forget(save.path, save)
            if self.last_model_path == save.path:
                self.last_model_path = str(written.path)
            save.path, save.best = str(written.path), frozenset(self.best_k_models)
        if not main:
            return
        checkpointing.tell_loggers(self)
        path = Path(save.path)
        try:
            if self.save_last and (written.finite or not self._finite):  # `last` is for resuming
                write_pointer(path.parent, path.name, link=self.save_last == "link")
            for old in self._outdated(save, checkpointing.run_id, written.finite):
                remove(Path(old))
        except (CheckpointError, OSError) as error:  # the checkpoint is saved; the next save tries again
            notice(f"ModelCheckpoint: {path} is saved, but: {error}")

    def _outdated(self, save: Save, run_id: str, finite: bool) -> list[str]:
        """The checkpoints of this run and callback that `save` makes unnecessary, the oldest first.

        Those whose parameters are not finite go before all others, and never make the newest of the others unnecessary.
        """
        if self.keep_last == -1 or (self.monitor is None and self.save_top_k == -1):
            return []
        protected = {*save.best, *self.best_k_models, save.path}
        own = self._saved_in(Path(save.path).parent, run_id)
        order = sorted((one.finite is not False, one.save_counter, path) for path, one in own.items())
        rest = [path for _, _, path in order if path not in protected]
        keep = self.keep_last if save.path in save.best else max(0, self.keep_last - 1)  # it counts as one of the newest
        newest = order[-1][-1] if order and order[-1][0] and not finite else ""
        return [path for path in rest[: max(0, len(rest) - keep)] if path != newest]

    def state_dict(self) -> dict[str, Any]:
        return {
            "dirpath": self.dirpath,
            "best_k_models": {self._stored(path): float(score) for path, score in self.best_k_models.items()},
            "displaced": {self._stored(path): float(score) for path, score in self._displaced.items()},
            "last_model_path": self._stored(self.last_model_path),
            "finite_paths": [self._stored(path) for path in self._finite],
            "current_score": None if self.current_score is None else float(self.current_score),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        folders = [folder for folder in (state_dict["dirpath"], self.dirpath) if folder is not None]
        self.last_model_path = _find(state_dict["last_model_path"], folders)
        best, displaced = (
            {path: score_of(score) for name, score in scores.items() if _may_be_best(path := _find(name, folders))}
            for scores in (state_dict["best_k_models"], state_dict.get("displaced", {}))
        )  # those that still exist
        if self.last_model_path and not _may_be_best(self.last_model_path):  # the checkpoint itself, which did not know
            best = {**displaced, **best}
        self.best_k_models, self._displaced = self._best_with("", None, best), displaced
        finite = [_find(name, folders) for name in state_dict.get("finite_paths", [state_dict["last_model_path"]])]
        self._finite = tuple(path for path in finite if _may_be_best(path))
        self.current_score = None if state_dict["current_score"] is None else score_of(state_dict["current_score"])

    def _stored(self, path: str) -> str:
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
    there = [place for place in dict.fromkeys(places) if os.path.isdir(place)]
    identities = [checkpoint_identity(Path(place)) for place in there]
    if len(there) == 2 and identities[0] and identities[0] == identities[1]:
        return there[1]
    return there[0] if there else ""


def _may_be_best(path: str) -> bool:
    """Whether a checkpoint exists, and its manifest does not say that its parameters are not finite."""
    manifest = inspect_checkpoint(Path(path))[0] if path else None
    return path != "" and (manifest is None or manifest.finite is not False)
