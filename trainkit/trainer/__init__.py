"""One run: ``Trainer``, its arguments, set-up and tear-down, the two loops, resume, saving and signals."""

from __future__ import annotations
