"""The errors that fleet raises deliberately, and the exit status with which a replica ends after each.

The class hierarchy separates causes: the user's mistakes (`ConfigurationError`), protocol errors of a peer or
of ours (`ProtocolError`), and failures of the environment (`PeerLostError`, `StateLostError`). The operator
reads the exit status, so the reserved codes below are part of the contract between the two distributions::

    FleetError                        1   training failed
    ├── ConfigurationError            2   a user error, found before any work starts
    │   ├── AlreadyJoinedError            the trainer already runs in this attempt or a later one
    │   ├── CheckpointError               the checkpoint is incomplete or of another training run
    │   ├── RoleError                     a role variable is missing, malformed or contradictory
    │   └── TranspileError                the program cannot be distributed as requested
    ├── DiskFullError                 1   a file cannot be written, as on a full disk
    ├── ProtocolError                 1   the wire protocol was violated
    │   ├── RemoteProtocolError           by the peer
    │   └── LocalProtocolError            by a message that this process was about to send
    ├── StateLostError               90   a parameter server restarted without its state
    └── PeerLostError                91   a peer is permanently lost
        └── DeadlineExceededError         a wait exceeded its deadline
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
    """The base class of all errors that fleet raises deliberately."""

    exit_code: ClassVar[int] = EXIT_FAILURE


class ConfigurationError(FleetError):
    """A user error that is found before any work starts and that a retry would not fix."""

    exit_code: ClassVar[int] = EXIT_CONFIGURATION


class AlreadyJoinedError(ConfigurationError):
    """A trainer with this id is already running in the same or a later attempt."""


class CheckpointError(ConfigurationError):
    """A checkpoint cannot be loaded: it is incomplete or belongs to another training run."""


class DiskFullError(FleetError):
    """A file cannot be written; a retry may succeed.

    The disk or the user's quota is full, the file would exceed the process's limit on file sizes, its path is
    that of a directory, or no file descriptor is free.
    """


_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.EISDIR})
"""The error numbers that `DiskFullError` covers. EISDIR means that the path is that of a directory."""


def no_room(raised: Exception) -> bool:
    """Return whether a write failed for a reason that `DiskFullError` covers."""
    return isinstance(raised, DiskFullError) or (isinstance(raised, OSError) and raised.errno in _NO_ROOM)


def disk_error(raised: Exception, sentence: str) -> FleetError:
    """Return a DiskFullError if `no_room` is true for a failed disk operation, else a FleetError."""
    return (DiskFullError if no_room(raised) else FleetError)(sentence)


def meant(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return a suggestion such as ``(did you mean sync_mode?)``, or an empty string if no name is close."""
    from difflib import get_close_matches  # imported only when an error occurs

    close = get_close_matches(name, known, n=1, cutoff=cutoff)
    return f" (did you mean {close[0]}?)" if close else ""


class RoleError(ConfigurationError):
    """The environment or a role maker's arguments do not describe a replica."""


class TranspileError(ConfigurationError):
    """The program cannot be captured or distributed as requested."""


class ProtocolError(FleetError):
    """A violation of the wire protocol."""


class RemoteProtocolError(ProtocolError):
    """The peer violated the protocol."""


class LocalProtocolError(ProtocolError):
    """A message that this process was about to send violates the protocol."""


class StateLostError(FleetError):
    """A parameter server restarted without the state that its trainers depend on."""

    exit_code: ClassVar[int] = EXIT_STATE_LOST


class PeerLostError(FleetError):
    """A peer is permanently lost."""

    exit_code: ClassVar[int] = EXIT_PEER_LOST


class DeadlineExceededError(PeerLostError):
    """A peer did not act before a deadline; the message names the peer and the awaited event."""
