"""A step that failed on a server, in the user's optimizer say: its block may be half stepped.

Training on from it would train on numbers that nobody meant. So it is no matter of the trainer whose gradient
happened to come last: the server's half tells of it when it is next asked what is missing, and the server
ends, with the reason for every trainer.
"""

import logging

from fleet.errors import ConfigurationError, FleetError

__all__ = ["FailedStep"]

_log = logging.getLogger(__name__)


class FailedStep:
    """The first failure of a server's half to make a step, if there was one.

    Parameters
    ----------
    endpoint : str
        The server's, for messages.
    """

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self.error: FleetError | None = None
        """What every trainer is told; None as long as nothing has failed."""

    def note(self, raised: BaseException) -> FleetError:
        """Take note of what a step raised, with its traceback in the log; return what is to be told."""
        if self.error is None:
            ours = isinstance(raised, FleetError)
            kind = ConfigurationError if isinstance(raised, ConfigurationError) else FleetError
            reason = (
                str(raised) if ours else f"{type(raised).__name__}: {raised}; the traceback is in its log"
            )
            self.error = kind(f"a block of parameter server {self._endpoint} could not be stepped: {reason}")
            _log.error("%s", self.error, exc_info=None if ours else raised)
        return self.error

    def check(self) -> None:
        """Raise what has failed, if anything has."""
        if self.error is not None:
            raise self.error
