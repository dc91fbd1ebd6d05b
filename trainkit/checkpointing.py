"""``Checkpointing``: when and where a fit saves, and what happens when that fails."""

from __future__ import annotations

import math
import secrets
import threading
from collections import deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.checkpoint.commit import commit
from trainkit.checkpoint.draft import Content, Draft
from trainkit.checkpoint.folder import check_writable, free_name, next_counter, remove_leftovers
from trainkit.checkpoint.lock import FolderLock
from trainkit.checkpoint.saver import Saver
from trainkit.console import notice, warn
from trainkit.errors import CheckpointWriteError, UnsavableError
from trainkit.state.model import frozen_fingerprint, has_adapters
from trainkit.state.parts import SaveMode, about, capture, shown
from trainkit.state.run import Phase, capture_run, consumed, parts_of

if TYPE_CHECKING:
    from trainkit.trainer import Trainer

__all__ = ["Checkpointing"]

_FAILURES = 3  # in a row, which end the run


class Checkpointing:
    """Saves a run's checkpoints at points where a step is complete.

    Hooks, timers and threads ask for a save with :meth:`request`, :meth:`every_n_steps` and :meth:`every`; the loop carries it
    out at the next safe point, in :meth:`attend`, when logging, validation and schedulers of the step are done. So what is
    saved is what an uninterrupted run had there.

    Attributes:
        run_id: what all checkpoints of a run have in common; a full resume keeps it.
        folders: those that the run saves to.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.run_id = secrets.token_hex(8)
        self.folders: list[Path] = []
        self.resumed_from: Path | None = None
        self._locks: dict[Path, FolderLock] = {}
        self._counter = 0
        self._saver = Saver(trainer.look)
        self._requests: deque[Callable[[], None]] = deque()  # appended to by other threads
        self._cadences: list[tuple[int, Callable[[], None]]] = []
        self._timers: list[threading.Timer] = []
        self._failures = 0
        self._last_good: Path | None = None
        self._fingerprint: tuple[list[str], str] | None = None
        self._first_step = 0

    def use_folder(self, folder: Path) -> None:
        """Save to a folder; no other run may save there as long as this one lives.

        Raises:
            CheckpointWriteError: it cannot be written.
            CheckpointLockedError: another live run saves there.
        """
        folder = folder.absolute()
        if folder not in self.folders:
            self.folders.append(folder)
            if folder.exists():  # else it is made when training begins: a fit that fails before leaves none behind
                self._enter(folder)

    def _enter(self, folder: Path) -> None:
        check_writable(folder)
        lock = self._locks[folder] = FolderLock(folder, self.run_id)
        lock.acquire()
        remove_leftovers(folder)

    def begin(self) -> None:
        """The run starts, new or resumed; what a checkpoint would hold is encoded once, so that an error comes now.

        Raises:
            UnsavableError: something that cannot be stored, with the path to it.
            CheckpointWriteError: a folder cannot be made or written.
        """
        self._first_step = self._trainer.global_step
        for folder in self.folders:
            self._counter = max(self._counter, next_counter(folder, self.run_id) - 1)
        if self.folders:
            Draft(self.content())
        for folder in self.folders:
            if folder not in self._locks:
                self._enter(folder)

    def request(self, due: Callable[[], None]) -> None:
        """Call ``due`` at the next safe point; from any hook or thread."""
        self._requests.append(due)
        self._trainer.look()

    def every_n_steps(self, n: int, due: Callable[[], None]) -> None:
        """Call ``due`` at the safe point after every n-th update."""
        self._cadences.append((n, due))
        self._trainer.next_save_step = 0  # worked out at the first safe point

    def every(self, interval: timedelta, due: Callable[[], None]) -> None:
        """Call ``due`` at the first safe point after each interval."""

        def fire() -> None:
            self.request(again)

        def again() -> None:
            due()
            start()

        def start() -> None:
            timer = threading.Timer(interval.total_seconds(), fire)
            timer.daemon = True
            self._timers = [other for other in self._timers if other.is_alive()] + [timer]
            timer.start()

        start()

    def attend(self) -> None:
        """A safe point: report failed saves, carry out those that are due, obey a signal that has come.

        Raises:
            CheckpointWriteError: three saves in a row have failed.
            Preempted, KeyboardInterrupt: a signal.
        """
        trainer = self._trainer
        trainer.attention = False  # before looking, so that what comes meanwhile is seen next time
        trainer.signals.follow_workers()
        self._saver.poll()
        requests = [self._requests.popleft() for _ in range(len(self._requests))]
        step = trainer.global_step
        if self._cadences and step >= trainer.next_save_step:
            if step > self._first_step:
                requests += [due for n, due in self._cadences if step % n == 0]
            trainer.next_save_step = min((step // n + 1) * n for n, _ in self._cadences)
        for due in requests:
            due()
        self.obey()

    def obey(self) -> None:
        """End the fit if a signal has come."""
        signals = self._trainer.signals
        if signals.received is not None:
            raise signals.ending(f"at step {self._trainer.global_step}")

    def content(
        self,
        *,
        weights_only: bool = False,
        save: SaveMode | None = None,
        saved_by: str | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> Content:
        """What a checkpoint of this moment holds; its tensors are the run's own."""
        trainer = self._trainer
        prints = {0: self._frozen()} if save == "trainable" else {}
        taken = capture(parts_of(trainer), save=save or "all", weights_only=weights_only, fingerprints=prints)
        state = {**taken.state, **capture_run(trainer, weights_only)}
        seen = shown(trainer.current_epoch, trainer.global_step, taken.tensors["model"], state)
        trainer.hooks.run("on_save_checkpoint", seen)
        taken.tensors["model"] = seen.pop("state_dict")
        for name in ("callbacks", "hyper_parameters"):
            kept = seen.pop(name, {})
            if name in state:
                state[name] = kept
        state["user"] = {name: value for name, value in seen.items() if name not in ("epoch", "global_step")}
        described = about(
            trainer.strategy,
            taken,
            seed=trainer.seed,
            run_id=self.run_id,
            save_counter=self._counter + 1,
            step=trainer.global_step,
            epoch=trainer.current_epoch,
            position=self._place(),
            save=save or "all",
            weights_only=weights_only,
            metrics=metrics,
            saved_by=saved_by,
        )
        return Content(taken.tensors, state, described, taken.attachments)

    def _frozen(self) -> str:
        """The fingerprint of the parameters that are not trained; taken once, as long as they are the same ones."""
        module = self._trainer.lightning_module
        frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
        if self._fingerprint is None or self._fingerprint[0] != frozen:
            self._fingerprint = frozen, frozen_fingerprint(module)
        return self._fingerprint[1]

    def _place(self) -> dict[str, Any]:
        """Where in the data the run is, for the manifest."""
        trainer = self._trainer
        plan = getattr(trainer, "fit_plan", None)
        if plan is None:
            return {}
        return {**plan.loader.position(trainer.current_epoch, consumed(trainer)), "phase": trainer.phase.value}

    def save(
        self,
        folder: Path,
        name: str,
        *,
        weights_only: bool = False,
        save: SaveMode | None = None,
        saved_by: str | None = None,
        metrics: Mapping[str, float] | None = None,
        blocking: bool = False,
        replace: bool = False,
        committed: Callable[[], None] | None = None,
        failed: Callable[[Exception], None] | None = None,
        before_capture: Callable[[Path], None] | None = None,
    ) -> Path:
        """Save to a folder of :meth:`use_folder`, under ``name`` or, if that is taken, ``name-v1``, …

        Args:
            folder: where.
            name: of the checkpoint.
            weights_only: leave out what only a resume needs.
            save: "all" (default) or "trainable".
            saved_by: whose rotation it belongs to.
            metrics: kept in the manifest.
            blocking: return when it is committed.
            replace: a checkpoint of that name is replaced once the new one is complete.
            committed: called after the commit, in the writer's thread.
            failed: called in this thread, later if not ``blocking``, when it could not be written.
            before_capture: called with the path before the state is taken.

        Returns:
            The path that it has, or will have.

        Raises:
            CheckpointWriteError: this was the third failure in a row.
            CheckpointLockedError: another run has taken over the folder, as this one did not answer for too long.
        """
        self._saver.wait()
        for lock in self._locks.values():
            lock.check()
        path = folder / (name if replace else free_name(folder, name))
        if before_capture is not None:
            before_capture(path)

        def done(*_: object) -> None:
            self._failures, self._last_good = 0, path
            if committed is not None:
                committed()

        def not_done(error: Exception) -> None:
            if failed is not None:
                failed(error)
            self._count_failure(error)

        try:
            draft = Draft(self.content(weights_only=weights_only, save=save, saved_by=saved_by, metrics=metrics))
            self._counter += 1
            later = None if blocking else not_done
            self._saver.save(draft, path, blocking=blocking, replace=replace, committed=done, failed=later)
        except (CheckpointWriteError, UnsavableError) as error:
            not_done(error)
        return path

    def wait(self) -> None:
        """Until no save is in flight; failures are reported."""
        self._saver.wait()

    def _count_failure(self, error: Exception) -> None:
        if isinstance(error, OSError):  # it is written, and an older one could not be removed
            warn(f"an old checkpoint could not be removed: {error}. Training goes on.")
            return
        if not isinstance(error, CheckpointWriteError | UnsavableError):
            raise error
        self._failures += 1
        last = f"the last good checkpoint is {self.newest}" if self.newest else "there is no checkpoint of this run yet"
        if self._failures >= _FAILURES:
            raise CheckpointWriteError(
                f"{self._failures} saves in a row have failed; {last}. The last error: {error}"
            ) from error
        warn(f"a checkpoint could not be saved: {error} Training goes on, and {last}.")

    def save_to(self, path: Path, *, weights_only: bool, blocking: bool) -> None:
        """Save to a path of the user's; a checkpoint that is there is replaced once the new one is complete."""
        self._saver.wait()
        adapters = has_adapters(self._trainer.lightning_module)
        if adapters:
            notice("the model has PEFT adapters, so only what is trained is saved, with a fingerprint of the rest.")
        draft = Draft(self.content(weights_only=weights_only, save="trainable" if adapters else "all"))
        self._counter += 1
        if blocking:
            commit(draft, path, replace=True)
        else:
            self._saver.save(draft, path, blocking=False, replace=True, failed=self._count_failure)

    def metric(self, name: str) -> tuple[float, bool] | None:
        """The latest value of a metric, and whether it was computed in the present step; ``None`` if it was never logged."""
        trainer = self._trainer
        value = trainer.callback_metrics.get(name)
        if value is None:
            return None
        step = trainer.global_step
        present = any(trainer.computed.get(key) == step for key in (name, f"{name}_epoch"))
        stamp = trainer.train_metrics.logged_at(name)
        if not present and stamp is not None:
            last = trainer.train_metrics.stamp
            present = stamp >= last - last % trainer.accumulate_grad_batches  # where the last window began
        return float(value.detach()), present

    @property
    def newest(self) -> Path | None:
        """The newest checkpoint that is complete, be it the one that the run went on from."""
        return self._last_good or self.resumed_from

    @property
    def position(self) -> tuple[Any, ...]:
        """Where the run is; as long as it is the same, nothing has changed."""
        trainer = self._trainer
        return trainer.global_step, trainer.current_epoch, consumed(trainer), trainer.phase

    def why_not_savable(self) -> str | None:
        """Why a checkpoint of this moment would be of no use, after an error; ``None`` if it would be."""
        trainer = self._trainer
        plan = getattr(trainer, "fit_plan", None)
        if trainer.signals.twice:
            return "Ctrl-C came twice"
        if plan is None or trainer.global_step == self._first_step:
            return "no update was made yet"
        engine = trainer.accelerator
        if engine.updating or (engine.updates != plan.updates and trainer.phase is Phase.STEP):
            return "the step that failed had begun to change the parameters"
        return None

    def close(self) -> None:
        """End timers and the writer, and let other runs into the folders."""
        for timer in self._timers:
            timer.cancel()
        self._cadences, self._timers = [], []
        self._requests.clear()
        self._trainer.next_save_step = math.inf
        try:
            self._saver.close()
        finally:
            for lock in self._locks.values():
                lock.release()
            self._locks = {}
