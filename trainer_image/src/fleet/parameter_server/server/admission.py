"""Who may speak with a server: replicas of its job, each in the life of it that has joined last."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from fleet.errors import ConfigurationError, RemoteProtocolError
from fleet.parameter_server.control.proto import control_pb2
from fleet.parameter_server.optimizer_state import INITIAL_STATE
from fleet.plan import describe_difference
from fleet.wire import Identity, job_hash

if TYPE_CHECKING:
    from fleet.role_maker import JobIdentity

__all__ = ["Admission", "check_agreement", "check_identity", "check_job"]


class Admission:
    """Decides who may join a server, and whose frames it takes.

    Parameters
    ----------
    job : JobIdentity
        The server's.
    agreement : mapping of str to str
        What a trainer must have in common with it, fact by fact.
    initial : mapping of str to str
        What its process had before the first step.
    restored : callable
        Returns the name of the checkpoint that is loaded, which then counts instead; empty without one.
    """

    def __init__(
        self,
        job: "JobIdentity",
        agreement: Mapping[str, str],
        initial: Mapping[str, str],
        restored: Callable[[], str],
    ) -> None:
        self._job = job
        self._agreement = agreement
        self._initial = initial
        self._restored = restored

    def check(self, request: control_pb2.JoinRequest) -> None:
        """Check that a trainer is of this job, and trains what is served; ConfigurationError if not."""
        check_job(request, self._job)
        check_agreement(self._agreement, request.agreement, None if self._restored() else self._initial)

    def identity(self, trainer: int, attempt: int) -> Identity:
        """Return by what the frames of one start of a trainer are known."""
        return Identity(job_hash(self._job.name, self._job.uid), trainer, attempt)

    def check_identity(self, identity: Identity, joined: int) -> None:
        """Check who greets; see the function `check_identity`."""
        check_identity(identity, self._job, joined)


def check_job(
    request: control_pb2.JoinRequest | control_pb2.CompletedRequest | control_pb2.NormRequest,
    job: "JobIdentity",
) -> None:
    """Check that a call comes from a replica of the server's job.

    Raises
    ------
    ConfigurationError
        It does not; the message names both jobs.
    """
    found, expected = (request.job_name, request.job_uid), (job.name, job.uid)
    if found != expected:
        raise ConfigurationError(
            f"a replica of job {found[0]!r} (uid {found[1]!r}) came to a server of job {expected[0]!r} "
            f"(uid {expected[1]!r}); are two jobs configured with the same addresses?"
        )


def check_agreement(
    ours: Mapping[str, str], theirs: Mapping[str, str], initial: Mapping[str, str] | None
) -> None:
    """Check that a trainer agrees with the server on everything that must be equal.

    Parameters
    ----------
    ours, theirs : mapping of str to str
        The server's facts and the trainer's.
    initial : mapping of str to str, optional
        What the server's process had before the first step; None where a checkpoint counts instead.

    Raises
    ------
    ConfigurationError
        It does not; the message names the difference.
    """
    if initial is None:
        theirs = {name: fact for name, fact in theirs.items() if name != INITIAL_STATE}
    difference = describe_difference({**ours, **(initial or {})}, theirs)
    if difference:
        raise ConfigurationError(
            f"this trainer does not run the same training as the parameter server: {difference} "
            "(here: the server; there: the trainer); run one script with the same settings in every role"
        )


def check_identity(identity: Identity, job: "JobIdentity", joined: int) -> None:
    """Check that a greeting comes from a trainer of the server's job that has joined.

    Parameters
    ----------
    identity : Identity
        Who greets.
    job : JobIdentity
        The server's.
    joined : int
        Under which attempt this trainer joined last; -1 where it has not.

    Raises
    ------
    RemoteProtocolError
        It does not; the message says what was expected.
    """
    expected = job_hash(job.name, job.uid)
    if identity.job != expected:
        raise RemoteProtocolError(
            f"a frame of job {identity.job:016x} came to the server of job {job.name} ({expected:016x}); are "
            "two jobs configured with the same addresses?"
        )
    if joined != identity.attempt:
        place = f"its place is taken by attempt {joined}" if joined >= 0 else "expected a join before data"
        raise RemoteProtocolError(
            f"trainer {identity.trainer} with attempt {identity.attempt} has not joined here; {place}"
        )
