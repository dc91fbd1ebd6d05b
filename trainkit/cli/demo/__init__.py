"""`trainkit demo`: a byte-level GPT on the source code of Python's own standard library.

Its parts are public, so that a script can train the same model: see `examples/byte_gpt.py`.
"""

from __future__ import annotations

from trainkit.cli.demo.command import add_arguments, run
from trainkit.cli.demo.corpus import SourceCode, bigram_bits, unigram_bits
from trainkit.cli.demo.gpt import ByteGPT

__all__ = ["ByteGPT", "SourceCode", "add_arguments", "bigram_bits", "run", "unigram_bits"]
