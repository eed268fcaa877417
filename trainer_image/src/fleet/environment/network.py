"""Selection of the network interface through which gloo and NCCL connect trainers.

A pod on its node's network (``FLEET_HOST_NETWORK``) also sees the node's bridges and the interfaces of other
pods. gloo and NCCL would choose an interface by name or order; the correct one is the one that routes to
trainer 0.
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
"""The prefix of an interface name in each variable. Without `=`, NCCL also selects longer names."""
_GET_ADDRESS = 0x8915
"""The ioctl request SIOCGIFADDR, which returns the IPv4 address of an interface; see netdevice(7)."""
_IPV6 = Path("/proc/net/if_inet6")


def choose_interface(
    host: str, port: int, environ: MutableMapping[str, str], patience_seconds: float = 0.0
) -> None:
    """Make gloo and NCCL use the interface that routes to trainer 0, unless the environment names one.

    Parameters
    ----------
    host, port : str, int
        Address of trainer 0's store.
    environ : mutable mapping
        The environment of the training processes; nothing is changed unless it has ``FLEET_HOST_NETWORK``.
    patience_seconds : float
        How long to wait until the host's name resolves: a pod's name resolves only once the pod runs.
    """
    unset = [name for name in _VARIABLES if name not in environ]
    if not (environ.get("FLEET_HOST_NETWORK") and unset and sys.platform == "linux"):
        return
    _wait_for_address(host, patience_seconds)
    if (interface := interface_to(host, port)) is None:
        _log.warning("no interface of this node routes to %s: gloo and NCCL choose one themselves", host)
        return
    environ.update({name: _VARIABLES[name] + interface for name in unset})


def _wait_for_address(host: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    logged = False
    while seconds > 0 and not _has_address(host) and time.monotonic() < deadline:
        if not logged:
            _log.info("waiting for the address of %s, which determines the network interface to use", host)
            logged = True
        time.sleep(LOOK_SECONDS)


def _has_address(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


def interface_to(host: str, port: int) -> str | None:
    """Return the network interface through which this machine would reach a host.

    Parameters
    ----------
    host, port : str, int
        No packet is sent.

    Returns
    -------
    str, optional
        None if the name or the route is unknown, or the address is not the first one of any interface.
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
        except OSError:  # the interface has no address
            return None
    return answer[20:24]
