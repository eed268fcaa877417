"""Kernel counters of network namespaces: TCP segments, and bytes on links."""

import csv
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import TextIO

__all__ = ["Link", "Segments", "Trace", "link_of", "segments_of", "segments_of_all"]

SAMPLE_SECONDS = 0.1


@dataclass(frozen=True)
class Segments:
    """The numbers of TCP segments that were sent and retransmitted."""

    sent: int
    resent: int

    def __add__(self, other: "Segments") -> "Segments":
        return Segments(self.sent + other.sent, self.resent + other.resent)

    def __sub__(self, other: "Segments") -> "Segments":
        return Segments(self.sent - other.sent, self.resent - other.resent)


@dataclass(frozen=True)
class Link:
    """The byte counters of a link at one moment, including all headers."""

    seconds: float
    sent_bytes: int
    received_bytes: int


def segments_of(snmp: str) -> Segments:
    """Parse the TCP counters of /proc/net/snmp."""
    names, values = (line.split() for line in snmp.splitlines() if line.startswith("Tcp:"))
    tcp = dict(zip(names[1:], map(int, values[1:]), strict=True))
    return Segments(sent=tcp["OutSegs"] + tcp["RetransSegs"], resent=tcp["RetransSegs"])


def link_of(dev: str, interface: str, seconds: float) -> Link:
    """Parse an interface's byte counters in /proc/net/dev."""
    (line,) = [line for line in dev.splitlines() if line.strip().startswith(f"{interface}:")]
    columns = line.partition(":")[2].split()
    return Link(seconds, sent_bytes=int(columns[8]), received_bytes=int(columns[0]))


def segments_of_all(pids: Mapping[str, int]) -> Segments:
    """Return the TCP counters summed over the network namespaces of the given processes."""
    return sum(
        (segments_of(Path(f"/proc/{pid}/net/snmp").read_text()) for pid in pids.values()), Segments(0, 0)
    )


class Trace:
    """A CSV file with the rate of every host's link, sampled ten times a second.

    Parameters
    ----------
    file : text file
    interface : str
        The name of the interface, which is the same on every host.
    """

    COLUMNS = ("case", "system", "round", "seconds", "host", "sent_mbit_per_s", "received_mbit_per_s")

    def __init__(self, file: TextIO, interface: str) -> None:
        self._csv = csv.writer(file)
        self._interface = interface
        self._csv.writerow(self.COLUMNS)

    @contextmanager
    def of(self, pids: Mapping[str, int], *about: object) -> Iterator[None]:
        """Sample the links of the given processes within the block.

        Parameters
        ----------
        pids : mapping of str to int
            One process of each host, by host name; each host is a separate namespace.
        *about : object
            The case, the system and the round.
        """
        ended = Event()
        before = {host: self._link(pid) for host, pid in pids.items()}
        sampler = Thread(target=self._sample, args=(pids, before, about, ended), name="trace")
        sampler.start()
        try:
            yield
        finally:
            ended.set()
            sampler.join()

    def _sample(
        self, pids: Mapping[str, int], before: dict[str, Link], about: tuple[object, ...], ended: Event
    ) -> None:
        began = time.perf_counter()
        with suppress(OSError):  # a process has ended, which the code that waits for its answer reports
            is_last = False
            while not is_last:
                is_last = ended.wait(SAMPLE_SECONDS)
                for host, pid in pids.items():
                    now = self._link(pid)
                    rates = (f"{rate:.1f}" for rate in rates_between(before[host], now))
                    self._csv.writerow([*about, f"{now.seconds - began:.3f}", host, *rates])
                    before[host] = now

    def _link(self, pid: int) -> Link:
        return link_of(Path(f"/proc/{pid}/net/dev").read_text(), self._interface, time.perf_counter())


def rates_between(before: Link, after: Link) -> tuple[float, float]:
    """Return the sending rate and the receiving rate between two moments, in Mbit/s."""
    microseconds = (after.seconds - before.seconds) * 1e6
    return (
        8 * (after.sent_bytes - before.sent_bytes) / microseconds,
        8 * (after.received_bytes - before.received_bytes) / microseconds,
    )
