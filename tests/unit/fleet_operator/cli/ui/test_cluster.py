from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from aiohttp import web

from fleet_operator.cli.ui import cluster
from fleet_operator.cli.ui.cluster import ClusterJobs
from fleet_operator.cli.ui.machine import LocalRuns
from fleet_operator.cli.ui.server import UiServer
from fleet_operator.client.logs import LINE_BYTES
from fleet_operator.client.session import ClusterRefusal, Where
from tests.support.log_server import LogServer, at

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

EVENT = {
    "metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"},
    "lastTimestamp": "2026-01-01T00:00:05Z",
    "reason": "ReplicaRestarting",
    "type": "Warning",
    "message": "trainer-0 failed with exit code 3",
    "count": 2,
}


class Api(LogServer):
    """A LogServer that has an event, and what trainer 0 says of its progress."""

    def __init__(self) -> None:
        super().__init__()
        self.events = [EVENT]
        self.histories: list[dict[str, Any]] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/api/v1/namespaces/default/pods/digits-trainer-0:6180/proxy/progress":
            if not self.histories:
                return web.json_response({"message": "pods is forbidden"}, status=403)
            return web.json_response(self.histories.pop(0))
        return await super().answer(request)


@pytest.fixture
def api() -> Api:
    return Api()


@asynccontextmanager
async def jobs_of(api: Api, folder: Path) -> AsyncIterator[ClusterJobs]:
    """Serve, and give the jobs as a kubeconfig finds them."""
    async with api.kubeconfig(folder) as kubeconfig:
        jobs = ClusterJobs(Where(kubeconfig))
        try:
            yield jobs
        finally:
            await jobs.close()


def progress(step: int, loss: float) -> dict[str, Any]:
    return {"state": "Running", "restarts": 1, "progress": {"step": step, "totalSteps": 8, "loss": loss}}


async def test_the_curve_of_a_job_is_what_its_status_has_said_so_far(api: Api, tmp_path: Path):
    async with jobs_of(api, tmp_path) as jobs:
        for step, loss in ((1, 2.0), (3, 1.0), (5, 0.5), (2, 1.5)):  # the last is that of a restarted job
            api.job["status"] = progress(step, loss)
            name, [row] = await jobs.rows()
        assert name.endswith(", namespace default")
        assert (row["id"], row["step"], row["loss"], row["restarts"]) == ("default/digits", 2, 1.5, 1)
        detail = await jobs.detail("default", "digits")
        assert detail["series"] == {"loss": {"trainer-0": [(1, 2.0), (2, 1.5)]}}
        [event] = detail["events"]
        assert event["message"] == "trainer-0 failed with exit code 3 (x2)"


async def test_the_curve_of_a_running_job_begins_with_its_training(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cluster, "INTERVAL_SECONDS", 0.0)
    api.put(0)
    api.job["status"] = progress(3, 1.0)
    history = [[1, 2.0], [2, 1.5], [3, 1.0], [4, 0.75]]
    api.histories = [
        {"step": 4, "loss": 0.75, "history": history, "metrics": {"accuracy": 0.5}},
        {"step": 5, "loss": 0.5, "history": [[1, 2.0], [5, 0.5]], "metrics": {"accuracy": 0.75}},
    ]
    async with jobs_of(api, tmp_path) as jobs:
        first = await jobs.detail("default", "digits")
        second = await jobs.detail("default", "digits")
        assert first["curves_note"] is None
        assert second["series"] == {
            "accuracy": {"trainer-0": [(4, 0.5), (5, 0.75)]},
            "loss": {"trainer-0": [(1, 2.0), (2, 1.5), (3, 1.0), (4, 0.75), (5, 0.5)]},
        }
        api.put(0, life=1)
        api.histories = [{"step": 3, "loss": 0.9, "history": [[2, 1.4], [3, 0.9]]}]
        detail = await jobs.detail("default", "digits")
        assert detail["series"]["loss"] == {"trainer-0": [(1, 2.0), (2, 1.4), (3, 0.9)]}


async def test_a_history_that_may_not_be_read_is_told_and_left_alone(api: Api, tmp_path: Path):
    api.put(0)
    api.job["status"] = progress(3, 1.0)
    async with jobs_of(api, tmp_path) as jobs:
        for _ in range(2):
            detail = await jobs.detail("default", "digits")
            assert "could not be read through the API server (pods is forbidden)" in detail["curves_note"]
            assert detail["series"] == {"loss": {"trainer-0": [(3, 1.0)]}}
            api.histories = [{"step": 4, "history": [[4, 0.5]]}]  # which nobody asks for within a minute
        assert len(api.histories) == 1
        api.put(0, phase="Succeeded")
        assert (await jobs.detail("default", "digits"))["curves_note"] is None


