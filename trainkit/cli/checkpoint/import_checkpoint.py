"""`trainkit checkpoint import`: convert a checkpoint of another program."""

from __future__ import annotations

import argparse
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from trainkit.checkpoint.read_foreign import Foreign
from trainkit.checkpoint.urls import remote_sync
from trainkit.cli.checkpoint.text import bytes_text, print_lines
from trainkit.console import quantity
from trainkit.state.foreign_state import import_checkpoint
from trainkit.state.training_objects import CapturedState

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Import the checkpoint; print what was converted, what was not, and how to use it."""
    names = None if args.names is None else Path(args.names).read_text(encoding="utf-8").split()
    with _raise_on_signals():
        foreign, taken = import_checkpoint(
            args.old, args.new, prefix=args.prefix, names=names, optimizer=args.optimizer, scheduler=args.scheduler
        )
        remote_sync.finish()
    tensors = [tensor for by_name in taken.tensors.values() for tensor in by_name.values()]
    print_lines(f"Wrote {args.new}: a checkpoint of {foreign.program}, {bytes_text(sum(t.nbytes for t in tensors))}")
    print_lines(*(f"  {line}" for line in _summary(foreign, taken)))
    print_lines(*(f"  not imported: {text}" for text in foreign.omitted))
    print_lines(*(f"  note: {text}" for text in foreign.notes))
    print_lines(f"Use it: {_use(foreign, taken, args.new)}")
    return 0


@contextmanager
def _raise_on_signals() -> Iterator[None]:
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


def _summary(foreign: Foreign, taken: CapturedState) -> list[str]:
    lines = [f"weights: {quantity(len(tensors), 'tensor')}" for tensors in foreign.models]
    for described in taken.state["optimizers"]:
        lines.append(f"optimizer: {described['class']}, {quantity(len(described['state']), 'parameter')}")
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


def _use(foreign: Foreign, taken: CapturedState, new: str) -> str:
    """The call that loads all of it."""
    if not taken.state["optimizers"]:
        return f"trainer.fit(module, ckpt_path={new!r}, restore={{'model'}}), or MyModule.load_from_checkpoint({new!r})"
    parts = ["model", "optimizer", *(["scheduler"] if taken.state["schedulers"] else [])]
    if foreign.step is None or foreign.epoch is None:
        return f"trainer.fit(module, ckpt_path={new!r}, restore={{{', '.join(map(repr, parts))}}})"
    if len(taken.state["schedulers"]) == len(foreign.schedulers):
        return f"trainer.fit(module, ckpt_path={new!r})"
    return f"trainer.fit(module, ckpt_path={new!r}, restore={{'model', 'optimizer', 'loop'}})"
