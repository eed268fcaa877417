"""The protocol of the data plane, without I/O: frames, their payloads, and the states of a connection.

A connection between one trainer and one parameter server carries frames in both directions. A frame is a
header of fixed size and a payload. The kernel writes tensors directly to preallocated arrays, so that only
headers and small payloads (JSON, lists of block numbers) pass through this package. Nothing is pickled.

``protocol`` defines the headers and the transition table, and checks each frame against the table.
``messages`` defines the small payloads, ``rows`` the payloads of tables, and ``proof`` the proofs that a peer
has the job's key.
"""

from fleet.wire.messages import NO_STEP, Hello, HyperParameters
from fleet.wire.protocol import (
    HEADER_BYTES,
    NO_BLOCK,
    NO_TABLES,
    RESUMED,
    TENSORS,
    TRANSITIONS,
    Conversation,
    Header,
    Identity,
    Kind,
    Side,
    State,
    job_hash,
    pack_header,
    read_header,
)

__all__ = [
    "HEADER_BYTES",
    "NO_BLOCK",
    "NO_STEP",
    "NO_TABLES",
    "RESUMED",
    "TENSORS",
    "TRANSITIONS",
    "Conversation",
    "Header",
    "Hello",
    "HyperParameters",
    "Identity",
    "Kind",
    "Side",
    "State",
    "job_hash",
    "pack_header",
    "read_header",
]