async def test_a_trainer_s_termination_message_has_its_whole_curve(api: Api, tmp_path: Path):
    api.put(0, life=1, phase="Succeeded")
    last = {"step": 3, "loss": 0.5, "history": [[1, 2.0], [2, 1.0], [3, 0.5]], "metrics": {"accuracy": 0.75}}
    ended = {"exitCode": 0, "message": json.dumps(last), "startedAt": "a", "finishedAt": "b"}
    api.pods["digits-trainer-0"]["status"]["containerStatuses"][1]["state"] = {"terminated": ended}
    async with jobs_of(api, tmp_path) as jobs:
        detail = await jobs.detail("default", "digits")
    assert detail["series"]["loss"] == {"trainer-0": [(1, 2.0), (2, 1.0), (3, 0.5)]}
    assert detail["series"]["accuracy"] == {"trainer-0": [(3, 0.75)]}
    [replica] = detail["replicas"]
    assert (replica["state"], replica["restarts"], replica["exit_codes"]) == ("Succeeded", 1, [0])
    assert replica["lives"] == [{"attempt": "0.1", "started": "a", "ended": "b", "exit_code": 0}]


async def test_a_log_is_followed_into_the_next_life_without_repetition(api: Api, tmp_path: Path):
    api.put(0, at(1, "one", "two"), at(1, "one", "two", "three"), at(2, "four \x1b[31mred\x1b[0m"))
    async with jobs_of(api, tmp_path) as jobs:
        told, cursor = list[str](), ""
        for _ in range(3):
            answer = await jobs.log("default", "digits", "trainer-0", cursor)
            cursor = answer["next"]
            told += answer["lines"]
        assert [line.partition(" ")[2] for line in told] == ["one", "two", "three", "four red"]
        asked = [(each.get("sinceTime"), each.get("tailLines")) for each in api.asked]
        assert asked[:2] == [(None, "400"), ("2026-01-01T00:00:01Z", None)]
        api.put(0, (500, "the kubelet is away"))
        answer = await jobs.log("default", "digits", "trainer-0", cursor)
        assert answer["next"] == cursor
        assert "the kubelet is away" in answer["note"]
        assert "no pod" in (await jobs.log("default", "digits", "trainer-7", ""))["note"]


async def test_the_log_of_the_next_life_is_whole_though_its_node_s_clock_is_behind(api: Api, tmp_path: Path):
    api.put(0, at(50, "one"))
    async with jobs_of(api, tmp_path) as jobs:
        first = await jobs.log("default", "digits", "trainer-0", "")
        api.put(0, at(10, "two"), life=1)
        second = await jobs.log("default", "digits", "trainer-0", first["next"])
    told = [line.partition(" ")[2] for line in (*first["lines"], *second["lines"])]
    assert told == ["one", "two"]
    assert not {"sinceTime", "tailLines"} & api.asked[1].keys()


async def test_a_log_with_its_node_s_time_zone_is_followed_without_repetition(api: Api, tmp_path: Path):
    one, two = b"2026-01-01T02:00:01+02:00 one\n", b"2026-01-01T02:00:01.5+02:00 two\n"
    api.put(0, one, one + two)
    async with jobs_of(api, tmp_path) as jobs:
        first = await jobs.log("default", "digits", "trainer-0", "")
        second = await jobs.log("default", "digits", "trainer-0", first["next"])
    assert first["lines"] == ["2026-01-01T00:00:01.000Z one"]
    assert second["lines"] == ["2026-01-01T00:00:01.500Z two"]
    assert api.asked[1]["sinceTime"] == "2026-01-01T00:00:01Z"


async def test_a_line_longer_than_a_piece_is_shown_once(api: Api, tmp_path: Path):
    long = at(1, "a" * (2 * LINE_BYTES))
    api.put(0, at(1, "one") + long, at(1, "one") + long + at(2, "two"))
    async with jobs_of(api, tmp_path) as jobs:
        first = await jobs.log("default", "digits", "trainer-0", "")
        second = await jobs.log("default", "digits", "trainer-0", first["next"])
    assert sum(line.count("a") for line in first["lines"]) == 2 * LINE_BYTES
    assert second["lines"] == ["2026-01-01T00:00:02.000Z two"]


async def test_a_log_that_is_far_ahead_comes_in_pieces(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cluster, "MOST_LINES", 2)
    api.put(0, at(1, "one", "two", "three", "four", "five"))
    async with jobs_of(api, tmp_path) as jobs:
        told, cursor = list[list[str]](), ""
        for _ in range(3):
            answer = await jobs.log("default", "digits", "trainer-0", cursor)
            cursor = answer["next"]
            told.append([line.partition(" ")[2] for line in answer["lines"]])
    assert told == [["one", "two"], ["three", "four"], ["five"]]


async def test_other_namespaces_are_refused_without_asking(api: Api, tmp_path: Path):
    async with jobs_of(api, tmp_path) as jobs:
        with pytest.raises(ClusterRefusal, match="this page shows namespace default, not kube-system"):
            await jobs.log("kube-system", "digits", "trainer-0", "")
    assert api.asked == []


async def test_without_a_cluster_the_page_has_the_machine_and_the_reason(tmp_path: Path):
    jobs = ClusterJobs(Where(tmp_path / "missing"))
    server = UiServer(LocalRuns([]), jobs, token="token")
    address = await server.start(0)
    try:
        async with aiohttp.ClientSession() as session:
            answer = await session.get(address.replace("/?", "/api/jobs?"))
            document = await answer.json()
            assert document["jobs"] == []
            assert "missing" in document["cluster"]["error"]
            refused = await session.get(address.replace("/?", "/api/job?id=default/digits&"))
            assert refused.status == 502
            assert "missing" in (await refused.json())["error"]
    finally:
        await server.close()
