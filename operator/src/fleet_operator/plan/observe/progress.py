"""The progress of a job as stored in its status, taken from the reports of trainer 0.

A running replica reports its progress as JSON at ``/progress``. A replica that has succeeded reports it in
its termination message, so that the final progress arrives with the end.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fleet_operator.api import JobProgress, Role, TableStatistics
from fleet_operator.plan.formats import stamp
from fleet_operator.plan.observe.attempts import RANK_ZERO
from fleet_operator.plan.observe.pods import has_succeeded

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import datetime

    from fleet_operator.api import JobState
    from fleet_operator.plan.model import ObservedPod
    from fleet_operator.plan.observe.context import Context

__all__ = ["Progress", "job_progress", "parse_progress", "progress_of", "trainers_with_non_finite"]

DIGITS = 6
"""The significant digits of a displayed loss; smaller differences do not count as changes."""

STEPS_PAST = "steps_past_the_others"
"""The runtime's counter of the steps that a late trainer made after the other trainers had completed."""

NON_FINITE = "non_finite_parameters"
"""The runtime's counter of the parameters that contain NaN or infinity at the end of the training."""

MAX_COUNT = 2**53
"""The limit of counts in a report: JSON readers that use doubles cannot distinguish larger integers."""

MAX_ETA_SECONDS = 10 * 365 * 24 * 3600
"""The maximum estimate of the remaining time, in seconds."""

MAX_TABLES = 10
"""The maximum number of tables in the status; a replica lists the largest tables first."""

MAX_WORDS = 100
"""The maximum length of a table's name, and of the text about what a replica waits for."""


@dataclass(frozen=True, slots=True)
class Progress:
    """A replica's progress report; missing values are None or empty."""

    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    samples: int | None = None
    samples_per_second: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    history: Mapping[int, float] = field(default_factory=dict)  # loss by step
    steps_past: int = 0  # steps that a late trainer made after the others had completed
    non_finite: int = 0  # parameters that hold NaN or infinity at the end
    tables: tuple[TableStatistics, ...] = ()  # the largest first
    memory_bytes: int | None = None  # of the replica's process
    parameter_bytes: int | None = None  # of the dense parameters that a server holds
    waits_for: str | None = None  # what the replica is waiting for before it trains or serves

    def after(self, earlier: Progress | None) -> Progress:
        """Return this report with the curve points of an earlier report of the same pod added."""
        if earlier is None:
            return self
        history = dict(sorted((dict(earlier.history) | dict(self.history)).items()))
        rate = earlier.samples_per_second if self.samples_per_second is None else self.samples_per_second
        return replace(self, samples_per_second=rate, history=history)


