"""Objects that know the ranks are accepted as `plugins` where they say what trainkit has found."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer
from helpers.worlds.worlds import run_world

from trainkit.errors import ConfigurationError, UnsupportedArgumentError
from trainkit.launch.cluster_plugins import take_cluster_environments


class Environment:
    """As Ray's, whose class inherits the other methods from Lightning's."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = size, rank

    def world_size(self) -> int:
        return self.size

    def global_rank(self) -> int:
        return self.rank


def test_which_plugins_are_taken() -> None:
    environment = Environment(1, 0)
    arguments: dict[str, Any] = {"plugins": environment, "max_steps": 1}
    assert take_cluster_environments(arguments) == [environment]
    assert arguments == {"max_steps": 1}
    mixed: dict[str, Any] = {"plugins": [environment, object()]}
    assert take_cluster_environments(mixed) == []
    assert len(mixed["plugins"]) == 2


def test_an_environment_of_one_process() -> None:
    trainer = make_trainer(plugins=[Environment(1, 0)], max_steps=1)
    trainer.fit(TinyModule(), tiny_loader())
    assert trainer.global_step == 1
    with pytest.raises(UnsupportedArgumentError, match="plugins"):
        make_trainer(plugins=[Environment(1, 0), object()])


def test_an_environment_that_says_something_else() -> None:
    with pytest.raises(ConfigurationError) as caught:
        make_trainer(plugins=[Environment(4, 1)])
    text = str(caught.value)
    assert "plugins: Environment() has world_size=4, global_rank=1" in text
    assert "for trainkit this process has world_size=1, global_rank=0. A Trainer reads RANK, WORLD_SIZE" in text


def of_two() -> tuple[int, bool]:
    import os

    trainer = make_trainer(plugins=[Environment(2, int(os.environ["RANK"]))], strategy="ddp", max_steps=1)
    return trainer.world_size, trainer._accelerator_connector.is_distributed


@pytest.mark.world_size(2)
def test_an_environment_of_two_processes() -> None:
    assert run_world(2, of_two) == [(2, True), (2, True)]
