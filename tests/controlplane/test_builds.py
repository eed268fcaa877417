"""An upgrade, a rollback and a downgrade of the operator while jobs run: pods and ports stay."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.support.digits_job import SERVERS, TRAINERS
from tests.support.jobs import collective_manifest, manifest
from tests.support.kube import WAIT_SECONDS, is_running, runs_again, uids
from tests.support.next_build import NextBuild
from tests.support.operator_process import CRD, OperatorProcess
from tests.support.pods import env_of, main_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.controlplane import ControlPlane
    from tests.support.kube import Manifest, Namespace

pytestmark = pytest.mark.usefixtures("alone")

HOST = {"hostNetwork": True, "portRange": {"first": 24000, "last": 24999}}
LISTS = ("PADDLE_PSERVERS_IP_PORT_LIST", "PADDLE_TRAINER_ENDPOINTS")


@pytest.fixture(scope="module")
def next_build(tmp_path_factory: pytest.TempPathFactory) -> NextBuild:
    return NextBuild(tmp_path_factory.mktemp("next-build"))


@pytest.fixture
def both(
    operator_kubeconfig: Path, control_plane: ControlPlane, next_build: NextBuild, tmp_path: Path
) -> Iterator[Builds]:
    operator = OperatorProcess(tmp_path, operator_kubeconfig)
    operator.start()
    yield Builds(operator, control_plane, next_build)
    operator.stop()
    control_plane.admin.kubectl("replace", "-f", str(CRD))


class Builds:
    """Switches between two builds of the operator, and their definitions of FleetJob."""

    def __init__(self, operator: OperatorProcess, plane: ControlPlane, later: NextBuild) -> None:
        self._operator, self._plane, self._later = operator, plane, later
        self._now = "this"

    def run(self, build: str, *, definition: bool = True) -> None:
        """Run one build of the operator, ``this`` or ``next``.

        Call this only from the main thread: the operator's process ends with the thread that starts it.

        Parameters
        ----------
        build : str
            The build that replaces the present one; nothing is restarted if it already runs.
        definition : bool
            Whether to replace the CustomResourceDefinition by the build's own, too.
        """
        if definition:
            text = CRD.read_text() if build == "this" else self._later.definition()
            self._plane.admin.kubectl("replace", "-f", "-", stdin=text)
        if build == self._now:
            return
        self._operator.stop()
        self._operator.tell(PYTHONPATH="" if build == "this" else str(self._later.path))
        self._operator.start()
        self._now = build


def ports_of(pods: dict[str, Manifest]) -> dict[str, tuple[object, ...]]:
    """Return the ports of each pod, after the lists in which it finds the ports of its peers."""
    found = {}
    for name, pod in pods.items():
        env, ports = env_of(main_of(pod)), main_of(pod)["ports"]
        found[name] = (*(env.get(each) for each in LISTS), *(port["containerPort"] for port in ports))
    return found


def built_by(pod: Manifest) -> str:
    return env_of(main_of(pod)).get("FLEET_BUILD") or "this"


async def until_noted(namespace: Namespace, name: str) -> Manifest:
    """Wait until the later build has written a status, and return its ledger."""
    job = await namespace.until_job(
        name, "the ledger of the next build", lambda job: job["status"].get("ledger", {}).get("pace") == 7
    )
    ledger: Manifest = job["status"]["ledger"]
    return ledger


async def test_a_job_runs_through_an_upgrade_a_rollback_and_a_downgrade(namespace: Namespace, both: Builds):
    await namespace.create_job(manifest(network=HOST))
    await namespace.create_job(collective_manifest("rank", network=HOST))
    before = await namespace.until_running("digits", *SERVERS, *TRAINERS)
    ranks = await namespace.until_running("rank", "rank-trainer-0", "rank-trainer-1")
    for name in ("digits", "rank"):
        await namespace.until_state(name, "Running")

    both.run("next")
    ledger = await until_noted(namespace, "digits")
    await until_noted(namespace, "rank")
    assert uids(await namespace.until_pods("digits", "the pods", bool)) == uids(before), (
        "an upgrade ends no pod"
    )
    assert uids(await namespace.until_pods("rank", "the pods", bool)) == uids(ranks)

    # A pod that the later build creates has the ports that the earlier build chose.
    await namespace.end(TRAINERS[1], exit_code=1)
    await namespace.until_pods("digits", "trainer 1 again", runs_again(TRAINERS[1], "0.1"))
    after = await namespace.until_running("digits", *SERVERS, *TRAINERS)
    assert {built_by(after[each]) for each in (*SERVERS, TRAINERS[0])} == {"this"}
    assert built_by(after[TRAINERS[1]]) == "next"
    assert ports_of(after) == ports_of(before)
    await namespace.end("rank-trainer-1", exit_code=1)
    again = await namespace.until_pods(
        "rank",
        "the second life",
        lambda pods: (
            len(pods) == 2 and uids(pods).isdisjoint(uids(ranks)) and all(map(is_running, pods.values()))
        ),
    )
    assert ports_of(again) == ports_of(ranks), "in the next life too"

    # A field of the later definition, which the earlier one does not know.
    path = namespace.path("fleetjobs", "digits")
    await namespace.client.merge_patch(path, {"spec": {"runPolicy": {"archive": True, "backoffLimit": 9}}})

    # A rollback of the operator, while the later definition stays.
    both.run("this", definition=False)
    await namespace.end(TRAINERS[0], exit_code=1)
    await namespace.until_pods("digits", "trainer 0 again", runs_again(TRAINERS[0], "0.1"))
    rolled_back = await namespace.until_running("digits", *SERVERS, *TRAINERS)
    assert ports_of(rolled_back) == ports_of(before)
    assert uids(rolled_back) & uids(after) == uids({each: after[each] for each in (*SERVERS, TRAINERS[1])})
    job = await namespace.until_job("digits", "both restarts", lambda job: job["status"]["restarts"] == 2)
    assert job["spec"]["runPolicy"]["archive"] is True
    kept = job["status"]["ledger"]
    assert (kept["pace"], kept["roles"]["trainer"]["speed"]) == (7, 9), "for the later build, when it is back"
    assert kept["roles"]["pserver"]["ports"] == ledger["roles"]["pserver"]["ports"]

    # A downgrade, of the definition too.
    both.run("this")
    async with asyncio.timeout(WAIT_SECONDS):
        while "archive" in (await namespace.get("fleetjobs", "digits"))["spec"]["runPolicy"]:  # noqa: ASYNC110 there is only the asking
            await asyncio.sleep(0.1)
    assert uids(await namespace.until_pods("digits", "the pods", bool)) == uids(rolled_back)
    await namespace.end(*TRAINERS)
    ended = await namespace.until_state("digits", "Succeeded")
    assert ended["status"]["restarts"] == 2
    assert ended["status"]["ledger"]["pace"] == 7
