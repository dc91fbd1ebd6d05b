"""The measurements of `checkpoint.py`, one per process: `python checkpoint_cases.py CASE FOLDER`.

The last line of the output is JSON: name of the row → [trainkit, reference] for each repeat, in seconds or MB.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from trainkit import Accelerator, Callback, Trainer, TrainModule
from trainkit.callbacks import ModelCheckpoint
from trainkit.checkpoint.reader import open_checkpoint
from trainkit.checkpoint.tensor_file import FiniteCheck

PIECE = 2**20
WORDS = 20_000
WIDTH = 512
RESERVED_BY = 3  # the optimizer step by which a thread has allocated the memory for copies

Pairs = dict[str, list[tuple[float, float]]]  # row → (trainkit, reference), one per repeat


class Language(TrainModule):
    """An embedding and transformer layers. Each parameter has a gradient in each step."""

    def __init__(self, layers: int, words: int = WORDS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, WIDTH)
        self.layers = nn.Sequential(*[nn.TransformerEncoderLayer(WIDTH, 8, batch_first=True) for _ in range(layers)])
        self.adamw = torch.optim.AdamW(self.parameters(), lr=1e-5)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        out: Tensor = self.layers(self.embedding(batch[0]))
        return out.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.adamw

    def fill(self) -> None:
        """Create the optimizer state that a step would create, without the memory that a step needs."""
        for parameter in self.parameters():
            self.adamw.state[parameter] = {
                "step": torch.tensor(1.0),
                "exp_avg": torch.rand_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.rand_like(parameter, requires_grad=False),
            }

    def tensors(self) -> list[Tensor]:
        """The current tensors of model and optimizer."""
        slots = [slot for state in self.adamw.state.values() for slot in state.values() if isinstance(slot, Tensor)]
        return [tensor.detach() for tensor in (*self.state_dict().values(), *slots)]


def prepared(module: Language) -> Accelerator:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(module, module.adamw)
    return accelerator


def fit(module: Language, callbacks: list[Callback], folder: Path, steps: int, device: str = "cpu") -> None:
    trainer = Trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        max_steps=steps,
        callbacks=callbacks,
        logger=False,
        default_root_dir=folder,
        enable_checkpointing=any(isinstance(one, ModelCheckpoint) for one in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        seed=0,
    )
    trainer.fit(module, [[torch.randint(WORDS, (2, 16))]] * steps)


def total_mb(tensors: Iterable[Tensor]) -> float:
    return sum(tensor.nbytes for tensor in tensors) / 1e6


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def between(ours: Callable[[], float], reference: Callable[[], float]) -> tuple[tuple[float, float], tuple[float, float]]:
    """Returns (trainkit, mean of the two references), and (reference before, reference after)."""
    before, own, after = reference(), ours(), reference()
    return (own, (before + after) / 2), (before, after)


# --------------------------------------------------------------------------------------------------------- references


def plain_write(tensors: list[Tensor], path: Path) -> None:
    digest = xxhash.xxh3_128()
    with path.open("xb", buffering=0) as file:
        for tensor in tensors:
            view = tensor.reshape(-1).view(torch.uint8).numpy().data
            for start in range(0, len(view), PIECE):
                digest.update(view[start : start + PIECE])
                file.write(view[start : start + PIECE])
        os.fsync(file.fileno())
    digest.hexdigest()


def plain_read(files: list[Path]) -> list[memoryview]:
    contents = []
    for path in files:
        digest = xxhash.xxh3_128()
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            view = torch.empty(size, dtype=torch.uint8).numpy().data
            for start in range(0, size, PIECE):
                file.readinto(view[start : start + PIECE])
                digest.update(view[start : start + PIECE])
        digest.hexdigest()
        contents.append(view)
    return contents


def plain_copy(tensors: list[Tensor], buffers: list[Tensor]) -> None:
    for tensor, buffer in zip(tensors, buffers, strict=True):
        buffer.copy_(tensor, non_blocking=True)
    wait_for_device()


def wait_for_device() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


# --------------------------------------------------------------------------------------------------------------- time


def measure_save(folder: Path, layers: int, repeats: int) -> Pairs:
    module = Language(layers)
    module.fill()
    accelerator, tensors = prepared(module), module.tensors()
    pairs: Pairs = {"bytes": [], "handed": [], "save": [], "save_control": []}
    saved, plain = folder / "saved", folder / "plain"

    def ours() -> float:
        before = written_by_this_process()
        took = seconds(lambda: accelerator.save_state(saved))
        after = written_by_this_process()
        pairs["bytes"].append((sum(path.stat().st_size for path in saved.iterdir()) / 1e6, total_mb(tensors)))
        if before is not None and after is not None:
            pairs["handed"].append(((after - before) / 1e6, total_mb(tensors)))
        shutil.rmtree(saved)
        return took

    def reference() -> float:
        took = seconds(lambda: plain_write(tensors, plain))
        plain.unlink()
        return took

    for _ in range(repeats):
        pair, control = between(ours, reference)
        pairs["save"].append(pair)
        pairs["save_control"].append(control)
    return pairs


def measure_finite(folder: Path, layers: int, repeats: int) -> Pairs:
    module = Language(layers)
    module.fill()
    tensors = module.tensors()
    pairs: Pairs = {"finite": [], "finite_control": []}

    def ours() -> None:
        for tensor in tensors:
            FiniteCheck({"": True}).add("", tensor)

    def reference() -> None:
        for tensor in tensors:
            bool(torch.isfinite(tensor).all())

    for _ in range(repeats):
        pair, control = between(lambda: seconds(ours), lambda: seconds(reference))
        pairs["finite"].append(pair)
        pairs["finite_control"].append(control)
    return pairs


def written_by_this_process() -> int | None:
    """Bytes that this process has passed to write calls; None where `/proc` does not exist."""
    try:
        text = Path("/proc/self/io").read_text()
    except OSError:
        return None
    return int(dict(line.split(": ") for line in text.splitlines())["wchar"])


class Saves(Callback):
    """Saves after each training step while no other save runs, and times a plain copy of the same bytes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.buffers: list[Tensor] = []
        self.pairs: list[tuple[float, float]] = []
        self.control: list[tuple[float, float]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step < RESERVED_BY:
            return
        tensors = module.tensors()
        if not self.buffers:
            pinned = tensors[0].is_cuda  # as the reference should be as fast as it can
            self.buffers = [torch.empty_like(tensor, device="cpu", pin_memory=pinned) for tensor in tensors]
            plain_copy(tensors, self.buffers)
        target = self.folder / f"step-{trainer.global_step}"
        pair, control = between(
            lambda: save_beside(trainer, target), lambda: seconds(lambda: plain_copy(tensors, self.buffers))
        )
        self.pairs.append(pair)
        self.control.append(control)


def save_beside(trainer: Any, target: Path) -> float:
    """Seconds inside the call. Returns when the checkpoint is written, and removes it."""
    wait_for_device()
    took = seconds(lambda: trainer.save_checkpoint(target, blocking=False))
    while not target.exists():
        time.sleep(0.01)
    shutil.rmtree(target)
    return took


def measure_stall(folder: Path, layers: int, repeats: int, device: str = "cpu") -> Pairs:
    saves = Saves(folder)
    kept = ModelCheckpoint(folder / "kept", every_n_train_steps=10**9)  # it reserves the memory
    fit(Language(layers), [saves, kept], folder, repeats + RESERVED_BY, device)
    return {"stall_control": saves.control, "stall_first": saves.pairs[:1], "stall": saves.pairs[1:]}


def measure_load(folder: Path, layers: int, repeats: int) -> Pairs:
    path = folder / "saved"
    module = Language(layers)
    module.fill()
    accelerator = prepared(module)
    accelerator.save_state(path)
    files = sorted(path.iterdir())
    pairs: Pairs = {}

    def timed(call: Callable[[], object], heat: str) -> float:
        module.adamw.state.clear()
        give_back_memory()
        for file in files:
            if heat == "cold":
                drop(file)
            else:
                file.read_bytes()
        return seconds(call)

    calls: dict[str, Callable[[], object]] = {
        "read": lambda: open_checkpoint(path).read(),
        "load": lambda: accelerator.load_state(path),
    }

    def measure(heat: str, what: str) -> None:
        pair, control = between(lambda: timed(calls[what], heat), lambda: timed(lambda: plain_read(files), heat))
        pairs.setdefault(f"{heat}_{what}", []).append(pair)
        pairs.setdefault(f"{heat}_control", []).append(control)

    for _ in range(repeats):
        for heat in ("warm", "cold") if hasattr(os, "posix_fadvise") else ("warm",):
            for what in calls:
                measure(heat, what)
    return pairs


def drop(path: Path) -> None:
    """Ask the system to drop a file from the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())  # pages that are not on the disk yet cannot be dropped
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def give_back_memory() -> None:
    """Return free memory to the system, so that a load has to request its memory, as in a new process."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:  # glibc only
        trim(0)


# ------------------------------------------------------------------------------------------------------------- memory


def peak_mb() -> float:
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6


def warm_up(folder: Path) -> None:
    """Save and load a small model, so that the code for it is already in memory."""
    small = Language(layers=0, words=1)
    small.fill()
    accelerator = prepared(small)
    accelerator.save_state(folder / "small")
    accelerator.load_state(folder / "small")


def measure_memory_save(folder: Path, layers: int, repeats: int) -> Pairs:
    warm_up(folder)
    module = Language(layers)
    module.fill()
    accelerator, before = prepared(module), peak_mb()
    accelerator.save_state(folder / "saved")
    return {"memory_save": [(peak_mb() - before, max(tensor.nbytes for tensor in module.tensors()) / 1e6)]}


class SavesAtStart(Callback):
    """Saves twice before the first step, when there are no gradients yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pairs: list[tuple[float, float]] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        before = peak_mb()
        for number in range(2):
            save_beside(trainer, self.folder / f"saved-{number}")
        self.pairs.append((peak_mb() - before, total_mb(module.tensors())))


def measure_memory_stall(folder: Path, layers: int, repeats: int) -> Pairs:
    warm_up(folder)
    module, saves = Language(layers), SavesAtStart(folder)
    module.fill()
    fit(module, [saves], folder, steps=1)
    return {"memory_stall": saves.pairs}


def measure_memory_read(folder: Path, layers: int, repeats: int) -> Pairs:
    path = written_elsewhere(folder, layers)
    before = peak_mb()
    loaded = open_checkpoint(path).read()
    return {"memory_read": [(peak_mb() - before, sum(total_mb(tensors.values()) for tensors in loaded.tensors.values()))]}


def measure_memory_load(folder: Path, layers: int, repeats: int) -> Pairs:
    path = written_elsewhere(folder, layers)
    module = Language(layers)
    accelerator, before = prepared(module), peak_mb()
    accelerator.load_state(path)
    return {"memory_load": [(peak_mb() - before, total_mb(module.tensors()))]}


def written_elsewhere(folder: Path, layers: int) -> Path:
    """A checkpoint written by another process, so that this process has never held its state."""
    warm_up(folder)
    command = [sys.executable, __file__, "memory_save", str(folder), f"--layers={layers}"]
    subprocess.run(command, check=True, capture_output=True)
    return folder / "saved"


MEASURES: dict[str, Callable[[Path, int, int], Pairs]] = {
    "save": measure_save,
    "finite": measure_finite,
    "stall": measure_stall,
    "load": measure_load,
    "memory_save": measure_memory_save,
    "memory_stall": measure_memory_stall,
    "memory_read": measure_memory_read,
    "memory_load": measure_memory_load,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=list(MEASURES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    measure = MEASURES[arguments.case]
    if arguments.device != "cpu":
        measure = partial(measure_stall, device=arguments.device)  # the only one on another device
    print(json.dumps(measure(arguments.folder, arguments.layers, arguments.repeats)))


if __name__ == "__main__":
    main()
