"""Fixtures for trackers, which test files request with `pytestmark`."""

from __future__ import annotations

from helpers.runs.trackers import comet_offline, local_mlflow, no_open_wandb_runs, wandb_service

__all__ = ["comet_offline", "local_mlflow", "no_open_wandb_runs", "wandb_service"]
