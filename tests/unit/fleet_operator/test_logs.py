from __future__ import annotations

import json
import logging
import sys

import pytest

from fleet_operator.logs import JsonFormatter, TextFormatter


@pytest.fixture
def record() -> logging.LogRecord:
    made = logging.LogRecord("fleet_operator.engine", logging.WARNING, "f.py", 1, "%d tries", (3,), None)
    made.created = 1767225600.25
    return made


def test_a_line_of_text_names_the_job(record: logging.LogRecord):
    record.job = "default/digits"
    expected = "2026-01-01T00:00:00.250Z WARNING default/digits fleet_operator.engine: 3 tries"
    assert TextFormatter().format(record) == expected


def test_a_line_of_text_without_a_job(record: logging.LogRecord):
    expected = "2026-01-01T00:00:00.250Z WARNING fleet_operator.engine: 3 tries"
    assert TextFormatter().format(record) == expected


def test_a_line_of_json_has_what_there_is(record: logging.LogRecord):
    record.job = "default/digits"
    assert json.loads(JsonFormatter().format(record)) == {
        "time": "2026-01-01T00:00:00.250Z",
        "level": "warning",
        "logger": "fleet_operator.engine",
        "job": "default/digits",
        "message": "3 tries",
    }


def test_an_exception_is_told(record: logging.LogRecord):
    try:
        int("broken")
    except ValueError:
        record.exc_info = sys.exc_info()
    assert TextFormatter().format(record).endswith("literal for int() with base 10: 'broken'")
    line = JsonFormatter().format(record)
    assert "\n" not in line
    assert json.loads(line)["exception"].endswith("'broken'")
