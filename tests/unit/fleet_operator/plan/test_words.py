"""What a pod says as it ends; it may say anything."""

from __future__ import annotations

import json

import pytest

from fleet_operator.plan.words import MOST_TRAINERS, LastWords, last_sentence, parse_words
from tests.support.afterwards import DESTROY, TERMINATE, TRACKER

DONE = {"step": 12, "joined": True, "completedTrainers": "0-1,3"}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        pytest.param(json.dumps(DONE), LastWords(True, frozenset({0, 1, 3})), id="who-has-completed"),
        pytest.param('{"joined": true, "step": 3}', LastWords(True), id="nobody-that-it-knows-of"),
        pytest.param('{"joined": false}', LastWords(False), id="one-that-ended-before-it-had-joined"),
        pytest.param(
            "trainer 1 (joined): its disk is full", LastWords(True, stepped=True), id="a-failure-at-work"
        ),
        pytest.param(
            "trainer 1 (joined, no step made): x", LastWords(True, stepped=False), id="before-its-first-step"
        ),
        pytest.param(
            "pserver 0 (not joined): no port", LastWords(False, stepped=False), id="a-failure-before-any"
        ),
        pytest.param("usage: train.py [-h]\ntrainer 1 (joined): x", LastWords(), id="a-log-that-quotes-one"),
        pytest.param(None, LastWords(), id="nothing"),
        pytest.param('{"step": 12, "completedTrainers": "0-1"}', LastWords(), id="another-runtimes-json"),
        pytest.param("[" * 4000, LastWords(), id="deep-brackets"),
        pytest.param('["joined"]', LastWords(), id="a-list"),
        pytest.param('{"joined": "true"}', LastWords(), id="a-text-for-a-truth"),
        pytest.param('{"joined": true, "completedTrainers": 7}', LastWords(True), id="a-number"),
        pytest.param('{"joined": true, "completedTrainers": "1-"}', LastWords(True), id="half-a-range"),
        pytest.param('{"joined": true, "completedTrainers": "-1"}', LastWords(True), id="a-negative"),
        pytest.param('{"joined": true, "completedTrainers": "5-2"}', LastWords(True), id="a-range-backwards"),
        pytest.param(
            '{"joined": true, "completedTrainers": "٣"}', LastWords(True), id="another-scripts-digit"
        ),
    ],
)
def test_parse_words(message: str | None, expected: LastWords):
    assert parse_words(message) == expected


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        pytest.param({"0": "0-1", "12": "3"}, {0: 0, 1: 0, 3: 12}, id="each-trainer"),
        pytest.param({"-1": "0", "": "1", "x": "2", "9" * 10: "3"}, {}, id="no-counts"),
        pytest.param({"1": ["0"]}, {}, id="no-text"),
        pytest.param(["0"], {}, id="a-list"),
    ],
)
def test_after_how_many_restarts_a_server_knew_trainers(after: object, expected: dict[int, int]):
    assert parse_words(json.dumps(DONE | {"completedAfter": after})).restarts == expected


def test_a_list_of_endless_ranges_costs_nothing():
    ranges = ",".join(["0-99999"] * 500)
    words = parse_words(json.dumps(DONE | {"completedTrainers": ranges}))
    assert words.completed == frozenset(range(MOST_TRAINERS))


@pytest.mark.parametrize(
    ("message", "said"),
    [
        pytest.param('{"joined":true,"step":3}', "", id="of-a-replica"),
        pytest.param('{"role":"TRAINER","index":0,"step":3,"loss":0.5}\n', "", id="of-a-plain-script"),
        pytest.param('{"step":3}', '{"step":3}', id="of-another-runtime"),
        pytest.param('["role", "step"]', '["role", "step"]', id="a-list"),
    ],
)
def test_progress_is_no_sentence_about_a_failure(message: str, said: str):
    assert last_sentence(message) == said


TRACE = """\
Traceback (most recent call last):
  File "/work/train.py", line 3, in <module>
    main()
train.NoData: label 1001 is out of range
"""
BY_RANK = "".join(f"[rank0]: {line}\n" for line in TRACE.splitlines())
NO_DATA = "train.NoData: label 1001 is out of range"


@pytest.mark.parametrize(
    ("message", "said"),
    [
        pytest.param(TRACE, NO_DATA, id="at-the-end"),
        pytest.param(BY_RANK, NO_DATA, id="behind-the-rank"),
        pytest.param(BY_RANK + TERMINATE, NO_DATA, id="before-an-abort"),
        pytest.param(BY_RANK + DESTROY, NO_DATA, id="before-a-warning-of-torch"),
        pytest.param(TRACE + TRACKER, NO_DATA, id="before-a-warning-of-python"),
        pytest.param(TRACE + "epoch 3\nshape (3, 4)\n", NO_DATA, id="whose-text-has-several-lines"),
        pytest.param(
            TRACE + "\nDuring\n\n" + TRACE.replace("1001", "7"), NO_DATA.replace("1001", "7"), id="of-two"
        ),
        pytest.param(
            TRACE + "Exception ignored in: <f>\n" + TRACE.replace("1001", "7"),
            NO_DATA,
            id="not-what-is-passed-over",
        ),
        pytest.param(TRACE + "epoch\n" * 50 + "Killed", "Killed", id="not-one-of-long-ago"),
        pytest.param(
            TRACE + "worker 1 failed with exit status 1: no data",
            "worker 1 failed with exit status 1: no data",
            id="not-before-the-sentence-of-a-launcher",
        ),
        pytest.param(TRACE + "trainer 0 (joined): no disk", "no disk", id="not-before-that-of-a-replica"),
        pytest.param(
            "Extension modules: numpy (total: 1)\n[rank1]: RuntimeError: x",
            "RuntimeError: x",
            id="without-a-head",
        ),
        pytest.param(
            "ain\n    raise KeyError(3)\nKeyError: 3\n" + TRACKER, "KeyError: 3", id="whose-head-is-cut-off"
        ),
        pytest.param(
            "  + Exception Group Traceback (most recent call last):\n"
            '  |   File "x", line 3, in <module>\n'
            "  | ExceptionGroup: two (2 sub-exceptions)\n"
            "  +-+---------------- 1 ----------------\n"
            "    | ValueError: a\n    +------------------------------------\n",
            "+------------------------------------",
            id="not-a-frame-of-a-group",
        ),
    ],
)
def test_the_exception_is_the_sentence(message: str, said: str):
    assert last_sentence(message) == said
