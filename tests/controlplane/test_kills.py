"""Operators are killed at each call of a job's life in its turn: nothing is lost, and nothing is done twice.

For each write there are two kills: in one the operator is killed when the call comes, which then never
reaches the API server, and in the other when it has been carried out, before the operator hears of it. A read
has the first only: it changes nothing. All calls count: the Lease as it is taken, lists, what kopf asks,
watches, and all writes of a job in which one trainer fails and runs again, from the operator's start to the
job's last Service. One life has several kills, so a successor is killed as well. The last test sees that no
call is left. Renewals of the Lease come by the clock, not by what a life does, and so no life has one: what
fails of those is in `test_election`. What is made anew for other settings is in `test_network_policies`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from tests.support.digits_job import SERVERS, TRAINERS
from tests.support.kube import client_for, fresh_namespace
from tests.support.lives import Kill, Life, Lifetime, Witness
from tests.support.operator_process import grant_lease, refusals

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.controlplane import ControlPlane

pytestmark = [pytest.mark.usefixtures("alone"), pytest.mark.asyncio(loop_scope="module")]

CALLS = {
    ("GET", "leases"): 1,
    ("PUT", "leases"): 1,
    ("GET", "fleetjobs"): 3,  # listed, by kopf too, and listed again when kopf has
    ("GET", "pods"): 1,
    ("GET", "services"): 1,
    ("GET", "other"): 6,  # what there is to watch, asked by kopf
    ("WATCH", "fleetjobs"): 1,
    ("WATCH", "pods"): 1,
    ("WATCH", "services"): 1,
    ("POST", "services"): 1,
    ("POST", "pods"): 5,
    ("PUT", "fleetjobs/status"): 11,
    ("POST", "events"): 3,
    ("PATCH", "events"): 1,
    ("DELETE", "pods"): 5,
    ("DELETE", "services"): 1,
}
"""The calls of a life that nothing disturbs, by their kinds."""


def kills(kind: tuple[str, str], numbers: range) -> list[Kill]:
    """Return all ways to be killed at the n-th calls of a kind."""
    writes = kind[0] not in ("GET", "WATCH")
    return [
        Kill(*kind, number, after) for number in numbers for after in ((False, True) if writes else (False,))
    ]


KILLS = [kill for kind, count in CALLS.items() for kill in kills(kind, range(1, count + 1))]

AMID_LIVES = 12
"""As many as there are kills at creations, so that each life has one of these and one at a deletion."""


def shared_out(kills: list[Kill]) -> list[tuple[Kill, ...]]:
    """Return the kills of each life.

    A killed operator loses the event that it was about to write, and forgets which ones it could count up.
    A life in which one is killed at an event has therefore no other kill but one at an operator's start.
    """
    at_start = [kill for kill in kills if kill.verb in ("GET", "WATCH") or kill.resource == "leases"]
    at_events = [kill for kill in kills if kill.resource == "events"]
    amid = [kill for kill in kills if kill not in (*at_start, *at_events)]
    lives = [[kill] for kill in at_events] + [amid[first::AMID_LIVES] for first in range(AMID_LIVES)]
    for life, kill in zip(itertools.cycle(reversed(lives)), at_start, strict=False):
        life.append(kill)
    return [tuple(life) for life in reversed(lives)]


LIVES = {kill: life for life in shared_out(KILLS) for kill in life}

AT_ONCE = 8

MADE = sorted(["digits", *(f"{name} 0.0" for name in (*SERVERS, *TRAINERS)), "digits-trainer-1 0.1"])
STATES = ["Pending", "Running", "Restarting", "Running", "Succeeded"]
TOLD = Counter({"Started": 2, "ReplicaFailed": 1, "Succeeded": 1})
TOLD_OF = {"Running": "Started", "Restarting": "ReplicaFailed", "Succeeded": "Succeeded"}


class Lives:
    """All lives, some of them at the same time."""

    def __init__(self, witness: Witness, control_plane: ControlPlane, kubeconfig: Path, folder: Path) -> None:
        self._witness = witness
        self._control_plane = control_plane
        self._kubeconfig = kubeconfig
        self._folder = folder
        self._places = asyncio.Semaphore(AT_ONCE)
        self._tasks: dict[tuple[Kill, ...], asyncio.Task[Life]] = {}

    def begin(self, *kills: Kill) -> asyncio.Task[Life]:
        """Begin the life with these kills, once, when there is a place for it; return its task."""
        if kills not in self._tasks:
            self._tasks[kills] = asyncio.create_task(self._live(kills))
        return self._tasks[kills]

    async def end(self) -> None:
        """End what nobody waits for any more."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _live(self, kills: tuple[Kill, ...]) -> Life:
        async with self._places, fresh_namespace(self._witness.client) as namespace:
            await asyncio.to_thread(grant_lease, self._control_plane, namespace.name)
            folder = self._folder / namespace.name
            folder.mkdir()
            life = Life(kills, self._witness.stories[namespace.name])
            lifetime = Lifetime(life, namespace, kubeconfig=self._kubeconfig, folder=folder)
            await lifetime.run()
            return life


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lives(
    control_plane: ControlPlane,
    operator_kubeconfig: Path,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> AsyncIterator[Lives]:
    """All lives that are asked for; those that tests will ask for begin beside each other."""
    folder = tmp_path_factory.mktemp("lives")
    async with client_for(control_plane.admin.kubeconfig) as client, Witness(client) as witness:
        lives = Lives(witness, control_plane, operator_kubeconfig, folder)
        for item in request.session.items:
            kill = item.callspec.params.get("kill") if hasattr(item, "callspec") else None
            if isinstance(kill, Kill):
                lives.begin(*LIVES[kill])
        yield lives
        await lives.end()


def check(life: Life) -> None:
    """See that a life came to what an undisturbed one comes to, by nothing that was done twice."""
    story = life.story
    assert sorted(story.made.values()) == MADE
    (key,) = story.keys
    assert len(bytes.fromhex(key)) == 32
    said = [call.answer for call in life.calls if call.resource in ("events", "fleetjobs/status")]
    assert key not in "".join((life.log, json.dumps(story.statuses), *map(str, said)))
    assert story.states in (STATES, STATES[1:])  # its pods may run before it has any status
    counted = [(status.get("restarts", 0), status.get("failures", 0)) for status in story.statuses]
    assert counted == sorted(counted)
    assert counted[-1] == (1, 1)
    status = story.status
    assert (status["jobRestarts"], status["columns"]["pservers"], status["columns"]["trainers"]) == (
        0,
        "2/2",
        "2/2",
    )
    for role in status["roles"]:
        assert (role["completedIndexes"], role["succeeded"], role["failed"]) == ("0-1", 2, 0)
    assert life.told + unsaid(life) >= TOLD >= life.told
    assert not refusals(life.log)
    assert "Traceback" not in life.log


def unsaid(life: Life) -> Counter[str]:
    """Return the events that killed operators had no time for.

    The status goes first, and events are told once. What the status says already is told by no successor.
    """
    lost: Counter[str] = Counter()
    state, told = "Pending", True
    for calls in life.operators[:-1]:
        for call in calls:
            if call.status not in (200, 201):
                continue
            if call.resource == "events":
                told = True
            elif call.resource == "fleetjobs/status":
                before, state = state, json.loads(call.answer)["status"]["state"]
                told = told and state == before
        if not told:
            lost[TOLD_OF[state]] += 1
        told = True
    return lost


@pytest.mark.parametrize("kill", KILLS, ids=str)
async def test_a_killed_operator_loses_and_doubles_nothing(lives: Lives, kill: Kill):
    life = await lives.begin(*LIVES[kill])
    check(life)
    if (call := life.killed.get(kill)) is not None:
        assert (call.status > 0) is kill.carried_out
    else:
        assert kill.resource in ("fleetjobs", "fleetjobs/status")  # of which a life may have fewer


async def test_no_call_is_left_without_its_turn(lives: Lives):
    whole = await lives.begin()
    check(whole)
    counts = Counter((call.verb, call.resource) for call in whole.calls)
    assert counts.keys() == CALLS.keys()
    # How many statuses there are depends on what is seen at once: what there was beyond has its turn now.
    beyond = [
        kill for kind, count in counts.items() for kill in kills(kind, range(CALLS[kind] + 1, count + 1))
    ]
    for life in await asyncio.gather(*map(lives.begin, beyond)):
        check(life)
    killed = {kill[:2] for life in LIVES.values() for kill in (await lives.begin(*life)).killed}
    assert killed == CALLS.keys()
