"""`set_gloo_interface`: set the network interface of gloo if gloo would choose one that other nodes cannot reach.

gloo uses the address of the host name. On many hosts that is a loopback address (`127.0.1.1` in `/etc/hosts`).
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator, MutableMapping

__all__ = ["GLOO", "set_gloo_interface"]

GLOO = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915
_OUTSIDE = "192.0.2.1"  # an address for documentation: nothing is sent there


def set_gloo_interface(env: MutableMapping[str, str], master_addr: str) -> None:
    """Set `GLOO_SOCKET_IFNAME` if it is not set and gloo would use the loopback interface; Linux only.

    Args:
        env: the environment variables of the processes.
        master_addr: the node of rank 0, which must be reachable through the interface.
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
    except OSError:  # then gloo uses the loopback interface, too
        return True
    return all(ipaddress.ip_address(str(one[4][0]).partition("%")[0]).is_loopback for one in found)


def _source(target: str) -> str | None:
    """The address from which this node reaches another one; `None` for a loopback address."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((target, 9))  # sends nothing
        address = str(probe.getsockname()[0])
        return None if ipaddress.ip_address(address).is_loopback else address
    return None


def _interface(address: str | None) -> str | None:
    return None if address is None else next((name for name, own in _addresses() if own == address), None)


def _addresses() -> Iterator[tuple[str, str]]:
    """Pairs of a network interface and its IPv4 address."""
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
