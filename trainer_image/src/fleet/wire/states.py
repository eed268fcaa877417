"""The states of a connection: one transition table, read by both ends.

Each direction of a connection is a machine of its own, advanced by the frames that this direction carries.
The two never wait for each other here: what one side answers and when is the business of the training mode,
and frames of both directions cross on the way. A kind that a state does not list breaks the protocol.

A connection that is lost while both processes live leaves the session as it was. The next one begins with a
greeting as every connection does, and then each direction goes on in the state in which its last frame that
arrived has left it, one of `RESUMED`: what came later is sent again.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from fleet.wire.frames import Kind

__all__ = ["RESUMED", "START", "TRANSITIONS", "Position", "Side", "State"]


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
    """The sender has finished well; a server sends nothing more, a trainer only that it has heard so."""
    CLOSED = "closed"
    """All is said: the sender took its leave, or reported an error."""


TRANSITIONS: Final[Mapping[Side, Mapping[State, Mapping[Kind, State]]]] = MappingProxyType(
    {
        Side.TRAINER: {
            State.START: {Kind.HELLO: State.OPEN, Kind.ERROR: State.CLOSED},
            State.OPEN: {
                Kind.PULL: State.OPEN,
                Kind.LOOK_UP: State.OPEN,
                Kind.HYPER: State.IN_STEP,
                Kind.CONFIRM: State.OPEN,
                Kind.COMPLETE: State.COMPLETED,
                Kind.ERROR: State.CLOSED,
            },
            State.IN_STEP: {
                Kind.GRAD: State.IN_STEP,
                Kind.LOOK_UP: State.IN_STEP,
                Kind.ROW_GRADIENT: State.IN_STEP,
                Kind.CONFIRM: State.IN_STEP,
                Kind.STEP_END: State.OPEN,
                Kind.ERROR: State.CLOSED,
            },
            State.COMPLETED: {Kind.CONFIRM: State.COMPLETED, Kind.GOODBYE: State.CLOSED},
            State.CLOSED: {},
        },
        Side.SERVER: {
            State.START: {Kind.HELLO: State.OPEN, Kind.ERROR: State.CLOSED},
            State.OPEN: {
                Kind.PARAM: State.OPEN,
                Kind.UNCHANGED: State.OPEN,
                Kind.ROWS: State.OPEN,
                Kind.STEPPED: State.OPEN,
                Kind.CONFIRM: State.OPEN,
                Kind.COMPLETE: State.COMPLETED,
                Kind.ERROR: State.CLOSED,
            },
            State.COMPLETED: {},
            State.CLOSED: {},
        },
    }
)

RESUMED: Final[Mapping[Side, frozenset[State]]] = MappingProxyType(
    {
        Side.TRAINER: frozenset({State.OPEN, State.IN_STEP, State.COMPLETED}),
        Side.SERVER: frozenset({State.OPEN}),
    }
)
"""The states in which a direction may go on after the greeting of a later connection."""


@dataclass(frozen=True, slots=True)
class Position:
    """How far one direction of a session has come: its state, and the step that began last."""

    state: State = State.OPEN
    step: int = 0

    def after(self, side: Side, kind: Kind, step: int) -> "Position":
        """Return the position after a frame that the table allows."""
        following = TRANSITIONS[side][self.state][kind]
        begun = step if kind is Kind.HYPER else self.step
        return self if (following, begun) == (self.state, self.step) else Position(following, begun)


START: Final = Position()
"""Where both directions of a session are after its first greeting."""
