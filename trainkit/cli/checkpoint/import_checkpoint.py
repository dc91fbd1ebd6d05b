"""`trainkit checkpoint import`: convert a checkpoint of another program."""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from trainkit.checkpoint.commit import check_target, commit
from trainkit.checkpoint.draft import Content, Draft
from trainkit.checkpoint.staging import staging
from trainkit.cli.checkpoint.foreign.named_state import converted
from trainkit.cli.checkpoint.foreign.read_foreign import MALFORMED, Foreign, malformed, read_foreign
from trainkit.cli.checkpoint.text import bytes_text, print_lines
from trainkit.console import counted
from trainkit.errors import ConfigurationError, TrainkitError
from trainkit.paths import local_path
from trainkit.state.parts import Captured, about
from trainkit.strategy import Strategy

__all__ = ["import_checkpoint", "run"]


def run(args: argparse.Namespace) -> int:
    """Import the checkpoint; print what was converted, what was not, and how to use it."""
    names = None if args.names is None else Path(args.names).read_text(encoding="utf-8").split()
    with _ended_by_exceptions():
        foreign, taken = import_checkpoint(
            args.old, args.new, prefix=args.prefix, names=names, optimizer=args.optimizer, scheduler=args.scheduler
        )
    tensors = [tensor for own in taken.tensors.values() for tensor in own.values()]
    print_lines(f"Wrote {args.new}: a checkpoint of {foreign.program}, {bytes_text(sum(t.nbytes for t in tensors))}")
    print_lines(*(f"  {line}" for line in _imported(foreign, taken)))
    print_lines(*(f"  not imported: {text}" for text in foreign.omitted))
    print_lines(*(f"  note: {text}" for text in foreign.notes))
    print_lines(f"Use it: {_use(foreign, taken, args.new)}")
    return 0


