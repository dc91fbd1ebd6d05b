"""`trainkit demo`: train, validate, plot, sample, and print the results."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trainkit.cli.demo.corpus import SourceCode, bigram_bits, unigram_bits
from trainkit.cli.demo.gpt import ByteGPT
from trainkit.cli.plot import draw
from trainkit.console import quantity
from trainkit.errors import ConfigurationError, missing_package
from trainkit.loggers.base import is_installed
from trainkit.loggers.csv_logs import CSVLogger
from trainkit.loggers.run_files import read_metrics
from trainkit.loggers.tensorboard import TensorBoardLogger
from trainkit.registry import load_callback
from trainkit.rng import seed_everything
from trainkit.trainer.trainer import Trainer

__all__ = ["FULL", "PROMPT", "SMALL", "Result", "Size", "add_arguments", "report", "run", "train"]

PROMPT = b"def "


@dataclass(frozen=True)
class Size:
    """The size of the model and of the run.

    Attributes:
        width, depth, heads, context: See `ByteGPT`.
        batch_size: Windows per batch.
        max_steps: Number of optimizer steps.
        val_windows: Windows to validate on.
        checks: Number of validations without early stopping.
        sample: Bytes to generate.
    """

    width: int = 160
    depth: int = 3
    heads: int = 5
    context: int = 64
    batch_size: int = 16
    max_steps: int = 1000
    val_windows: int = 1024
    checks: int = 10
    sample: int = 400


FULL = Size()
SMALL = Size(width=32, depth=2, heads=2, context=32, max_steps=60, val_windows=128, checks=3, sample=80)


@dataclass(frozen=True)
class Result:
    """The results; losses in bits per byte.

    Attributes:
        val_loss: The loss of the model on the validation windows.
        bigram, unigram: The losses of the baselines on the same bytes.
        sample: `PROMPT` and what the model generated after it.
        steps: Number of optimizer steps.
        stopped_early: Whether early stopping ended the run.
        log_dir: The folder of the run.
        picture: The PNG file of the loss curve.
    """

    val_loss: float
    bigram: float
    unigram: float
    sample: bytes
    steps: int
    stopped_early: bool
    log_dir: Path
    picture: Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `trainkit demo` to a parser."""
    parser.add_argument("--max-steps", type=int, metavar="N", help=f"number of optimizer steps (default: {FULL.max_steps})")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed (default: 0)")
    parser.add_argument(
        "--root", default="trainkit_runs/demo", metavar="DIR", help="folder for all files (default: ./trainkit_runs/demo)"
    )
    parser.add_argument("--small", action="store_true", help="train a tiny model for a few seconds")


def run(args: argparse.Namespace) -> int:
    """Run the demo and print the results."""
    if args.max_steps is not None and args.max_steps < 1:
        raise ConfigurationError(f"--max-steps: expected a number ≥ 1, got {args.max_steps}. Fix: --max-steps 100")
    # check before the training, which takes a minute
    for package, extra in (("tensorboard", "tensorboard"), ("matplotlib", "plot")):
        if not is_installed(package):
            raise missing_package(package, extra, "The demo")
    start, size, root = time.monotonic(), SMALL if args.small else FULL, Path(args.root)
    try:
        result = train(size, args.seed, root, args.max_steps)
    except KeyboardInterrupt:
        folder = _run_folder(root, size, args.seed, args.max_steps or size.max_steps)
        saved = f"To continue, run the same command again; to start over, first remove {folder}."
        raise KeyboardInterrupt(f"stopped. {saved if _has_checkpoints(folder) else 'Nothing was saved yet.'}") from None
    report(result, time.monotonic() - start)
    return 0


