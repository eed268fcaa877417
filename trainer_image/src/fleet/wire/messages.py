"""Small payloads: greetings, hyper-parameters, lists of blocks or trainers, and errors.

Tensors do not pass through this module: the kernel writes their bytes directly to the receiver's arrays.
"""

import array
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from fleet.errors import (
    CheckpointError,
    ConfigurationError,
    DeadlineExceededError,
    FleetError,
    LocalProtocolError,
    PeerLostError,
    RemoteProtocolError,
    StateLostError,
)

__all__ = [
    "MAX_TEXT_BYTES",
    "NO_STEP",
    "Hello",
    "HyperParameters",
    "pack_error",
    "pack_hello",
    "pack_hyper",
    "pack_numbers",
    "read_error",
    "read_hello",
    "read_hyper",
    "read_numbers",
]

MAX_TEXT_BYTES: Final = 1 << 20
"""The largest size of a JSON or text payload, in bytes."""

HyperParameters = tuple[dict[str, Any], ...]
"""The hyper-parameters of a step: one mapping per param group, in group order. A value is a number,
a boolean, None or a tuple of these."""

NO_STEP: Final[HyperParameters] = ()
"""The hyper-parameters of a step that the trainer skips because its gradients are not finite."""

_NUMBER_BYTES: Final = 4
_ERRORS: Final[dict[str, type[FleetError]]] = {
    kind.__name__: kind
    for kind in (
        CheckpointError,
        ConfigurationError,
        DeadlineExceededError,
        FleetError,
        PeerLostError,
        StateLostError,
    )
}


@dataclass(frozen=True, slots=True)
class Hello:
    """The payload of a HELLO frame, which greets the peer.

    Attributes
    ----------
    incarnation : str
        The incarnation of the server.
    num_blocks : int
        The number of blocks in the session.
    session : str
        A random name that the trainer chooses; the same on each connection of the session.
    taken : int
        The number of the session's frames that the sender has received.
    shared : bool
        True if a descriptor of shared memory accompanies the frame. In a server's greeting, True also means
        that the server has mapped the trainer's memory.
    """

    incarnation: str
    num_blocks: int
    session: str = ""
    taken: int = 0
    shared: bool = False


def pack_hello(hello: Hello) -> bytes:
    """Encode a greeting."""
    return json.dumps(asdict(hello)).encode()


def read_hello(payload: bytes) -> Hello:
    """Decode a greeting.

    Raises
    ------
    RemoteProtocolError
        The payload is not the expected JSON object.
    """
    document = _read_json(payload, "HELLO")
    match document:
        case {
            "incarnation": str(incarnation),
            "num_blocks": int(num_blocks),
            "session": str(session),
            "taken": int(taken),
            "shared": bool(shared),
        }:
            return Hello(incarnation, num_blocks, session, taken, shared)
    raise RemoteProtocolError(
        f"a HELLO frame carries {payload[:200]!r}, "
        "expected an object with incarnation and session (text), num_blocks and taken (numbers), shared "
        "(true or false)"
    )


def pack_hyper(groups: Sequence[dict[str, Any]]) -> bytes:
    """Encode the hyper-parameters of a step as JSON that preserves every float exactly.

    Raises
    ------
    LocalProtocolError
        A value has a type that JSON cannot represent.
    """
    try:
        return json.dumps(list(groups), sort_keys=True).encode()
    except TypeError as error:
        raise LocalProtocolError(
            f"the hyper-parameters {list(groups)!r} cannot be sent with the step: {error}; "
            "expected numbers, booleans, None and tuples of these"
        ) from error


def read_hyper(payload: bytes) -> HyperParameters:
    """Decode the hyper-parameters of a step; lists become the tuples that torch.optim uses.

    Raises
    ------
    RemoteProtocolError
        The payload is not a list of objects.
    """
    document = _read_json(payload, "HYPER")
    if not isinstance(document, list) or not all(isinstance(group, dict) for group in document):
        raise RemoteProtocolError(
            f"a HYPER frame carries {payload[:200]!r}, expected a list with an object per param group"
        )
    try:
        return tuple(
            {name: _tuples(value) if isinstance(value, list) else value for name, value in group.items()}
            for group in document
        )
    except RecursionError:
        raise RemoteProtocolError(
            f"a HYPER frame carries {payload[:200]!r}, which is nested too deeply; expected numbers and "
            "tuples"
        ) from None


def pack_numbers(numbers: Sequence[int]) -> bytes:
    """Encode block numbers or trainer ids as four bytes each, little endian."""
    packed = array.array("I", numbers)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def read_numbers(payload: bytes) -> tuple[int, ...]:
    """Decode block numbers or trainer ids.

    Raises
    ------
    RemoteProtocolError
        The size of the payload is not a multiple of four bytes.
    """
    if len(payload) % _NUMBER_BYTES:
        raise RemoteProtocolError(
            f"a list of numbers has {len(payload)} bytes, expected a multiple of {_NUMBER_BYTES}"
        )
    numbers = array.array("I", payload)
    if sys.byteorder == "big":
        numbers.byteswap()
    return tuple(numbers)


def pack_error(error: FleetError) -> bytes:
    """Encode an error: its type name, a line break and its message, truncated to `MAX_TEXT_BYTES`."""
    return f"{type(error).__name__}\n{error}".encode()[:MAX_TEXT_BYTES]


def read_error(payload: bytes) -> FleetError:
    """Decode an error; an unknown type becomes RemoteProtocolError with the same message."""
    # Truncation may have cut a character in two, which must not hide the error itself.
    name, _, sentence = payload.decode("utf-8", errors="backslashreplace").partition("\n")
    return _ERRORS.get(name, RemoteProtocolError)(sentence or name)


def _read_json(payload: bytes, kind: str) -> Any:
    try:
        return json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise RemoteProtocolError(
            f"a {kind} frame carries {payload[:200]!r}, expected JSON: {error}"
        ) from error


def _tuples(values: list[Any]) -> tuple[Any, ...]:
    return tuple(_tuples(value) if isinstance(value, list) else value for value in values)
