"""Run the code blocks of a documentation page in order, in one process.

| fence | what happens |
|---|---|
| `python` | runs, in the namespace of the blocks before it |
| any with `title="train.py"` (a title with a dot) | is written to that file |
| `bash` | runs in a shell, in the same folder |
| `python title="Lightning"` (a name in `FOREIGN`) | is only compiled, because that package may not be installed |
| any other language | is skipped: output, configuration |

A block does not run if the line before its fence is `<!-- not run: reason -->`.

    python tests/helpers/docs/pages.py docs/get-started/tutorial.md
"""

from __future__ import annotations

import linecache
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

__all__ = ["FOREIGN", "Block", "blocks", "run_page", "write"]

FOREIGN = ("Lightning", "Fabric", "Accelerate", "Hugging Face Trainer", "PyTorch")

_FENCE = re.compile(
    r"(?:<!-- not run: (?P<reason>[^\n]+?) -->\n+)?"
    r"^(?P<indent> *)```(?P<language>\w+)(?P<info>[^\n]*)\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    language: str
    title: str
    text: str
    line: int  # of the first line of the text, from 1
    reason: str | None  # why it does not run, as the page says


def blocks(markdown: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found = []
    for match in _FENCE.finditer(markdown):
        title = re.search(r'title="([^"]*)"', match["info"])
        line = markdown.count("\n", 0, match.start("text")) + 1
        found.append(Block(match["language"], title[1] if title else "", textwrap.dedent(match["text"]), line, match["reason"]))
    return found


def write(block: Block, folder: Path) -> None:
    """Write a block that has the name of a file to that file below a folder."""
    path = folder / block.title
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(block.text, "utf-8")


def run_page(page: Path) -> None:
    """Run the blocks of a page in the current folder, as `__main__`."""
    namespace = vars(sys.modules["__main__"])
    for block in blocks(page.read_text("utf-8")):
        if block.reason is not None:
            continue
        if "." in block.title:
            write(block, Path())
        elif block.language == "python":
            source = "\n" * (block.line - 1) + block.text
            code = compile(source, str(page), "exec")
            if block.title not in FOREIGN:
                # so that tracebacks and `inspect.getsource` show the page
                linecache.cache[str(page)] = (len(source), None, source.splitlines(keepends=True), str(page))
                exec(code, namespace)
        elif block.language == "bash":
            sys.stdout.flush()
            subprocess.run(["bash", "-euo", "pipefail", "-c", block.text], check=True)


if __name__ == "__main__":
    run_page(Path(sys.argv[1]))
