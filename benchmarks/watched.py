"""Watches pods and jobs, and records when each reached a phase and when its status changed."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self

from fleet_operator.kubernetes.client import ApiClient

__all__ = ["GONE", "Behind", "Watched", "behind"]

GONE = "Gone"
"""The phase of a deleted object."""

SILENCE_SECONDS = 120.0

Said = Sequence[tuple[float, int]]
"""The times at which a job's status changed, with the number of running or completed replicas reported."""


class Watched:
    """The objects of a watched collection, with the times at which they reached phases.

    Parameters
    ----------
    client : ApiClient
    path : str
        The collection, in a new namespace.
    """

    def __init__(self, client: ApiClient, path: str) -> None:
        self._client = client
        self._path = path
        self._changed = asyncio.Event()
        self._ended: Exception | None = None
        self._numbers: Counter[str] = Counter()
        self.first: dict[str, dict[str, float]] = {}  # the first time in each phase, by name and phase
        self.said: dict[str, list[tuple[float, int]]] = {}  # reports of statuses, by job name

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[Self]:
        """Watch the collection within the block."""
        task = asyncio.create_task(self._watch())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def until(self, phase: str, number: int, *, seconds: float) -> list[float]:
        """Wait until enough objects have reached a phase; return the sorted times at which they did.

        Raises
        ------
        SystemExit
            Too few objects reached the phase in time, or the watch has ended.
        """
        await self._until(
            lambda: self._numbers[phase] >= number,
            lambda: f"{self._numbers[phase]} of {number} were {phase}",
            seconds,
        )
        return sorted(seen[phase] for seen in self.first.values() if phase in seen)

    def forget(self) -> None:
        """Discard all recorded observations, so that later waits need new ones."""
        self.first.clear()
        self._numbers.clear()

    async def until_one(self, name: str, *phases: str, seconds: float) -> None:
        """Wait until an object has reached any of the given phases; raise the same errors as `until`."""
        await self._until(
            lambda: any(phase in self.first.get(name, {}) for phase in phases),
            lambda: f"{name} was not {' or '.join(phases)}",
            seconds,
        )

    async def _until(self, is_so: Callable[[], bool], found: Callable[[], str], seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                while not is_so():
                    if self._ended is not None:
                        raise SystemExit(f"the watch of {self._path} has ended: {self._ended!r}")
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise SystemExit(f"{self._path}: {found()} after {seconds:g} s; is the machine busy?") from None

    async def _watch(self) -> None:
        """Watch until cancelled; when the server ends a watch, continue from the last version."""
        version = "0"
        try:
            while True:
                params = {"resourceVersion": version, "allowWatchBookmarks": "true"}
                opened = self._client.stream(self._path, params, silence_seconds=SILENCE_SECONDS)
                async with opened as lines:
                    async for line in lines:
                        version = self._take(json.loads(line))
        except Exception as error:  # noqa: BLE001 waiting calls raise the error
            self._ended = error
            self._changed.set()

    def _take(self, event: Mapping[str, Any]) -> str:
        """Record a watch event and return the version at which a new watch would resume."""
        kind, item = event["type"], event["object"]
        if kind == "ERROR":
            raise RuntimeError(item.get("message", "an error without a message"))
        if kind != "BOOKMARK":
            self._note(item["metadata"]["name"], item.get("status", {}), gone=kind == "DELETED")
        version: str = item["metadata"]["resourceVersion"]
        return version

    def _note(self, name: str, status: Mapping[str, Any], *, gone: bool) -> None:
        now = asyncio.get_running_loop().time()
        seen = self.first.setdefault(name, {})
        for phase in ("Seen", status.get("phase") or status.get("state"), GONE if gone else None):
            if phase is not None and phase not in seen:
                seen[phase] = now
                self._numbers[phase] += 1
        if "trainers" in status:
            self.said.setdefault(name, []).append((now, _up(status)))
        self._changed.set()


def _up(status: Mapping[str, Any]) -> int:
    """Return the number of running or completed replicas in a job's status."""
    return sum(int(status.get(role, "0/0").partition("/")[0]) for role in ("pservers", "trainers"))


@dataclass(frozen=True)
class Behind:
    """How far statuses lag behind the pods.

    Attributes
    ----------
    seconds : tuple of float
        For each pod, the delay until the status reported that it runs; infinite if it never did.
    most_pods : int
        The maximum number of a job's running pods that its status did not report at a moment.
    """

    seconds: tuple[float, ...]
    most_pods: int


def behind(ran: Mapping[str, Iterable[float]], said: Mapping[str, Said]) -> Behind:
    """Compare statuses with the pods that they describe, and return their lag.

    Parameters
    ----------
    ran : mapping
        The time at which each pod first ran, by job.
    said : mapping
        The reports of each job's status, in order.
    """
    seconds, most = [], 0
    for job, moments in ran.items():
        told = said.get(job, ())
        for number, moment in enumerate(sorted(moments), start=1):
            when = next((at for at, up in told if up >= number), float("inf"))
            seconds.append(max(0.0, when - moment))
            known = max((up for at, up in told if at <= moment), default=0)
            most = max(most, number - known)
    return Behind(tuple(seconds), most)
