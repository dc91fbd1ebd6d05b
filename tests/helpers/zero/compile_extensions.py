"""Compile the extensions of DeepSpeed that `make test-zero` needs, or print what is missing."""

from __future__ import annotations

import sys

import torch

from trainkit.errors import MissingPackageError
from trainkit.strategies.zero.deepspeed_api import import_deepspeed, load, require_async_io


def main() -> None:
    """Compile the extensions once, before tests run in parallel."""
    try:
        require_async_io()
    except MissingPackageError as error:
        sys.exit(str(error))
    import_deepspeed(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    load("AsyncIOBuilder", "pin_memory", "async_io")
    load("CPUAdamBuilder", "cpu_adam")


if __name__ == "__main__":
    main()
