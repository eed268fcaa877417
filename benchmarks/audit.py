"""The requests to an API server, read from its audit log."""

import json
from collections import Counter
from datetime import datetime
from pathlib import Path

__all__ = ["AuditLog", "is_write", "leases"]

READS = ("get", "list", "watch")

Calls = Counter[str]
"""The number of requests by verb and resource, such as ``create pods`` or ``update fleetjobs/status``."""


class AuditLog:
    """A reader of an API server's growing audit log.

    Parameters
    ----------
    path : Path
        The log, with one JSON object per line, written when a request is complete. A watch is one request,
        which is complete when it ends.
    account : str
        The prefix of the user names whose requests are counted.
    """

    def __init__(self, path: Path, account: str) -> None:
        self._path = path
        self._account = account
        self._read_bytes = 0
        self._calls: Calls = Counter()
        self.renewals: list[float] = []
        """The times at which the Lease was renewed, in seconds since the epoch."""

    def calls(self) -> Calls:
        """Return all requests in the log so far."""
        with self._path.open("rb") as log:
            log.seek(self._read_bytes)
            for line in log:
                if not line.endswith(b"\n"):  # the line is not complete yet
                    break
                self._read_bytes += len(line)
                self._count(line)
        return self._calls.copy()

    def _count(self, line: bytes) -> None:
        call = json.loads(line)
        if call["user"]["username"].startswith(self._account):
            what = call.get("objectRef") or {}
            resource = "/".join(filter(None, (what.get("resource", "other"), what.get("subresource"))))
            self._calls[f"{call['verb']} {resource}"] += 1
            if (call["verb"], resource) == ("update", "leases") and "requestReceivedTimestamp" in call:
                self.renewals.append(datetime.fromisoformat(call["requestReceivedTimestamp"]).timestamp())


def is_write(call: str) -> bool:
    """Return whether a verb can change an object."""
    return call.split()[0] not in READS


def leases(calls: Calls) -> int:
    """Return the number of requests for the Lease of the leader election."""
    return sum(number for call, number in calls.items() if call.endswith(" leases"))
