"""What ``ModelCheckpoint`` knows of the checkpoints that it has saved: the best, the newest, and which may go."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainkit.callback import Callback
from trainkit.checkpoint.folder import FoundCheckpoint, list_checkpoints, remove, write_pointer
from trainkit.checkpoint.manifest import DIGEST
from trainkit.console import notice
from trainkit.errors import CheckpointError

__all__: list[str] = []


@dataclass
class Save:
    """One save on its way, and what it has changed in the books, so that it can be taken back.

    Attributes:
        position: where the run was.
        score: the monitor's value of that step, None if there is none.
        path: the checkpoint, "" before it is known and after the save has failed.
        committed: it is complete.
    """

    position: tuple[Any, ...]
    score: Tensor | None
    path: str = ""
    committed: bool = False
    best: frozenset[str] = frozenset()  # with this one
    displaced: dict[str, Tensor] = field(default_factory=dict)  # what it pushed out of the best
    before: tuple[str, Tensor | None] = ("", None)  # the newest until then, and its score


class CheckpointBooks(Callback):
    """The part of ``ModelCheckpoint`` that knows what has been saved.

    The books are brought up to date before a checkpoint is written, so that it knows of itself, and taken back if it could
    not be. Mappings are replaced, never changed: the writer's thread reads them.

    Attributes:
        best_k_models: path → score of the best checkpoints, the best first, NaN last, of equals the older first.
        last_model_path: the newest checkpoint, be it complete or being written; "" if there is none.
        current_score: the score of the newest, None if it was not ranked.
    """

    dirpath: str | None
    _default_dirpath: bool
    monitor: str | None
    mode: str
    save_top_k: int
    save_last: bool | None
    keep_last: int

    def _open_books(self) -> None:
        self.best_k_models: dict[str, Tensor] = {}
        self.last_model_path = ""
        self.current_score: Tensor | None = None

    @property
    def told_folder(self) -> str | None:
        """The folder that it was told to save to by ``dirpath``; None: that of the run."""
        return None if self._default_dirpath else self.dirpath

    def _placed(self, folder: Path) -> None:
        """The folder of the run is known."""
        self.dirpath = str(folder)

    @property
    def best_model_path(self) -> str:
        """The best checkpoint; without ``monitor`` the newest; "" if there is none."""
        return self.last_model_path if self.monitor is None else next(iter(self.best_k_models), "")

    @property
    def best_model_score(self) -> Tensor | None:
        """The value of ``monitor`` of the best checkpoint, a scalar float64 tensor; None if there is none."""
        return next(iter(self.best_k_models.values()), None)

    @property
    def kth_best_model_path(self) -> str:
        """The worst of the ``save_top_k`` best checkpoints; "" while there are fewer."""
        paths = list(self.best_k_models)
        return paths[-1] if paths and len(paths) >= self.save_top_k else ""

    def best_in(self, found: Sequence[FoundCheckpoint]) -> str:
        """The best of the checkpoints that the newest run of such a callback has saved; "" if there is none.

        It is told by what is in the manifests, so weights without a run's state will do.
        """
        own = [one for one in found if one.manifest is not None and one.manifest.saved_by == self.state_key and not one.problem]
        manifests = [(str(one.path), one.manifest) for one in own if one.manifest is not None]
        run = [(path, manifest) for path, manifest in manifests if manifest.run_id == manifests[0][1].run_id]
        if self.monitor is None:
            return run[0][0] if run else ""
        scores = {path: score_of(m.metrics[self.monitor]) for path, m in reversed(run) if self.monitor in m.metrics}
        return next(iter(self._best_with("", None, scores)), "")

    def _best_with(self, path: str, score: Tensor | None, others: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The best of ``others`` (default: of those that are now) and of a newer one, in order."""
        scores = {known: s for known, s in (self.best_k_models if others is None else others).items() if known != path}
        if score is not None:
            scores[path] = score
        sign = 1.0 if self.mode == "min" else -1.0

        def order(item: tuple[str, Tensor]) -> tuple[bool, float]:
            value = float(item[1])
            return math.isnan(value), 0.0 if math.isnan(value) else sign * value

        ordered = sorted(scores.items(), key=order)
        return dict(ordered if self.save_top_k == -1 else ordered[: self.save_top_k])

    def _enter(self, save: Save, path: Path) -> None:
        """Take in a checkpoint that is about to be written to ``path``."""
        save.path, save.before = str(path), (self.last_model_path, self.current_score)
        best = self._best_with(save.path, save.score)
        save.best = frozenset(best)
        save.displaced = {known: s for known, s in self.best_k_models.items() if known == save.path or known not in best}
        self.best_k_models, self.last_model_path, self.current_score = best, save.path, save.score

    def _take_back(self, save: Save) -> bool:
        """Undo :meth:`_enter`, as the save has failed; what was entered since stays. Returns whether there was cause to."""
        path, save.path = save.path, ""
        if not path or save.committed:
            return False
        back = {known: score for known, score in save.displaced.items() if os.path.isdir(known)}
        others = {known: score for known, score in self.best_k_models.items() if known != path}
        self.best_k_models = self._best_with("", None, {**back, **others})
        if self.last_model_path == path:
            self.last_model_path, self.current_score = save.before
        return True

    def _clean_up(self, save: Save, run_id: str, main: bool) -> None:
        """Called in the writer's thread when a checkpoint is complete; the main process's removes what is superfluous now."""
        save.committed = True
        if not main:
            return
        path = Path(save.path)
        try:
            if self.save_last:
                write_pointer(path.parent, path.name)
            for old in self._outdated(save, run_id):
                remove(old)
        except (CheckpointError, OSError) as error:  # the checkpoint is there; the next one tries again
            notice(f"ModelCheckpoint: {path} is saved, but: {error}")

    def _outdated(self, save: Save, run_id: str) -> list[Path]:
        """Those that ``save`` has made superfluous: of this run and callback only, the oldest first."""
        if self.keep_last == -1 or (self.monitor is None and self.save_top_k == -1):
            return []
        protected = {*save.best, *self.best_k_models, save.path}
        rest = [
            (found.manifest.save_counter, found.path)
            for found in list_checkpoints(Path(save.path).parent)
            if found.manifest is not None
            and found.problem is None
            and (found.manifest.run_id, found.manifest.saved_by) == (run_id, self.state_key)
            and str(found.path) not in protected
        ]
        keep = self.keep_last if save.path in save.best else max(0, self.keep_last - 1)  # it is one of the rest itself
        return [path for _, path in sorted(rest)][: max(0, len(rest) - keep)]

    def state_dict(self) -> dict[str, Any]:
        return {
            "dirpath": self.dirpath,
            "best_k_models": {self._stored(path): float(score) for path, score in self.best_k_models.items()},
            "last_model_path": self._stored(self.last_model_path),
            "current_score": None if self.current_score is None else float(self.current_score),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        folders = [folder for folder in (state_dict["dirpath"], self.dirpath) if folder is not None]
        found = {_find(name, folders): score for name, score in state_dict["best_k_models"].items()}
        scores = {path: score_of(score) for path, score in found.items() if path}  # without those that are gone
        self.best_k_models = self._best_with("", None, scores)
        self.last_model_path = _find(state_dict["last_model_path"], folders)
        self.current_score = None if state_dict["current_score"] is None else score_of(state_dict["current_score"])

    def _stored(self, path: str) -> str:
        """Relative to ``dirpath`` where it lies in it, so that the folder can be moved."""
        folder, name = os.path.split(path)
        return name if folder == self.dirpath else path


def score_of(value: float) -> Tensor:
    """A score as it is kept: float64, on the CPU, an ordinary tensor wherever it is made."""
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=torch.float64, device="cpu")


def _find(name: str, folders: Sequence[str]) -> str:
    """The checkpoint of that name in the folder of then or, if it was moved or copied, in that of now; "" if it is gone."""
    places = [os.path.join(folder, name) for folder in folders if name]
    there = [place for place in dict.fromkeys(places) if os.path.isdir(place)]
    if len(there) == 2 and _digest(there[0]) == _digest(there[1]):
        return there[1]
    return there[0] if there else ""


def _digest(path: str) -> bytes:
    try:
        return (Path(path) / DIGEST).read_bytes()
    except OSError:
        return os.fsencode(path)  # like no other
