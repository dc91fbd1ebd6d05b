"""`python -m trainkit`: the same as the command `trainkit`."""

from __future__ import annotations

import sys

from trainkit.cli.main import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
