"""A server that is busy with a step for as long as a test likes, and may fail at it."""

import threading
from typing import Any

import pytest

from tests.support.parameter_server import Loopback

__all__ = ["SlowStep"]


class SlowStep:
    """The first server's steps end only when told to.

    Parameters
    ----------
    job : Loopback
    monkeypatch : pytest.MonkeyPatch
    fails : Exception, optional
        How they end, if not well.
    """

    def __init__(
        self, job: Loopback, monkeypatch: pytest.MonkeyPatch, fails: Exception | None = None
    ) -> None:
        self.begun = threading.Event()
        self.may_end = threading.Event()
        store = job.servers[0].server._shard.store
        rule = store._rule

        def slowly(*arguments: Any) -> None:
            self.begun.set()
            assert self.may_end.wait(60)
            if fails is not None:
                raise fails
            rule(*arguments)

        monkeypatch.setattr(store, "_rule", slowly)
