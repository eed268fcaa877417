"""Runs complete lives of jobs, some of them concurrently, and kills operators at selected API calls.

Each life has its own namespace, to which its operators are limited, its own Lease, and its own proxy, which
counts API calls. Lives share only the control plane, whose responses about one namespace do not depend on
other namespaces; an operator therefore behaves as if it were alone. One `Witness` watches the objects of all
lives, independently of the operators and their proxies.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, NamedTuple, Self

from fleet_operator.api.names import API_VERSION, LABEL_JOB_NAME
from tests.support.digits_job import SERVERS, TRAINERS
from tests.support.fault_proxy import Reset, proxy_for
from tests.support.forked_operator import ForkedOperator
from tests.support.jobs import manifest
from tests.support.kube import Namespace, attempt, is_running
from tests.support.pods import env_of, main_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.fault_proxy import Call, Fault, FaultProxy
    from tests.support.kube import ApiServer, Manifest

WAIT_SECONDS = 100.0
LEASE_SECONDS = 3600
"""Longer than any life, so that the calls do not include renewals that depend on time."""


class Kill(NamedTuple):
    """The moment at which an operator is killed: before or after its n-th API call of a kind.

    Calls are counted by kind, because concurrent calls arrive in any order. Reads are counted per operator,
    because a successor reads everything again. Successful writes are counted over the whole life, because a
    successor makes only the remaining writes.
    """

    verb: str
    resource: str
    number: int  # from 1
    carried_out: bool

    def __str__(self) -> str:
        """Return the id of the test case."""
        moment = "after" if self.carried_out else "before"
        return f"{moment}-{self.verb}-{self.resource.replace('/', '-')}-{self.number}"


@dataclass
class Story:
    """The history of one namespace, as the witness recorded it."""

    pods: dict[str, Manifest] = field(default_factory=dict)  # the existing pods, by name
    services: dict[str, Manifest] = field(default_factory=dict)  # the existing Services, by name
    made: dict[str, str] = field(default_factory=dict)
    """All objects that have existed, by uid: the name and, for a pod, the attempt."""
    keys: set[str] = field(default_factory=set)  # the job keys that any pod has had; "" for a pod without one
    statuses: list[Manifest] = field(default_factory=list)  # all statuses of the job, in order
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def status(self) -> Manifest:
        """The job's newest status."""
        return self.statuses[-1] if self.statuses else {}

    @property
    def states(self) -> list[str]:
        """The states that the job has passed through, in order."""
        states = (status["state"] for status in self.statuses if "state" in status)
        return [state for state, _ in itertools.groupby(states)]

    def runs(self, state: str, attempts: Manifest) -> bool:
        """Return whether the job has a state and exactly the given running pods, in the given attempts."""
        found = {name: attempt(pod) for name, pod in self.pods.items() if is_running(pod)}
        return self.status.get("state") == state and found == attempts and set(self.pods) == set(attempts)

    def note(self, kind: str, item: Manifest) -> None:
        """Record a watch event."""
        name, uid = item["metadata"]["name"], item["metadata"]["uid"]
        match item["kind"]:
            case "Pod":
                self.made[uid] = f"{name} {attempt(item)}"
                self.keys.add(env_of(main_of(item)).get("FLEET_JOB_KEY") or "")
                _keep(self.pods, name, item, kind)
            case "Service":
                self.made[uid] = name
                _keep(self.services, name, item, kind)
            case "FleetJob" if kind != "DELETED":
                self.statuses.append(item.get("status") or {})
        self.news.set()

    async def until(self, what: str, probe: Callable[[Story], bool]) -> None:
        """Wait until `probe` is true for the recorded history."""
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                while not probe(self):
                    self.news.clear()
                    await self.news.wait()
        except TimeoutError:
            pods = {name: pod["status"].get("phase") for name, pod in self.pods.items()}
            shown = json.dumps({"pods": pods, "status": self.status}, indent=1)
            raise AssertionError(f"waited {WAIT_SECONDS:g} s in vain for {what}; there is: {shown}") from None


