"""`SavePolicy`: what and where a fit saves, and what happens when that fails. When it saves: `safe_points`."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.checkpoint.checkpoint_plan import CheckpointContent, sizes_to_copy
from trainkit.checkpoint.checksum import DEFAULT_CHECKSUM
from trainkit.checkpoint.ckpt_file import check_replaceable, folder_for, is_named_so, write_ckpt
from trainkit.checkpoint.commit import NONFINITE, CommitResult, check_target
from trainkit.checkpoint.folder import remove
from trainkit.checkpoint.manifest import is_checkpoint
from trainkit.checkpoint.pointers import own_folder
from trainkit.checkpoint.ranks import run_on_all_ranks
from trainkit.checkpoint.reader import open_checkpoint
from trainkit.checkpoint.saver import SaveFolders, Saver
from trainkit.console import join_names, notice, warn
from trainkit.errors import CheckpointWriteError, Preempted, UnsavableError
from trainkit.loggers.base import Logger
from trainkit.module.overridable_hooks import is_overridden
from trainkit.names.doors import is_open
from trainkit.registry import load_callback
from trainkit.state.model import fingerprint_frozen
from trainkit.state.plan_checkpoint import plan_checkpoint
from trainkit.state.pretrained import has_adapters
from trainkit.state.training_objects import TRAINED_WEIGHTS, SaveMode, capture, checkpoint_for_hooks, manifest_fields
from trainkit.trainer.progress import Phase
from trainkit.trainer.run_folder import choose_folder
from trainkit.trainer.run_state import capture_run, training_objects
from trainkit.trainer.safe_points import SafePoints

if TYPE_CHECKING:
    from trainkit.trainer.run import Run

__all__ = ["SavePolicy"]

_MAX_FAILURES = 3  # The run ends after this number of failures in a row.


class SavePolicy:
    """Saves the checkpoints of a run.

    With several processes, all call the same methods at the same points, also in hooks. Paths, names and numbers of the main
    process are used on all.

    Args:
        run: the fit.

    Attributes:
        safe_points: where saves that hooks request are carried out, so that what is saved is what an uninterrupted run had.
        run_id: what all checkpoints of a run have in common; a full resume keeps it.
        resumed_from: the checkpoint that the run resumed from.
        resumed_saved_at: when that one was saved, as in its manifest.
        resumed_finite: whether its parameters are finite, as far as it says.
        save_folders: the folders that it saves to.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._world = run.strategy.world
        self.run_id: str = self._world.from_main(secrets.token_hex(8))
        self.resumed_from: Path | None = None
        self.resumed_saved_at: str | None = None
        self.resumed_finite = True
        self.save_folders = SaveFolders(self._world, self.run_id)
        self._counter = 0
        self.safe_points = SafePoints(run, self._report_failures, self._report_saved)
        self._saver = Saver(self.safe_points.save_failed, self._world.thread_exchange(f"saves/{self.run_id}"))
        self._complete: deque[Any] = deque()  # callbacks that have saved; the writer's thread appends
        self._failures = 0
        self._last_good: Path | None = None
        self._last_finite: Path | None = None
        self._nonfinite: deque[tuple[int, CommitResult]] = deque()  # the step; the writer's thread appends
        self._warned_of_nonfinite = False
        # of the frozen parameters: name → object and number of its changes; and the fingerprint
        self._fingerprint: tuple[dict[str, tuple[int, int | None]], str] | None = None
        self._reserves = False
        self._said_unknown = False
        self._replaced = False  # Whether the weights were replaced by some that no metric was computed with.

    def continue_in(self, run: Run) -> None:
        """An evaluation begins after the fit; saves from now on are of its module."""
        self._run = run

    @property
    def folders(self) -> list[Path]:
        """The folders that the run saves to."""
        return self.save_folders.folders

    def use_folder(self, folder: Path) -> None:
        """Save to a folder; no other run may save there while this run is alive.

        Raises:
            CheckpointWriteError: it cannot be written, or is not the same for all processes.
            CheckpointLockedError: another live run saves there.
        """
        self.save_folders.use(folder, self.run_id)

    def last_counter(self) -> int:
        """The highest save counter of this run in its folders; 0 if it has saved none."""
        return self.save_folders.last_counter(self.run_id)

    def begin(self) -> None:
        """The run starts, new or resumed. Its state is encoded once, so that a value that cannot be stored raises now.

        Raises:
            UnsavableError: a value cannot be stored, the message names the path to it; or a `state_dict` is not ready yet.
            CheckpointWriteError: a folder cannot be created or written.
        """
        self.save_folders.choose(partial(choose_folder, self._run))
        if self.folders:
            self._counter = max(self._counter, self.last_counter())
            try:
                content = self.content()
            except (AttributeError, KeyError, TypeError) as error:  # such as of a state that on_fit_start creates
                raise UnsavableError(
                    f"the state of the run cannot be collected: {type(error).__name__}: {error}. state_dict and "
                    "on_save_checkpoint are called once before on_fit_start, so that what cannot be saved is an error now. "
                    "Fix: create what they read in __init__ or setup"
                ) from error
            plan_checkpoint(self._world, content)
            self.save_folders.begin(self.run_id)

    def content(
        self,
        *,
        weights_only: bool = False,
        save: SaveMode | None = None,
        saved_by: str | None = None,
        metrics: Mapping[str, float] | None = None,
        checksum: str = DEFAULT_CHECKSUM,
    ) -> CheckpointContent:
        """The content of a checkpoint of this moment; its tensors are the run's own and not copies."""
        run = self._run
        main = self._world.is_main or run.strategy.shards_parameters  # sharded parameters are gathered
        fingerprints = {0: self._fingerprint_frozen() if main else "the main process's"} if save == "trainable" else {}
        taken = capture(training_objects(run), save=save or "all", weights_only=weights_only, fingerprints=fingerprints)
        state = {**taken.state, **capture_run(run, None if weights_only else run.train_loader)}
        seen = checkpoint_for_hooks(run.progress.current_epoch, run.progress.global_step, taken.tensors["model"], state)
        run.hooks.run("on_save_checkpoint", seen)
        self._omit(seen, state)
        taken.tensors["model"] = seen.pop("state_dict")
        aliases = taken.aliases["model"]  # Names that a hook has removed have no alias.
        taken.aliases["model"] = {alias: name for alias, name in aliases.items() if name in taken.tensors["model"]}
        taken.choose_files([run.module])
        for name in ("callbacks", "hyper_parameters"):
            kept = seen.pop(name, {})
            if name in state:
                state[name] = kept
        state["user"] = {name: value for name, value in seen.items() if name not in ("epoch", "global_step")}
        described = manifest_fields(
            run.strategy,
            taken,
            seed=run.seed,
            run_id=self.run_id,
            save_counter=self._counter + 1,
            step=run.progress.global_step,
            epoch=run.progress.current_epoch,
            position=self._place(),
            save=save or "all",
            weights_only=weights_only,
            metrics=metrics,
            saved_by=saved_by,
        )
        described["contents"]["module"] = state["module"]  # "auto" finds the checkpoints of a module by this
        parameters: dict[str, dict[str, bool]] = dict(taken.parameters)
        if TRAINED_WEIGHTS in state["user"]:  # a run resumes with these, not with the averaged ones
            parameters["state"] = {f"user/{TRAINED_WEIGHTS}/{name}": tensor for name, tensor in parameters["model"].items()}
        return CheckpointContent(
            taken.tensors,
            state,
            described,
            taken.attachments,
            parameters=parameters,
            checksum=checksum,
            model_files=taken.model_files,
        )

    def _omit(self, seen: dict[str, Any], state: dict[str, Any]) -> None:
        """Remove what the user does not want to store, and note its names. Those that no hook has added are said once."""
        omitted, unknown = list[str](), list[str]()
        for name in self._run.arguments.omit_from_checkpoint or ():
            owner, _, inner = name.partition(".")
            within, key = (seen[owner], inner) if inner and owner == "hyper_parameters" else (seen, name)
            (omitted if key in within else unknown).append(name)
            within.pop(key, None)
        if unknown and not self._said_unknown:
            self._said_unknown = True
            warn(
                f"omit_from_checkpoint names {join_names(unknown)}, which no on_save_checkpoint has added. Added: "
                f"{join_names([name for name in seen if name not in ('epoch', 'global_step', 'state_dict', 'callbacks')])}."
            )
        if omitted:
            state["omitted"] = omitted

    def _fingerprint_frozen(self) -> str:
        """The fingerprint of the parameters that are not trained; computed again only when these, or their values, change."""
        module = self._run.module
        frozen = {
            name: (id(parameter), None if parameter.is_inference() else parameter._version)
            for name, parameter in module.named_parameters()
            if not parameter.requires_grad
        }
        if self._fingerprint is None or self._fingerprint[0] != frozen:
            before, now = self._fingerprint, fingerprint_frozen(module, self._run.strategy.stored_weights(module))
            self._fingerprint = frozen, now
            if before is not None and before[0].keys() == frozen.keys() and before[1] != now:
                changed = [name for name in frozen if frozen[name] != before[0][name]]
                warn(
                    f"save='trainable' does not store parameters with requires_grad=False, but {join_names(changed)} changed "
                    "since the checkpoint before: no run can resume from this one, because it would need their values. "
                    "Fix: ModelCheckpoint(save='all')"
                )
        return self._fingerprint[1]

    def _place(self) -> dict[str, Any]:
        """Where in the data the run is, for the manifest."""
        loader, progress = self._run.train_loader, self._run.progress
        if loader is None:
            return {}
        position = loader.position(progress.current_epoch, progress.batches_consumed)
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
        committed: Callable[[CommitResult], None] | None = None,
        failed: Callable[[Exception], None] | None = None,
        before_capture: Callable[[Path], None] | None = None,
        checksum: str | None = None,
    ) -> Path:
        """Save to a folder of `use_folder`, under `name` or, if that is taken, `name-v1`, …

        Args:
            folder: where.
            name: of the checkpoint.
            weights_only: skip what only a resume needs.
            save: "all" (default) or "trainable".
            saved_by: whose rotation it belongs to.
            metrics: kept in the manifest.
            blocking: return when it is committed.
            replace: a checkpoint of that name is replaced once the new one is complete.
            committed: called after the commit, in the writer's thread. The path is another one if parameters are not finite
                and those of the checkpoint that would be replaced are.
            failed: called in this thread if it could not be written; later if not `blocking`.
            before_capture: called with the path before the state is captured.
            checksum: how its files are checked; `None`: as the Trainer says.

        Returns:
            The path that it has, or will have.

        Raises:
            CheckpointWriteError: this was the third failure in a row.
            UnsavableError: the state cannot be stored; the next save would not succeed either.
            CheckpointLockedError: another run has taken over the folder, because this one did not respond for too long.
        """
        self.wait()
        path = self.save_folders.choose_path(folder, name, replace)
        if before_capture is not None:
            before_capture(path)

        step = self._run.progress.global_step

        def on_commit(written: CommitResult) -> None:
            self._failures = 0
            self._last_good = written.path
            if written.finite:
                self._last_finite = written.path
            if committed is not None:
                committed(written)
            self._note_nonfinite(step, written)

        def not_done(error: Exception) -> None:
            if failed is not None:
                failed(error)
            self._count_failure(error)

        try:
            content = self.content(
                weights_only=weights_only,
                save=save,
                saved_by=saved_by,
                metrics=metrics,
                checksum=checksum or self._run.arguments.checksum,
            )
            plan = plan_checkpoint(self._world, content)
            self._counter += 1
            later = None if blocking else not_done
            self._saver.save(plan, path, blocking=blocking, replace=replace, committed=on_commit, failed=later)
        except CheckpointWriteError as error:  # unlike an UnsavableError, which the next save would have too
            not_done(error)
        if blocking:
            self._report_saved()
        return path

    def reserve(self, *, weights_only: bool = False, save: SaveMode | None = None) -> None:
        """Allocate the host memory for asynchronous saves after the first step, when the optimizers have their state.

        A thread does it. What callbacks add to a checkpoint is not counted. Arguments as for `save`.
        """

        def begin() -> None:
            run, world = self._run, self._world
            taken = capture(
                training_objects(run), save=save or "all", weights_only=weights_only, fingerprints={0: "not needed"}
            )
            taken.choose_files([run.module])
            sizes = sizes_to_copy(taken.tensors, model_files=taken.model_files, rank=world.rank, ranks=world.size)
            self._saver.reserve(sizes, run.strategy.device)

        if not self._reserves:
            self._reserves = True
            self.safe_points.request(begin)

    def release_buffers(self) -> None:
        """Free the host memory of asynchronous saves, after the one in flight; the next one allocates it again."""
        self._saver.close()
        self._report_saved()

    def wait(self) -> None:
        """Wait until no save is in flight, and report failures and complete checkpoints."""
        self._saver.wait()
        self._report_saved()

    def tell_loggers(self, callback: Any) -> None:
        """A checkpoint of a callback is complete; called on the main process, in any thread.

        Loggers that define `after_save_checkpoint` are called in the main thread, which may be logging now.
        """
        if any(is_overridden(logger, "after_save_checkpoint", Logger) for logger in self._run.loggers):
            self._complete.append(callback)
            self.safe_points.note_save()

    def _report_saved(self) -> None:
        while self._complete:
            callback = self._complete.popleft()
            for logger in self._run.loggers:
                with logger._surviving("store the checkpoint"):
                    logger.after_save_checkpoint(callback)
        self._report_nonfinite()

    def _report_nonfinite(self) -> None:
        while self._nonfinite:
            step, written = self._nonfinite.popleft()
            text = f"step {step}: {written.text}"
            marked = f"{text} The checkpoint is marked so, is never the best, and removes none that is finite."
            if not self._warn_of_nonfinite(marked) and written.kept is not None:
                notice(text)

    def _note_nonfinite(self, step: int, written: CommitResult) -> None:
        """If parameters of a checkpoint are not finite, say so at the next safe point; called in any thread."""
        if not written.finite and self._world.is_main:
            self._nonfinite.append((step, written))
            self.safe_points.note_save()

    def warn_of_loss(self, loss: float) -> None:
        """The loss of the current step is not finite: warn once in a run, unless a `NonFiniteGuard` reports it."""
        kind = load_callback("nonfinite_guard")
        if not any(isinstance(callback, kind) for callback in self._run.callbacks):
            self._warn_of_nonfinite(f"the loss is {loss} in optimizer step {self._run.progress.global_step}.")

    def expect_nonfinite(self) -> None:
        """The run is a trial that may diverge, which is no reason for a warning."""
        self._warned_of_nonfinite = True

    def _warn_of_nonfinite(self, what: str) -> bool:
        """Warn of the first loss or parameter that is not finite; returns whether it is the first."""
        if self._warned_of_nonfinite:
            return False
        self._warned_of_nonfinite = True
        self._saver.join()  # the checkpoint that is being written may be the one to go back to
        finite = self._last_finite or (self.resumed_from if self.resumed_finite else None)
        back = (
            f"The checkpoint to go back to: {finite}" if finite else "There is no checkpoint of this run with finite parameters"
        )
        warn(
            f"{what} Training continues. {back}. To stop at such a step, or to skip it: Trainer(callbacks=[NonFiniteGuard()]), "
            "NonFiniteGuard(action='skip') (docs/how-to/debug-nans.md)"
        )
        return True

    def _report_failures(self, wait: bool) -> None:
        """Report saves that have failed in the writer's thread; with `wait` also the one in flight."""
        if wait:
            self._saver.wait()
        else:
            self._saver.poll()

    def _count_failure(self, error: Exception) -> None:
        if isinstance(error, OSError):  # the new checkpoint is complete
            warn(f"an old checkpoint could not be removed: {error}. Training continues.")
            return
        if not isinstance(error, CheckpointWriteError | UnsavableError):
            raise error
        self._failures += 1
        last = f"the last good checkpoint is {self.newest}" if self.newest else "there is no checkpoint of this run yet"
        if self._failures >= _MAX_FAILURES:
            raise CheckpointWriteError(
                f"{self._failures} saves in a row have failed; {last}. The last error: {error}"
            ) from error
        left = _MAX_FAILURES - self._failures
        warn(
            f"a checkpoint could not be saved: {str(error).rstrip('.')}. Training continues, and {last}. After {left} more "
            f"failure{'s' if left > 1 else ''} in a row the run ends."
        )

    def save_to(self, path: Path, *, weights_only: bool, blocking: bool) -> None:
        """Save to a path of the user's; a checkpoint that is there is replaced once the new one is complete.

        An empty file at the path becomes a `.ckpt` with all that Lightning needs to resume.

        Raises:
            CheckpointError: something else is at `path`; or `blocking`, and it cannot be written.
        """
        self._saver.wait()
        path, file, keep = self._targets(path.absolute())
        if not blocking:  # an error of the call is raised by the call, not at a later step
            run_on_all_ranks(self._world, lambda: check_target(path) if self._world.is_main else None)
        adapted = has_adapters(self._run.module)
        if adapted:
            notice(
                "the model has PEFT adapters, so only trained parameters and buffers are saved, with a fingerprint of the rest."
            )
        save: SaveMode = "trainable" if adapted else "all"
        content = self.content(weights_only=weights_only, save=save, checksum=self._run.arguments.checksum)
        plan = plan_checkpoint(self._world, content)
        self._counter += 1
        step = self._run.progress.global_step

        complete: list[CommitResult] = []

        def on_commit(written: CommitResult) -> None:
            self._failures = 0
            self._note_nonfinite(step, written)
            complete.append(written)
            if not blocking:
                write_file()

        def write_file() -> None:
            if file is not None and self._world.is_main:
                _write_file(complete[0], file, keep)

        self._saver.save(plan, path, blocking=blocking, replace=True, committed=on_commit, failed=self._count_failure)
        if blocking:
            if file is not None:
                run_on_all_ranks(self._world, write_file, CheckpointWriteError)
            self._report_saved()

    def _targets(self, path: Path) -> tuple[Path, Path | None, bool]:
        """The folder of a checkpoint for a path of the user's, the file to make of it, and whether the folder is kept.

        An empty file, such as a temporary one, becomes a file. Where `import lightning` gives trainkit, so does `x.ckpt` or
        `x.pt`, next to the folder `x`.
        """

        def choose() -> list[Any] | None:
            if not self._world.is_main:
                return None
            if path.is_file() and not path.stat().st_size:
                return [str(own_folder(path)), str(path), False]
            if not is_open("lightning") or not is_named_so(path):
                return [str(path), None, True]
            if is_checkpoint(path):
                notice(f"{path} is the folder of a checkpoint, and remains one. For a file that torch.load opens, remove it.")
                return [str(path), None, True]
            check_replaceable(path)
            return [str(folder_for(path)), str(path), True]

        folder, file, keep = run_on_all_ranks(self._world, choose)
        return Path(folder), None if file is None else Path(file), keep

    def metrics(self) -> dict[str, tuple[float, bool]]:
        """For each metric that was logged, by name, its latest value and whether it was computed in the current step.

        Values may differ between processes: all use the value of the first process that has one.
        """
        of_this_rank = {name: (float(v.detach()), self._is_current(name)) for name, v in self._run.callback_metrics.items()}
        if self._world.size == 1:
            return of_this_rank
        known = {name: entry for process in reversed(self._world.exchange(of_this_rank)) for name, entry in process.items()}
        return {name: (value, current) for name, (value, current) in sorted(known.items())}

    def weights_replaced(self) -> None:
        """A callback has given the module other weights at the end of training: they are worth a checkpoint of their own."""
        self._replaced = self._run.progress.global_step > self._run.progress.first_step  # a resumed one may have them already

    @property
    def replaced(self) -> bool:
        """Whether `weights_replaced` was called, so that no metric is of the weights of the module."""
        return self._replaced

    @property
    def total_limit(self) -> int | None:
        """Maximum number of checkpoints to keep of the run; `None`: no limit."""
        return self._run.arguments.save_total_limit

    def _is_current(self, name: str) -> bool:
        """Whether a metric was computed in the current step, and with the weights of the module."""
        run = self._run
        if self._replaced:
            return False
        step = run.progress.global_step
        if run.find_computed_step(name) == step:
            return True
        stamp = run.train_metrics.last_stamp(name)
        if stamp is None or name in run.results.evaluated:
            return False
        last = run.train_metrics.stamp
        return stamp >= last - last % run.accumulation  # The right side is the start of the last window.

    @property
    def newest(self) -> Path | None:
        """The newest complete checkpoint with finite parameters, or the one that the run resumed from; else the newest."""
        return self._last_finite or (self.resumed_from if self.resumed_finite else None) or self._last_good or self.resumed_from

    @property
    def position(self) -> tuple[Any, ...]:
        """Where the run is; while it is the same, nothing has changed."""
        at = self._run.progress
        return at.global_step, at.current_epoch, at.batches_consumed, at.phase, self._replaced

    def why_not_savable(self, exception: BaseException) -> str | None:
        """After an error, why a checkpoint of this moment would be useless or impossible; `None` if it is neither."""
        run = self._run
        if run.restored is not None:
            return "the module has the weights of the best checkpoint, and the last step is saved"
        if run.signals.twice:
            return "Ctrl-C was pressed twice"
        agreed = run.signals.received is not None and isinstance(exception, Preempted | KeyboardInterrupt)
        if self._world.size > 1 and not agreed:
            return "an error stopped the run, and a save needs all processes at the same step"
        if run.train_loader is None or run.progress.global_step == run.progress.first_step:
            return "no optimizer step was made yet"
        engine = run.accelerator
        if engine.updating or (engine.updates != run.progress.steps_done and run.progress.phase is Phase.STEP):
            return "the step that failed had begun to change the parameters"
        return None

    def close(self) -> None:
        """Cancel requests, end the writer, and release the folders for other runs."""
        self.safe_points.close()
        try:
            self._saver.close()
            self._report_nonfinite()
        finally:
            self.save_folders.release()


def _write_file(written: CommitResult, file: Path, keep: bool) -> None:
    """Make the file of a checkpoint, and remove the checkpoint unless it is kept.

    That of a checkpoint which did not replace a finite one does not replace its file either.
    """
    if written.kept is not None:
        file = file.with_name(f"{file.stem}{NONFINITE}{file.suffix}")
    try:
        notes = write_ckpt(open_checkpoint(written.path), file, resumable=not keep)
    except CheckpointWriteError as error:
        raise CheckpointWriteError(f"{error} {written.path} is complete." if keep else str(error)) from error
    finally:
        if not keep:
            remove(written.path)
    if notes:
        notice(f"{file}: {'; '.join(notes)}")
