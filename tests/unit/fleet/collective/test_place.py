"""Where a trainer looks for the others, and how long."""

import pytest

from fleet.collective.rendezvous import Place, place_of
from fleet.errors import ConfigurationError
from fleet.role_maker import Role, RoleKind


def role(*endpoints: str) -> Role:
    return Role(RoleKind.WORKER, 1, 2, worker_endpoints=endpoints, is_collective=True)


def test_the_master_variables_say_where_the_store_is():
    place = place_of(role("a:1", "b:2"), {"MASTER_ADDR": "m", "MASTER_PORT": "6175"})
    assert place == Place(1, 2, "m", 6175, ("a:1", "b:2"))


def test_without_them_trainer_0_has_it():
    assert place_of(role("a:1", "b:2"), {}) == Place(1, 2, "a", 1, ("a:1", "b:2"))


def test_torchruns_agent_has_the_store_already():
    environ = {"MASTER_ADDR": "m", "MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    place = place_of(role(), environ | {"TORCHELASTIC_RESTART_COUNT": "2"})
    assert (place.launcher_has_store, place.launcher_restarts) == (True, "2")


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "MASTER_ADDR and MASTER_PORT are not set"),
        ({"MASTER_ADDR": "m", "MASTER_PORT": "x"}, "MASTER_PORT is 'x'; expected a port number"),
        ({"MASTER_ADDR": "m", "MASTER_PORT": "70000"}, "MASTER_PORT is '70000'; expected a port number"),
    ],
)
def test_a_place_that_cannot_be_found_is_named(environ, message):
    with pytest.raises(ConfigurationError, match=message):
        place_of(role(), environ)


def test_trainers_are_called_by_index_and_address():
    place = Place(0, 10, "m", 6175, ("a:1", "b:2"))
    assert place.names([1]) == "trainer 1 (b:2)"
    assert Place(1, 2, "m", 6175).names([0, 1]) == "trainer 0 (m:6175), trainer 1"
    assert place.names(list(range(10))).endswith("trainer 7 and 2 more")
