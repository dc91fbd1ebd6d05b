"""`RestartStore`: strings that survive a restart. test_agent.py and test_joining.py test it with the store of an agent."""

from __future__ import annotations

import pytest
from torch.distributed import TCPStore

from trainkit.distributed.stores import RestartStore, restarts

AT = {"MASTER_ADDR": "h", "MASTER_PORT": "2"}


@pytest.mark.parametrize("env, expected", [
    ({}, None),
    (AT, None),
    ({"TRAINKIT_RESTART_STORE": "h:1", "TORCHELASTIC_RUN_ID": "x"}, "RestartStore('h', 1, 'x')"),
    ({"TRAINKIT_RESTART_STORE": "::1:7"}, "RestartStore('::1', 7, '')"),
    ({"TORCHELASTIC_USE_AGENT_STORE": "True", **AT, "TORCHELASTIC_RUN_ID": "y"}, "RestartStore('h', 2, 'y')"),
    ({"TORCHELASTIC_USE_AGENT_STORE": "False", **AT}, None),
    ({"TORCHELASTIC_USE_AGENT_STORE": "True", "TRAINKIT_RESTART_STORE": "a:1", **AT}, "RestartStore('a', 1, '')"),
])  # fmt: skip
def test_the_store_of_the_environment(env: dict[str, str], expected: str | None) -> None:
    """The launcher's environment variables determine the address of the store. Without them there is no store."""
    memory = RestartStore.of(env)
    assert (None if memory is None else repr(memory)) == expected


def test_texts_are_kept_by_job_and_name() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    where = {"TRAINKIT_RESTART_STORE": f"127.0.0.1:{server.port}"}
    memory = RestartStore.of({**where, "TORCHELASTIC_RUN_ID": "job"})
    another = RestartStore.of({**where, "TORCHELASTIC_RUN_ID": "another"})
    assert memory is not None
    assert another is not None
    assert memory.get("run") is None
    memory.set("run", "é" * 5000)
    assert memory.get("run") == "é" * 5000
    assert memory.get("other") is None
    assert another.get("run") is None


def test_restarts() -> None:
    assert restarts({}) == 0
    assert restarts({"TORCHELASTIC_RESTART_COUNT": "3"}) == 3
    assert restarts({"TORCHELASTIC_RESTART_COUNT": "x"}) == 0
