"""How far a replica has come, as it tells itself: the JSON of its ``/progress`` or its last words.

The replicas are asked once a second each, in a task of its own, so that a replica that answers slowly or not
at all delays nothing but its own line in the table.
"""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

TIMEOUT_SECONDS = 1.0
MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Progress:
    """What one replica reported; None and empty where it did not."""

    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    samples: int | None = None
    samples_per_second: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    history: Mapping[int, float] = field(default_factory=dict)  # loss by step

    def after(self, earlier: Progress | None) -> Progress:
        """Return this with the points of the curve that only an earlier snapshot of the same life has."""
        if earlier is None:
            return self
        history = dict(sorted((dict(earlier.history) | dict(self.history)).items()))
        rate = earlier.samples_per_second if self.samples_per_second is None else self.samples_per_second
        return Progress(self.step, self.total_steps, self.loss, self.samples, rate, self.metrics, history)


def parse_progress(text: str) -> Progress | None:
    """Read a replica's progress; None if `text` is not one, unknown and odd values are left out."""
    try:
        document = json.loads(text)
    except ValueError:
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
    )


async def fetch_progress(host: str, port: int) -> Progress | None:
    """Ask a replica; None if it does not answer in time or has nothing to tell."""
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            reader, writer = await asyncio.open_connection(host, port, limit=MAX_BYTES)
            try:
                writer.write(f"GET /progress HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
                answer = await _read(reader)
            finally:
                writer.close()
    except OSError:  # TimeoutError is one
        return None
    head, _, body = answer.partition(b"\r\n\r\n")
    return parse_progress(body.decode(errors="replace")) if b" 200 " in head.split(b"\r\n")[0] else None


async def _read(reader: asyncio.StreamReader) -> bytes:
    data = b""
    while len(data) < MAX_BYTES and (more := await reader.read(MAX_BYTES)):
        data += more
    return data


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _metrics(values: Any) -> dict[str, float]:
    if not isinstance(values, dict):
        return {}
    numbers = {str(name): _number(value) for name, value in values.items()}
    return {name: number for name, number in numbers.items() if number is not None}


def _history(points: Any) -> dict[int, float]:
    history: dict[int, float] = {}
    for point in points if isinstance(points, list) else ():
        if isinstance(point, list) and len(point) == 2:
            step, loss = _whole(point[0]), _number(point[1])
            if step is not None and loss is not None:
                history[step] = loss
    return history
