"""Where trainers meet, and which addresses are of this machine."""

from dataclasses import replace

import pytest

from fleet.collective.world import World, find_world, is_here, loopback_of, with_separate_port
from fleet.errors import ConfigurationError
from fleet.role_maker import Role, RoleKind

WORLD = World(0, 1, "127.0.0.1", 1)


def role(*endpoints: str) -> Role:
    return Role(RoleKind.WORKER, 1, 2, worker_endpoints=endpoints, is_collective=True)


def test_the_master_variables_locate_the_store():
    world = find_world(role("a:1", "b:2"), {"MASTER_ADDR": "m", "MASTER_PORT": "6175"})
    assert world == World(1, 2, "m", 6175, ("a:1", "b:2"))


def test_without_master_variables_trainer_0_has_the_store():
    assert find_world(role("a:1", "b:2"), {}) == World(1, 2, "a", 1, ("a:1", "b:2"))


def test_torchruns_agent_has_the_store():
    environ = {"MASTER_ADDR": "m", "MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    world = find_world(role(), environ | {"TORCHELASTIC_RESTART_COUNT": "2"})
    assert (world.launcher_has_store, world.launcher_restarts) == (True, "2")


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "MASTER_ADDR and MASTER_PORT are not set"),
        ({"MASTER_ADDR": "m..n", "MASTER_PORT": "1"}, "MASTER_ADDR is 'm..n'; expected a host name"),
        ({"MASTER_ADDR": "m", "MASTER_PORT": "x"}, "MASTER_PORT is 'x'; expected a port number"),
        ({"MASTER_ADDR": "m", "MASTER_PORT": "70000"}, "MASTER_PORT is '70000'; expected a port number"),
    ],
)
def test_a_store_that_cannot_be_found_is_named(environ, message):
    with pytest.raises(ConfigurationError, match=message):
        find_world(role(), environ)


def test_names_have_index_and_address():
    world = World(0, 10, "m", 6175, ("a:1", "b:2"))
    assert world.names([1]) == "trainer 1 (b:2)"
    assert World(1, 2, "m", 6175).names([0, 1]) == "trainer 0 (m:6175), trainer 1"
    assert world.names(list(range(10))).endswith("trainer 7 and 2 more")


@pytest.mark.usefixtures("process_group")
def test_the_scripts_store_keeps_its_port_unless_it_is_the_launchers():
    assert with_separate_port(WORLD).port != WORLD.port
    launched = replace(WORLD, launcher_has_store=True)
    assert with_separate_port(launched) is launched


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("host", ["::1", "trainer-0.invalid"], ids=["ipv6", "not-yet-known"])
def test_a_free_port_is_found_for_any_host(host):
    assert with_separate_port(replace(WORLD, host=host)).port > 1


@pytest.mark.usefixtures("process_group")
def test_a_process_group_of_other_ranks_is_refused():
    with pytest.raises(ConfigurationError, match=r"rank 0 of 1, but to fleet.init it is trainer 1 of 2"):
        with_separate_port(replace(WORLD, rank=1, size=2))


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("127.3.2.1", "127.3.2.1"),
        ("localhost", "127.0.0.1"),
        ("::1", "::1"),
        ("192.0.2.1", None),
    ],
)
def test_loopback_addresses(host: str, address: str | None):
    assert loopback_of(host) == address


def test_addresses_of_this_machine():
    assert is_here("127.0.0.1")
    assert not is_here("192.0.2.1")  # kept for documentation: nobody has it
