"""What the processes of an elastic job must have in common, and which modes can have such a job."""

import pytest

from fleet.errors import ConfigurationError
from fleet.parameter_server.facts import elastic_facts
from fleet.parameter_server.modes import Async, Geo, HalfAsync, Sync


@pytest.mark.parametrize("mode", [Async(), HalfAsync(), Geo(), Sync()], ids=lambda mode: mode.name)
def test_a_job_with_a_fixed_number_of_trainers_has_no_such_facts(mode):
    assert elastic_facts(mode, 2, None) == {}


@pytest.mark.parametrize("mode", [Async(dc_asgd=True), HalfAsync()], ids=lambda mode: mode.name)
def test_the_bound_takes_the_place_of_the_number(mode):
    assert elastic_facts(mode, 1, 3) == elastic_facts(mode, 3, 3) == {"trainers": "up to 3"}


@pytest.mark.parametrize("mode", [Geo(), Sync()], ids=lambda mode: mode.name)
def test_a_mode_that_needs_a_fixed_number_is_refused_by_name(mode):
    with pytest.raises(ConfigurationError, match=rf"FLEET_MAX_TRAINERS is 3.*mode {mode.name}, which needs"):
        elastic_facts(mode, 1, 3)


def test_more_trainers_than_the_bound_are_refused():
    with pytest.raises(ConfigurationError, match=r"4 trainers .*FLEET_MAX_TRAINERS is 3"):
        elastic_facts(Async(), 4, 3)
