"""NetworkPolicies of running jobs, after a change of the operator's settings."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING

import pytest

from tests.support.faulty import PODS
from tests.support.kube import WAIT_SECONDS, uids
from tests.support.operator_process import METRICS_READER

if TYPE_CHECKING:
    from tests.support.fault_proxy import Call
    from tests.support.faulty import Faulty
    from tests.support.kube import Manifest

pytestmark = pytest.mark.usefixtures("alone")

POLICY = {"policy": {"type": "Isolated"}}


def readers(policy: Manifest) -> list[Manifest]:
    """Return the peers that may read metrics by a policy, without the operator's namespace."""
    _, reading = policy["spec"]["ingress"]
    found: list[Manifest] = reading["from"][1:]
    return found


async def test_an_operator_killed_amid_making_a_policy_anew_leaves_no_job_without_one(faulty: Faulty):
    await faulty.start_again(FLEET_OPERATOR_FEATURES="networkPolicies")
    before = await faulty.run(network=POLICY)
    assert readers(await faulty.namespace.get("networkpolicies", "digits")) == []
    killed = asyncio.Event()

    def kill_once_it_is_deleted(call: Call) -> None:
        if (call.verb, call.resource) == ("DELETE", "networkpolicies"):
            faulty.proxy.dead = True
            faulty.operator.kill_at_once()
            killed.set()

    faulty.proxy.on_answer = kill_once_it_is_deleted
    with contextlib.suppress(AssertionError):  # it was killed before it said it was ready
        await faulty.start_again(FLEET_OPERATOR_METRICS_READERS=json.dumps([METRICS_READER]))
    async with asyncio.timeout(WAIT_SECONDS):
        await killed.wait()
    await faulty.kill()
    assert await faulty.namespace.all("networkpolicies") == []
    made_anew = asyncio.Event()

    def note_the_policy(call: Call) -> None:
        if (call.verb, call.resource) == ("POST", "networkpolicies"):
            made_anew.set()

    faulty.proxy.on_answer = note_the_policy
    await faulty.start()
    found = await faulty.namespace.until("networkpolicies", "the policy", lambda found: "digits" in found)
    assert readers(found["digits"]) == [METRICS_READER]
    async with asyncio.timeout(WAIT_SECONDS):
        await made_anew.wait()  # the watch may tell of it before the answer has passed the proxy
    assert faulty.proxy.created("networkpolicies") == ["digits", "digits"]
    assert uids(await faulty.until_running()) == uids(before)


async def test_readers_that_the_api_server_refuses_are_told_and_end_no_job(faulty: Faulty):
    await faulty.start_again(FLEET_OPERATOR_FEATURES="networkPolicies")
    before = await faulty.run(network=POLICY)
    wrong = {"podSelector": {"matchLabels": {"no label": "prometheus"}}}
    await faulty.start_again(FLEET_OPERATOR_METRICS_READERS=json.dumps([wrong]))
    found = await faulty.namespace.until(
        "events",
        "the refusal",
        lambda found: any(event["reason"] == "ActionRefused" for event in found.values()),
        fieldSelector="involvedObject.kind=FleetJob",
    )
    (told,) = [event["message"] for event in found.values() if event["reason"] == "ActionRefused"]
    assert told.startswith("EnsureObject: ")
    assert "no label" in told
    assert uids(await faulty.until_running()) == uids(before)
    await faulty.start_again(FLEET_OPERATOR_METRICS_READERS=json.dumps([METRICS_READER]))
    found = await faulty.namespace.until("networkpolicies", "the policy", lambda found: "digits" in found)
    assert readers(found["digits"]) == [METRICS_READER]
    await faulty.finish_kept()
    assert sorted(faulty.proxy.created("pods")) == PODS
