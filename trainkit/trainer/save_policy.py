"""``Checkpointing``: when and where a fit saves, and what happens when that fails."""

from __future__ import annotations

import math
import secrets
import threading
from collections import deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.checkpoint.all_ranks import run_on_all_ranks
from trainkit.checkpoint.commit import check_target
from trainkit.checkpoint.draft import Content
from trainkit.checkpoint.save_folders import SaveFolders
from trainkit.checkpoint.saver import Saver
from trainkit.console import notice, warn
from trainkit.errors import CheckpointWriteError, Preempted, UnsavableError
from trainkit.state.model import frozen_fingerprint, has_adapters
from trainkit.state.parts import SaveMode, about, capture, shown
from trainkit.state.run import drafted
from trainkit.trainer.progress import Phase
from trainkit.trainer.run_folder import choose_folder
from trainkit.trainer.run_state import capture_run, parts_of

if TYPE_CHECKING:
    from trainkit.trainer.trainer import Trainer

__all__ = ["Checkpointing"]

_FAILURES = 3  # in a row, which end the run


class Checkpointing:
    """Saves a run's checkpoints at points where a step is complete.

    Hooks, timers and threads ask for a save with :meth:`request`, :meth:`every_n_steps` and :meth:`every`; the loop carries it
    out at the next safe point, in :meth:`attend`, when logging, validation and schedulers of the step are done. So what is
    saved is what an uninterrupted run had there.

    Over several processes all of them call the same methods at the same points, hooks included. What only one of them can
    know, that a timer has fired or that the saver's thread has failed, is told by the control word, and attended to by all at
    the same safe point. Timers run on the main process, and its paths, names and numbers are everybody's.

    Attributes:
        run_id: what all checkpoints of a run have in common; a full resume keeps it.
        resumed_from: the checkpoint that the run went on from.
        places: the folders that it saves to.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._world = trainer.strategy.world
        self.run_id: str = self._world.from_main(secrets.token_hex(8))
        self.resumed_from: Path | None = None
        self.places = SaveFolders(self._world, self.run_id)
        self._counter = 0
        self._saver = Saver(self._failed, self._world.team(f"saves/{self.run_id}"))
        self._requests: deque[Callable[[], None]] = deque()
        self._cadences: list[tuple[int, Callable[[], None]]] = []
        self._alerts: deque[int] = deque()  # bits of the control word; appended to by other threads
        self._timed: list[tuple[timedelta, Callable[[], None]]] = []
        self._timers: dict[int, threading.Timer] = {}
        self._failures = 0
        self._last_good: Path | None = None
        self._fingerprint: tuple[list[str], str] | None = None
        self._first_step = 0

    @property
    def folders(self) -> list[Path]:
        """The folders that the run saves to."""
        return self.places.folders

    def use_folder(self, folder: Path) -> None:
        """Save to a folder; no other run may save there as long as this one lives.

        Raises:
            CheckpointWriteError: it cannot be written, or is not the same one for all processes.
            CheckpointLockedError: another live run saves there.
        """
        self.places.use(folder, self.run_id)

    def last_counter(self) -> int:
        """The highest save counter of this run in its folders; 0 if it has saved none."""
        return self.places.last_counter(self.run_id)

    def begin(self) -> None:
        """The run starts, new or resumed; what a checkpoint would hold is encoded once, so that an error comes now.

        Raises:
            UnsavableError: something that cannot be stored, with the path to it.
            CheckpointWriteError: a folder cannot be made or written.
        """
        self._first_step = self._trainer.global_step
        self.places.choose(partial(choose_folder, self._trainer))
        if self.folders:
            self._counter = max(self._counter, self.last_counter())
            drafted(self._world, self.content())
            self.places.begin(self.run_id)

    def request(self, due: Callable[[], None]) -> None:
        """Call ``due`` at the next safe point; from any hook. From another thread with one process only."""
        self._requests.append(due)
        self._trainer._progress.safe_point_due = True

    def every_n_steps(self, n: int, due: Callable[[], None]) -> None:
        """Call ``due`` at the safe point after every n-th update."""
        self._cadences.append((n, due))
        self._trainer._progress.next_save_step = 0  # worked out at the first safe point

    def every(self, interval: timedelta, due: Callable[[], None]) -> None:
        """Call ``due`` at the first safe point after each interval."""
        self._timed.append((interval, due))
        self._start_timer(len(self._timed))

    def _start_timer(self, number: int) -> None:
        if self._world.is_main:
            timer = threading.Timer(self._timed[number - 1][0].total_seconds(), self._alert, [number])
            timer.daemon = True
            self._timers[number] = timer
            timer.start()

    def _failed(self) -> None:
        """Called by the saver's thread."""
        self._alert(0)

    def _alert(self, bit: int) -> None:
        """Called by other threads: there is something for the next safe point."""
        self._alerts.append(bit)
        self._trainer._look()

    def local_attention(self) -> int:
        """What has come up in other threads since this was asked last: bit 0, the saver has failed; bit n, timer n is due."""
        bits = 0
        while self._alerts:
            bits |= 1 << self._alerts.popleft()
        return bits

    def attend(self) -> None:
        """A safe point: report failed saves, carry out those that are due, obey a signal that has come.

        Raises:
            CheckpointWriteError: three saves in a row have failed.
            Preempted, KeyboardInterrupt: a signal.
        """
        trainer, control = self._trainer, self._trainer._control
        trainer._progress.safe_point_due = False  # before looking, so that what comes meanwhile is seen next time
        trainer._signals.follow_workers()
        if control is None:
            bits = self.local_attention()
            self._saver.poll()
        else:
            bits = control.take_bits()
            if bits & 1:
                self._saver.wait()  # another process may not have got so far
        due = [self._requests.popleft() for _ in range(len(self._requests))]
        step = trainer.global_step
        if self._cadences and step >= trainer._progress.next_save_step:
            if step > self._first_step:
                due += [act for n, act in self._cadences if step % n == 0]
            trainer._progress.next_save_step = min((step // n + 1) * n for n, _ in self._cadences)
        fired = [number for number in range(1, len(self._timed) + 1) if bits >> number & 1]
        for act in due + [self._timed[number - 1][1] for number in fired]:
            act()
        for number in fired:
            self._start_timer(number)
        self.obey()

    def obey(self) -> None:
        """End the fit if a signal has come, to any of the processes."""
        signals, control = self._trainer._signals, self._trainer._control
        if (signals.received if control is None else control.signal) is not None:
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
        main = self._world.is_main or trainer.strategy.shards_parameters  # which are gathered, to be read
        prints = {0: self._frozen() if main else "the main process's"} if save == "trainable" else {}
        taken = capture(parts_of(trainer), save=save or "all", weights_only=weights_only, fingerprints=prints)
        state = {**taken.state, **capture_run(trainer, weights_only)}
        seen = shown(trainer.current_epoch, trainer.global_step, taken.tensors["model"], state)
        trainer._hooks.run("on_save_checkpoint", seen)
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
        described["contents"]["module"] = state["module"]  # by which "auto" tells what a run has trained
        return Content(taken.tensors, state, described, taken.attachments)

    def _frozen(self) -> str:
        """The fingerprint of the parameters that are not trained; taken once, as long as they are the same ones."""
        module = self._trainer.lightning_module
        frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
        if self._fingerprint is None or self._fingerprint[0] != frozen:
            self._fingerprint = frozen, frozen_fingerprint(module, self._trainer.strategy.stored_weights(module))
        return self._fingerprint[1]

    def _place(self) -> dict[str, Any]:
        """Where in the data the run is, for the manifest."""
        plan = self._trainer._plan
        if plan is None:
            return {}
        progress = self._trainer._progress
        position = plan.loader.position(progress.current_epoch, progress.batches_consumed)
        return {**position, "phase": progress.phase.value}

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
        path = self.places.place(folder, name, replace)
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
            content = self.content(weights_only=weights_only, save=save, saved_by=saved_by, metrics=metrics)
            draft = drafted(self._world, content)
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
        left = _FAILURES - self._failures
        warn(
            f"a checkpoint could not be saved: {str(error).rstrip('.')}. Training goes on, and {last}. After {left} more "
            f"failure{'s' if left > 1 else ''} in a row the run ends."
        )

    def save_to(self, path: Path, *, weights_only: bool, blocking: bool) -> None:
        """Save to a path of the user's; a checkpoint that is there is replaced once the new one is complete.

        Raises:
            CheckpointError: something else is at ``path``; or ``blocking``, and it cannot be written.
        """
        self._saver.wait()
        if not blocking:  # an error of the call is raised by the call, not at a later step
            run_on_all_ranks(self._world, lambda: check_target(path.absolute()) if self._world.is_main else None)
        adapters = has_adapters(self._trainer.lightning_module)
        if adapters:
            notice("the model has PEFT adapters, so only what is trained is saved, with a fingerprint of the rest.")
        draft = drafted(self._world, self.content(weights_only=weights_only, save="trainable" if adapters else "all"))
        self._counter += 1

        def done(*_: object) -> None:
            self._failures = 0

        self._saver.save(draft, path, blocking=blocking, replace=True, committed=done, failed=self._count_failure)

    def metrics(self) -> dict[str, tuple[float, bool]]:
        """The latest value of each metric that was logged, and whether it was computed in the present step; by name.

        A value may be each process's own: that of the first that has it is everybody's.
        """
        own = {name: (float(v.detach()), self._is_present(name)) for name, v in self._trainer.callback_metrics.items()}
        if self._world.size == 1:
            return own
        known = {name: found for process in reversed(self._world.exchange(own)) for name, found in process.items()}
        return {name: (value, present) for name, (value, present) in sorted(known.items())}

    def _is_present(self, name: str) -> bool:
        """Whether a metric was computed in the present step."""
        trainer = self._trainer
        step = trainer.global_step
        if any(trainer._progress.computed.get(key) == step for key in (name, f"{name}_epoch")):
            return True
        stamp = trainer._train_metrics.logged_at(name)
        if stamp is None or name in trainer._results.evaluated:
            return False
        last = trainer._train_metrics.stamp
        return stamp >= last - last % trainer.accumulate_grad_batches  # where the last window began

    @property
    def newest(self) -> Path | None:
        """The newest checkpoint that is complete, be it the one that the run went on from."""
        return self._last_good or self.resumed_from

    @property
    def position(self) -> tuple[Any, ...]:
        """Where the run is; as long as it is the same, nothing has changed."""
        trainer = self._trainer
        return trainer.global_step, trainer.current_epoch, trainer._progress.batches_consumed, trainer._progress.phase

    def why_not_savable(self, exception: BaseException) -> str | None:
        """Why a checkpoint of this moment would be of no use, after an error, or cannot be; ``None`` if it would be."""
        trainer = self._trainer
        plan = trainer._plan
        if trainer._signals.twice:
            return "Ctrl-C came twice"
        agreed = trainer._signals.received is not None and isinstance(exception, Preempted | KeyboardInterrupt)
        if self._world.size > 1 and not agreed:
            return "an error on one of several processes leaves the others behind"
        if plan is None or trainer.global_step == self._first_step:
            return "no optimizer step was made yet"
        engine = trainer.accelerator
        if engine.updating or (engine.updates != trainer._progress.steps_done and trainer._progress.phase is Phase.STEP):
            return "the step that failed had begun to change the parameters"
        return None

    def close(self) -> None:
        """End timers and the writer, and let other runs into the folders."""
        for timer in self._timers.values():
            timer.cancel()
        self._cadences, self._timed, self._timers = [], [], {}
        self._requests.clear()
        self._alerts.clear()
        self._trainer._progress.next_save_step = math.inf
        try:
            self._saver.close()
        finally:
            self.places.release()
