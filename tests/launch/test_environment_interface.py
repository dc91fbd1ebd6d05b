"""The network interface that gloo uses."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from trainkit.launch import environment
from trainkit.launch.environment import GLOO, set_gloo_interface


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`machine(own, sources)` mocks a host with lo, eth0 and ib0: the addresses of its name, and of its routes to others."""

    def make(own: list[str], **sources: str) -> None:
        def resolve(*_: Any, **__: Any) -> list[Any]:
            if not own:
                raise socket.gaierror
            return [(None, None, None, "", (address, 0)) for address in own]

        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        monkeypatch.setattr(environment, "_source", lambda target: sources.get("master" if target == "master" else "outside"))
        addresses = [("lo", "127.0.0.1"), ("eth0", "10.0.0.7"), ("ib0", "192.168.3.7")]
        monkeypatch.setattr(environment, "_addresses", lambda: iter(addresses))

    return make


def led(**env: str) -> str | None:
    set_gloo_interface(env, "master")
    return env.get(GLOO)


def test_a_host_name_that_other_nodes_can_reach(machine: Any) -> None:
    machine(["10.0.0.7"], master="192.168.3.7")
    assert led() is None
    machine(["127.0.1.1", "10.0.0.7"], master="192.168.3.7")
    assert led() is None


@pytest.mark.parametrize("own", [["127.0.1.1"], ["::1", "127.0.0.1"], []], ids=["debian", "localhost", "unknown"])
def test_a_host_name_that_is_a_loopback_address(machine: Any, own: list[str]) -> None:
    machine(own, master="192.168.3.7", outside="10.0.0.7")
    assert led() == "ib0"
    machine(own, outside="10.0.0.7")  # as on the first node: its own name gives no route to other nodes
    assert led() == "eth0"
    machine(own, master="10.9.9.9")  # the address of an unknown interface
    assert led() is None


def test_the_interface_of_the_user_is_kept(machine: Any) -> None:
    machine(["127.0.1.1"], master="192.168.3.7")
    assert led(GLOO_SOCKET_IFNAME="mine") == "mine"


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux only")
def test_the_real_interfaces() -> None:
    assert ("lo", "127.0.0.1") in list(environment._addresses())
    assert environment._source("127.0.0.1") is None
    assert environment._interface("127.0.0.1") == "lo"
    assert environment._interface(None) is None
