"""`ProjectConfiguration`, `GradientAccumulationPlugin`, `DataLoaderConfiguration`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from trainkit.errors import ConfigurationError, UnsupportedArgumentError
from trainkit.utils import DataLoaderConfiguration, GradientAccumulationPlugin, ProjectConfiguration


def test_folders_of_a_project() -> None:
    project = ProjectConfiguration("runs")
    assert (project.project_dir, project.logging_dir) == ("runs", "runs")
    project = ProjectConfiguration("runs", "logs")
    assert (project.project_dir, project.logging_dir) == ("runs", "logs")
    project = ProjectConfiguration()
    project.set_directories("later")
    assert (project.project_dir, project.logging_dir) == ("later", "later")


def test_the_number_of_steps() -> None:
    assert GradientAccumulationPlugin(4).num_steps == 4
    assert GradientAccumulationPlugin(num_steps=None).num_steps == 1, "as Accelerate leaves it open"  # type: ignore[arg-type]
    assert GradientAccumulationPlugin(2, adjust_scheduler=False).num_steps == 2


@pytest.mark.parametrize(
    "make, kind, message",
    [
        (lambda: ProjectConfiguration(total_limit=0), ConfigurationError, r"total_limit=\) must be an integer ≥ 1, not 0"),
        (lambda: ProjectConfiguration(iteration=-1), ConfigurationError, r"iteration=\) must be an integer ≥ 0, not -1"),
        (lambda: ProjectConfiguration(save_on_each_node=True), UnsupportedArgumentError, "put project_dir on a shared disk"),
        (lambda: GradientAccumulationPlugin(0), ConfigurationError, r"num_steps=\) must be an integer ≥ 1, not 0"),
        (lambda: GradientAccumulationPlugin(True), ConfigurationError, "must be an integer"),
        (lambda: GradientAccumulationPlugin(2, sync_with_dataloader=False), UnsupportedArgumentError, "Remove it"),
        (lambda: GradientAccumulationPlugin(2, sync_each_batch=True), UnsupportedArgumentError, "strategy='zero2'"),
        (lambda: DataLoaderConfiguration(data_seed=3), UnsupportedArgumentError, r"trainkit.set_seed\(3\) before Accelerator"),
    ],
)
def test_what_is_refused(make: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        make()


def test_arguments_without_effect_are_accepted() -> None:
    given = DataLoaderConfiguration(use_seedable_sampler=True, non_blocking=True, use_stateful_dataloader=True)
    assert given.even_batches
