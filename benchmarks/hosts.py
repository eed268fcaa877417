"""Where the processes of a measured system run: all on this host's loopback, or each on a host of its own."""

import socket
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Protocol

__all__ = ["LOOPBACK", "Hosts"]


class Hosts(Protocol):
    """Hosts for a system's processes, by number: the trainers in order, then the servers."""

    @property
    def interface(self) -> str:
        """The network interface by which a host reaches the others."""

    def command(self, host: int, program: Sequence[str]) -> list[str]:
        """Return the command that runs a program on a host."""

    def endpoints(self, hosts: Sequence[int]) -> tuple[str, ...]:
        """Return one free host:port on each of some hosts."""


class _Loopback:
    """The benchmark's own host, for every process."""

    interface = "lo"

    def command(self, host: int, program: Sequence[str]) -> list[str]:
        del host
        return list(program)

    def endpoints(self, hosts: Sequence[int]) -> tuple[str, ...]:
        with ExitStack() as stack:
            sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in hosts]
            return tuple(f"127.0.0.1:{each.getsockname()[1]}" for each in sockets)


LOOPBACK: Hosts = _Loopback()
