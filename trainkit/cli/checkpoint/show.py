"""`trainkit checkpoint show`: what is in one checkpoint."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainkit.checkpoint.checksum import CHECKSUMS
from trainkit.checkpoint.manifest import Manifest
from trainkit.checkpoint.reader import Checkpoint, open_checkpoint
from trainkit.cli.checkpoint.text import (
    TensorHeader,
    about_manifest,
    as_json,
    bytes_text,
    contents_text,
    print_lines,
    short,
    table,
    tensor_headers,
)
from trainkit.console import quantity
from trainkit.state.callback_state import readable_key

__all__ = ["groups_of", "run"]

_FIRST = ("lr", "weight_decay", "momentum", "betas")  # options to show first
_INDENT = "  "
_MANY = 20  # items of a list to show
_Headers = Mapping[str, Mapping[str, TensorHeader]]  # Stem → name → header.


def run(args: argparse.Namespace) -> int:
    """Print the checkpoint. Reads only the headers of tensor files; `verify` reads the tensors."""
    checkpoint = open_checkpoint(args.path)
    headers = _headers(checkpoint)
    state = checkpoint.read({"state"}, unregistered=True).state
    if args.json:
        print(as_json(_describe(checkpoint, headers, state, args)))
        return 0
    print_lines(*_about(checkpoint.path, checkpoint.manifest), "", *_files(checkpoint.manifest, headers))
    print_lines("", *_parts(headers), *_optimizers(state))
    values = state.get("hyper_parameters")
    if isinstance(values, Mapping) and values:
        print_lines("hyper-parameters", *_tree(values, _INDENT))
    if args.tensors:
        every = [(stem, name, header) for stem, tensors in headers.items() for name, header in tensors.items()]
        rows = [(stem, name, header.dtype, str(list(header.shape))) for stem, name, header in every]
        print_lines("", *table(("OF", "TENSOR", "DTYPE", "SHAPE"), rows))
        for stem, names in checkpoint.manifest.aliases.items():
            print_lines(*(f"{stem}: {alias} is tied to {stored}" for alias, stored in names.items()))
    if args.state:
        print_lines("", "state", *_tree(state, _INDENT))
    return 0


def groups_of(state: Mapping[str, Any]) -> Iterator[tuple[int, str, int, list[str], dict[str, Any]]]:
    """The groups of all optimizers: optimizer index and class, group index, parameter names and options."""
    optimizers = state.get("optimizers")
    for index, optimizer in enumerate(optimizers if isinstance(optimizers, list) else []):
        groups = optimizer.get("groups") if isinstance(optimizer, Mapping) else None
        for number, group in enumerate(groups if isinstance(groups, list) else []):
            if isinstance(group, Mapping):
                options = group.get("options")
                options = dict(options) if isinstance(options, Mapping) else {}
                yield index, str(optimizer.get("class")), number, list(group.get("parameters") or []), options


def _headers(checkpoint: Checkpoint) -> dict[str, dict[str, TensorHeader]]:
    """Stem → name → header."""
    by_stem = {
        stem: {
            named(key): header
            for file, named in checkpoint.names_in_files(stem).items()
            for key, header in tensor_headers(checkpoint.path / file).items()
        }
        for stem in checkpoint.stems
    }
    return {stem: headers for stem, headers in by_stem.items() if headers or stem != "state"}


def _describe(checkpoint: Checkpoint, headers: _Headers, state: Mapping[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    value: dict[str, Any] = {"path": str(checkpoint.path), **about_manifest(checkpoint.manifest)}
    value["parts"] = {stem: _count(tensors) for stem, tensors in headers.items()}
    value["groups"] = [
        {"optimizer": index, "class": kind, "group": number, "parameters": parameters, "options": options}
        for index, kind, number, parameters, options in groups_of(state)
    ]
    value["hyper_parameters"] = state.get("hyper_parameters", {})
    if args.tensors:
        value["tensors"] = {
            stem: {name: header._asdict() for name, header in tensors.items()} for stem, tensors in headers.items()
        }
    if args.state:
        value["state"] = state
    return value


def _count(headers: Mapping[str, TensorHeader]) -> dict[str, int]:
    return {"tensors": len(headers), "elements": sum(header.elements for header in headers.values())}


def _about(path: Path, manifest: Manifest) -> list[str]:
    metrics = ", ".join(f"{name}={value:.6g}" for name, value in manifest.metrics.items())
    saved_by = "the user" if manifest.saved_by is None else readable_key(manifest.saved_by)
    values = {
        "step": f"{manifest.step}, {quantity(manifest.epoch, 'epoch')} complete",
        "position": short(manifest.position),
        "run": f"{manifest.run_id}, save {manifest.save_counter}",
        "saved": f"{manifest.saved_at} by {saved_by}, trainkit {manifest.trainkit_version}",
        "contains": contents_text(manifest),
        "finite": {True: "yes", False: "no, it has parameters that are infinite or NaN", None: "unknown"}[manifest.finite],
        "metrics": metrics or "none",
        "seed": f"{manifest.seed} (order {manifest.order_version}, keys {manifest.key_version})",
        "ran on": f"{manifest.world_size} × {manifest.strategy}, {manifest.precision}",
        "format": str(manifest.format_version),
    }
    return [str(path), *(f"{_INDENT}{name:<9} {value}" for name, value in values.items())]


def _files(manifest: Manifest, headers: _Headers) -> list[str]:
    counts = Counter(header.file for tensors in headers.values() for header in tensors.values())
    rows = [
        (name, bytes_text(entry.size), quantity(counts[name], "tensor") if name in counts else "", entry.digest[:16] + "…")
        for name, entry in sorted(manifest.all_files.items())
    ]
    title = CHECKSUMS[manifest.checksum].title
    total = bytes_text(manifest.total_size)
    return [*table(("FILE", "SIZE", "CONTAINS", title), rows, right="SIZE"), f"{quantity(len(rows), 'file')}, {total}"]


def _parts(headers: _Headers) -> list[str]:
    counts = ((stem, _count(tensors)) for stem, tensors in headers.items())
    return [f"{stem}: {quantity(n['tensors'], 'tensor')}, {quantity(n['elements'], 'element')}" for stem, n in counts]


def _optimizers(state: Mapping[str, Any]) -> list[str]:
    lines = []
    for index, kind, number, parameters, options in groups_of(state):
        names = sorted(options, key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST))
        shown = ", ".join(f"{name}={short(options[name])}" for name in names)
        lines.append(f"optimizer {index} ({kind}) group {number}: {quantity(len(parameters), 'parameter')}, {shown}")
    return lines


def _tree(value: Any, indent: str) -> Iterator[str]:
    """A nested value, one line for each item that is not nested."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    for key, item in items:
        nested = isinstance(item, (list, tuple)) and any(isinstance(inner, (Mapping, list)) for inner in item)
        if nested or (isinstance(item, Mapping) and item):
            yield f"{indent}{key}:"
            yield from _tree(item, indent + _INDENT)
        else:
            yield f"{indent}{key}: {_leaf(item)}"


def _leaf(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        text = ", ".join(short(item) for item in value[:_MANY])
        more = f", … ({len(value)} items)" if len(value) > _MANY else ""
        return f"[{text}{more}]" if isinstance(value, list) else f"({text}{more})"
    return short(value)
