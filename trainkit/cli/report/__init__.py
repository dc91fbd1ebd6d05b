"""`trainkit report RUN_DIR …`: one HTML page about runs that opens without a network."""

from __future__ import annotations

import argparse
from pathlib import Path

from trainkit.cli.logged_runs import MOST_DRAWN, labels_of, metric_names, select, write_output
from trainkit.errors import ConfigurationError, missing_package

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `trainkit report`."""
    parser.add_argument(
        "run_dir",
        metavar="RUN_DIR",
        nargs="+",
        help="a run's folder (…/version_3), or a folder above it, for the newest run that trained; "
        "several runs, at most 10, are compared",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="the HTML file (default: report.html in the run's folder; for several runs, the current folder)",
    )
    parser.add_argument(
        "--metrics",
        metavar="A,B",
        help="show only these metrics; 'loss' includes train_loss and val_loss (default: all, of "
        f"which {MOST_DRAWN} are drawn)",
    )


def run(args: argparse.Namespace) -> int:
    """Read the runs and write the page; print their folders and the file."""
    try:
        import bokeh  # noqa: F401
    except ImportError as error:
        raise missing_package("bokeh", "report", "trainkit report") from error
    from trainkit.cli.report.page import page
    from trainkit.cli.report.run_data import read_run, report_folders

    folders = report_folders(args.run_dir)
    out = Path(args.out or ("report.html" if len(folders) > 1 else next(iter(folders)) / "report.html"))
    if out.suffix.lower() not in (".html", ".htm"):
        raise ConfigurationError(f"Expected a file ending in .html, got {str(out)!r}. Fix: --out {out.with_suffix('.html')}")
    runs = []
    for (folder, notes), label in zip(folders.items(), labels_of(list(folders)), strict=True):
        print(f"Reading {folder}")
        runs.append(read_run(folder, label, notes))
    if args.metrics:
        known = [name for one in runs for name in one.metrics]
        for one in runs:
            one.metrics = select(one.metrics, metric_names(args.metrics), known)
    write_output(out, page(runs).encode("utf-8", "backslashreplace"), "--out report.html")
    print(f"Wrote {out}")
    return 0
