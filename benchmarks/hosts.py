"""The hosts on which a system's processes run: this machine, or one simulated host per process."""

import socket
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Protocol

__all__ = ["LOOPBACK", "Hosts"]


class Hosts(Protocol):
    """The hosts of a system's processes; the trainers' hosts are numbered first, then the servers' hosts."""

    @property
    def interface(self) -> str:
        """The network interface through which hosts reach each other."""

    def command(self, host: int, program: Sequence[str]) -> list[str]:
        """Return the command line that runs a program on a host."""

    def endpoints(self, hosts: Sequence[int]) -> tuple[str, ...]:
        """Return one free host:port on each of the given hosts."""


class _Loopback:
    """The benchmark's own machine as the host of all processes."""

    interface = "lo"

    def command(self, host: int, program: Sequence[str]) -> list[str]:
        del host
        return list(program)

    def endpoints(self, hosts: Sequence[int]) -> tuple[str, ...]:
        with ExitStack() as stack:
            sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in hosts]
            return tuple(f"127.0.0.1:{each.getsockname()[1]}" for each in sockets)


LOOPBACK: Hosts = _Loopback()
