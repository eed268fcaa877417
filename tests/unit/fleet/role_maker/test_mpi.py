"""mpirun's environment becomes a role: even ranks serve, odd ranks train."""

from typing import Any

import pytest

from fleet import role_maker
from fleet.errors import DeadlineExceededError, RoleError
from fleet.rendezvous import Card, exchange
from fleet.role_maker import MPISymmetricRoleMaker
from tests.support.threads import at_once

ONE_HOST = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_MCA_ess_base_jobid": "390463489",
}
TWO_HOSTS = {
    **ONE_HOST,
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "390463488.0;tcp://10.0.0.5,172.17.0.1:36617;tcp6://[fd00::2]:49329",
}
ENDPOINTS = ("10.0.0.5:7000", "", "10.0.0.6:7001", "")


class Exchange:
    """Stands in for the others; remembers what it was asked with."""

    card: Card

    def __call__(self, card: Card) -> tuple[str, ...]:
        self.card = card
        return ENDPOINTS


def make(rank: int, environ: dict[str, str]) -> tuple[Any, Card]:
    exchanged = Exchange()
    maker = MPISymmetricRoleMaker(exchanged)
    return maker.generate_role({"OMPI_COMM_WORLD_RANK": str(rank), **environ}), exchanged.card


@pytest.mark.parametrize(
    ("rank", "is_server", "index", "endpoint"),
    [(0, True, 0, "10.0.0.5:7000"), (1, False, 0, ""), (2, True, 1, "10.0.0.6:7001"), (3, False, 1, "")],
)
def test_even_ranks_serve_and_odd_ranks_train(rank, is_server, index, endpoint):
    role, card = make(rank, ONE_HOST)
    assert (role.is_server, role.index, role.current_endpoint) == (is_server, index, endpoint)
    assert (role.worker_num, role.server_endpoints) == (2, ("10.0.0.5:7000", "10.0.0.6:7001"))
    assert role.job.uid == "390463489"
    assert card.serves is is_server


def test_the_originals_spelling_is_the_same_class():
    assert role_maker.MPISymetricRoleMaker is role_maker.MPISymmetricRoleMaker


@pytest.mark.parametrize(
    ("environ", "hosts", "port"),
    [
        pytest.param(ONE_HOST, ("127.0.0.1",), None, id="one-host"),
        pytest.param(TWO_HOSTS, ("10.0.0.5", "172.17.0.1"), None, id="mpiruns-host"),
        pytest.param({**TWO_HOSTS, "FLEET_MPI_RENDEZVOUS": "node-7:4000"}, ("node-7",), 4000, id="as-told"),
    ],
)
def test_rank_zero_is_looked_for_where_it_may_be(environ, hosts, port):
    card = make(1, environ)[1]
    assert (card.hosts, card.port) == (hosts, port)
    assert card.deadline_seconds == 180


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({"OMPI_COMM_WORLD_SIZE": "3"}, r"is '3'; expected an even number.*-np 4", id="odd"),
        pytest.param({"OMPI_COMM_WORLD_SIZE": ""}, "OMPI_COMM_WORLD_SIZE is empty", id="no-size"),
        pytest.param({"FLEET_MPI_RENDEZVOUS": "node"}, "FLEET_MPI_RENDEZVOUS is 'node'", id="no-port"),
        pytest.param({"FLAGS_rpc_deadline": "soon"}, "FLAGS_rpc_deadline is 'soon'", id="deadline"),
        pytest.param(
            {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "expected FLEET_MPI_RENDEZVOUS=host:port", id="nowhere"
        ),
    ],
)
def test_what_describes_no_rank_is_named(changes, words):
    with pytest.raises(RoleError, match=words):
        make(0, {**ONE_HOST, **changes})


def test_outside_of_mpirun_the_missing_variable_is_named():
    with pytest.raises(RoleError, match="OMPI_COMM_WORLD_SIZE is not set"):
        MPISymmetricRoleMaker(Exchange()).generate_role({})


def card(rank: int, job: str, size: int = 4, seconds: float = 20.0) -> Card:
    return Card(job, rank, size, ("127.0.0.1",), None, rank % 2 == 0, seconds)


def test_the_ranks_of_two_jobs_find_their_own_addresses():
    jobs = ("mpi-test-a", "mpi-test-b")
    cards = [card(rank, job) for rank in (3, 1, 0, 2) for job in jobs]
    results = dict(zip(cards, at_once(*(lambda c=each: exchange(c) for each in cards)), strict=True))
    for job in jobs:
        of_job = {results[each] for each in cards if each.job == job}
        (endpoints,) = of_job  # everybody has been told the same
        assert [endpoint != "" for endpoint in endpoints] == [True, False, True, False]
        assert endpoints[0] != endpoints[2]


def test_a_rank_that_never_comes_is_named_on_both_sides():
    with pytest.raises(
        DeadlineExceededError, match=r"rank 0 waited 0\.5 s on port \d+ for the ranks 1, 2, 3"
    ):
        exchange(card(0, "mpi-test-c", seconds=0.5))
    with pytest.raises(DeadlineExceededError, match=r"rank 1 found no rank 0.*FLEET_MPI_RENDEZVOUS"):
        exchange(card(1, "mpi-test-d", seconds=0.5))
