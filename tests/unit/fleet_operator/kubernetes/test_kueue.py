"""Kueue's reasons, from the Workloads of groups that it holds back."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from fleet_operator.cluster import Key
from fleet_operator.kubernetes import kueue
from fleet_operator.kubernetes.client import ApiError
from fleet_operator.kubernetes.kueue import WORKLOADS, Admissions, why_not_admitted
from tests.support.fake_api import FakeApi

if TYPE_CHECKING:
    from collections.abc import Mapping

KEY = Key("default", "digits")
GROUP = "digits-11111111-0"
PATH = f"{WORKLOADS}/namespaces/default/workloads/{GROUP}"
LACKING = "insufficient unused quota for cpu in flavor a, 2 more needed"


def workload(*conditions: tuple[str, str, str], **status: Any) -> dict[str, Any]:
    told = [{"type": kind, "status": held, "message": message} for kind, held, message in conditions]
    return {"spec": {"active": True}, "status": {"conditions": told, **status}}


RESERVED = ("QuotaReserved", "True", "Quota reserved")


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        pytest.param({"spec": {}}, None, id="not-looked-at-yet"),
        pytest.param(workload(("QuotaReserved", "False", LACKING)), LACKING, id="no-quota"),
        pytest.param(workload(RESERVED, ("Admitted", "True", "admitted")), None, id="admitted"),
        pytest.param(
            workload(
                RESERVED, admissionChecks=[{"name": "a", "state": "Pending"}, {"name": "b", "state": "Ready"}]
            ),
            "admission checks are pending: a",
            id="checks",
        ),
        pytest.param(
            {"spec": {"active": False}},
            "the Workload is deactivated (spec.active is false)",
            id="deactivated-in-the-queue",
        ),
    ],
)
def test_why_a_group_is_not_admitted(found: dict[str, Any], reason: str | None):
    assert why_not_admitted(found) == reason


class WatchedApi(FakeApi):
    """Tells which paths are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = asyncio.Queue[str]()

    async def get(self, path: str, params: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Answer, and tell the path."""
        self.looks.put_nowait(path)
        return await super().get(path, params)


async def test_a_group_is_looked_up_until_it_is_admitted_and_its_job_hears_of_news_only(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(kueue, "TICK_SECONDS", 0.001)
    monkeypatch.setattr(kueue, "LOOK_SECONDS", 0.001)
    api, heard = WatchedApi(), asyncio.Queue[Key]()
    admissions = Admissions(api, heard.put_nowait)
    api.refusals["GET", PATH] = ApiError(403, "Forbidden", "not yours")
    looking = asyncio.create_task(admissions.look_forever())
    async with asyncio.timeout(5):
        assert admissions.of(KEY, GROUP) is None
        for _ in range(3):  # refused, then not there
            assert await api.looks.get() == PATH
        api.put(PATH, workload(("QuotaReserved", "False", LACKING)))
        assert await heard.get() == KEY
        assert admissions.of(KEY, GROUP) == LACKING
        for _ in range(3):
            await api.looks.get()
        assert heard.empty(), "it says the same"
        assert admissions.of(KEY, f"{GROUP}-next") is None, "of another group"
        admissions.forget(KEY)
        api.looks = asyncio.Queue()
        admissions.of(Key("default", "other"), "other")
        looked = {await api.looks.get() for _ in range(5)}
    assert looked == {PATH.replace(GROUP, "other")}
    looking.cancel()
