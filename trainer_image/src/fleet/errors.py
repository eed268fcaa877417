"""Every error that fleet raises on purpose, and the exit status with which each ends a replica.

The tree separates whose mistake it was: the user's (`ConfigurationError`), a peer's or ours on the wire
(`ProtocolError`), or the world's (`PeerLostError`, `StateLostError`). The operator reads the exit status,
so the reserved codes below are part of the contract between the two distributions::

    FleetError                        1   something failed while training
    ├── ConfigurationError            2   the user's mistake, found before any work started
    │   ├── AlreadyJoinedError            a trainer of this id and attempt lives already, or a later one does
    │   ├── CheckpointError               a checkpoint that is not whole, or is of another training
    │   ├── RoleError                     a role variable is missing, malformed or contradicts another
    │   └── TranspileError                a program that cannot be distributed as asked
    ├── DiskFullError                 1   no room on a disk, or no descriptor, for what was to be written
    ├── ProtocolError                 1   bytes or messages that break the wire protocol
    │   ├── RemoteProtocolError           the peer sent them
    │   └── LocalProtocolError            we were about to send them
    ├── StateLostError               90   a parameter server came back without its state
    └── PeerLostError                91   a peer vanished for good
        └── DeadlineExceededError         a wait passed its deadline
"""

import errno
from collections.abc import Iterable
from typing import ClassVar

__all__ = [
    "EXIT_CONFIGURATION",
    "EXIT_FAILURE",
    "EXIT_PEER_LOST",
    "EXIT_STATE_LOST",
    "AlreadyJoinedError",
    "CheckpointError",
    "ConfigurationError",
    "DeadlineExceededError",
    "DiskFullError",
    "FleetError",
    "LocalProtocolError",
    "PeerLostError",
    "ProtocolError",
    "RemoteProtocolError",
    "RoleError",
    "StateLostError",
    "TranspileError",
    "disk_error",
    "meant",
    "no_room",
]

EXIT_FAILURE = 1
EXIT_CONFIGURATION = 2
EXIT_STATE_LOST = 90
EXIT_PEER_LOST = 91


class FleetError(Exception):
    """The root of all errors that fleet raises on purpose."""

    exit_code: ClassVar[int] = EXIT_FAILURE


class ConfigurationError(FleetError):
    """The user's mistake, found before any work started: a second try fails the same way."""

    exit_code: ClassVar[int] = EXIT_CONFIGURATION


class AlreadyJoinedError(ConfigurationError):
    """A trainer of this id and attempt lives already, or a later one does."""


class CheckpointError(ConfigurationError):
    """A checkpoint cannot be loaded: it is not whole, or is of another training."""


class DiskFullError(FleetError):
    """There is no room for what was to be written, on the disk or in its place, or no descriptor for it.

    There may be some later.
    """


_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.EISDIR})
"""The last one: a directory is in the place of the file."""


def no_room(raised: Exception) -> bool:
    """Whether something could not be written for want of room on a disk, or of a descriptor."""
    return isinstance(raised, DiskFullError) or (isinstance(raised, OSError) and raised.errno in _NO_ROOM)


def disk_error(raised: Exception, sentence: str) -> FleetError:
    """Return a sentence about what a disk has refused as the error that it is."""
    return (DiskFullError if no_room(raised) else FleetError)(sentence)


def meant(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return a question about the name that a mistyped one may have meant; empty where none is close."""
    from difflib import get_close_matches  # imported on the way to an error, and not by every process

    close = get_close_matches(name, known, n=1, cutoff=cutoff)
    return f" (did you mean {close[0]}?)" if close else ""


class RoleError(ConfigurationError):
    """The environment or a role maker's arguments do not describe a replica."""


class TranspileError(ConfigurationError):
    """The program cannot be captured or distributed as asked."""


class ProtocolError(FleetError):
    """Bytes or messages that break the wire protocol."""


class RemoteProtocolError(ProtocolError):
    """The peer broke the protocol."""


class LocalProtocolError(ProtocolError):
    """A message that this process was about to send would break the protocol."""


class StateLostError(FleetError):
    """A parameter server came back without the state that the trainers rely on."""

    exit_code: ClassVar[int] = EXIT_STATE_LOST


class PeerLostError(FleetError):
    """A peer vanished for good."""

    exit_code: ClassVar[int] = EXIT_PEER_LOST


class DeadlineExceededError(PeerLostError):
    """A wait passed its deadline; the message names the peer, the step and what was awaited."""
