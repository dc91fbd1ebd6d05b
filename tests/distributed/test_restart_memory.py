"""What outlives a restart; with the stores of an agent, it is tried in test_agent.py and test_joining.py."""

from __future__ import annotations

import pytest

from trainkit.distributed.restart_memory import Memory, restarts
from trainkit.launch.rendezvous import Alone

AT = {"MASTER_ADDR": "h", "MASTER_PORT": "2"}


@pytest.mark.parametrize("env, expected", [
    ({}, None),
    (AT, None),
    ({"TRAINKIT_MEMORY": "h:1", "TORCHELASTIC_RUN_ID": "x"}, "Memory('h', 1, 'x')"),
    ({"TRAINKIT_MEMORY": "::1:7"}, "Memory('::1', 7, '')"),
    ({"TORCHELASTIC_USE_AGENT_STORE": "True", **AT, "TORCHELASTIC_RUN_ID": "y"}, "Memory('h', 2, 'y')"),
    ({"TORCHELASTIC_USE_AGENT_STORE": "False", **AT}, None),
    ({"TORCHELASTIC_USE_AGENT_STORE": "True", "TRAINKIT_MEMORY": "a:1", **AT}, "Memory('a', 1, '')"),
])  # fmt: skip
def test_where_it_is(env: dict[str, str], expected: str | None) -> None:
    memory = Memory.of(env)
    assert (None if memory is None else repr(memory)) == expected


def test_texts_are_kept_by_job_and_name() -> None:
    agent = Alone("job", None)
    memory = Memory.of({"TRAINKIT_MEMORY": agent.memory, "TORCHELASTIC_RUN_ID": "job"})
    another = Memory.of({"TRAINKIT_MEMORY": agent.memory, "TORCHELASTIC_RUN_ID": "another"})
    assert memory is not None
    assert another is not None
    assert memory.get("run") is None
    memory.set("run", "é" * 5000)
    assert memory.get("run") == "é" * 5000
    assert memory.get("other") is None
    assert another.get("run") is None
    agent.next_rendezvous()
    agent.next_rendezvous()
    assert memory.get("run") == "é" * 5000


def test_restarts() -> None:
    assert restarts({}) == 0
    assert restarts({"TORCHELASTIC_RESTART_COUNT": "3"}) == 3
    assert restarts({"TORCHELASTIC_RESTART_COUNT": "x"}) == 0
