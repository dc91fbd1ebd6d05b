"""What MkDocs calls while it builds the site: pages made from the source, and links from names to the reference."""

from __future__ import annotations

import inspect
import io
import json
import os
import re
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

# What a code span may name alone, such as `Trainer`: the classes of these modules.
_LINKED_MODULES = ("trainkit", "trainkit.callbacks", "trainkit.loggers", "trainkit.strategies", "trainkit.errors")

# Names of `trainkit` that a code span may name, though they are functions.
_FUNCTIONS = ("notebook_launcher", "seed_everything", "skip_first_batches", "load_checkpoint_in_model")

# What is public, but has no docstring of its own.
_CONSTANTS = {
    "Seq2SeqTrainingArguments": "That of `transformers`.",
    "TrainingArguments": "That of `transformers`.",
    "__version__": "The version of trainkit, such as `0.1.0`.",
    "ArgsType": "What `TrainkitCLI(args=…)` accepts, as an annotation.",
    "LRSchedulerCallable": "An argument that creates a scheduler from the optimizer, as an annotation.",
    "LightningArgumentParser": "Another name of `TrainkitArgumentParser`.",
    "LightningCLI": "Another name of `TrainkitCLI`.",
    "LRSchedulerTypeUnion": "A scheduler, as an annotation.",
    "OptimizerCallable": "An argument of a module that creates an optimizer from the parameters, as an annotation.",
    "errors": "The module of all exceptions: [errors and exit codes](errors.md).",
    "LightningDataModule": "Lightning's name of [`DataModule`](module.md).",
    "LightningModule": "Lightning's name of [`TrainModule`](module.md).",
    "WHOLE_WINDOW": "A `MicroBatch` that is an accumulation window of its own, for code outside of a loader.",
}

# What a user searches for, and a page that the search must find.
_SEARCHES = {
    "resume": "how-to/resume-after-preemption",
    "OOM": "how-to/model-does-not-fit",
    "hang": "how-to/debug-a-hang",
    "EarlyStopping": "how-to/keep-the-best-checkpoints",
    "deepspeed": "how-to/model-does-not-fit",
    "NaN": "how-to/debug-nans",
    "gradient accumulation": "how-to/gradient-accumulation",
    "LoRA": "how-to/lora",
    "SLURM": "how-to/resume-after-preemption",
    "FSDP": "how-to/shard-with-fsdp",
    "Lightning": "moving-over/lightning",
}

# Not inside a link, a heading or a block of code.
_OPAQUE = re.compile(
    r"<(a|h[1-6]|pre|autoref)\b.*?</\1>|<code>(?:trainkit\.)?(?P<name>[A-Za-z]\w*)(?P<member>\.\w+)?(?:\(\))?</code>", re.DOTALL
)


def _linked_names() -> dict[str, str]:
    """Each linked name → its identifier in the reference, which `autorefs` resolves."""
    names = {name: f"trainkit.{name}" for name in _FUNCTIONS}
    for module in _LINKED_MODULES:
        names |= {name: f"{module}.{name}" for name in _public(module) if name[0].isupper()}
    return names | {
        "Callback": "trainkit.Callback",
        "GeneralTracker": "trainkit.tracking.GeneralTracker",
        "PrecisionSpec": "trainkit.precision.PrecisionSpec",
        "StrategyInfo": "trainkit.registry.StrategyInfo",
    }


def _public(module: str) -> list[str]:
    names: list[str] = vars(import_module(module))["__all__"]
    return names


