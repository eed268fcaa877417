from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from fleet_operator.engine import Election, NotLeadingError
from fleet_operator.kubernetes.client import ApiError
from tests.support.clusters import FakeClock
from tests.support.fake_api import FakeApi

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

pytestmark = pytest.mark.timeout(20)

LEASES = "/apis/coordination.k8s.io/v1/namespaces/ns/leases"
LEASE = f"{LEASES}/fleet"


class Candidate:
    """An operator with a clock of its own, for which one try of the election is one call."""

    def __init__(self, api: FakeApi, identity: str, *, seconds: float = 15) -> None:
        self.clock = FakeClock()
        self.election = Election(
            api,
            namespace="ns",
            name="fleet",
            identity=identity,
            duration=timedelta(seconds=seconds),
            clock=self.clock,
        )

    async def tries(self) -> bool:
        return await self.election._try()

    @property
    def leads(self) -> bool:
        return self.election.leads


@pytest.fixture
def api() -> FakeApi:
    """Return an API with a lease that was released."""
    api = FakeApi()
    api.put(LEASE, {"spec": {"holderIdentity": "", "leaseDurationSeconds": 1}})
    return api


def spec(api: FakeApi) -> Mapping[str, Any]:
    found: Mapping[str, Any] = api.objects[LEASE]["spec"]
    return found


@pytest.mark.parametrize("owner", [None, {"kind": "ServiceAccount", "name": "fleet", "uid": "5"}])
async def test_a_lease_refers_to_its_owner(owner: Mapping[str, Any] | None):
    api, clock = FakeApi(), FakeClock()
    election = Election(api, namespace="ns", name="fleet", identity="one", clock=clock, owner=lambda: owner)
    assert not await election._try()
    clock.seconds += 15
    assert await election._try()
    assert api.objects[LEASE]["metadata"].get("ownerReferences") == (None if owner is None else [owner])


async def test_the_first_to_ask_leads_and_the_second_stands_by(api: FakeApi):
    one, two = Candidate(api, "one"), Candidate(api, "two")
    assert not one.election.asked
    assert await one.tries()
    assert not await two.tries()
    assert (one.leads, two.leads, two.election.asked) == (True, False, True)
    assert (spec(api)["holderIdentity"], spec(api)["leaseTransitions"]) == ("one", 1)
    one.election.check()
    with pytest.raises(NotLeadingError):
        two.election.check()


async def test_a_renewed_lease_is_never_taken(api: FakeApi):
    one, two = Candidate(api, "one"), Candidate(api, "two")
    await one.tries()
    for _ in range(10):
        one.clock.seconds += 9
        two.clock.seconds += 9
        assert await one.tries()
        assert not await two.tries()


async def test_a_holder_stops_before_its_lease_can_be_taken(api: FakeApi):
    one, two = Candidate(api, "one"), Candidate(api, "two")
    await one.tries()
    await two.tries()  # two sees it for the first time: no earlier than it was written
    taken_after = None
    for tenths in range(1, 200):
        one.clock.seconds = two.clock.seconds = tenths / 10
        if taken_after is None and await two.tries():
            taken_after = tenths / 10
        assert not (one.leads and two.leads)
    assert taken_after == 15
    assert spec(api)["leaseTransitions"] == 2


async def test_operators_freeze_in_peering(api: FakeApi):
    one, two, three = (Candidate(api, each) for each in ("one", "two", "three"))
    await one.tries()  # and is never heard of again
    for seconds in range(0, 40, 5):
        two.clock.seconds = three.clock.seconds = seconds
        await two.tries()
        await three.tries()
        assert not (two.leads and three.leads)
    assert two.leads != three.leads, "somebody goes on, and one only"


async def test_times_of_day_are_never_compared(api: FakeApi):
    one, two = Candidate(api, "one"), Candidate(api, "two")
    await one.tries()
    api.put(LEASE, {"spec": {**spec(api), "renewTime": "1970-01-01T00:00:00.000000Z"}})
    two.clock.seconds = 1e6
    assert not await two.tries()


async def test_a_holder_that_was_paused_does_not_lead_when_it_wakes_and_does_not_take_it_back(api: FakeApi):
    one, two = Candidate(api, "one"), Candidate(api, "two")
    await one.tries()
    await two.tries()
    one.clock.seconds = two.clock.seconds = 20
    assert not one.leads
    assert await two.tries()
    async with asyncio.timeout(1):
        await one.election.keep()  # returns at once
    assert not await one.tries()
    assert two.leads