def parse_progress(text: str) -> Progress | None:
    """Parse a progress report, dropping unknown and invalid values; return None for any other text."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):  # the pod runs user code, which may send anything
        return None
    if not isinstance(document, dict) or "step" not in document:
        return None
    return Progress(
        step=_whole(document.get("step")),
        total_steps=_whole(document.get("totalSteps")),
        loss=_number(document.get("loss")),
        samples=_whole(document.get("samples")),
        samples_per_second=_number(document.get("samplesPerSecond")),
        metrics=_metrics(document.get("metrics")),
        history=_history(document.get("history")),
        steps_past=_counted(document.get("counters"), STEPS_PAST),
        non_finite=_counted(document.get("counters"), NON_FINITE),
        tables=_tables(document.get("tables")),
        memory_bytes=_whole(document.get("memoryBytes")),
        parameter_bytes=_whole(document.get("parameterBytes")),
        waits_for=_words(document.get("waitsFor")),
    )


def job_progress(
    progress: Progress, *, steps_per_second: float | None = None, moment: datetime | None = None
) -> JobProgress | None:
    """Convert a replica's progress to the form stored in the status; return None before the first step.

    Parameters
    ----------
    progress : Progress
        The replica's report.
    steps_per_second : float, optional
        Its recent speed, for the estimate of the remaining time.
    moment : datetime, optional
        The time of the report.
    """
    step, total = progress.step, progress.total_steps
    if step is None:
        return None
    percentage = min(100, 100 * step // total) if total else None
    eta = None
    if total is not None and step < total and steps_per_second:
        eta = math.ceil(min(MAX_ETA_SECONDS, (total - step) / steps_per_second))
    return JobProgress(
        percentage=percentage,
        step=step,
        total_steps=total,
        loss=None if progress.loss is None else float(f"{progress.loss:.{DIGITS}g}"),
        eta_seconds=eta,
        time=None if moment is None else stamp(moment),
        tables=progress.tables or None,
    )


def progress_of(context: Context, state: JobState) -> JobProgress | None:
    """Return the job's progress, from trainer 0's termination message or else its latest report.

    A restarted job starts without progress. A finished job has no estimate.
    """
    pod = context.replicas.present.get(RANK_ZERO, context.replicas.departed.get(RANK_ZERO))
    before = context.job.status
    latest = before.progress if context.ledger.job_restarts == before.job_restarts else None
    if pod is not None and has_succeeded(pod):
        last = parse_progress(pod.message or "")
        final = None if last is None else job_progress(last, moment=pod.finished_at)
        latest = final or latest
    elif context.observed.progress is not None and pod is not None:
        latest = context.observed.progress
    if latest is None or not state.final:
        return latest
    return latest.model_copy(update={"eta_seconds": None})


def _whole(value: Any) -> int | None:
    """Return a value if it is a valid count, else None, because an invalid one would fail status writes."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return value if whole and 0 <= value < MAX_COUNT else None


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # integers in JSON may exceed a float
        return None
    return number if math.isfinite(number) else None


def _metrics(values: Any) -> dict[str, float]:
    if not isinstance(values, dict):
        return {}
    numbers = {_printable(name): _number(value) for name, value in values.items()}
    return {name: number for name, number in numbers.items() if number is not None}


def _counted(counters: Any, name: str) -> int:
    return _whole(counters.get(name)) or 0 if isinstance(counters, dict) else 0


def _words(text: Any) -> str | None:
    """Return a text shortened and with unprintable characters replaced, or None for any other value."""
    if not isinstance(text, str):
        return None
    return _printable(text[:MAX_WORDS])


def _printable(text: str) -> str:
    # A lone surrogate, which JSON can contain but UTF-8 cannot, is not printable either.
    return "".join(each if each.isprintable() else "?" for each in text)


def _tables(tables: Any) -> tuple[TableStatistics, ...]:
    found = []
    for table in tables[:MAX_TABLES] if isinstance(tables, list) else ():
        fields = table if isinstance(table, dict) else {}
        name, rows, size = fields.get("name"), _whole(fields.get("rows")), _whole(fields.get("bytes"))
        if isinstance(name, str) and rows is not None and size is not None:
            shown = _words(name) or ""
            skew = _number(fields.get("shardSkew"))
            found.append(
                TableStatistics(
                    name=shown,
                    rows=rows,
                    bytes=size,
                    rows_on_disk=_whole(fields.get("rowsOnDisk")),
                    hit_percentage=_whole(fields.get("hitPercentage")),
                    shard_skew=None if skew is None else float(f"{skew:.{DIGITS}g}"),
                )
            )
    return tuple(found)


def _history(points: Any) -> dict[int, float]:
    history: dict[int, float] = {}
    for point in points if isinstance(points, list) else ():
        if isinstance(point, list) and len(point) == 2:
            step, loss = _whole(point[0]), _number(point[1])
            if step is not None and loss is not None:
                history[step] = loss
    return history


def trainers_with_non_finite(pods: Iterable[ObservedPod]) -> list[int]:
    """Return the indexes of trainers that reported NaN or infinity in their final weights.

    Parameters
    ----------
    pods : iterable of ObservedPod
        The latest pod of each replica. Only messages of pods that succeeded count.
    """
    reports = {
        pod.index: parse_progress(pod.message or "")
        for pod in pods
        if pod.role is Role.TRAINER and has_succeeded(pod)
    }
    return sorted(
        index for index, progress in reports.items() if progress is not None and progress.non_finite
    )