def train(size: Size, seed: int, root: Path, max_steps: int | None = None) -> Result:
    """Train a `ByteGPT` on the standard library.

    An interrupted run resumes from its newest checkpoint if it is started with the same arguments. After a complete run
    the next one starts over, in another folder.

    Args:
        size: The size of the model and the run.
        seed: The seed of the initial parameters, the order and the sample.
        root: The folder for all files.
        max_steps: Number of optimizer steps; default: that of `size`.
    """
    max_steps = max_steps or size.max_steps
    seed_everything(seed)
    data = SourceCode(context=size.context, batch_size=size.batch_size, val_windows=size.val_windows)
    data.setup("fit")
    model = ByteGPT(width=size.width, depth=size.depth, heads=size.heads, context=size.context)
    stopping = load_callback("early_stopping")(monitor="val_loss", patience=3)
    csv, unfinished = CSVLogger(), _run_folder(root, size, seed, max_steps)
    saving = load_callback("model_checkpoint")(dirpath=unfinished, every_n_train_steps=max(max_steps // size.checks, 1))
    trainer = Trainer(
        max_steps=max_steps,
        limit_train_batches=max_steps,  # With one short epoch, the progress bar ends where the run does.
        val_every_n_steps=max(max_steps // size.checks, 1),
        log_every_n_steps=10,
        gradient_clip_val=1.0,
        logger=[csv, TensorBoardLogger()],
        callbacks=[stopping, saving],
        default_root_dir=root,
        deterministic=torch.cuda.is_available() or None,  # CPU kernels are deterministic anyway
        seed=seed,
    )
    _introduce(data, model, max_steps)
    if _has_checkpoints(unfinished):
        print(f"Resuming the run that was interrupted. To start over, remove {unfinished}.", flush=True)
        trainer.fit(model, datamodule=data, ckpt_path="auto")
    else:
        trainer.fit(model, datamodule=data)
    # The last validation may be some steps old. Without loggers, so that no step has two values in the files.
    evaluator = Trainer(logger=False, enable_progress_bar=False, enable_model_summary=False, max_epochs=1, seed=seed)
    [metrics] = evaluator.validate(model, datamodule=data, verbose=False)

    folder = Path(csv.log_dir or root)
    windows = data.val.all()
    bigram, unigram = _baselines(data.corpus.train, windows)
    losses = {name: points for name, points in read_metrics(folder).items() if name in ("train_loss", "val_loss")}
    title = f"bits per byte (bigram {bigram:.2f}, unigram {unigram:.2f})"
    result = Result(
        val_loss=metrics["val_loss"],
        bigram=bigram,
        unigram=unigram,
        sample=model.generate(PROMPT, size.sample, seed=seed),
        steps=trainer.global_step,
        stopped_early=trainer.global_step < max_steps,
        log_dir=folder,
        picture=draw(losses, folder / "loss.png", title=title),
    )
    if unfinished.exists():  # complete: the next run starts over
        unfinished.replace(folder / "checkpoints")
    return result


def _run_folder(root: Path, size: Size, seed: int, max_steps: int) -> Path:
    """The folder of the checkpoints of an incomplete run with these arguments."""
    return root / "unfinished" / f"width-{size.width}-steps-{max_steps}-seed-{seed}"


def _has_checkpoints(folder: Path) -> bool:
    return folder.is_dir() and any(not path.name.startswith(".") for path in folder.iterdir())


def _baselines(train: bytes, windows: Tensor) -> tuple[float, float]:
    previous, targets = windows[:, :-1].numpy(), windows[:, 1:].numpy()
    return bigram_bits(train, previous, targets), unigram_bits(train, targets)


def _introduce(data: SourceCode, model: ByteGPT, max_steps: int) -> None:
    corpus = data.corpus
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"A GPT over bytes with {parameters:,} parameters learns to write Python: {quantity(max_steps, 'optimizer step')} "
        f"on Python's own\nstandard library, {len(corpus.train_files)} files ({len(corpus.train) / 1e6:.1f} MB) to train on "
        f"and {len(corpus.val_files)} others to validate on.",
        flush=True,
    )


def report(result: Result, seconds: float) -> None:
    """Print the sample, the losses, the files and what to do next; `seconds` is the duration of the run."""
    early = ", stopped early because the validation loss no longer fell" if result.stopped_early else ""
    difference = result.bigram - result.val_loss
    comparison = f"{abs(difference):.2f} bits {'better' if difference > 0 else 'worse'} than the bigram baseline"
    folder = result.log_dir
    print(f"\nWhat it writes after {PROMPT.decode()!r}:\n\n{_indent(result.sample)}\n")
    print(f"{quantity(result.steps, 'optimizer step')} in {seconds:.0f} s in total{early}.")
    print(f"Validation loss     {result.val_loss:.3f} bits per byte, {comparison}")
    print(f"  bigram baseline   {result.bigram:.3f} on the same bytes")
    print(f"  unigram baseline  {result.unigram:.3f} on the same bytes")
    print(f"\nFiles, in {folder}:")
    print(f"  {result.picture.name:<12} the loss curve")
    print("  metrics.csv  the logged metrics; events.out.tfevents.* the same for TensorBoard")
    print("  checkpoints  the model and the state to resume from")
    print("\nNext:")
    print(f"  {_python()} -m tensorboard.main --logdir {shlex.quote(str(folder.parent))}")
    print(f"  {_python()} -m trainkit plot {shlex.quote(str(folder))}")
    print("  examples/byte_gpt.py in the repository is the same run as a script that you can change.")


def _python() -> str:
    """The command for this Python, which may not be on the path."""
    this = Path(sys.executable)
    if shutil.which("python") == str(this):
        return "python"
    return shlex.quote(str(this.relative_to(Path.cwd()) if this.is_relative_to(Path.cwd()) else this))


def _indent(sample: bytes) -> str:
    """The sample as printable text."""
    text = sample.decode("utf-8", "replace")
    text = "".join(c if c == "\n" or c.isprintable() else "?" for c in text.expandtabs(4))
    encoding = sys.stdout.encoding or "utf-8"
    text = text.encode(encoding, "replace").decode(encoding)
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())