LINKED = _linked_names()


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Replace the marks of a page by what the source says, and links out of docs/ by the repository's.

    A search lists pages of the reference after those that explain.

    `<!-- help: plot -->` becomes what `trainkit plot --help` prints, `<!-- names: trainkit.data -->` a table of the public
    names of a module, and `<!-- names: trainkit.launch.joining join device_of -->` one of these names.
    `<!-- lightning: callbacks -->` becomes a table of the names of `lightning.pytorch.callbacks`, and
    `<!-- accelerate: imports -->` one of the names of Accelerate that trainkit does not have, as `<!-- hugging_face: hooks -->`
    is one of the names of the Hugging Face Trainer, and `<!-- training_arguments -->` one of what `from_arguments` reads.
    `<!-- rooms -->` becomes the picture of the rooms of trainkit.
    """
    if page.file.src_uri.startswith("reference/"):
        page.meta.setdefault("search", {"boost": 0.3})
    markdown = re.sub(r"<!-- help: (.*?) -->", lambda match: f"```text\n{command_help(match[1].split())}```", markdown)
    markdown = re.sub(r"<!-- names: (\S+)(.*?) -->", lambda match: table_of_names(match[1], match[2].split()), markdown)
    markdown = re.sub(r"<!-- lightning: (\S+) -->", lambda match: table_of_lightning(match[1]), markdown)
    markdown = re.sub(r"<!-- accelerate: (\S+) -->", lambda match: table_of_accelerate(match[1]), markdown)
    markdown = re.sub(r"<!-- hugging_face: (\S+) -->", lambda match: table_of_hugging_face(match[1]), markdown)
    if "<!-- training_arguments -->" in markdown:
        markdown = markdown.replace("<!-- training_arguments -->", table_of_training_arguments())
    if "<!-- rooms -->" in markdown:
        markdown = markdown.replace("<!-- rooms -->", import_module("docs.rooms").picture())
    home = config.extra["repository"]
    return re.sub(r"\]\((?:\.\./)+(?=(?:examples|benchmarks|tests|trainkit)/)", f"]({home}/blob/main/", markdown)


def command_help(arguments: list[str]) -> str:
    """The help of a command of `trainkit`, 100 columns wide."""
    main = import_module("trainkit.cli.main").main
    shown = io.StringIO()
    with redirect_stdout(shown), patch.dict(os.environ, COLUMNS="100"):
        if main([*arguments, "--help"]) != 0:
            raise ValueError(f"`trainkit {' '.join(arguments)} --help` failed")
    return shown.getvalue()


def table_of_names(module: str, names: list[str]) -> str:
    """A table of public names, each with a link to its entry and the beginning of its docstring."""
    rows = ["| name | what it is for |", "|---|---|"]
    for name in names or _public(module):
        value = getattr(import_module(module), name)
        if name in _CONSTANTS:
            rows.append(f"| `{name}` | {_CONSTANTS[name]} |")
        else:
            text = inspect.getdoc(value) or ""
            whole = isinstance(value, type) and issubclass(value, BaseException)  # what is wrong, and what to do
            shown = first_paragraph(text) if whole else first_sentence(text)
            renamed = isinstance(value, type) and value.__name__ != name  # the name of another package, for a class of trainkit
            target = f"{value.__module__}.{value.__name__}" if renamed else f"{module}.{name}"
            rows.append(f"| [`{name}`][{target}] | {shown} |")
    return "\n".join(rows)


def table_of_lightning(group: str) -> str:
    """A table of Lightning's names, from the tables that the messages of trainkit use.

    Args:
        group: A module below `lightning.pytorch`, "top" for itself, a class for its members, or "arguments" of the Trainer.
    """
    table = import_module("trainkit.names").table("lightning")
    group = "" if group == "top" else group
    same = {" ".join(names): f"the same, `from {home} import …`" for home, names in table["same"].get(group, {}).items()}
    others = table["renamed"].get(group, {}) | table["absent"].get(group, {}) | table["members"].get(group, {})
    return rows_of("Lightning", same | uses_of(table["arguments"]["Trainer"] if group == "arguments" else others))


def table_of_accelerate(group: str) -> str:
    """A table of Accelerate's names that trainkit does not have, from the tables that the messages of trainkit use.

    Args:
        group: "imports", "attributes" of the Accelerator, or a class or verb for its arguments.
    """
    table = import_module("trainkit.names").table("accelerate")
    return rows_of("Accelerate", uses_of(table[group] if group in table else table["arguments"][group]))


def table_of_hugging_face(group: str) -> str:
    """A table of names of the Hugging Face Trainer, from the table that the messages of trainkit use.

    Args:
        group: "arguments" of `TrainingArguments`, "constructor" for those of its `Trainer`, "imports", "attributes", "state" or
            "hooks".
    """
    table = import_module("trainkit.names").table("hugging_face")
    advice = table[group] | (table["unwarned_hooks"] if group == "hooks" else {})
    same = {" ".join(table["same"]): "the same"} if group == "arguments" else {}
    return rows_of("Hugging Face Trainer", same | uses_of(advice))


def table_of_training_arguments() -> str:
    """A table of the arguments of `TrainingArguments`, from the table that `from_arguments` and its messages use."""
    table = import_module("trainkit.names").table("hugging_face")["training_arguments"]
    rows = (f"| `{name}` | {answer} | {escaped(text)} |" for name, (answer, text) in table.items())
    return "\n".join(["| argument | | trainkit |", "|---|---|---|", *rows])


def uses_of(advice: dict[str, str]) -> dict[str, str]:
    """The names, those of one use together → what to use."""
    return {" ".join(name for name in advice if advice[name] == use): escaped(use) for use in dict.fromkeys(advice.values())}


def escaped(use: str) -> str:
    """A text of the tables as Markdown that shows the same."""
    return re.sub(r"([*_|<\[\]])", r"\\\1", use)


def rows_of(framework: str, rows: dict[str, str]) -> str:
    """The table of names, separated by spaces, and what they are in trainkit."""
    shown = (f"| {', '.join(f'`{name}`' for name in names.split())} | {use} |" for names, use in rows.items())
    return "\n".join([f"| {framework} | trainkit |", "|---|---|", *shown])


def first_sentence(text: str) -> str:
    """The first sentence of a docstring, for a cell of a table."""
    return re.split(r"(?<=[.:])\s+(?=[A-Z`])", first_paragraph(text))[0].rstrip(":")


def first_paragraph(text: str) -> str:
    """The first paragraph of a docstring, for a cell of a table."""
    return " ".join(text.partition("\n\n")[0].split()).replace("|", "\\|")


def on_page_content(content: str, **_: Any) -> str:
    """Link the names of public classes, and of their methods, in the text of a page to the reference."""

    def linked(match: re.Match[str]) -> str:
        target = LINKED.get(match["name"] or "")
        if target is None:
            return match[0]
        return f'<autoref identifier="{target}{match["member"] or ""}" optional>{match[0]}</autoref>'

    return _OPAQUE.sub(linked, content)


def on_post_build(*, config: Any, **_: Any) -> None:
    """Raise if a page loads something from elsewhere, as the site works without a network, or is not found by its words."""
    for page in Path(config.site_dir).rglob("*.html"):
        found = re.search(r'<(?:script|link|img)\b[^>]*\b(?:src|href)="?https?://[^>]*>', page.read_text("utf-8"))
        if found:
            raise ValueError(f"{page} loads from elsewhere: {found[0]}. Fix: put the file into docs/assets")
    sections = json.loads((Path(config.site_dir) / "search" / "search_index.json").read_text("utf-8"))["docs"]
    for words, page in _SEARCHES.items():
        texts = [one["title"] + one["text"] for one in sections if one["location"].partition("#")[0] == f"{page}.html"]
        if not any(re.search(rf"\b{words}\b", text, re.IGNORECASE) for text in texts):
            raise ValueError(f"a search for {words!r} does not find docs/{page}.md. Fix: use the word on that page")
