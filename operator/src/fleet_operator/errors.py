"""What can go wrong, and how what is wrong with a manifest is told. Each class stands where it is raised.

::

    OperatorError
    ├── InvalidJob                  a manifest is not a FleetJob that can run: the user's mistake
    ├── ManifestError               cli: a file cannot be read as one FleetJob: the user's mistake
    ├── ClusterRefusal              cli: the API server refused or did not answer, and what to do about it
    ├── SettingsError               an environment variable of the operator has a value that cannot be used
    ├── ConnectionSettingsError     kubernetes: what says where the API server is cannot be used
    ├── NotOpenedError              start-up: a port or a name in a certificate cannot be used
    ├── NotSyncedError              kubernetes: the API server did not list in time what there is
    ├── AddressError                local: this machine has no addresses for a local run
    ├── SupervisorLostError         local: the process that owns a local run has ended
    └── ClusterError                cluster: what was asked for was not done; another try follows
        ├── ConflictError           what a plan was decided on has changed since
        ├── NotLeadingError         engine: another operator may be at work by now
        └── ApiError                kubernetes: the API server refused, or did not answer
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["InvalidJob", "OperatorError", "Problem"]


MOST_SHOWN = 50
"""How many problems of one manifest a message shows."""


class OperatorError(Exception):
    """The base of this package's own errors."""

    exit_status = 1
    """That of a command which ends by it."""


class Problem(NamedTuple):
    """One thing wrong with a manifest."""

    path: str  # the field, as kubectl writes it: spec.template.spec.containers[0].image
    found: str  # what is there, or "nothing"
    expected: str  # what would have been right, and where it helps, what to do
    file: str | None = None  # where the manifest has it, if it comes from a file
    line: int | None = None  # counted from 1

    def __str__(self) -> str:
        """Return the problem in one sentence, led by its place as editors and compilers write it."""
        place = "" if self.file is None else f"{self.file}:{self.line}: "
        return f"{place}{self.path}: found {self.found}, expected {self.expected}"


class InvalidJob(OperatorError):  # noqa: N818  the name says what is wrong, as the message does
    """A manifest is not a valid FleetJob; `problems` holds all that is wrong with it."""

    exit_status = 2

    def __init__(self, name: str, problems: Iterable[Problem]) -> None:
        self.name = name
        self.problems = tuple(problems)
        lines = [f"\n  {problem}" for problem in self.problems[:MOST_SHOWN]]
        if len(self.problems) > MOST_SHOWN:
            lines.append(f"\n  and {len(self.problems) - MOST_SHOWN} more")
        super().__init__(f"FleetJob {name} is not valid:{''.join(lines)}")
