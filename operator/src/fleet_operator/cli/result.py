"""Pure functions that format a run's result for people and for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fleet_operator.api import JobState
from fleet_operator.cli.lines import duration
from fleet_operator.errors import InvalidJob, OperatorError
from fleet_operator.manifests.manifest import ManifestError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fleet_operator.cli.replica import ReplicaView
    from fleet_operator.cli.run import RunResult

INVALID = 2  # the exit status for invalid input
INVALID_MANIFEST = "InvalidManifest"


def to_json(result: RunResult) -> dict[str, Any]:
    """Return the object that ``-o json`` prints for a finished run."""
    return {
        "state": result.state,
        "reason": result.reason,
        "message": result.message,
        "wall_seconds": round(result.wall_seconds, 3),
        "replicas": [
            {
                "role": replica.role.value,
                "index": replica.index,
                "state": replica.state,
                "exit_codes": list(replica.exit_codes),
                "restarts": replica.restarts,
                "log": str(result.logs / f"{replica.name}.log") if replica.lives else None,
            }
            for replica in result.view.replicas.values()
        ],
        "metrics": dict(sorted(result.view.metrics.items())),
        "logs": str(result.logs),
    }


def refusal_to_json(error: OperatorError | OSError) -> dict[str, Any]:
    """Return the object that ``-o json`` prints for a job that could not run."""
    invalid = isinstance(error, OperatorError) and error.exit_status == INVALID
    state = "Invalid" if invalid else JobState.FAILED.value
    refused: dict[str, Any] = {"state": state, "reason": type(error).__name__, "message": str(error)}
    match error:
        case InvalidJob():
            problems = [problem._asdict() for problem in error.problems]
            return {**refused, "reason": INVALID_MANIFEST, "problems": problems}
        case ManifestError():
            place = {"file": error.file, "line": error.line, "column": error.column}
            return {**refused, "reason": INVALID_MANIFEST, "problems": [{"found": error.sentence, **place}]}
    return refused


def to_text(result: RunResult) -> str:
    """Return the summary of a finished run as text."""
    view = result.view
    lines = [f"{view.job.name}: {result.state}, {duration(result.wall_seconds)}"]
    if result.state != JobState.SUCCEEDED and result.message:
        lines.append(f"  {result.message}")
    width = max(len(replica.name) for replica in view.replicas.values())
    lines += [f"  {replica.name:{width}}  {_lives(replica)}" for replica in view.replicas.values()]
    lines += _overruns(view.replicas.values()) + _non_finite(view.replicas.values())
    lines += [f"  {name} {value:.6g}" for name, value in sorted(view.metrics.items())]
    lines.append(f"  logs in {result.logs}")
    return "\n".join(lines)


def _overruns(replicas: Iterable[ReplicaView]) -> list[str]:
    """Return a line for each late trainer that kept training after the others had completed."""
    return [
        f"  {replica.name} joined late, and made {past} steps after the others completed, with its own data "
        "only: a loop over fleet.epochs() resumes at the job's current step"
        for replica in replicas
        if replica.progress is not None and (past := replica.progress.steps_past)
    ]


def _non_finite(replicas: Iterable[ReplicaView]) -> list[str]:
    """Return a line for each replica whose weights contain NaN or infinity."""
    return [
        f"  {replica.name} ended with NaN or infinity in {lost} parameters; its log names them"
        for replica in replicas
        if replica.progress is not None and (lost := replica.progress.non_finite)
    ]


def _lives(replica: ReplicaView) -> str:
    """Return a phrase about how each attempt of a replica ended."""
    if not replica.exit_codes:
        return "ended with the run" if replica.lives else "was not started"
    noun = "exit code" if len(replica.exit_codes) == 1 else "exit codes"
    codes = ", ".join(map(str, replica.exit_codes))
    stopped = "stopped, " if replica.stopped else ""
    times = {0: "", 1: "; restarted once"}.get(replica.restarts, f"; restarted {replica.restarts} times")
    return f"{stopped}{noun} {codes}{times}"
