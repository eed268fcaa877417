"""How long a job waits is read in one place, alike with parameter servers, without them, and under mpirun."""

from dataclasses import asdict
from pathlib import Path

import pytest

import fleet
from fleet.environment import deadlines
from fleet.environment.deadlines import Deadlines
from fleet.errors import ConfigurationError
from fleet.parameter_server.settings import Settings


def test_deadlines_come_from_the_environment():
    deadlines = Deadlines.from_environ({"FLEET_HEARTBEAT_SECONDS": "0.5", "FLAGS_rpc_deadline": "4000"})
    assert (deadlines.silent_seconds, deadlines.deadline_seconds) == (2.5, 4.0)
    assert Deadlines.from_environ({}) == Deadlines(2.0, 180.0)


@pytest.mark.parametrize("value", ["0", "-1", "x", "nan", "inf"])
def test_a_deadline_that_is_no_time_is_named(value):
    with pytest.raises(
        ConfigurationError, match=f"FLAGS_rpc_deadline is '{value}'; expected a positive number"
    ):
        Deadlines.from_environ({"FLAGS_rpc_deadline": value})


def test_the_deadline_for_starting_is_that_for_a_lost_trainer_unless_it_is_told():
    told = {"FLAGS_rpc_deadline": "2500", "FLEET_START_DEADLINE_SECONDS": "600"}
    assert Deadlines.from_environ({"FLAGS_rpc_deadline": "2500"}).starting_seconds == 2.5
    assert Deadlines.from_environ(told).starting_seconds == 600
    shorter = Deadlines(deadline_seconds=180, start_deadline_seconds=30)
    assert shorter.starting_seconds == 180, "never a shorter one"


def test_a_runtime_with_servers_has_the_same_deadlines():
    environ = {
        "FLEET_HEARTBEAT_SECONDS": "0.5",
        "FLAGS_rpc_deadline": "4000",
        "FLEET_START_DEADLINE_SECONDS": "9",
    }
    found, settings = Deadlines.from_environ(environ), Settings.from_environ(environ)
    assert {name: getattr(settings, name) for name in asdict(found)} == asdict(found)


@pytest.mark.parametrize(
    "name", ["FLEET_HEARTBEAT_SECONDS", "FLAGS_rpc_deadline", "FLEET_START_DEADLINE_SECONDS"]
)
def test_a_deadline_is_read_in_one_module(name):
    sources = Path(fleet.__file__).parent.rglob("*.py")
    readers = [source for source in sources if f'"{name}"' in source.read_text()]
    assert readers == [Path(deadlines.__file__)]
