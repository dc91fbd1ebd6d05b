"""Which network interface gloo is to use, where it would take the one that leads nowhere.

gloo takes the address that the machine's own name stands for. On many machines that is a loopback address (``127.0.1.1`` in
``/etc/hosts``), at which no other machine can reach it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator, MutableMapping

__all__ = ["GLOO", "lead_gloo_out"]

GLOO = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915
_OUTSIDE = "192.0.2.1"  # an address for documentation: nothing is sent there


def lead_gloo_out(env: MutableMapping[str, str], master_addr: str) -> None:
    """Set gloo's variable if it is not set and gloo would take the loopback interface; Linux only.

    Args:
        env: the variables of the processes.
        master_addr: the machine of rank 0, which the interface must lead to.
    """
    if GLOO in env or not _own_name_is_loopback():
        return
    for target in (master_addr, _OUTSIDE):
        name = _interface(_source(target))
        if name is not None:
            env[GLOO] = name
            return


def _own_name_is_loopback() -> bool:
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:  # then it takes the loopback interface, too
        return True
    return all(ipaddress.ip_address(str(one[4][0]).partition("%")[0]).is_loopback for one in found)


def _source(target: str) -> str | None:
    """This machine's address for another one; "loopback" is none."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((target, 9))  # sends nothing
        address = str(probe.getsockname()[0])
        return None if ipaddress.ip_address(address).is_loopback else address
    return None


def _interface(address: str | None) -> str | None:
    return None if address is None else next((name for name, own in _addresses() if own == address), None)


def _addresses() -> Iterator[tuple[str, str]]:
    """The interfaces with their IPv4 addresses."""
    try:
        import fcntl
    except ImportError:
        return
    if os.uname().sysname != "Linux":
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                yield name, socket.inet_ntoa(answer[20:24])
