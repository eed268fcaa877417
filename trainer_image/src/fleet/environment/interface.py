"""The network interface by which trainers reach each other, on a node that has many.

A pod on its node's network (``FLEET_HOST_NETWORK``) sees the node's bridges and the ends of other pods' links
as well. gloo and NCCL would take one by its name or its order; the one that leads to trainer 0 is right.
"""

import fcntl
import ipaddress
import logging
import socket
import struct
import sys
import time
from collections.abc import MutableMapping
from pathlib import Path

__all__ = ["choose_interface", "interface_to"]

LOOK_SECONDS = 0.5

_log = logging.getLogger(__name__)

_VARIABLES = {"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": "="}
"""What each has before a name. Without its `=`, NCCL takes all interfaces whose names begin so."""
_GET_ADDRESS = 0x8915
"""SIOCGIFADDR: the IPv4 address of an interface (netdevice(7))."""
_IPV6 = Path("/proc/net/if_inet6")


def choose_interface(
    host: str, port: int, environ: MutableMapping[str, str], patience_seconds: float = 0.0
) -> None:
    """Have gloo and NCCL use the interface that leads to trainer 0, where the environment names none.

    Parameters
    ----------
    host, port : str, int
        Where trainer 0's store listens.
    environ : mutable mapping
        The environment of the processes that train: nothing is done unless ``FLEET_HOST_NETWORK`` is in it.
    patience_seconds : float
        How long a host that has no address yet is waited for: a pod's name has one once the pod is there.
    """
    unset = [name for name in _VARIABLES if name not in environ]
    if not (environ.get("FLEET_HOST_NETWORK") and unset and sys.platform == "linux"):
        return
    _await_address(host, patience_seconds)
    if (interface := interface_to(host, port)) is None:
        _log.warning("no interface of this node leads to %s: gloo and NCCL choose one themselves", host)
        return
    environ.update({name: _VARIABLES[name] + interface for name in unset})


def _await_address(host: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    told = False
    while seconds > 0 and not _has_address(host) and time.monotonic() < deadline:
        if not told:
            _log.info("waiting for the address of %s, which says by which interface to connect", host)
            told = True
        time.sleep(LOOK_SECONDS)


def _has_address(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


def interface_to(host: str, port: int) -> str | None:
    """Return the interface that has the address from which this machine would speak to a host.

    Parameters
    ----------
    host, port : str, int
        Nothing is sent there.

    Returns
    -------
    str, optional
        None where the name or the route is unknown, or no interface has the address as its first.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(address)
            except OSError:
                continue
            own = ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])
        if (name := _interface_of(own)) is not None:
            return name
    return None


def _interface_of(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str | None:
    if address.version == 6:
        lines = [line.split() for line in _IPV6.read_text().splitlines()] if _IPV6.exists() else []
        return next((line[5] for line in lines if line[0] == address.exploded.replace(":", "")), None)
    names = (name for _, name in socket.if_nameindex())
    return next((name for name in names if _first_ipv4(name) == address.packed), None)


def _first_ipv4(interface: str) -> bytes | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, _GET_ADDRESS, struct.pack("16s240x", interface.encode()))
        except OSError:  # it has no address
            return None
    return answer[20:24]
