"""By which interface trainers on their nodes' network reach each other."""

import socket
import sys

import pytest

from fleet.environment import network
from fleet.environment.network import choose_interface, interface_to

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="interfaces are looked up as Linux tells them"
)

HOST = {"FLEET_HOST_NETWORK": "true"}


def has_ipv6() -> bool:
    """Whether there is a route to ::1; ``socket.has_ipv6`` says only that Python was built with IPv6."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            probe.connect(("::1", 6175))
    except OSError:
        return False
    return True


def test_the_interface_is_that_of_the_address_from_which_one_would_speak():
    assert interface_to("127.0.0.1", 6175) == "lo"


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_addresses_of_ipv6_are_known_too(tmp_path, monkeypatch):
    known = tmp_path / "if_inet6"
    known.write_text("00000000000000000000000000000001 01 80 10 80       lo6\n")
    monkeypatch.setattr(network, "_IPV6", known)
    assert interface_to("::1", 6175) == "lo6"


@pytest.mark.parametrize("host", ["no-such-host.invalid", "192.0.2.300"])
def test_a_host_that_is_unknown_leads_nowhere(host):
    assert interface_to(host, 6175) is None


def test_gloo_and_nccl_take_it_on_the_nodes_network_only():
    environ = dict(HOST)
    choose_interface("127.0.0.1", 6175, environ)
    assert environ == {**HOST, "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    environ = {}
    choose_interface("127.0.0.1", 6175, environ)
    assert environ == {}


def test_what_the_template_names_stays():
    environ = {**HOST, "NCCL_SOCKET_IFNAME": "ib0"}
    choose_interface("127.0.0.1", 6175, environ)
    assert environ == {**HOST, "NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "lo"}


def test_a_route_that_is_not_found_is_told(caplog):
    environ = dict(HOST)
    choose_interface("no-such-host.invalid", 6175, environ)
    assert environ == HOST
    assert "no interface of this node routes to no-such-host.invalid" in caplog.text


def test_a_name_without_an_address_is_waited_for_where_somebody_has_the_patience(monkeypatch, caplog):
    caplog.set_level("INFO")
    answers = iter([False, False, True])
    monkeypatch.setattr(network, "LOOK_SECONDS", 0.001)
    monkeypatch.setattr(network, "_has_address", lambda _: next(answers))
    environ = dict(HOST)
    choose_interface("localhost", 6175, environ, patience_seconds=60)
    assert environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert caplog.text.count("waiting for the address of localhost") == 1


def test_a_name_that_never_has_an_address_is_given_up(monkeypatch, caplog):
    monkeypatch.setattr(network, "LOOK_SECONDS", 0.001)
    environ = dict(HOST)
    choose_interface("no-such-host.invalid", 6175, environ, patience_seconds=0.01)
    assert environ == HOST
    assert "no interface of this node routes to no-such-host.invalid" in caplog.text
