"""Makes gloo and NCCL use the network interface that has the pod's own address.

A pod on its node's network also sees the node's bridges and the interfaces of other pods, and gloo and NCCL
would choose an interface by name or order. The operator passes such a pod the address at which its peers
reach it (``FLEET_POD_IP``). The interpreter calls `choose_interface` when it starts (from
``fleet_interface.pth``), so that a script for torchrun needs no changes; no host name is resolved. Only the
image has this hook: installed with the wheel, it would run in every Python process of the environment.
"""

from __future__ import annotations

import os

__all__ = ["choose_interface"]

ADDRESS = "FLEET_POD_IP"
VARIABLES = {"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": "="}
"""The prefix of a name in each variable. Without `=`, NCCL treats the name as a prefix of names."""
GET_ADDRESS = 0x8915
"""SIOCGIFADDR: the IPv4 address of an interface (netdevice(7))."""


def choose_interface() -> None:
    """Set gloo's and NCCL's interface variables unless they are already set."""
    address = os.environ.get(ADDRESS)
    unset = [name for name in VARIABLES if name not in os.environ]
    if not (address and unset):
        return
    try:
        interface = _interface_of(address)
    except (OSError, ValueError):  # not an address, or unknown to the kernel: gloo and NCCL choose
        return
    if interface is not None:
        os.environ.update({name: VARIABLES[name] + interface for name in unset})


def _interface_of(address: str) -> str | None:
    """Return the interface with an address, or None; only the first IPv4 address of each is considered."""
    import socket  # imported late, because every Python process runs this module

    if ":" in address:
        digits = socket.inet_pton(socket.AF_INET6, address).hex()
        with open("/proc/net/if_inet6", encoding="ascii") as known:  # noqa: PTH123  pathlib is slow to load
            lines = [line.split() for line in known]
        return next((line[5] for line in lines if line[0] == digits), None)
    wanted = socket.inet_pton(socket.AF_INET, address)
    names = (name for _, name in socket.if_nameindex())
    return next((name for name in names if _first_ipv4(name) == wanted), None)


def _first_ipv4(interface: str) -> bytes | None:
    import fcntl
    import socket
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, GET_ADDRESS, struct.pack("16s240x", interface.encode()))
        except OSError:  # the interface has no address
            return None
    return answer[20:24]
