"""Endpoints: ``host:port`` texts, checked the same way wherever a user writes them."""

from collections.abc import Iterable, Sequence

__all__ = ["endpoint_problem", "endpoints_problem", "split_endpoints"]

_LAST_PORT = 65535


def split_endpoints(value: str | Iterable[str]) -> list[str]:
    """Return the endpoints of a comma separated text, or of a list of them, without blanks around them."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",")]
    # What the user wrote may be anything; as text it is refused with the others that are not host:port.
    return [str(part).strip() for part in (value if isinstance(value, Iterable) else (value,))]


def endpoint_problem(endpoint: str) -> str | None:
    """Say what is wrong with one endpoint; None when it is ``host:port``.

    An IPv6 address stands in brackets: ``[::1]:6174``.
    """
    host, colon, port = endpoint.rpartition(":")
    if not colon or not host:
        return f"{endpoint!r} is not host:port"
    if (":" in host) != (host.startswith("[") and host.endswith("]")) or host.split() != [host]:
        return f"{endpoint!r} has a malformed host"
    if not (port.isascii() and port.isdigit() and 1 <= int(port) <= _LAST_PORT):
        return f"{endpoint!r} has the port {port!r}, which is not a number from 1 to {_LAST_PORT}"
    return None


def endpoints_problem(endpoints: Sequence[str]) -> str | None:
    """Say what is wrong with a list of endpoints; None when all are well-formed and different."""
    if not any(endpoints):
        return "it is empty"
    for endpoint in endpoints:
        if (problem := endpoint_problem(endpoint)) is not None:
            return problem
    for position, endpoint in enumerate(endpoints):
        if endpoint in endpoints[:position]:
            return f"{endpoint!r} stands in it twice"
    return None
