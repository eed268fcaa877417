"""Parsing and validation of endpoints, which are ``host:port`` strings."""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import prod
from typing import Final

__all__ = ["can_be_host", "endpoint_problem", "endpoints_problem", "split_endpoints"]

_LAST_PORT: Final = 65535
_RANGE: Final = re.compile(r"\[(\d{1,9})-(\d{1,9})(?:\+(\d{1,5}))?\]")
_MOST: Final = 1_000_000
"""The maximum number of endpoints in one pattern; a larger number is treated as a mistake."""


def split_endpoints(value: str | Iterable[str]) -> list[str]:
    """Return a list of endpoints, given comma-separated text or an iterable.

    Whitespace around endpoints is removed. In text, a range expands to each of its numbers, and the last
    range varies fastest: ``t-[0-1]:[6170-6171]`` means ``t-0:6170,t-0:6171,t-1:6170,t-1:6171``. A stride is
    added to a range for each number of the previous range: ``t-[0-1]:[6170-6171+9]`` means
    ``t-0:6170,t-0:6171,t-1:6179,t-1:6180``.
    """
    if isinstance(value, str):
        return [endpoint for part in value.split(",") for endpoint in _expanded(part.strip())]
    # A list may hold anything; converted to text, an element is rejected like any text that is not host:port.
    return [str(part).strip() for part in (value if isinstance(value, Iterable) else (value,))]


def endpoint_problem(endpoint: str) -> str | None:
    """Describe what is wrong with an endpoint; return None if it is a valid ``host:port``.

    An IPv6 address is written in brackets: ``[::1]:6174``.
    """
    host, colon, port = endpoint.rpartition(":")
    if not colon or not host:
        return f"{endpoint!r} is not host:port"
    bracketed = host.startswith("[") and host.endswith("]")
    if (":" in host) != bracketed or host.split() != [host] or not can_be_host(host):
        return f"{endpoint!r} has a malformed host"
    if not bracketed and ("[" in host or "]" in host):
        return (
            f"{endpoint!r} has brackets in its host; expected ranges as in t-[0-7]:6170, of at most {_MOST} "
            "endpoints, if they stand for several"
        )
    if not (port.isascii() and port.isdigit() and 1 <= int(port) <= _LAST_PORT):
        return f"{endpoint!r} has the port {port!r}, which is not a number from 1 to {_LAST_PORT}"
    return None


def can_be_host(name: str) -> bool:
    """Return whether a name can be encoded for the resolver: its labels have 1 to 63 characters."""
    try:
        name.encode("idna")
    except UnicodeError:
        return False
    return True


def endpoints_problem(endpoints: Sequence[str]) -> str | None:
    """Describe what is wrong with a list of endpoints; return None if all are valid and distinct."""
    if not any(endpoints):
        return "it is empty"
    for endpoint in endpoints:
        if (problem := endpoint_problem(endpoint)) is not None:
            return problem
    seen = set()
    for endpoint in endpoints:
        if endpoint in seen:
            return f"{endpoint!r} occurs twice"
        seen.add(endpoint)
    return None


def _expanded(pattern: str) -> list[str]:
    """Return a pattern's endpoints, or the pattern alone if it has no valid range or too many endpoints."""
    ranges = [(int(first), int(last), int(stride or 0)) for first, last, stride in _RANGE.findall(pattern)]
    lengths = [last + 1 - first for first, last, _ in ranges]
    follows_none = bool(ranges) and ranges[0][2] > 0  # a stride without a previous range
    if follows_none or min(lengths, default=1) < 1 or prod(lengths) > _MOST:
        return [pattern]
    head, *tails = _RANGE.split(pattern)[:: _RANGE.groups + 1]
    return [
        head
        + "".join(f"{number}{tail}" for number, tail in zip(_numbers(ranges, places), tails, strict=True))
        for places in product(*map(range, lengths))
    ]


def _numbers(ranges: Sequence[tuple[int, int, int]], places: Sequence[int]) -> Iterator[int]:
    """Yield each range's number: that at its index, plus its stride times the previous range's index."""
    before = 0
    for (first, _, stride), place in zip(ranges, places, strict=True):
        yield first + place + stride * before
        before = place
