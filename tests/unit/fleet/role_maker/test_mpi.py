"""A rank under mpirun becomes a role: even ranks serve, odd ranks train.

The other ranks are threads here, as one machine cannot be several. A real mpirun runs in
tests/runtime/role_maker/test_mpirun.py.
"""

import contextlib
import socket
import sys
import threading
from functools import partial
from typing import Any

import pytest

from fleet import role_maker
from fleet.errors import RoleError
from fleet.role_maker import MPISymmetricRoleMaker, Role
from fleet.role_maker.mpi import World, connect
from tests.support.threads import at_once


class Ranks:
    """So many ranks, each in a thread; rank i is on the i-th machine of those that are given."""

    def __init__(self, size: int, machines: str = "") -> None:
        self.size = size
        self.machines = machines or "a" * size
        self._records: dict[int, dict[str, Any]] = {}
        self._all_there = threading.Barrier(size)

    def of(self, rank: int) -> "OneRank":
        return OneRank(self, rank)

    def gather(self, rank: int, record: dict[str, Any]) -> list[dict[str, Any]]:
        self._records[rank] = {**record, "machine": self.machines[rank]}
        self._all_there.wait(10)
        return [self._records[each] for each in range(self.size)]


class OneRank(World):
    def __init__(self, ranks: Ranks, rank: int) -> None:
        self._ranks, self.rank, self.size = ranks, rank, ranks.size

    def allgather(self, record: Any) -> list[dict[str, Any]]:
        return self._ranks.gather(self.rank, record)


def roles(size: int, *environs: dict[str, str], machines: str = "") -> list[Role]:
    """Return the role of each rank; ranks without an environment of their own have the last one given."""
    ranks, given = Ranks(size, machines), environs or ({},)
    return at_once(
        *(
            lambda rank=rank: MPISymmetricRoleMaker(lambda: ranks.of(rank)).generate_role(
                given[min(rank, len(given) - 1)]
            )
            for rank in range(size)
        )
    )


def test_even_ranks_serve_and_odd_ranks_train():
    made = roles(4)
    assert [(role.is_server, role.index, role.worker_num) for role in made] == [
        (True, 0, 2),
        (False, 0, 2),
        (True, 1, 2),
        (False, 1, 2),
    ]
    [servers] = {role.server_endpoints for role in made}
    assert [role.current_endpoint for role in made] == [servers[0], "", servers[1], ""]


def test_the_originals_spelling_is_the_same_class():
    assert role_maker.MPISymetricRoleMaker is role_maker.MPISymmetricRoleMaker


@pytest.mark.parametrize(("size", "found"), [(1, "has 1 rank;"), (3, "has 3 ranks;")])
def test_a_number_of_ranks_that_is_not_even_is_refused(size, found):
    with pytest.raises(RoleError, match=f"{found} expected an even number.*mpirun -np {size + 1}"):
        roles(size)


def test_ranks_of_one_machine_serve_on_loopback_and_those_of_several_on_their_addresses():
    assert {each.partition(":")[0] for each in roles(4)[1].server_endpoints} == {"127.0.0.1"}
    environs = [{"POD_IP": f"10.0.0.{rank}"} for rank in range(4)]
    [servers] = {role.server_endpoints for role in roles(4, *environs, machines="abab")}
    assert [each.partition(":")[0] for each in servers] == ["10.0.0.0", "10.0.0.2"]


def test_a_loopback_address_is_refused_where_ranks_are_on_several_machines():
    with pytest.raises(RoleError, match=r"rank 1 on b has no address except 127\.0\.1\.1.*POD_IP"):
        roles(2, {"POD_IP": "10.0.0.1"}, {"POD_IP": "127.0.1.1"}, machines="ab")


def test_all_ranks_have_one_key_and_one_uid_which_rank_zero_makes():
    made = roles(4)
    assert len({role.job.key for role in made}) == len({role.job.uid for role in made}) == 1
    assert len(made[0].job.key) == 32
    assert roles(2)[0].job.key != made[0].job.key


def test_the_key_and_the_uid_of_the_environment_are_those_of_all():
    given = {"FLEET_JOB_KEY": "6b" * 32, "FLEET_JOB_UID": "digits-1"}
    assert {(role.job.key.hex(), role.job.uid) for role in roles(2, given)} == {("6b" * 32, "digits-1")}


@pytest.mark.parametrize(("having", "lacking"), [(0, 1), (1, 0)])
def test_a_key_that_only_some_ranks_have_is_refused(having, lacking):
    environs = [{"FLEET_JOB_KEY": "6b" * 32} if rank == having else {} for rank in (0, 1)]
    with pytest.raises(
        RoleError, match=f"set on rank {having} but not on rank {lacking}; expected all ranks"
    ):
        roles(2, *environs)


def test_a_key_that_was_given_does_not_travel():
    sent = []

    class Listening(OneRank):
        def allgather(self, record: Any) -> list[dict[str, Any]]:
            sent.append(record)
            return super().allgather(record)

    ranks, given = Ranks(2), {"FLEET_JOB_KEY": "6b" * 32}
    makers = [MPISymmetricRoleMaker(partial(Listening, ranks, rank)) for rank in (0, 1)]
    at_once(*(partial(maker.generate_role, given) for maker in makers))
    assert "6b6b" not in str(sent)


def test_each_rank_keeps_its_port_until_all_have_told_theirs():
    """Otherwise the system gives one port to two ranks of a machine once in a while."""
    free: list[int] = []

    class Looking(OneRank):
        def allgather(self, record: Any) -> list[dict[str, Any]]:
            with socket.socket() as other:
                if other.connect_ex(("127.0.0.1", record["port"])) == 0:
                    raise AssertionError("a trainer would take it for the server")
            with contextlib.suppress(OSError), socket.create_server(("", record["port"])):
                free.append(record["port"])
            return super().allgather(record)

    ranks = Ranks(2)
    at_once(*(MPISymmetricRoleMaker(partial(Looking, ranks, rank)).generate_role for rank in (0, 1)))
    assert free == []


def test_without_mpi4py_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(RoleError, match=r"needs mpi4py.*pip install 'fleet-trainer\[mpi\]'"):
        connect()
