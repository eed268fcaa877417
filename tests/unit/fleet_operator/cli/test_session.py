"""A person's session with an API server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from fleet_operator.cli import session as module
from fleet_operator.cli.session import ClusterRefusal, Session
from fleet_operator.cluster.client import ApiError
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