@pytest.mark.parametrize(
    "error",
    [
        ApiError(0, "NoAnswer", "refused"),
        ApiError(500, "", "etcd is away"),
        ValueError("no lease"),
        TimeoutError(),
    ],
    ids=["no answer", "500", "nonsense", "time-out"],
)
async def test_any_error_counts_as_not_renewed(api: FakeApi, error: Exception):
    one = Candidate(api, "one")
    await one.tries()
    one.clock.seconds = 9
    api.refusals["PUT", LEASE] = error  # type: ignore[assignment]
    assert not await one.tries()
    assert one.leads  # what it was told at 0 still holds
    one.clock.seconds = 10
    assert not one.leads


async def test_after_an_error_it_reads_the_lease_before_it_renews_it(api: FakeApi):
    one = Candidate(api, "one")
    await one.tries()
    api.refusals["PUT", LEASE] = ApiError(0, "NoAnswer", "it may have been written")
    api.put(LEASE, api.objects[LEASE])  # it was
    await one.tries()
    assert await one.tries()
    assert one.leads


async def test_a_try_that_hangs_is_given_up(api: FakeApi, monkeypatch: pytest.MonkeyPatch):
    one = Candidate(api, "one", seconds=0.5)

    async def hang(*_: object) -> dict[str, Any]:
        await asyncio.sleep(3600)
        raise AssertionError

    monkeypatch.setattr(api, "get", hang)
    async with asyncio.timeout(5):
        assert not await one.tries()


async def test_two_that_take_a_free_lease_at_once_are_told_apart(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch
):
    one, two = Candidate(api, "one"), Candidate(api, "two")
    await one.tries()
    await one.election.release()
    found = await api.get(LEASE)

    async def as_it_was(*_: object) -> dict[str, Any]:
        return found

    assert await two.tries()
    monkeypatch.setattr(api, "get", as_it_was)
    assert not await one.tries()


async def test_a_released_lease_is_taken_at_once(api: FakeApi):
    one, two = Candidate(api, "one"), Candidate(api, "two")
    await one.tries()
    await two.tries()
    await one.election.release()
    assert not one.leads
    assert await two.tries()


async def test_what_another_holds_is_not_released(api: FakeApi):
    one, two = Candidate(api, "one"), Candidate(api, "two")
    await one.tries()
    await two.tries()
    one.clock.seconds = two.clock.seconds = 15
    await two.tries()
    await one.election.release()
    assert spec(api)["holderIdentity"] == "two"


