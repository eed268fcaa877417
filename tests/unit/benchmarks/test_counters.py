"""What the kernel counts, as the benchmark of the network reads it."""

import csv
import io
import os
import socket

from benchmarks.counters import (
    Link,
    Segments,
    Trace,
    link_of,
    rates_between,
    segments_of,
    segments_of_all,
)

SNMP = """\
Ip: Forwarding DefaultTTL InReceives
Ip: 2 64 3
Tcp: RtoAlgorithm RtoMin RtoMax MaxConn ActiveOpens InSegs OutSegs RetransSegs InErrs
Tcp: 1 200 120000 -1 4 61 70 5 0
Udp: InDatagrams NoPorts
Udp: 0 0
"""
DEV = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:     100       1    0    0    0     0          0         0      100       1    0    0    0     0       0          0
  eth0: 5000       10    0    0    0     0          0         0     7000      11    0    0    0     0       0          0
"""  # noqa: E501 (as the kernel prints it)


def test_segments_that_were_sent_again_are_told_from_the_first_ones():
    found = segments_of(SNMP)
    assert found == Segments(sent=75, resent=5)  # OutSegs leaves those out that only repeat
    assert found - Segments(sent=70, resent=2) == Segments(sent=5, resent=3)


def test_a_link_has_its_bytes_in_both_directions():
    assert link_of(DEV, "eth0", 1.5) == Link(1.5, sent_bytes=7000, received_bytes=5000)
    assert link_of(DEV, "lo", 0) == Link(0, sent_bytes=100, received_bytes=100)


def test_rates_are_in_megabits_per_second_of_the_time_that_has_passed():
    assert rates_between(Link(1.0, 0, 1_000_000), Link(1.5, 250_000, 1_000_000)) == (4.0, 0.0)


def test_a_trace_has_what_each_link_carried_while_it_was_watched():
    file = io.StringIO()
    with Trace(file, "lo").of({"trainer0": os.getpid()}, "4+4@400", "fleet", 2), socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        one.listen()
        with socket.create_connection(one.getsockname()) as other:
            other.sendall(bytes(100_000))
    first, *rest = csv.DictReader(io.StringIO(file.getvalue()))
    assert {name: first[name] for name in ("case", "system", "round", "host")} == {
        "case": "4+4@400",
        "system": "fleet",
        "round": "2",
        "host": "trainer0",
    }
    assert any(float(row["sent_mbit_per_s"]) > 0 for row in (first, *rest))


def test_this_kernel_counts_segments():
    assert segments_of_all({"here": os.getpid(), "again": os.getpid()}).sent > 0
