"""What a training step on two processes costs, compared with a DDP loop written by hand, over gloo.

    python benchmarks/ddp.py [--only mlp gpt] [--repeats 5] [--chunks 16] [--json FILE]

A multilayer perceptron with 10 million parameters, and the byte-level GPT of `trainkit demo`; AdamW, float32, one thread per
process. The loop by hand is that of PyTorch's tutorial: `DistributedDataParallel` and a `DataLoader` with a
`DistributedSampler`. `Trainer` gets the same dataset in a plain `DataLoader`, without logger, progress bar and checkpoints.

`pairs.py` explains how it is measured.

Returns 1 if a ratio of wall-clock times is above 1.03. Linux and macOS only.
"""

from __future__ import annotations

import sys
from typing import Any

from pairs import BATCH, Clocked, Contender, adamw, argument_parser, compare, fit, loss_of, make_module, own_loop, work
from report import Report
from torch.utils.data import DataLoader

LIMIT = 1.03


def hand(model: str, data: Clocked) -> None:
    """The loop of PyTorch's tutorial."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data.distributed import DistributedSampler

    dist.init_process_group("gloo")
    ddp = DistributedDataParallel(make_module(model))
    optimizer = adamw(ddp)
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    sampler.set_epoch(0)
    for batch in DataLoader(data, BATCH[model], sampler=sampler):
        optimizer.zero_grad()
        loss_of(model, ddp, batch).backward()
        optimizer.step()
    dist.destroy_process_group()


def trainer(model: str, data: Clocked) -> None:
    fit("ddp", model, data)


def loop_with_accelerator(model: str, data: Clocked) -> None:
    from trainkit.strategies import DDPStrategy

    own_loop(DDPStrategy(device="cpu"), model, data)


CONTENDERS = {
    "hand": Contender("the loop by hand / itself", hand, "hand", None),
    "trainer": Contender("Trainer", trainer, "hand", LIMIT),
    "own_loop": Contender("Accelerator, own loop", loop_with_accelerator, "hand", LIMIT),
}


def main() -> int:
    """Measure, print, and return 1 if the limit is exceeded."""
    arguments = argument_parser(__doc__, list(CONTENDERS)).parse_args()
    if arguments.work:
        work(arguments, CONTENDERS)
        return 0
    report = Report()
    compare(report, __file__, arguments, CONTENDERS)
    return report.finish(arguments.json)


if __name__ == "__main__":
    sys.exit(main())