class Slow:
    """Has every write of an API carried out at once and answered late."""

    def __init__(self, api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
        self.written, self.answered = asyncio.Event(), asyncio.Event()
        self.held = 1  # how many answers come late
        for verb in ("create", "replace"):
            monkeypatch.setattr(api, verb, self._late(getattr(api, verb)))

    def _late(
        self, write: Callable[..., Awaitable[dict[str, Any]]]
    ) -> Callable[..., Awaitable[dict[str, Any]]]:
        async def late(*arguments: Any) -> dict[str, Any]:
            answer = await write(*arguments)
            if self.held:
                self.held -= 1
                self.written.set()
                await self.answered.wait()
            return answer

        return late


async def test_a_release_waits_for_the_renewal_under_way_and_is_the_last_word(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch
):
    one, two = Candidate(api, "one"), Candidate(api, "two")
    await one.tries()
    slow = Slow(api, monkeypatch)
    renewing = asyncio.create_task(one.tries())
    await slow.written.wait()
    releasing = asyncio.create_task(one.election.release())
    await asyncio.sleep(0)  # it has begun
    assert not one.leads
    slow.answered.set()
    async with asyncio.timeout(5):
        assert not await renewing
        await releasing
    assert spec(api)["holderIdentity"] == ""
    assert not one.leads
    assert await two.tries()


@pytest.mark.parametrize("first", ["make", "take", "renew"])
async def test_what_a_try_that_was_broken_off_has_taken_is_released_all_the_same(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch, first: str
):
    one, two = Candidate(api, "one"), Candidate(api, "two")
    if first == "make":
        api.vanish(LEASE)
        await one.tries()
        one.clock.seconds = 15
    elif first == "renew":
        await one.tries()
    slow = Slow(api, monkeypatch)
    trying = asyncio.create_task(one.tries())
    await slow.written.wait()
    trying.cancel()  # as whoever waits for a signal does it
    await one.election.release()
    assert spec(api)["holderIdentity"] == ""
    assert await two.tries()


async def test_a_renewal_that_is_carried_out_amid_the_release_is_undone(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch
):
    one = Candidate(api, "one")
    await one.tries()
    api.refusals["PUT", LEASE] = ApiError(0, "NoAnswer", "it was broken off")
    await one.tries()
    answer = api.get

    async def get(path: str, params: Mapping[str, str] | None = None) -> dict[str, Any]:
        found = await answer(path, params)
        if len(api.requests) < 5:
            api.put(LEASE, found)  # what was broken off arrives after all
        return found

    monkeypatch.setattr(api, "get", get)
    await one.election.release()
    assert spec(api)["holderIdentity"] == ""


async def test_what_was_released_is_not_kept_any_more(api: FakeApi):
    one = Election(api, namespace="ns", name="fleet", identity="one", duration=timedelta(seconds=0.3))
    await one.acquire()
    keeping = asyncio.create_task(one.keep())
    await asyncio.sleep(0)  # it waits for its next renewal
    await one.release()
    async with asyncio.timeout(5):
        await keeping
    assert spec(api)["holderIdentity"] == ""


async def test_an_operator_that_never_held_the_lease_asks_nothing_at_its_end(api: FakeApi):
    one, two = Candidate(api, "one"), Candidate(api, "two")
    await one.tries()
    await two.tries()
    before = len(api.requests)
    await two.election.release()
    assert len(api.requests) == before


async def test_a_process_started_again_under_its_old_name_takes_its_lease_up_at_once(api: FakeApi):
    await Candidate(api, "one").tries()
    again = Candidate(api, "one")
    assert await again.tries()
    assert spec(api)["leaseTransitions"] == 1


async def test_where_there_is_no_lease_it_is_made_after_the_time_for_which_one_is_valid(api: FakeApi):
    api.vanish(LEASE)
    one = Candidate(api, "one")
    for seconds in (0, 3, 14.9):
        one.clock.seconds = seconds
        assert not await one.tries()
        assert (one.election.asked, LEASE in api.objects) == (True, False)
    one.clock.seconds = 15
    assert await one.tries()
    assert (spec(api)["holderIdentity"], spec(api)["leaseTransitions"]) == ("one", 0)


async def vanished(api: FakeApi) -> None:
    api.vanish(LEASE)


async def emptied(api: FakeApi) -> None:
    lease = {key: value for key, value in (await api.get(LEASE)).items() if key != "spec"}
    api.put(LEASE, lease)


@pytest.mark.parametrize("lost", [vanished, emptied])
async def test_a_lease_that_somebody_removes_is_made_anew_by_its_holder_who_leads_on(
    api: FakeApi, lost: Callable[[FakeApi], Awaitable[None]]
):
    one, two = Candidate(api, "one"), Candidate(api, "two")
    await one.tries()
    await two.tries()
    await lost(api)
    assert not await two.tries(), "the first may lead still"
    one.clock.seconds = two.clock.seconds = 3
    assert not await one.tries()  # the renewal fails
    assert one.leads
    assert await one.tries()
    assert not await two.tries()
    assert spec(api)["holderIdentity"] == "one"


@pytest.mark.parametrize("lost", [vanished, emptied])
async def test_no_two_lead_when_the_lease_is_removed_and_its_holder_cannot_be_heard(
    api: FakeApi, lost: Callable[[FakeApi], Awaitable[None]]
):
    one, two = Candidate(api, "one"), Candidate(api, "two")
    await one.tries()  # and is cut off
    await lost(api)
    taken_after = None
    for tenths in range(200):
        one.clock.seconds = two.clock.seconds = tenths / 10
        if taken_after is None and await two.tries():
            taken_after = tenths / 10
        assert not (one.leads and two.leads)
    assert taken_after == 15
    one.clock.seconds = 20
    assert not await one.tries()


async def test_keep_renews_until_it_cannot(api: FakeApi, monkeypatch: pytest.MonkeyPatch):
    election = Election(api, namespace="ns", name="fleet", identity="one", duration=timedelta(seconds=0.3))
    await election.acquire()
    renewals: asyncio.Queue[bool] = asyncio.Queue()
    replace = api.replace

    async def noted(path: str, manifest: Mapping[str, Any]) -> dict[str, Any]:
        renewals.put_nowait(election.leads)
        return await replace(path, manifest)

    monkeypatch.setattr(api, "replace", noted)
    keeping = asyncio.create_task(election.keep())
    async with asyncio.timeout(10):
        assert [await renewals.get() for _ in range(3)] == [True] * 3
        api.put(LEASE, {"spec": {**spec(api), "holderIdentity": "two", "leaseDurationSeconds": 3600}})
        await keeping
    assert not election.leads
