"""A person's session with an API server."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import pytest

from fleet_operator.api.names import PLURAL
from fleet_operator.client import session as module
from fleet_operator.client.session import ClusterRefusal, JobNotFoundError, Session
from fleet_operator.kubernetes.client import ApiError, collection
from tests.support.fake_api import FakeApi

if TYPE_CHECKING:
    from collections.abc import Mapping

PODS = "/api/v1/namespaces/default/pods"


class Silent(FakeApi):
    """Answers the first question alone."""

    async def get(self, path: str, params: Mapping[str, str] | None = None) -> dict[str, Any]:
        if self.requests:
            raise ApiError(0, "NoAnswer", "no answer")
        return await super().get(path, params)


async def test_a_list_that_does_not_come_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "SYNC_SECONDS", 0.05)
    session = Session(Silent(), "https://fake", "default")
    with pytest.raises(ClusterRefusal, match=f"has not listed {PODS} within 0.05 s"):
        async with session.watching("pods", job="digits"):
            pass


async def test_the_end_of_another_job_of_the_same_name_is_not_waited_for():
    api = FakeApi()
    path = f"{collection(PLURAL, 'default')}/digits"
    api.put(path, {"status": {"state": "Running"}})
    session = Session(api, "https://fake", "default")
    async with aclosing(session.changes("digits")) as changes:
        first = await anext(changes)
        api.vanish(path)
        api.put(path, {"status": {"state": "Succeeded"}})
        assert api.objects[path]["metadata"]["uid"] != first["metadata"]["uid"]
        with pytest.raises(JobNotFoundError, match="digits was deleted before it had finished"):
            _ = [job async for job in changes]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        pytest.param(
            ApiError(0, "NoAnswer", "no answer from https://fake"), "is this the right context", id="away"
        ),
        pytest.param(
            ApiError(0, "NoToken", "the token cannot be read: sign in again"),
            "the token cannot be read: sign in again$",
            id="no-credentials",
        ),
        pytest.param(
            ApiError(404, "NotFound", 'namespaces "default" not found'),
            'namespaces "default" not found; create it, or choose another namespace$',
            id="no-such-namespace",
        ),
        pytest.param(
            ApiError(404, "NotFound", "the server could not find the requested resource"),
            "does not know FleetJobs .* install the chart",
            id="no-definition",
        ),
        pytest.param(
            ApiError(410, "Expired", "the continue token is too old"),
            "^https://fake took too long to list: the continue token is too old; try again$",
            id="a-list-that-took-too-long",
        ),
    ],
)
async def test_a_refusal_says_what_to_do(error: ApiError, said: str):
    api = FakeApi()
    session = Session(api, "https://fake", "default")
    api.refusals["GET", collection(PLURAL, "default")] = error
    with pytest.raises(ClusterRefusal, match=said):
        await session.jobs()
