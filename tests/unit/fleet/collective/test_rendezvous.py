"""How trainers of a collective job wait for one another to start."""

import socket
import sys

import pytest

from fleet.collective import rendezvous
from fleet.collective.rendezvous import Place, meet
from fleet.environment.deadlines import Deadlines
from fleet.errors import ConfigurationError, DeadlineExceededError

pytestmark = pytest.mark.timeout(60)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@pytest.mark.parametrize(
    ("rank", "said"),
    [
        pytest.param(0, r"trainer 1 did not come within", id="trainer-0-waits-for-the-others"),
        pytest.param(1, r"did not listen at 127.0.0.1:\d+ within", id="the-others-wait-for-trainer-0"),
    ],
)
def test_who_has_never_been_there_is_waited_for_by_a_deadline_of_its_own(rank, said, monkeypatch, caplog):
    monkeypatch.setattr(rendezvous, "TRY_SECONDS", 0.2)
    place = Place(rank, 2, "127.0.0.1", free_port())
    with pytest.raises(DeadlineExceededError, match=said) as raised:
        meet(place, Deadlines(deadline_seconds=0.1, start_deadline_seconds=1.5))
    seconds = float(str(raised.value).split("within ")[1].split(" s")[0])
    assert seconds >= 1.0, "not that for a lost one"
    assert "FLEET_START_DEADLINE_SECONDS" in str(raised.value)
    assert caplog.text.count("waiting for trainer") >= 1


def reaches(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 5).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(sys.platform != "linux", reason="only there 127.0.0.2 is an address of every machine")
def test_the_store_of_a_run_on_this_machine_listens_on_its_loopback_address_only():
    """torch's own listens on every interface, and knows no key."""
    port = free_port()
    store = meet(Place(0, 1, "127.0.0.1", port), Deadlines(deadline_seconds=5.0))
    assert reaches("127.0.0.1", port)
    assert not reaches("127.0.0.2", port)
    store.set("said", "so")
    assert store.get("said") == b"so"


def test_a_port_that_is_taken_is_told_with_the_reason():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=rf"cannot listen at 127.0.0.1:{port}: .*in use"):
            meet(Place(0, 1, "127.0.0.1", port), Deadlines(deadline_seconds=5.0))
