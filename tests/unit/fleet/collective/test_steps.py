"""The steps that trainers compare."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from fleet.collective.rendezvous import Place
from fleet.collective.steps import Steps
from fleet.errors import ConfigurationError


def test_a_trainer_that_has_stepped_otherwise_is_named():
    texts: list[str] = []
    group = SimpleNamespace(place=Place(0, 2, "m", 1), agree=lambda *_: dict(enumerate(texts)))
    ours, theirs = (Steps(cast("Any", group)) for _ in range(2))
    for steps, rate in ((ours, 0.1), (theirs, 0.2)):
        steps.number = 1
        steps.note([{"lr": rate}])
        texts.append(steps._history.account.to_text())
    assert ours.digest != theirs.digest
    with pytest.raises(ConfigurationError, match=r"trainer 1 stepped with lr=0.2 in param group 0"):
        ours.compare("steps")
