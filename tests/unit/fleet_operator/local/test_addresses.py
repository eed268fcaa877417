"""Claims of loopback addresses; they bind sockets, as the thing itself does."""

from __future__ import annotations

import errno
import os
import socket
import sys

import pytest

from fleet_operator.api import Role, parse_job
from fleet_operator.local import addresses as module
from fleet_operator.local.addresses import (
    AddressError,
    LocalHosts,
    addresses,
    claim_addresses,
    claim_ports,
    job_ports,
    network,
)
from tests.support.local import job_manifest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="all of 127.0.0.0/8 is there on Linux")

PORT = 16174


@pytest.fixture
def environ(tmp_path):
    return {"XDG_RUNTIME_DIR": str(tmp_path)}


def test_networks_never_meet_that_of_localhost():
    seen = {network(number) for number in range(254 * 256)}
    assert len(seen) == 254 * 256
    assert all(1 <= int(prefix.split(".")[1]) <= 254 for prefix in seen)
    assert network(254 * 256) == network(0)


def test_a_claim_gives_each_pod_its_own_address(environ):
    claim = claim_addresses([[PORT], [PORT], [PORT]], start=300, environ=environ)
    assert claim.hosts == addresses(network(300), 3) == ("127.2.44.2", "127.2.44.3", "127.2.44.4")
    claim.release()


def test_a_claimed_network_is_passed_over_until_it_is_released(environ):
    first = claim_addresses([[PORT]], start=5, environ=environ)
    second = claim_addresses([[PORT]], start=5, environ=environ)
    assert second.hosts == addresses(network(6), 1)
    first.release()
    third = claim_addresses([[PORT]], start=5, environ=environ)
    assert third.hosts == first.hosts
    for claim in (second, third):
        claim.release()


def test_who_inherits_the_descriptors_keeps_the_claim(environ):
    first = claim_addresses([[PORT]], start=5, environ=environ)
    kept = [os.dup(descriptor) for descriptor in first.descriptors]
    first.release()
    second = claim_addresses([[PORT]], start=5, environ=environ)
    assert second.hosts != first.hosts
    second.release()
    for descriptor in kept:
        os.close(descriptor)


def test_a_network_on_which_somebody_listens_is_passed_over(environ):
    with socket.create_server((addresses(network(5), 1)[0], PORT)):
        claim = claim_addresses([[PORT]], start=5, environ=environ)
        assert claim.hosts == addresses(network(6), 1)
        claim.release()


def test_a_port_that_is_taken_everywhere_is_named(environ):
    with (
        socket.create_server(("", PORT)),
        pytest.raises(AddressError, match=rf"{PORT} is in use on all addresses .* spec\.pserver\.port"),
    ):
        claim_addresses([[PORT]], start=5, environ=environ)


def test_missing_addresses_are_answered_with_the_command_that_adds_them(environ, monkeypatch):
    def nothing(host, port):
        return OSError(errno.EADDRNOTAVAIL, "not available")

    monkeypatch.setattr(module, "bind_error", nothing)
    with pytest.raises(
        AddressError, match=r"for i in \$\(seq 2 4\); do sudo ifconfig lo0 alias 127\.0\.0\.\$i up"
    ):
        claim_addresses([[PORT]] * 3, start=5, environ=environ)


def test_named_aliases_serve_where_only_they_exist(environ, monkeypatch):
    def only_aliases(host, port):
        return None if host in ("127.0.0.2", "127.0.0.3") else OSError(errno.EADDRNOTAVAIL, "not available")

    monkeypatch.setattr(module, "bind_error", only_aliases)
    claim = claim_addresses([[PORT]] * 2, start=5, environ=environ)
    assert claim.hosts == ("127.0.0.2", "127.0.0.3")
    claim.release()


def test_more_replicas_than_a_network_holds_are_refused(environ):
    with pytest.raises(AddressError, match="the job has 254 replicas; a run on this machine has at most 253"):
        claim_addresses([[PORT]] * 254, start=5, environ=environ)


def test_a_folder_that_is_somebody_elses_is_refused(environ, tmp_path, monkeypatch):
    (tmp_path / f"fleetjob-{os.getuid()}").symlink_to("/")
    with pytest.raises(AddressError, match="is not a folder of user"):
        claim_addresses([[PORT]], start=5, environ=environ)


def test_ports_for_a_rendezvous_are_those_wanted_or_the_next_free_ones(environ):
    first = claim_ports(PORT, 2, environ=environ)
    second = claim_ports(PORT, 2, environ=environ)
    assert (first.port, second.port) == (PORT, PORT + 10)
    first.release()
    with socket.create_server(("", PORT + 1)):
        third = claim_ports(PORT, 2, environ=environ)
    assert third.port == PORT + 20
    for claim in (second, third):
        claim.release()


def test_the_ports_of_a_parameter_server_job():
    job = parse_job(job_manifest("pass", trainers=2))
    assert job_ports(job) == {
        (Role.PSERVER, 0): (6174, 6180),
        (Role.TRAINER, 0): (6180,),
        (Role.TRAINER, 1): (6180,),
    }


def test_the_ports_of_a_collective_job_are_one_per_slot():
    manifest = job_manifest("pass", server=None)
    manifest["spec"]["trainer"]["nprocPerNode"] = 3
    assert job_ports(parse_job(manifest)) == {(Role.TRAINER, 0): (6175, 6176, 6177, 6180)}


def test_hosts_by_replica():
    assert LocalHosts({(Role.TRAINER, 1): "127.1.1.3"})(Role.TRAINER, 1) == "127.1.1.3"
