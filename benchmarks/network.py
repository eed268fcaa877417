"""A simulated network with limited links: network namespaces as hosts, joined by a bridge.

A link is limited by a token bucket (tc tbf) at each end, one for each direction, so that both directions
carry the full rate at the same time, as on a switch port. All interfaces are created inside the namespaces,
whose names contain this process's id, so that removing the namespaces removes everything.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

__all__ = ["Network", "leftovers", "network", "report_leftovers", "unmet_needs"]

NAMESPACES = Path("/run/netns")
PREFIX = "fleetbench-"
MAX_HOSTS = 250
INTERFACE = "eth0"
FIRST_PORT = 20000
"""Below the range of ephemeral ports, so that these ports are free on every host."""
BUCKET = "burst 192kb limit 1500kb"
"""The bytes that may be sent in a burst and the bytes that may queue: 3.9 and 31 ms at 400 Mbit/s. Excess
packets are dropped, as in a switch, and TCP retransmits them."""


def unmet_needs() -> str | None:
    """Describe what this process lacks to create a network; return None if nothing is missing."""
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    found = [*(["no root"] if os.geteuid() != 0 else []), *(f"no `{program}`" for program in missing)]
    if not found:
        return None
    return (
        f"hosts with limited links need root and iproute2, found {' and '.join(found)}: install it, use sudo"
    )


def leftovers(namespaces: Collection[str]) -> list[str]:
    """Return the names of namespaces that were left behind by ended runs."""
    return sorted(
        name for name in namespaces if name.startswith(PREFIX) and not Path(f"/proc/{_maker(name)}").exists()
    )


def _maker(name: str) -> str:
    return name.removeprefix(PREFIX).partition("-")[0]


class Network:
    """Network namespaces as the hosts of processes; see `benchmarks.hosts.Hosts` and `network`."""

    interface = INTERFACE

    def __init__(self) -> None:
        self._prefix = f"{PREFIX}{os.getpid()}-"
        self._ports = count(FIRST_PORT)

    def command(self, host: int, program: Sequence[str]) -> list[str]:
        """Return the command line that runs a program on a host."""
        return ["ip", "netns", "exec", self._name(host), *program]

    def endpoints(self, hosts: Sequence[int]) -> tuple[str, ...]:
        """Return one unused host:port on each of the given hosts."""
        return tuple(f"{_address(host)}:{port}" for host, port in zip(hosts, self._ports, strict=False))

    def make(self, num_hosts: int, mbit_per_second: int) -> None:
        """Create the hosts and their links.

        Raises
        ------
        SystemExit
            The kernel or the container does not allow it.
        """
        switch = f"{self._prefix}switch"
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "switch", "up", "type", "bridge")
        for host in range(num_hosts):
            name, port = self._name(host), f"port{host}"
            _run("ip", "netns", "add", name)
            _run(*f"ip -n {switch} link add {port} type veth peer name {INTERFACE} netns {name}".split())
            _run(*f"ip -n {switch} link set {port} master switch up".split())
            _run(*f"ip -n {name} address add {_address(host)}/24 dev {INTERFACE}".split())
            for interface in ("lo", INTERFACE):
                _run(*f"ip -n {name} link set {interface} up".split())
            for namespace, interface in ((name, INTERFACE), (switch, port)):
                rate = f"rate {mbit_per_second}mbit {BUCKET}"
                _run(*f"tc -n {namespace} qdisc replace dev {interface} root tbf {rate}".split())

    def remove(self) -> None:
        """Remove all hosts and their links."""
        for name in _namespaces():
            if name.startswith(self._prefix):
                _run("ip", "netns", "delete", name)

    def _name(self, host: int) -> str:
        return f"{self._prefix}{host}"


@contextmanager
def network(num_hosts: int, mbit_per_second: int) -> Iterator[Network]:
    """Create a network with the given number of hosts, and remove it after the block.

    Parameters
    ----------
    num_hosts : int
        At most 250.
    mbit_per_second : int
        The rate of a link in each direction.
    """
    made = Network()
    try:
        made.make(num_hosts, mbit_per_second)
        yield made
    finally:
        with _undisturbed():
            made.remove()


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignore SIGINT and SIGTERM within the block, so that the clean-up can finish."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def report_leftovers() -> str | None:
    """Return a message about namespaces that an earlier run has left behind, or None."""
    if not (left := leftovers(_namespaces())):
        return None
    return (
        f"an earlier run was killed and has left {len(left)} network namespaces; remove them: "
        f"for name in {' '.join(left)}; do ip netns delete $name; done"
    )


def _namespaces() -> list[str]:
    with suppress(FileNotFoundError):
        return [each.name for each in NAMESPACES.iterdir()]
    return []


def _address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def _run(*command: str) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise SystemExit(
            f"`{' '.join(command)}` failed: {ended.stderr.strip()}; network namespaces with limited links "
            "need CAP_NET_ADMIN and CAP_SYS_ADMIN, and veth, bridge and sch_tbf of the kernel"
        )
