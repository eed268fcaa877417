"""What breaks around an operator on a real API server: nothing is lost, and nothing is done twice.

The operator reaches the API server through a proxy that makes the faults (`tests.support.faulty`). What
happens to pods, nodes and Services by other hands is in `test_life` and `test_policies`, lost leases are in
`test_election`.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import json
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.support.digits_job import SERVERS, TRAINERS, annotated
from tests.support.fault_proxy import Answer, ErrorEvent, Lost, Page, Reset, Slow
from tests.support.faulty import PODS
from tests.support.jobs import manifest
from tests.support.kube import WAIT_SECONDS, ApiException, attempt, condition, runs_again, told_of, uids
from tests.support.operator_process import CRD

if TYPE_CHECKING:
    from tests.support.controlplane import ControlPlane
    from tests.support.fault_proxy import Call, Fault
    from tests.support.faulty import Faulty
    from tests.support.kube import Manifest, Namespace

pytestmark = pytest.mark.usefixtures("alone")

ALL_GONE = {"cleanPodPolicy": "All"}


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(Answer(409, "Conflict"), id="409"),
        pytest.param(Answer(429, "TooManyRequests", retry_after=1), id="429"),
        pytest.param(Answer(503, "ServiceUnavailable"), id="503"),
        pytest.param(Reset(), id="reset-before-it-arrives"),
        pytest.param(Lost(), id="reset-after-it-arrived"),
    ],
)
async def test_writes_of_each_kind_that_fail_are_made_good(faulty: Faulty, fault: Fault):
    # What has arrived once may be seen before it is asked for again, and an event is asked for again always.
    times, answers = (1, 2) if isinstance(fault, Lost) else (2, 1)
    waits = isinstance(fault, Answer) and fault.retry_after
    if waits:  # a second each time
        times = 1
    met = [
        faulty.proxy.fail(fault, verb, resource, times=times)
        for verb, resource in (
            ("POST", "services"),
            ("POST", "pods"),
            ("PUT", "fleetjobs/status"),
            ("POST", "events"),
            ("PATCH", "events"),
            ("DELETE", "pods"),
            ("DELETE", "services"),
        )
    ]
    await faulty.run(runPolicy=ALL_GONE)
    await faulty.until_answered("POST", "events", answers)  # else the next such event is one of its own
    await faulty.namespace.end("digits-trainer-1", exit_code=1)
    await faulty.namespace.until_pods("digits", "the second attempt", runs_again("digits-trainer-1", "0.1"))
    await faulty.until_running()
    await faulty.finish()
    await faulty.namespace.until("services", "no service", lambda found: "digits" not in found)
    await faulty.until_answered("POST", "events", answers + 2)
    await faulty.until_answered("PATCH", "events", answers)
    assert all(each.is_set() for each in met)
    await faulty.was_done_once("digits-trainer-1")
    await faulty.was_told(Started=2, ReplicaFailed=1, Succeeded=1)
    if waits:
        posts = [call.at for call in faulty.proxy.calls if (call.verb, call.resource) == ("POST", "services")]
        assert min(later - one for one, later in itertools.pairwise(posts)) >= 1


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(Answer(429, "TooManyRequests", retry_after=1), id="429"),
        pytest.param(Answer(500), id="500"),
        pytest.param(Reset(), id="reset-before-it-arrives"),
        pytest.param(Lost(), id="reset-after-it-arrived"),
        pytest.param(Slow(2.0), id="slow"),
    ],
)
async def test_lists_and_watches_that_fail_are_asked_for_again(faulty: Faulty, fault: Fault):
    await faulty.kill()
    before = len(faulty.proxy.calls)
    reads = [(verb, resource) for verb in ("GET", "WATCH") for resource in ("fleetjobs", "pods", "services")]
    met = [faulty.proxy.fail(fault, verb, resource) for verb, resource in (*reads, ("GET", "other"))]
    await faulty.namespace.create_job(manifest(runPolicy=ALL_GONE))
    await faulty.start()
    await faulty.until_running()
    await faulty.finish()
    assert all(each.is_set() for each in met)
    await faulty.was_done_once()
    await faulty.until_answered("POST", "events", 2)
    await faulty.was_told(Started=1, Succeeded=1)
    if isinstance(fault, Answer) and fault.retry_after:
        for resource in ("pods", "services"):
            for verb in ("GET", "WATCH"):
                one, later, *_ = [
                    call.at
                    for call in faulty.proxy.calls[before:]
                    if (call.verb, call.resource) == (verb, resource)
                ]
                assert later - one >= fault.retry_after


async def test_what_a_proxy_answers_in_place_of_the_api_server_ends_no_job(faulty: Faulty):
    met = faulty.proxy.fail(Page(422), "POST", "pods", times=3)
    await faulty.run(runPolicy=ALL_GONE)
    assert met.is_set()
    await faulty.finish()
    await faulty.was_done_once()
    told = await faulty.namespace.events("digits")
    assert any(reason == "ActionRefused" and "Bad request" in sentence for _, reason, sentence in told)


async def start_servers(namespace: Namespace) -> None:
    """Let servers start that were held back, and also those that are created later."""

    def held(pods: dict[str, Manifest]) -> list[str]:
        annotations = {name: pod["metadata"].get("annotations", {}) for name, pod in pods.items()}
        return [name for name, each in annotations.items() if "fleet.test/hold" in each]

    while True:
        pods = await namespace.until(
            "pods", "a server that is held back", lambda pods: bool(held(pods)), seconds=300
        )
        for name in held(pods):
            with contextlib.suppress(ApiException):  # it was given back meanwhile
                await namespace.annotate(name, hold=None)


@pytest.mark.timeout(400)
async def test_two_jobs_that_share_a_quota_for_one_run_one_after_the_other(faulty: Faulty):
    namespace, names = faulty.namespace, ("first", "second")
    await faulty.kill()
    faulty.operator.quota_patience = timedelta(seconds=3)
    await faulty.start()
    limit: Manifest = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "for-one"},
        "spec": {"hard": {"pods": "3"}},
    }
    await namespace.client.create(namespace.path("resourcequotas"), limit)
    await namespace.until(
        "resourcequotas", "the quota in force", lambda found: "hard" in found["for-one"].get("status", {})
    )
    for name in names:
        document = manifest(name, pservers=1, trainers=2)
        slow = annotated({"spec": {"template": copy.deepcopy(document["spec"]["template"])}}, hold="yes")
        document["spec"]["pserver"]["template"] = slow["spec"]["template"]
        await namespace.create_job(document)
    await namespace.until(
        "pods", "a server of each", lambda pods: {*pods} == {f"{each}-pserver-0" for each in names}
    )
    starting = asyncio.create_task(start_servers(namespace))
    try:
        for name in names:  # a server and a trainer here, a server there: neither can go on
            await namespace.until_job(
                name,
                "a refusal",
                lambda job: "exceeded quota" in str(job.get("status", {}).get("conditions")),
            )
        left = {*names}
        while left:
            jobs = await namespace.until(
                "fleetjobs",
                "a job that runs",
                lambda jobs: any(jobs[each]["status"].get("state") == "Running" for each in left),
                seconds=150,
            )
            (running,) = [each for each in left if jobs[each]["status"]["state"] == "Running"]
            pods = {*await namespace.until_pods(running, "its pods", lambda pods: len(pods) == 3)}
            assert len(await namespace.all("pods", fieldSelector="status.phase=Running")) == 3
            await namespace.end(f"{running}-trainer-0", f"{running}-trainer-1")
            await namespace.until_state(running, "Succeeded")
            await namespace.end(f"{running}-pserver-0")
            left.remove(running)
            assert pods
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
    told = [each for name in names for each in await namespace.events(name)]
    given_back = [message for kind, reason, message in told if (kind, reason) == ("Warning", "QuotaBackOff")]
    assert given_back
    assert all(
        "exceeded quota: for-one" in each and "requests all of them again at" in each for each in given_back
    )
    for name in names:
        status = (await namespace.get("fleetjobs", name))["status"]
        assert (status["state"], status["restarts"], status["failures"]) == ("Succeeded", 0, 0)
        assert "quotaBackOff" not in status.get("ledger", {})


async def remove_ended(namespace: Namespace, *pods: str) -> None:
    """Remove pods the moment they have ended."""

    def have_ended(found: dict[str, Manifest]) -> bool:
        return all(found[pod]["status"]["phase"] == "Succeeded" for pod in pods)

    await namespace.until_pods("digits", "pods that have ended", have_ended)
    for pod in pods:
        await namespace.delete("pods", pod)
    await namespace.until_pods("digits", "their removal", lambda found: not found.keys() & {*pods})


@pytest.mark.parametrize(
    ("ended", "removed", "words"),
    [
        pytest.param(("digits-pserver-0", *TRAINERS), ("digits-trainer-1",), None, id="a-server-is-left"),
        pytest.param(
            (*SERVERS, *TRAINERS),
            (*SERVERS, "digits-trainer-1"),
            '{"joined":true,"completedTrainers":"0-1"}',
            id="the-last-trainer-is-left",
        ),
    ],
)
async def test_a_job_that_ends_while_no_operator_runs_has_succeeded_whoever_removes_its_pods(
    faulty: Faulty, ended: tuple[str, ...], removed: tuple[str, ...], words: str | None
):
    await faulty.run(runPolicy={"backoffLimit": 0})
    await faulty.kill()
    await faulty.namespace.end(*ended, message=words)
    await remove_ended(faulty.namespace, *removed)
    await faulty.start()
    await faulty.namespace.until_state("digits", "Succeeded")
    await faulty.was_done_once()


async def test_a_pod_that_is_removed_as_soon_as_it_has_ended_has_completed(faulty: Faulty):
    await faulty.run(runPolicy={"backoffLimit": 0})
    await faulty.namespace.end("digits-trainer-1")
    await remove_ended(faulty.namespace, "digits-trainer-1")
    await faulty.namespace.end("digits-trainer-0")
    await faulty.namespace.until_state("digits", "Succeeded")
    await faulty.was_done_once()


async def test_an_api_server_that_takes_two_seconds_is_waited_for(faulty: Faulty):
    met = [
        faulty.proxy.fail(Slow(2.0), verb, resource)
        for verb, resource in (("PUT", "fleetjobs/status"), ("POST", "pods"), ("DELETE", "pods"))
    ]
    await faulty.run(runPolicy=ALL_GONE)
    await faulty.finish()
    assert all(each.is_set() for each in met)
    await faulty.was_done_once()


TOLD: dict[str, Fault] = {
    "forgotten": ErrorEvent(410),
    "forgotten-at-once": Answer(410, "Expired"),
    "broken": ErrorEvent(500),
}


@pytest.mark.parametrize("how", ["cut", "silent", *TOLD])
async def test_what_happens_while_the_watches_are_blind_is_found(faulty: Faulty, how: str):
    if how == "silent":
        await faulty.kill()
        faulty.operator.silence_seconds = 1.0
        await faulty.start()
    pods = await faulty.run()
    suspended = manifest("suspended", suspend=True)
    await faulty.namespace.create_job(suspended)
    await faulty.namespace.until_state("suspended", "Suspended")
    await faulty.until_known("Suspended")
    watched = ("pods", "services", "fleetjobs")
    met: list[asyncio.Event] = []
    for resource in watched:
        faulty.proxy.hold(resource)
        if how in TOLD:
            met.append(faulty.proxy.fail(TOLD[how], "WATCH", resource))
    # A job that is idle: only a watch, or a list, can tell that it is gone.
    await faulty.namespace.delete("fleetjobs", "suspended")
    await faulty.namespace.delete("services", "digits")
    await faulty.namespace.delete("pods", "digits-trainer-1")
    await faulty.namespace.until_pods("digits", "a pod less", lambda found: "digits-trainer-1" not in found)
    assert "digits-trainer-1" not in await faulty.namespace.until_pods("digits", "the pods", bool)
    if how == "silent":
        faulty.proxy.hold_no_more()
    else:
        assert faulty.proxy.cut() >= len(watched)
    again = await faulty.until_running()
    assert all(each.is_set() for each in met)
    assert attempt(again["digits-trainer-1"]) == "0.1"
    assert len(uids(again) & uids(pods)) == 3
    await faulty.namespace.until("services", "the service", lambda found: "digits" in found)
    await faulty.until_known("Suspended", known=False)
    await faulty.finish_kept()
    assert faulty.proxy.created("services") == ["digits", "digits"]
    assert sorted(faulty.proxy.created("pods")) == sorted([*PODS, "digits-trainer-1"])
    if how in ("forgotten-at-once", "broken"):  # of which kopf says more than others
        assert ("kopf has ended" in faulty.operator.log.read_text()) is (how == "broken")
        faulty.operator.log.write_text("")


async def test_a_webhook_that_does_not_answer_is_told_until_it_does(faulty: Faulty):
    said = (
        'Internal error occurred: failed calling webhook "pods.example.com": failed to call webhook: refused'
    )

    def refuse(call: Call) -> Fault | None:
        return Answer(500, message=said) if (call.verb, call.resource) == ("POST", "pods") else None

    faulty.proxy.on_call = refuse
    await faulty.namespace.create_job(manifest(runPolicy=ALL_GONE))
    job = await faulty.namespace.until_job(
        "digits",
        "the refusal",
        lambda job: (
            condition(job, "PodsCreated") == "False"
            and told_of(job, "PodsCreated")["reason"] == "CreationRefused"
        ),
    )
    assert said in told_of(job, "PodsCreated")["message"]
    faulty.proxy.on_call = lambda _: None
    await faulty.until_running()
    await faulty.finish()


async def test_a_status_that_somebody_edits_is_put_right_and_nothing_follows_from_it(faulty: Faulty):
    await faulty.run()
    before = (await faulty.namespace.get("fleetjobs", "digits"))["status"]
    path = faulty.namespace.path("fleetjobs", "digits", subresource="status")
    await faulty.namespace.client.merge_patch(
        path, {"status": {"state": "Restarting", "columns": {"trainers": "0/9"}, "conditions": []}}
    )
    job = await faulty.namespace.until_job(
        "digits",
        "the status put right",
        lambda job: (
            (job["status"].get("state"), job["status"].get("columns", {}).get("trainers"))
            == ("Running", "2/2")
        ),
    )
    assert job["status"]["restarts"] == before["restarts"] == 0
    await faulty.finish_kept()
    assert sorted(faulty.proxy.created("pods")) == PODS


async def test_a_status_that_somebody_wipes_costs_no_pod(faulty: Faulty):
    await faulty.run()
    await faulty.namespace.end("digits-trainer-1", exit_code=1)
    await faulty.namespace.until_pods("digits", "the second attempt", runs_again("digits-trainer-1", "0.1"))
    before = await faulty.until_running()
    path = faulty.namespace.path("fleetjobs", "digits", subresource="status")
    await faulty.namespace.client.merge_patch(path, {"status": None})
    assert uids(await faulty.until_running()) == uids(before)
    await faulty.finish_kept()
    after = await faulty.namespace.until_pods("digits", "the pods", bool)
    assert uids(after) == uids(before)
    assert sorted(faulty.proxy.created("pods")) == sorted([*PODS, "digits-trainer-1"])


@pytest.mark.parametrize("again", [False, True], ids=["deleted", "deleted-and-created-again"])
async def test_a_job_deleted_amid_its_creation_leaves_nothing_behind(faulty: Faulty, again: bool):
    asked = asyncio.Event()

    def slow(call: Call) -> Fault | None:
        if (call.verb, call.resource) == ("POST", "pods") and not asked.is_set():
            asked.set()
            return Slow(0.5)
        return None

    faulty.proxy.on_call = slow
    await faulty.namespace.create_job(manifest(startupPolicy={"order": "AnyOrder"}))
    async with asyncio.timeout(WAIT_SECONDS):
        await asked.wait()
    await faulty.namespace.delete("fleetjobs", "digits")
    if again:
        created = await faulty.namespace.create_job(manifest(runPolicy=ALL_GONE))
        pods = await faulty.until_running()
        owners = {pod["metadata"]["ownerReferences"][0]["uid"] for pod in pods.values()}
        assert owners == {created["metadata"]["uid"]}
        await faulty.finish()
    else:
        await faulty.namespace.until("services", "no service", lambda found: "digits" not in found)
        await faulty.namespace.until_pods("digits", "no pod", lambda pods: not pods)


async def test_a_clock_that_moves_by_a_day_moves_nothing_else(faulty: Faulty):
    before = await faulty.run()
    for offset in (timedelta(days=-1), timedelta(days=1)):
        await faulty.kill()
        faulty.operator.clock_offset = offset
        await faulty.start()
        # Once the operator has seen this, it has looked at the job under its new time.
        name = f"probe-{offset.days % 7}"
        await faulty.namespace.create_job(manifest(name, pservers=1, trainers=1))
        await faulty.namespace.until_state(name, "Running")
        after = await faulty.namespace.until_running("digits", *PODS)
        assert uids(after) == uids(before)
    await faulty.finish_kept()


async def test_a_clock_that_is_set_back_prolongs_no_pause(faulty: Faulty):
    await faulty.run(runPolicy=ALL_GONE)
    killed = asyncio.Event()

    def kill_amid_the_pause(call: Call) -> None:
        if (call.resource, call.status) != ("fleetjobs/status", 200):
            return
        if json.loads(call.answer)["status"]["state"] == "Restarting":
            faulty.proxy.dead = True
            faulty.operator.kill_at_once()
            killed.set()

    faulty.proxy.on_answer = kill_amid_the_pause
    await faulty.namespace.end("digits-trainer-1", exit_code=1)
    async with asyncio.timeout(WAIT_SECONDS):
        await killed.wait()
    await faulty.kill()
    faulty.proxy.on_answer = lambda _: None
    faulty.operator.clock_offset = timedelta(days=-1)
    await faulty.start()
    await faulty.namespace.until_pods("digits", "the second attempt", runs_again("digits-trainer-1", "0.1"))
    await faulty.finish()
    assert sorted(faulty.proxy.created("pods")) == sorted([*PODS, "digits-trainer-1"])


async def is_served(namespace: Namespace, field: str) -> bool:
    """Whether the API server accepts jobs with a field; right after an upgrade, it serves none at all."""
    document = manifest("probe")
    document["spec"][field] = "blue"
    try:
        await namespace.create_job(document, dry_run=True)
    except ApiException:
        return False
    return True


async def test_a_definition_that_is_upgraded_leaves_running_jobs_alone(
    faulty: Faulty, control_plane: ControlPlane
):
    before = await faulty.run()
    upgraded = yaml.safe_load(CRD.read_text())
    (version,) = upgraded["spec"]["versions"]
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    # A later version's new field, which every job has by its default.
    spec["properties"]["colour"] = {"type": "string", "default": "red"}
    apply = ["apply", "--server-side", "--force-conflicts", "-f", "-"]
    try:
        await asyncio.to_thread(control_plane.admin.kubectl, *apply, stdin=json.dumps(upgraded))
        async with asyncio.timeout(WAIT_SECONDS):
            while not await is_served(faulty.namespace, "colour"):  # noqa: ASYNC110 there is only the asking
                await asyncio.sleep(0.1)
        await faulty.kill()  # and an operator that is started afterwards takes them over
        await faulty.start()
        await faulty.namespace.end(*TRAINERS)
        await faulty.namespace.until_state("digits", "Succeeded")
    finally:
        await asyncio.to_thread(control_plane.admin.kubectl, "replace", "-f", str(CRD))
    after = await faulty.namespace.until_pods("digits", "the pods", bool)
    assert uids(after) == uids(before)
    assert sorted(faulty.proxy.created("pods")) == PODS
