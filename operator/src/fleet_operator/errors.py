"""The base class of the operator's errors, and the problems of a manifest.

::

    OperatorError
    ├── InvalidJob                  a manifest is not a valid FleetJob: the user's mistake
    ├── ManifestError               manifests: a file cannot be read as one FleetJob: the user's mistake
    ├── ClusterRefusal              client: the API server refused or did not answer, and what to do about it
    │   └── JobNotFoundError        there is no job of this name
    ├── JobFailedError              client: a job that was waited for has failed
    ├── NotInTimeError              client: what was waited for has not happened in the given time
    ├── SettingsError               an environment variable of the operator has an invalid value
    ├── ConnectionSettingsError     kubernetes: the configuration of the API server is unusable
    ├── NotOpenedError              start-up: a port or a name in a certificate is unusable
    ├── NotSyncedError              kubernetes: the initial lists did not arrive in time
    ├── AddressError                local: this machine has no addresses for a local run
    ├── SupervisorLostError         local: the process that owns a local run has ended
    └── ClusterError                cluster: a request failed; a retry follows
        ├── ConflictError           the state on which a plan is based has changed
        ├── NotLeadingError         engine: another operator may be active by now
        └── ApiError                kubernetes: the API server refused, or did not answer
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["InvalidJob", "OperatorError", "Problem"]


MOST_SHOWN = 50
"""The maximum number of problems that the message about a manifest shows."""


class OperatorError(Exception):
    """The base class of all errors of this package."""

    exit_status = 1
    """The exit status of a command that ends with this error."""


class Problem(NamedTuple):
    """A problem in a manifest."""

    path: str  # the field, as kubectl writes it: spec.template.spec.containers[0].image
    found: str  # the current value, or "nothing"
    expected: str  # a valid value, and if helpful what to do
    file: str | None = None  # the manifest's file, if there is one
    line: int | None = None  # counted from 1

    def __str__(self) -> str:
        """Return the problem in a sentence, prefixed with ``file:line:`` if known."""
        place = "" if self.file is None else f"{self.file}:{self.line}: "
        return f"{place}{self.path}: found {self.found}, expected {self.expected}"


class InvalidJob(OperatorError):  # noqa: N818  the name describes the problem, as the message does
    """The manifest is not a valid FleetJob; `problems` lists everything that is wrong."""

    exit_status = 2

    def __init__(self, name: str, problems: Iterable[Problem]) -> None:
        self.name = name
        self.problems = tuple(problems)
        lines = [f"\n  {problem}" for problem in self.problems[:MOST_SHOWN]]
        if len(self.problems) > MOST_SHOWN:
            lines.append(f"\n  and {len(self.problems) - MOST_SHOWN} more")
        super().__init__(f"FleetJob {name} is not valid:{''.join(lines)}")
