"""Requests that are cancelled at any moment, for example while they connect."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

from fleet_operator.kubernetes.client import ApiClient
from fleet_operator.kubernetes.login import from_kubeconfig

if TYPE_CHECKING:
    from tests.support.controlplane import ControlPlane

TIMES = 250
CLIENTS = 8


async def test_requests_that_are_cut_off_break_no_other(control_plane: ControlPlane):
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    moments = random.Random(1)  # noqa: S311 no secret
    path, ended = "/api/v1/namespaces/default", 0

    async def cut_off() -> None:
        nonlocal ended
        while ended < TIMES:
            ended += 1
            async with ApiClient(from_kubeconfig(control_plane.admin.kubeconfig)) as client:
                asking = asyncio.create_task(client.get(path))
                await asyncio.wait([asking], timeout=moments.uniform(0, 0.06))
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(cut_off())
    async with ApiClient(from_kubeconfig(control_plane.admin.kubeconfig)) as client:
        assert (await client.get(path))["metadata"]["name"] == "default"
    assert errors == []
