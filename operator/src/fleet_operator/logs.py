"""The operator's log formats: one record per line, including the job it concerns."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime


class TextFormatter(logging.Formatter):
    """Formats a record as text: time, level, job, logger and message."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line, followed by the traceback, if any."""
        job = getattr(record, "job", None)
        about = f"{job} " if job else ""
        line = f"{_moment(record)} {record.levelname} {about}{record.name}: {record.getMessage()}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object: time, level, logger, message and, if any, job and exception."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of JSON."""
        fields = {
            "time": _moment(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "job": getattr(record, "job", None),
            "message": record.getMessage(),
            "exception": self.formatException(record.exc_info) if record.exc_info else None,
        }
        return json.dumps({name: value for name, value in fields.items() if value is not None})


def configure_logging(level: str, form: str) -> None:
    """Log to standard error, replacing any previous configuration."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # kopf logs the end of each watch at level INFO; only its warnings and errors matter.
    logging.getLogger("kopf").setLevel(max(logging.WARNING, root.level))


def _moment(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
