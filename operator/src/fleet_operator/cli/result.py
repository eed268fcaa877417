"""Pure: how a run ended, for people and for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fleet_operator.api import JobState
from fleet_operator.cli.lines import duration

if TYPE_CHECKING:
    from fleet_operator.cli.run import RunResult


def to_json(result: RunResult) -> dict[str, Any]:
    """Return the one object that ``--json`` prints."""
    state = result.view.status.state or JobState.PENDING
    return {
        "state": state.value,
        "wall_seconds": round(result.wall_seconds, 3),
        "replicas": [
            {
                "role": replica.role.value,
                "index": replica.index,
                "exit_codes": list(replica.exit_codes),
                "restarts": replica.restarts,
            }
            for replica in result.view.replicas.values()
        ],
        "metrics": dict(sorted(result.view.metrics.items())),
    }


def to_text(result: RunResult) -> str:
    """Return the summary that a run ends with."""
    view = result.view
    state = (view.status.state or JobState.PENDING).value
    stopped = ", stopped before its end" if result.stopped_by and result.exit_status else ""
    lines = [f"{view.job.name}: {state}{stopped}, {duration(result.wall_seconds)}"]
    if result.problem is not None:
        lines.append(f"  {result.problem}")
    if view.status.state is JobState.FAILED and (failure := view.status.last_failure) is not None:
        lines.append(f"  {failure.message}")
    width = max(len(replica.name) for replica in view.replicas.values())
    for replica in view.replicas.values():
        codes = ", ".join(map(str, replica.exit_codes)) or "none: it was not started"
        noun = "exit code" if len(replica.exit_codes) <= 1 else "exit codes"
        times = {0: "", 1: "; restarted once"}.get(replica.restarts, f"; restarted {replica.restarts} times")
        lines.append(f"  {replica.name:{width}}  {noun} {codes}{times}")
    lines += [f"  {name} {value:.6g}" for name, value in sorted(view.metrics.items())]
    return "\n".join(lines)
