"""Draw docs/images/resume.svg: the loss of `trainkit demo`'s model, in a run that is never killed and in one that is.

    python docs/pictures.py

Needs matplotlib. Each run is a process of its own; the second one is ended with SIGKILL and started again with the same
command. Takes some minutes on two CPU cores. A loss that differs in one bit is an error.
"""

from __future__ import annotations

import argparse
import csv
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from trainkit import Trainer, seed_everything
from trainkit.callbacks import ModelCheckpoint
from trainkit.cli.demo import ByteGPT, SourceCode
from trainkit.loggers import CSVLogger

PICTURE = Path(__file__).parent / "images" / "resume.svg"
STEPS, SAVE_EVERY, KILL_AFTER = 400, 50, 150  # the kill comes between the checkpoints of steps 150 and 200
GREY, BLUE, ORANGE, RED = "#7d8590", "#3b82f6", "#f97316", "#e5484d"  # legible on white and on black

Losses = dict[int, str]
"""The loss of each step, as the log has it."""


def train(root: Path) -> None:
    """Train the model of the demo, from its newest checkpoint if there is one."""
    seed_everything(0)
    trainer = Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        gradient_clip_val=1.0,
        logger=CSVLogger(),
        log_every_n_steps=1,
        callbacks=[ModelCheckpoint(every_n_train_steps=SAVE_EVERY)],
        default_root_dir=root,
        limit_val_batches=0,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(ByteGPT(), datamodule=SourceCode(), ckpt_path="auto")


def start(root: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__, "--train", str(root)])


def killed(root: Path) -> Losses:
    """Start a run, kill it some steps after a checkpoint, and return the losses that it had logged."""
    process = start(root)
    while not any(root.glob(f"logs/*/*/checkpoints/step-{KILL_AFTER:08d}")) or max(losses(root)) < KILL_AFTER + SAVE_EVERY // 2:
        if process.poll() is not None:
            raise RuntimeError(f"expected a run to kill after step {KILL_AFTER}, but it ended with {process.returncode}")
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    if process.wait() != -signal.SIGKILL:
        raise RuntimeError(f"expected a process that SIGKILL ended, got exit code {process.returncode}")
    return losses(root)


def losses(root: Path) -> Losses:
    [log] = root.glob("logs/*/*/metrics.csv")
    with log.open(newline="") as file:
        return {int(row["step"]): row["train_loss"] for row in csv.DictReader(file) if row["train_loss"]}


def draw(whole: Losses, before: Losses, resumed: Losses) -> None:
    """One panel with both curves, and one with the part around the kill."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {"text.color": GREY, "axes.labelcolor": GREY, "axes.edgecolor": GREY, "xtick.color": GREY, "ytick.color": GREY}
        | {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "trainkit"}
    )
    at, kept = max(before), max(step for step in before if step % SAVE_EVERY == 0)
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), width_ratios=(3, 2), layout="constrained")
    for axes in (left, right):
        axes.plot(list(whole), list(map(float, whole.values())), color=BLUE, linewidth=5, alpha=0.45, label="never killed")
        first = {step: float(loss) for step, loss in before.items() if step <= kept}
        axes.plot(
            list(first) + [step for step in resumed if step > kept],
            [*first.values(), *(float(loss) for step, loss in resumed.items() if step > kept)],
            color=ORANGE,
            linewidth=1.3,
            label="killed and resumed",
        )
        axes.axvline(at, color=RED, linewidth=1.2, linestyle="--")
        axes.set_xlabel("optimizer step")
        axes.grid(color=GREY, alpha=0.2)
    left.set_ylabel("training loss, bits per byte")
    left.annotate(f"SIGKILL after step {at}", (at, left.get_ylim()[1]), (6, -10), textcoords="offset points", color=RED)
    left.legend(loc="upper right", frameon=False, labelcolor="linecolor", bbox_to_anchor=(1.0, 0.88))
    right.set_xlim(kept - 70, at + 60)
    shown = [float(loss) for step, loss in whole.items() if kept - 70 <= step <= at + 60]
    right.set_ylim(min(shown) - 0.15, max(shown) + 0.35)
    right.axvline(kept, color=GREY, linewidth=1.2, linestyle=":")
    top = right.get_ylim()[1]
    right.annotate(
        f"resumed from {kept} ", (kept, top), (-3, -10), textcoords="offset points", ha="right", color=GREY, fontsize=9
    )
    right.annotate("SIGKILL", (at, top), (4, -10), textcoords="offset points", color=RED, fontsize=9)
    figure.suptitle(f"All {len(whole)} losses are the same, bit for bit", fontsize=11)
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, transparent=True, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw docs/images/resume.svg.")
    parser.add_argument("--train", type=Path, metavar="ROOT", help="a run, as the script starts it")
    args = parser.parse_args()
    if args.train:
        return train(args.train)
    with tempfile.TemporaryDirectory() as folder:
        roots = Path(folder, "whole"), Path(folder, "killed")
        if start(roots[0]).wait() != 0:
            raise RuntimeError("the run that is never killed failed")
        before = killed(roots[1])
        if start(roots[1]).wait() != 0:
            raise RuntimeError("the resumed run failed")
        whole, resumed = (losses(root) for root in roots)
        if whole != resumed:
            raise RuntimeError(f"the losses differ: {[step for step in whole if whole[step] != resumed.get(step)]}")
        draw(whole, before, resumed)
    print(f"Wrote {PICTURE}")


if __name__ == "__main__":
    main()