@contextmanager
def _ended_by_exceptions() -> Iterator[None]:
    """In this context SIGTERM and SIGHUP raise a `SystemExit`, so that what was written so far is removed."""

    def end(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    kinds = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    if threading.current_thread() is not threading.main_thread():
        kinds = []
    before = {kind: signal.getsignal(kind) for kind in kinds}
    try:
        for kind, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(kind, end)
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


def import_checkpoint(
    old: str | os.PathLike[str],
    new: str | os.PathLike[str],
    *,
    prefix: str = "",
    names: list[str] | None = None,
    optimizer: str | None = None,
    scheduler: str | None = None,
) -> tuple[Foreign, Captured]:
    """Convert a checkpoint of another program to a checkpoint directory. Writes nothing if there is an error.

    Args:
        old: A Lightning `.ckpt`, a folder of Accelerate's `save_state`, a `checkpoint-N` of Hugging Face's Trainer, a universal
            checkpoint of DeepSpeed, or a file with a state dict.
        new: The checkpoint to write. It must not exist, or be an empty folder.
        prefix: Put before each name, such as `"model."` if the module has the model as `self.model`.
        names: The parameters in the order of `model.named_parameters()`, for optimizer state that is numbered.
        optimizer: The class of the optimizer in `torch.optim`. `None`: the one whose options were saved.
        scheduler: The class of the scheduler. `None`: the one whose state was saved.

    Returns:
        What was read and what was written.

    Raises:
        ConfigurationError: The format is not known, or an argument does not fit.
        CheckpointError: `old` cannot be read, or `new` cannot be written.
    """
    target = Path(os.path.abspath(local_path(new, "NEW")))
    if target.exists() and (target.is_file() or os.listdir(target)):
        raise ConfigurationError(f"{target} exists. Choose another name for the new checkpoint, or remove it.")
    check_target(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.import-", dir=target.parent) as scratch:
        source = Path(os.path.abspath(old))
        foreign = read_foreign(source, Path(scratch))
        try:
            taken, content = _converted(foreign, prefix, names, optimizer, scheduler)
        except TrainkitError:
            raise
        except MALFORMED as error:
            raise malformed(source, error) from error
        commit(Draft(content), target)
    staging.finish()
    return foreign, taken


def _converted(
    foreign: Foreign, prefix: str, names: list[str] | None, optimizer: str | None, scheduler: str | None
) -> tuple[Captured, Content]:
    """What the new checkpoint captures, and all its content; arguments as for `import_checkpoint`."""
    foreign.models = [{_renamed(name, prefix): t for name, t in tensors.items()} for tensors in foreign.models]
    for group in (group for state in foreign.optimizers for group in state["param_groups"] if "param_names" in group):
        group["param_names"] = [_renamed(name, prefix) for name in group["param_names"]]
    known = set(foreign.models[0])
    order = None if names is None else [name if name in known else _renamed(name, prefix) for name in names]
    taken = converted(foreign, order, optimizer, scheduler)
    return taken, _content(foreign, taken)


def _renamed(name: str, prefix: str) -> str:
    """The name in the new checkpoint: without what `torch.compile` adds."""
    return prefix + name.replace("_orig_mod.", "")


def _content(foreign: Foreign, taken: Captured) -> Content:
    """What the new checkpoint contains; with the counters of a run if they are known."""
    optimizers = bool(taken.state["optimizers"])
    position = {"epoch": foreign.epoch, "batches": 0, "samples": 0, "complete": False, "dataset": None, "iterable": None}
    state: dict[str, Any] = {
        **taken.state,
        "hyper_parameters": foreign.hyper_parameters,
        "hyper_parameters_name": foreign.hparams_name,
    }
    if not optimizers:
        for key in ("optimizers", "schedulers", "scaler"):
            del state[key]
        del taken.tensors["optimizer"]
    elif foreign.step is not None and foreign.epoch is not None:
        state |= _run_state(foreign, position)
    described = about(
        Strategy(device="cpu"),
        taken,
        seed=0,
        run_id=secrets.token_hex(8),
        save_counter=1,
        step=foreign.step or 0,
        epoch=foreign.epoch or 0,
        position=position if "loop" in state else {},
        weights_only=not optimizers,
    )
    # which of them were parameters is not known; NaN is wrong in any
    names = {stem: dict.fromkeys(tensors, False) for stem, tensors in taken.tensors.items() if stem != "optimizer"}
    return Content(taken.tensors, state, described, taken.attachments, parameters=names)


def _run_state(foreign: Foreign, position: dict[str, Any]) -> dict[str, Any]:
    """The state of a run at the start of an epoch, without metrics."""
    loop = {
        "global_step": foreign.step,
        "current_epoch": foreign.epoch,
        "phase": "step",
        "position": position,
        "validated": 0,
        "earlier_batches": 0,
        "validation_pending": False,
        "validation_batches": 0,
        "epoch_complete": True,
        "stop_asked": False,
        "stopping": False,
        "should_stop": False,
        "computed": {},
    }
    return {
        "loop": loop,
        "metrics": {"stamp": -1, "metrics": [], "objects": {}},
        "results": {"callback": {}, "progress_bar": {}, "logged": {}, "evaluated": []},
        "callbacks": {},
        "loggers": [],
        "user": {},
    }


def _imported(foreign: Foreign, taken: Captured) -> list[str]:
    lines = [f"weights: {counted(len(tensors), 'tensor')}" for tensors in foreign.models]
    for described in taken.state["optimizers"]:
        lines.append(f"optimizer: {described['class']}, {counted(len(described['state']), 'parameter')}")
    if taken.state["optimizers"]:
        lines += [f"scheduler: {described['class']}" for described in taken.state["schedulers"]]
        lines += ["loss scaler"] if taken.state["scaler"] else []
    if foreign.hyper_parameters:
        lines.append(f"hyper-parameters: {', '.join(map(str, foreign.hyper_parameters))}")
    if foreign.step is not None:
        again = ", which starts again at its first batch" if foreign.in_epoch else ""
        epoch = "" if foreign.epoch is None else f", epoch {foreign.epoch}{again}"
        lines.append(f"counters: step {foreign.step}{epoch}")
    return lines


def _use(foreign: Foreign, taken: Captured, new: str) -> str:
    """The call that loads all of it."""
    if not taken.state["optimizers"]:
        return f"trainer.fit(module, ckpt_path={new!r}, restore={{'model'}}), or MyModule.load_from_checkpoint({new!r})"
    parts = ["model", "optimizer", *(["scheduler"] if taken.state["schedulers"] else [])]
    if foreign.step is None or foreign.epoch is None:
        return f"trainer.fit(module, ckpt_path={new!r}, restore={{{', '.join(map(repr, parts))}}})"
    if len(taken.state["schedulers"]) == len(foreign.schedulers):
        return f"trainer.fit(module, ckpt_path={new!r})"
    return f"trainer.fit(module, ckpt_path={new!r}, restore={{'model', 'optimizer', 'loop'}})"
