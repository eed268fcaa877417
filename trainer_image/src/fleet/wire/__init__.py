"""The data plane's protocol without a socket: frames, their payloads, and the states of a connection.

A connection between one trainer and one parameter server carries frames in both directions. A frame is a
header of fixed size and a payload; tensors go from the socket straight into preallocated arrays, so only
headers and small payloads (JSON, lists of block numbers) pass through this package. Nothing is pickled.

``frames`` packs and reads headers, ``messages`` the small payloads, ``states`` holds the one transition
table, and ``conversation`` checks each frame of one direction against it.
"""

from fleet.wire.conversation import NO_TABLES, Conversation, Identity
from fleet.wire.frames import HEADER_BYTES, NO_BLOCK, Header, Kind, job_hash, pack_header, read_header
from fleet.wire.messages import NO_STEP, Hello, HyperParameters
from fleet.wire.states import RESUMED, START, TRANSITIONS, Position, Side, State

__all__ = [
    "HEADER_BYTES",
    "NO_BLOCK",
    "NO_STEP",
    "NO_TABLES",
    "RESUMED",
    "START",
    "TRANSITIONS",
    "Conversation",
    "Header",
    "Hello",
    "HyperParameters",
    "Identity",
    "Kind",
    "Position",
    "Side",
    "State",
    "job_hash",
    "pack_header",
    "read_header",
]
