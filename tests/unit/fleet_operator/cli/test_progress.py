from __future__ import annotations

import asyncio
import json

import pytest

from fleet_operator.cli.progress import Progress, fetch_progress, parse_progress

WHOLE = {
    "role": "TRAINER",
    "index": 0,
    "step": 12,
    "totalSteps": 100,
    "loss": 0.31,
    "samples": 1536,
    "samplesPerSecond": 812.4,
    "metrics": {"test_accuracy": 0.97, "absent": None},
    "history": [[1, 2.0], [12, 0.31]],
    "counters": {"bytes_sent": 3},
    "unknown": [],
}
PARSED = Progress(12, 100, 0.31, 1536, 812.4, {"test_accuracy": 0.97}, {1: 2.0, 12: 0.31})


def test_a_whole_progress():
    assert parse_progress(json.dumps(WHOLE)) == PARSED


@pytest.mark.parametrize("text", ["", "trained", "[1]", "3", '{"other": 1}', "{"])
def test_other_last_words_are_no_progress(text):
    assert parse_progress(text) is None


@pytest.mark.parametrize(
    "odd",
    [
        {"step": "x", "loss": [], "samples": 1.5, "metrics": [1], "history": {}},
        {
            "step": None,
            "loss": True,
            "history": [[1], "x", [1, None], [None, 1], [1.5, 2]],
            "metrics": {"a": "b"},
        },
    ],
)
def test_odd_values_are_left_out(odd):
    assert parse_progress(json.dumps(odd)) == Progress()


def test_not_a_number_is_left_out():
    assert parse_progress('{"step": 1, "loss": NaN}') == Progress(step=1)


def test_an_earlier_snapshot_lends_its_points_and_its_rate():
    earlier = Progress(step=2, samples_per_second=10.0, history={1: 3.0, 2: 2.0})
    assert Progress(step=3, loss=1.0, history={1: 3.5, 3: 1.0}).after(earlier) == Progress(
        step=3, loss=1.0, samples_per_second=10.0, history={1: 3.5, 2: 2.0, 3: 1.0}
    )


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        pytest.param(f"HTTP/1.0 200 OK\r\nA: b\r\n\r\n{json.dumps(WHOLE)}", PARSED, id="its-progress"),
        pytest.param("HTTP/1.0 404 Not Found\r\n\r\n{}", None, id="no-such-page"),
        pytest.param("garbage", None, id="garbage"),
        pytest.param("", None, id="nothing"),
    ],
)
async def test_a_replica_answers(answer, expected):
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET /progress HTTP/1.0\r\n")
        writer.write(answer.encode())
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        assert await fetch_progress("127.0.0.1", port) == expected


async def test_a_replica_that_says_nothing_is_given_up_on():
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        async with asyncio.timeout(3):
            assert await fetch_progress("127.0.0.1", port) is None


async def test_nobody_listens():
    assert await fetch_progress("127.0.0.1", 9) is None
