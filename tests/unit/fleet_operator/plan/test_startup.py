"""Startup policy: whether trainers may be created yet."""

import pytest

from fleet_operator.api import StartupPolicy
from fleet_operator.plan.startup import may_start_trainers
from tests.support.plans import Story, ended, pserver, trainer


@pytest.mark.parametrize(
    ("policy", "gang", "servers", "up", "expected"),
    [
        pytest.param(StartupPolicy.IN_ORDER, False, 2, 1, False, id="in-order-waits-for-the-last-server"),
        pytest.param(StartupPolicy.IN_ORDER, False, 2, 2, True, id="in-order-goes-on-when-all-are-ready"),
        pytest.param(StartupPolicy.IN_ORDER, False, 0, 0, True, id="without-servers-nobody-waits"),
        pytest.param(StartupPolicy.ANY_ORDER, False, 2, 0, True, id="any-order-never-waits"),
        pytest.param(StartupPolicy.IN_ORDER, True, 2, 0, True, id="a-gang-is-complete-or-gets-no-place"),
    ],
)
def test_may_start_trainers(policy, gang, servers, up, expected):
    assert may_start_trainers(policy, gang=gang, servers=servers, up=up) is expected


def test_a_server_that_runs_but_is_not_ready_holds_the_trainers_back():
    lines = Story().sees(pserver(0), pserver(1, ready=False))
    assert (
        "PodsCreated False WaitingForParameterServers: trainers are created once all parameter servers are"
        in (lines[1])
    )
    assert not any(line.startswith("create") for line in lines)


def test_any_order_creates_everything_at_once():
    lines = Story(startupPolicy="AnyOrder").sees(service=False)
    assert [line for line in lines if line.startswith("create")] == [
        "create Service digits",
        "create digits-pserver-0 0.0",
        "create digits-pserver-1 0.0",
        "create digits-trainer-0 0.0",
        "create digits-trainer-1 0.0",
    ]


def test_trainers_that_run_are_left_alone_when_a_server_stops_being_ready():
    story = Story()
    story.sees(pserver(0), pserver(1), trainer(0), trainer(1))
    assert story.sees(pserver(0), pserver(1, ready=False), trainer(0), trainer(1), after=1)[0] == (
        "Running pservers 1/2 trainers 2/2 restarts 0 failures 0"
    )


def test_a_trainer_that_starts_again_waits_for_its_servers_too():
    story = Story()
    story.sees(pserver(0), pserver(1), trainer(0), trainer(1))
    story.sees(pserver(0), pserver(1, ready=False), trainer(0), ended(trainer(1), 1))
    lines = story.sees(pserver(0), pserver(1, ready=False), trainer(0), after=5)
    assert not any("create " in line for line in lines)
    assert "create digits-trainer-1 0.1" in story.sees(pserver(0), pserver(1), trainer(0), after=6)
