"""The states of a connection: one transition table, read by both ends.

Each direction of a connection is a machine of its own, advanced by the frames that this direction carries.
The two never wait for each other here: what one side answers and when is the business of the sync mode, and
frames of both directions cross on the way. A kind that a state does not list breaks the protocol.
"""

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from fleet.wire.frames import Kind

__all__ = ["TRANSITIONS", "Side", "State"]


class Side(enum.Enum):
    """Who sends the frames of a direction."""

    TRAINER = "trainer"
    SERVER = "parameter server"


class State(enum.Enum):
    """How far one direction of a connection has come."""

    START = "start"
    """Nothing sent yet."""
    OPEN = "open"
    """Greeted, and between steps."""
    IN_STEP = "in step"
    """The hyper-parameters of a step have gone; its gradients follow."""
    COMPLETED = "completed"
    """The sender has finished well and sends nothing more."""
    CLOSED = "closed"
    """The sender reported an error and sends nothing more."""


TRANSITIONS: Final[Mapping[Side, Mapping[State, Mapping[Kind, State]]]] = MappingProxyType(
    {
        Side.TRAINER: {
            State.START: {Kind.HELLO: State.OPEN, Kind.ERROR: State.CLOSED},
            State.OPEN: {
                Kind.PULL: State.OPEN,
                Kind.HYPER: State.IN_STEP,
                Kind.COMPLETE: State.COMPLETED,
                Kind.ERROR: State.CLOSED,
            },
            State.IN_STEP: {Kind.GRAD: State.IN_STEP, Kind.STEP_END: State.OPEN, Kind.ERROR: State.CLOSED},
            State.COMPLETED: {},
            State.CLOSED: {},
        },
        Side.SERVER: {
            State.START: {Kind.HELLO: State.OPEN, Kind.ERROR: State.CLOSED},
            State.OPEN: {
                Kind.PARAM: State.OPEN,
                Kind.UNCHANGED: State.OPEN,
                Kind.COMPLETE: State.COMPLETED,
                Kind.ERROR: State.CLOSED,
            },
            State.COMPLETED: {},
            State.CLOSED: {},
        },
    }
)
