"""``trainkit checkpoint diff``: in what two checkpoints differ."""

from __future__ import annotations

import argparse

from trainkit.checkpoint.reader import open_checkpoint
from trainkit.cli.checkpoint.compare import compare_checkpoints
from trainkit.cli.checkpoint.text import count_text, say

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """One line for each difference; 0 if there is none, else 1."""
    first, second = open_checkpoint(args.first), open_checkpoint(args.second)
    counts: dict[str, int] = {}
    for difference in compare_checkpoints(first, second, everything=args.all):
        say(str(difference))
        counts[difference.part] = counts.get(difference.part, 0) + 1
    if not counts:
        left_out = "" if args.all else " (callbacks, loggers and logged metrics not compared: --all)"
        say(f"equal, bit for bit: {', '.join(first.stems)}{left_out}")
        return 0
    say(f"{count_text(sum(counts.values()), 'difference')}: " + ", ".join(f"{part} {n}" for part, n in counts.items()))
    return 1
