"""What MkDocs calls while it builds the site: pages made from the source, and links from names to the reference."""

from __future__ import annotations

import io
import os
import re
from contextlib import redirect_stdout
from typing import Any
from unittest.mock import patch

import trainkit
from trainkit import callbacks, errors, loggers, strategies
from trainkit.cli.main import main

# A code span that is one of these names becomes a link to its entry in the reference; `autorefs` resolves the identifiers.
LINKED = {
    **{name: f"trainkit.{name}" for name in trainkit.__all__ if name[0].isupper()},
    **{name: f"trainkit.callbacks.{name}" for name in callbacks.__all__},
    **{name: f"trainkit.loggers.{name}" for name in loggers.__all__},
    **{name: f"trainkit.strategies.{name}" for name in strategies.__all__},
    **{name: f"trainkit.errors.{name}" for name in errors.__all__},
}
LINKED["Callback"] = "trainkit.Callback"

# Not inside a link, a heading or a block of code.
_OPAQUE = re.compile(r"<(a|h[1-6]|pre|autoref)\b.*?</\1>|<code>([A-Za-z_]+)</code>", re.DOTALL)


def on_page_markdown(markdown: str, *, config: Any, **_: Any) -> str:
    """Replace `<!-- help: plot -->` with what `trainkit plot --help` prints, and links out of docs/ with the repository's."""
    markdown = re.sub(r"<!-- help: (.*?) -->", lambda match: f"```text\n{command_help(match[1].split())}```", markdown)
    return re.sub(r"\]\((?:\.\./)+(?=(?:examples|benchmarks|tests|trainkit)/)", f"]({config.repo_url}/blob/main/", markdown)


def command_help(arguments: list[str]) -> str:
    """The help of a command of `trainkit`, 100 columns wide."""
    shown = io.StringIO()
    with redirect_stdout(shown), patch.dict(os.environ, COLUMNS="100"):
        if main([*arguments, "--help"]) != 0:
            raise ValueError(f"`trainkit {' '.join(arguments)} --help` failed")
    return shown.getvalue()


def on_page_content(content: str, **_: Any) -> str:
    """Link the names of public classes in the text of a page to the reference."""

    def linked(match: re.Match[str]) -> str:
        target = LINKED.get(match[2] or "")
        return f'<autoref identifier="{target}" optional>{match[0]}</autoref>' if target else match[0]

    return _OPAQUE.sub(linked, content)
