"""What modes have in common whose servers answer each gradient with a value within the step."""

from collections.abc import Sequence

from fleet.parameter_server.modes.interface import Session
from fleet.plan.blocks import PlannedBlock
from fleet.wire import HyperParameters

__all__ = ["AnsweredTrainer"]


class AnsweredTrainer:
    """A trainer's half that sends each gradient as it comes, and ends a step with the answers to all.

    Parameters
    ----------
    session : Session
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.send = session.send_gradient
        """Sends a block's gradient."""

    def start(self) -> None:
        """Do nothing: there is no thread."""

    def begin(self, hyper_parameters: HyperParameters) -> None:
        """Begin a step, just before its first gradient."""
        self._session.expect_values()
        self._session.begin_step(hyper_parameters)

    def finish(self, absent: Sequence[PlannedBlock]) -> None:
        """End the step, and wait until the values after its gradients are the parameters."""
        self._session.end_step(absent)
        self._session.wait_for_values()
        self._session.adopt_values()
        self._session.advance()

    def stop(self) -> None:
        """Do nothing: every step has been answered."""

    def close(self) -> None:
        """Do nothing: there is no thread."""
