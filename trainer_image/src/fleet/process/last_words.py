"""What a replica says at its end: who it is, how far it has come, and what ended it."""

import contextlib
import os
import sys
import traceback
from collections.abc import Collection, Mapping

from fleet.errors import FleetError
from fleet.process import progress, termination
from fleet.process.sigterm import TORCHRUN

__all__ = ["LastWords"]


class LastWords:
    """What is known of this replica, and the ways to say it."""

    def __init__(self) -> None:
        self.identity = "this process"
        self.is_server = False
        self.started = False
        self.joined = False
        self.step_at_join = 0
        self.failed = False
        self.completed: Collection[int] | None = None
        self.attempts: Mapping[int, int] = {}

    def identify(self, environ: Mapping[str, str]) -> None:
        """Take the name of a process without a role from its environment, as far as that says one."""
        role = environ.get("PADDLE_TRAINING_ROLE", "TRAINER")
        index = environ.get("PADDLE_PSERVER_ID") if role == "PSERVER" else None
        names = ("PADDLE_TRAINER_ID", "RANK", "NODE_RANK")  # where nobody gave a rank, the pod's number
        index = index or next((environ[name] for name in names if environ.get(name)), "")
        if role in ("PSERVER", "TRAINER") and index.isascii() and index.isdigit():
            self.name(role, int(index))

    def name(self, role: str, index: int) -> None:
        """Sign the progress and the messages of this process."""
        self.identity, self.is_server = f"{role.lower()} {index}", role == "PSERVER"
        progress.identify(role, index)

    def join(self) -> None:
        """Note that this replica has joined its job, and at which step of the training."""
        self.joined, self.step_at_join = True, _current_step()

    def leave_progress(self) -> None:
        """Write the last words of a replica that ends well; one process of a pod speaks for all."""
        if self._is_one_of_several() and TORCHRUN in os.environ:
            return  # it would hide what torchrun says should another one fail
        if not self.failed and os.environ.get("LOCAL_RANK", "0") == "0":
            state = progress.snapshot()
            if self.started:
                known = termination.completed_trainers(self.completed or (), self.attempts)
                state = {"joined": self.joined, **known, **state}
            termination.write_progress(state, os.environ)

    def leave_error(self, error: BaseException) -> None:
        """Write the sentence of an error; one of ours on the standard error, too."""
        sentence = _one_sentence(error)
        if isinstance(error, FleetError):
            with contextlib.suppress(OSError, ValueError):  # a closed stderr must not hide the exit status
                print(f"{self.identity}: {sentence}", file=sys.stderr, flush=True)
        self.leave_failure(sentence)

    def leave_failure(self, sentence: str) -> None:
        """Write what has gone wrong."""
        if self._is_one_of_several():
            return  # and maybe the only one that reports: the launcher says who failed first
        termination.write_failure(f"{self.identity}{self._stage()}: {sentence}", os.environ)

    def leave_stop(self) -> None:
        """Write that somebody has stopped this replica."""
        if TORCHRUN not in os.environ:  # which stops the others where one has failed, and says who has
            termination.write_failure(f"{self.identity} was stopped by SIGTERM", os.environ)

    def _stage(self) -> str:
        """Return how far this replica has come, as the plan reads it; nothing for a plain script."""
        if not self.started:
            return ""
        if not self.joined:
            return " (not joined)"
        return " (joined)" if _current_step() != self.step_at_join else " (joined, no step made)"

    def _is_one_of_several(self) -> bool:
        """Whether this is a plain script's process, and a launcher has started others beside it."""
        return not self.started and os.environ.get("LOCAL_WORLD_SIZE", "1") != "1"


def _current_step() -> int:
    return int(progress.snapshot()["step"] or 0)


def _one_sentence(error: BaseException) -> str:
    """Return the message of an error on one line; one that is not ours also says its type and place."""
    words = " ".join(str(error).split())
    if isinstance(error, FleetError):
        return words or type(error).__name__
    sentence = f"{type(error).__name__}: {words}" if words else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    return f"{sentence} (at {frames[-1].filename}:{frames[-1].lineno})" if frames else sentence
