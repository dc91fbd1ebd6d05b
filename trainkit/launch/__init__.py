"""Where the processes of a run come from, how they find each other, and how they end.

In the order in which a run uses them: `environment` says which processes a launcher has started, `strategy_choice` what the
arguments request, `starting` makes a script the launcher of the processes that it lacks, and `joining` connects them. A
launcher is an `agent`, which meets those of other nodes in a `rendezvous` and starts `workers`; `notebook` and `remote` start
agents.
"""

from __future__ import annotations

import os

__all__: list[str] = []


def _folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return None


# The working directory when trainkit was imported: a script may go to another folder before it uses trainkit.
START_FOLDER = _folder()
