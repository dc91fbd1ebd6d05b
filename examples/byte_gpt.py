r"""Train the language model of `trainkit demo` in a script of your own, and change what you like.

    python examples/byte_gpt.py --max-steps 1000 --width 160 --depth 3

A GPT over bytes learns Python from the standard library's source files. The default takes a minute or two on two CPU
cores. With a GPU, try more:

```python
python examples/byte_gpt.py --width 384 --depth 6 --heads 6 --context 256 --batch-size 64 --learning-rate 1e-3 \
    --max-steps 5000 --precision bf16-mixed
```
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from trainkit import Trainer, seed_everything
from trainkit.callbacks import EarlyStopping, LearningRateMonitor
from trainkit.cli.demo import ByteGPT, SourceCode, bigram_bits
from trainkit.loggers import CSVLogger


def main(argv: Sequence[str] | None = None) -> tuple[float, float]:
    """Train; returns the validation loss and that of a bigram model on the same bytes, in bits per byte."""
    parser = argparse.ArgumentParser(description="A byte-level GPT on Python's standard library.")
    parser.add_argument("--max-steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--context", type=int, default=64, help="bytes in a training sample")
    parser.add_argument("--width", type=int, default=160)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--heads", type=int, default=5)
    parser.add_argument("--learning-rate", type=float, default=2.5e-3)
    parser.add_argument("--accumulate", type=int, default=1, help="batches in an optimizer step")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--root", default="trainkit_runs/byte_gpt", help="where logs go")
    args = parser.parse_args(argv)

    seed_everything(args.seed)
    data = SourceCode(context=args.context, batch_size=args.batch_size)
    model = ByteGPT(args.width, args.depth, args.heads, args.context, args.learning_rate)
    trainer = Trainer(
        max_steps=args.max_steps,
        val_every_n_steps=max(args.max_steps // 10, 1),
        log_every_n_steps=10,
        accumulate_grad_batches=args.accumulate,
        gradient_clip_val=1.0,
        precision=args.precision,
        logger=CSVLogger(),
        callbacks=[EarlyStopping("val_loss", patience=3), LearningRateMonitor()],
        default_root_dir=args.root,
    )
    trainer.fit(model, datamodule=data)
    [metrics] = trainer.validate(model, datamodule=data)

    windows = data.val.all().numpy()
    bigram = bigram_bits(data.corpus.train, windows[:, :-1], windows[:, 1:])
    print(model.generate(b"def ", 300, seed=args.seed).decode("utf-8", "replace"))
    print(f"{metrics['val_loss']:.3f} bits per byte; a bigram model has {bigram:.3f}. Logs: {trainer.log_dir}")
    return metrics["val_loss"], bigram


if __name__ == "__main__":
    main()