class Witness:
    """A watcher of all namespaces that records the history of every job."""

    def __init__(self, client: ApiServer) -> None:
        self.stories: defaultdict[str, Story] = defaultdict(Story)
        self.client = client
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        """Start watching."""
        of_jobs = {"labelSelector": LABEL_JOB_NAME}
        for path, selector in (
            ("/api/v1/pods", of_jobs),
            ("/api/v1/services", of_jobs),
            (f"/apis/{API_VERSION}/fleetjobs", {}),
        ):
            version = (await self.client.get(path, {**selector, "limit": "1"}))["metadata"]["resourceVersion"]
            self._tasks.append(asyncio.create_task(self._watch(path, version, selector)))
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop watching; fail if a watch ended early, because the history would be incomplete."""
        ended = [task for task in self._tasks if task.done()]
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        assert not ended, f"a watch of the witness has ended: {ended}"

    async def _watch(self, path: str, version: str, selector: dict[str, str]) -> None:
        async with contextlib.aclosing(self.client.changes(path, version, selector)) as changes:
            async for kind, item in changes:
                self.stories[item["metadata"]["namespace"]].note(kind, item)


@dataclass
class Life:
    """A test case: the life of a job with two servers and two trainers, one of which fails once.

    Attributes
    ----------
    kills : tuple of Kill
        When operators are killed; another operator takes over immediately.
    calls : list of Call
        All calls of all operators in this life.
    killed : dict
        The call of each kill, except kills that did not happen because the life had fewer calls.
    operators : list of list of Call
        The calls of each operator while it was running, in order of arrival.
    told : Counter
        The number of events on the job, by reason.
    log : str
        The log of the operators.
    """

    kills: tuple[Kill, ...]
    story: Story
    calls: list[Call] = field(default_factory=list)
    killed: dict[Kill, Call] = field(default_factory=dict)
    operators: list[list[Call]] = field(default_factory=lambda: [[]])
    told: Counter[str] = field(default_factory=Counter)
    log: str = ""


class Lifetime:
    """Runs the life of one job, and kills its operators as the test case requires.

    Parameters
    ----------
    life : Life
        The test case, which also receives the results.
    namespace : Namespace
        The namespace of the life.
    kubeconfig : Path
        The operator's kubeconfig.
    folder : Path
        The folder of the operator's files.
    """

    def __init__(self, life: Life, namespace: Namespace, *, kubeconfig: Path, folder: Path) -> None:
        self._life = life
        self._namespace = namespace
        self._proxy: FaultProxy = proxy_for(kubeconfig)
        self._kubeconfig = kubeconfig
        self._folder = folder
        self._written: Counter[tuple[str, str]] = Counter()  # the writes in progress or successful
        self._watched, self._killed = asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        """Run the whole life of the job."""
        self._proxy.on_call, self._proxy.on_answer = self._on_call, self._on_answer
        async with self._proxy.running() as proxy:
            self._operator = ForkedOperator(
                self._folder,
                proxy.kubeconfig(self._folder / "kubeconfig", like=self._kubeconfig),
                FLEET_OPERATOR_NAMESPACES=self._namespace.name,
                FLEET_OPERATOR_LEASE=self._namespace.name,
                FLEET_OPERATOR_LEASE_SECONDS=str(LEASE_SECONDS),
                FLEET_OPERATOR_HTTP_PORT="0",
            )
            self._operator.start_at_once()
            replacing = asyncio.create_task(self._replace())
            try:
                await self._live()
            except AssertionError as error:
                calls = [f"{call.verb} {call.path} {call.status}" for call in proxy.calls]
                shown = "\n".join([*calls, self._operator.tail()])
                raise AssertionError(f"{', '.join(map(str, self._life.kills))}: {error}\n{shown}") from None
            finally:
                replacing.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await replacing
                await asyncio.to_thread(self._operator.kill)
                self._life.calls = proxy.calls
                self._life.log = self._operator.log.read_text()

    async def _live(self) -> None:
        story, namespace = self._life.story, self._namespace
        await self._until_watched()
        await namespace.create_job(manifest(runPolicy={"cleanPodPolicy": "All"}))
        attempts = dict.fromkeys((*SERVERS, *TRAINERS), "0.0")
        await story.until("the job to run", lambda seen: seen.runs("Running", attempts))
        await namespace.end("digits-trainer-1", exit_code=1)
        again = {**attempts, "digits-trainer-1": "0.1"}
        await story.until("the failed trainer to run again", lambda seen: seen.runs("Running", again))
        await namespace.end(*TRAINERS)
        await story.until("success", lambda seen: seen.status.get("state") == "Succeeded")
        await namespace.end(*SERVERS)
        await story.until("the end", _has_ended)
        for event in await namespace.all("events", fieldSelector="involvedObject.kind=FleetJob"):
            self._life.told[event["reason"]] += event["count"]

    async def _until_watched(self) -> None:
        """Wait until an operator has started up, which is when it begins to watch jobs."""
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await self._watched.wait()
        except TimeoutError:
            raise AssertionError(f"no watch on jobs within {WAIT_SECONDS:g} s") from None

    async def _replace(self) -> None:
        """Start a new operator whenever one has been killed."""
        while True:
            await self._killed.wait()
            self._killed.clear()
            await asyncio.to_thread(self._operator.kill)
            self._life.operators.append([])
            self._proxy.dead = False
            self._operator.start_at_once()

    def _on_call(self, call: Call) -> Fault | None:
        if self._proxy.dead:
            return None  # the proxy resets it
        kind, calls = (call.verb, call.resource), self._life.operators[-1]
        if kind == ("WATCH", "fleetjobs"):
            self._watched.set()
        calls.append(call)
        if call.writes:
            self._written[kind] += 1
            number = self._written[kind]
        else:
            number = sum((each.verb, each.resource) == kind for each in calls)
        if (kill := self._due(Kill(*kind, number, carried_out=False))) is not None:
            self._written[kind] -= call.writes
            self._life.killed[kill] = call
            self._die()
            return Reset()
        if (kill := self._due(Kill(*kind, number, carried_out=True))) is not None:
            self._life.killed[kill] = call
        return None

    def _due(self, kill: Kill) -> Kill | None:
        return kill if kill in self._life.kills and kill not in self._life.killed else None

    def _on_answer(self, call: Call) -> None:
        refused = call.writes and call.status >= HTTPStatus.BAD_REQUEST
        if refused:
            self._written[call.verb, call.resource] -= 1
        for kill in [kill for kill, at in self._life.killed.items() if at is call and kill.carried_out]:
            if refused:
                del self._life.killed[kill]
            elif not self._proxy.dead:  # otherwise another call has already killed the operator
                self._die()

    def _die(self) -> None:
        self._proxy.dead = True
        self._operator.kill_at_once()
        self._killed.set()


def _has_ended(seen: Story) -> bool:
    """Return whether all pods and services are gone and the status shows no active replicas."""
    active = sum(role["active"] for role in seen.status.get("roles", ()))
    return not (seen.pods or seen.services or active)


def _keep(items: dict[str, Manifest], name: str, item: Manifest, kind: str) -> None:
    if kind == "DELETED":
        items.pop(name, None)
    else:
        items[name] = item
