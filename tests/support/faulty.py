"""An operator behind a fault-injecting proxy, and checks of its required behaviour.

A job's whole life is: a Service, four pods, Running, Succeeded, and deletion of all pods by ``cleanPodPolicy:
All``.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from tests.support.digits_job import SERVERS, TRAINERS
from tests.support.jobs import manifest
from tests.support.kube import WAIT_SECONDS

if TYPE_CHECKING:
    from tests.support.fault_proxy import FaultProxy
    from tests.support.forked_operator import ForkedOperator
    from tests.support.kube import Manifest, Namespace

PODS = sorted((*SERVERS, *TRAINERS))


class Faulty:
    """An operator that runs behind a fault-injecting proxy, and the namespace of its job."""

    def __init__(self, operator: ForkedOperator, proxy: FaultProxy, namespace: Namespace) -> None:
        self.operator = operator
        self.proxy = proxy
        self.namespace = namespace

    async def start(self) -> None:
        self.proxy.dead = False
        await asyncio.to_thread(self.operator.start)

    async def kill(self) -> None:
        await asyncio.to_thread(self.operator.kill)

    async def start_again(self, **environment: str) -> None:
        """Kill the operator and restart it with different settings."""
        await self.kill()
        self.operator.tell(**environment)
        await self.start()

    async def run(self, **spec: Any) -> dict[str, Manifest]:
        """Create the job and wait until it runs; return its pods."""
        await self.namespace.create_job(manifest(**spec))
        return await self.until_running()

    async def until_running(self) -> dict[str, Manifest]:
        await self.namespace.until_state("digits", "Running")
        return await self.namespace.until_running("digits", *PODS)

    async def finish(self) -> None:
        """End all pods successfully; wait until the job has succeeded and its pods are deleted."""
        await self.finish_kept()
        await self.namespace.end(*SERVERS)
        await self.namespace.until_pods("digits", "no pod", lambda pods: not pods)

    async def until_known(self, state: str, *, known: bool = True) -> None:
        """Wait until the operator's metrics show a job in the given state or, if not `known`, no such job."""
        shown = f'state="{state}"'
        async with asyncio.timeout(WAIT_SECONDS):
            while True:
                metrics = await asyncio.to_thread(self.operator.get, "/metrics")
                if metrics is not None and (shown in metrics) is known:
                    return
                await asyncio.sleep(0.05)

    async def finish_kept(self) -> None:
        """End the trainers successfully; wait until the job has succeeded."""
        await self.namespace.end(*TRAINERS)
        await self.namespace.until_state("digits", "Succeeded")

    async def until_answered(self, verb: str, resource: str, times: int) -> None:
        """Wait until the API server has answered the given number of matching requests."""
        async with asyncio.timeout(WAIT_SECONDS):
            while self.proxy.answered(verb, resource) < times:  # noqa: ASYNC110 there is only the asking
                await asyncio.sleep(0.05)

    async def was_done_once(self, *failed: str) -> None:
        """Check that the job succeeded, and that only failed pods were created a second time."""
        assert sorted(self.proxy.created("pods")) == sorted([*PODS, *failed])
        assert self.proxy.created("services") == ["digits"]
        status = (await self.namespace.get("fleetjobs", "digits"))["status"]
        counted = (status["restarts"], status.get("failures", 0))
        assert (status["state"], counted) == ("Succeeded", (len(failed), len(failed)))

    async def was_told(self, **counts: int) -> None:
        """Check that the events on the job have exactly the given reasons and counts."""
        found = await self.namespace.all("events", fieldSelector="involvedObject.kind=FleetJob")
        assert sorted((each["reason"], each["count"]) for each in found) == sorted(counts.items())
