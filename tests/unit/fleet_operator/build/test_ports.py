"""Ports on a node's network: known before a pod is there, and never shared within a job."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_operator.api import FleetJob, FleetJobStatus, PortBlocks, Role, StoredLedger, StoredRole
from fleet_operator.build import ClusterHosts, ReplicaPorts, Start, assigned_ports, replica_ports, role_env
from fleet_operator.build.ports import first_ports
from tests.support import jobs


def on_host(first: int = 20000, last: int = 20999, uid: str = "u", **spec: Any) -> FleetJob:
    network = {"hostNetwork": True, "portRange": {"first": first, "last": last}}
    return jobs.job(jobs.manifest(network=network, **spec), uid=uid)


def all_ports(job: FleetJob) -> list[int]:
    found: list[int] = []
    for role in job.roles:
        for index in range(job.replicas(role)):
            ports = replica_ports(job, role, index)
            found += range(ports.first, ports.metrics + 1)
    return found


def test_a_pod_of_its_own_network_has_the_manifests_ports():
    assert replica_ports(jobs.job(), Role.PSERVER, 1) == ReplicaPorts(6174, 6180)


@settings(max_examples=30)
@given(servers=st.integers(1, 5), trainers=st.integers(1, 5), uid=st.text(), spare=st.integers(0, 50))
def test_no_two_replicas_of_a_job_share_a_port_and_none_is_out_of_range(servers, trainers, uid, spare):
    last = 20000 + 2 * (servers + trainers) - 1 + spare
    ports = all_ports(on_host(last=last, uid=uid, pservers=servers, trainers=trainers))
    assert len(ports) == len(set(ports))
    assert min(ports) >= 20000
    assert max(ports) <= last


def test_ports_stay_when_trainers_are_added():
    bounds = {"minReplicas": 1, "maxReplicas": 5}
    before, after = (on_host(syncMode="Async", trainer={"replicas": number, **bounds}) for number in (2, 5))
    assert all_ports(before) == all_ports(after)[: len(all_ports(before))]


def test_jobs_begin_at_different_places_of_one_range():
    assert len({min(all_ports(on_host(uid=f"job-{number}"))) for number in range(20)}) > 10


def test_the_environment_lists_each_servers_own_port():
    job = on_host()
    env = role_env(job, Role.PSERVER, 1, ClusterHosts(job))
    ports = [replica_ports(job, Role.PSERVER, index).first for index in (0, 1)]
    assert env["PADDLE_PSERVERS_IP_PORT_LIST"] == (
        f"digits-pserver-0.digits.default.svc:{ports[0]},digits-pserver-1.digits.default.svc:{ports[1]}"
    )
    assert env["PADDLE_PORT"] == str(ports[1])
    assert env["FLEET_METRICS_PORT"] == str(replica_ports(job, Role.PSERVER, 1).metrics)
    assert "PADDLE_PSERVER_IPS" not in env, "it would mean one port for all servers"


def test_processes_find_each_other_at_their_own_ports():
    network = {"hostNetwork": True, "portRange": {"first": 20000, "last": 20999}}
    job = jobs.job(jobs.collective_manifest(network=network, trainer={"replicas": 2, "nprocPerNode": 2}))
    env = role_env(job, Role.TRAINER, 1, ClusterHosts(job))
    first, second = (replica_ports(job, Role.TRAINER, index).first for index in (0, 1))
    assert [each.rpartition(":")[2] for each in env["PADDLE_TRAINER_ENDPOINTS"].split(",")] == [
        str(port) for port in (first, first + 1, second, second + 1)
    ]
    assert env["MASTER_PORT"] == env["PET_MASTER_PORT"] == str(first)


@pytest.mark.parametrize(
    ("servers", "trainer"),
    [
        pytest.param(2, {"replicas": 2}, id="servers"),
        pytest.param(0, {"replicas": 2, "nprocPerNode": 2}, id="processes"),
        pytest.param(0, {"replicas": 1000, "nprocPerNode": 8}, id="thousands-by-a-pattern"),
        pytest.param(0, {"replicas": 1000, "nprocPerNode": 1}, id="thousands-of-one-slot"),
    ],
)
def test_what_pods_were_told_is_read_back_and_told_to_those_that_come_later(
    servers: int, trainer: dict[str, Any]
):
    role = Role.PSERVER if servers else Role.TRAINER
    made = jobs.manifest if servers else jobs.collective_manifest
    network = {"hostNetwork": True, "portRange": {"first": 20000, "last": 39999}}
    job = jobs.job(made(network=network, trainer=trainer))
    hosts = ClusterHosts(job)
    told = assigned_ports(role_env(job, Role.TRAINER, 1, hosts))
    assert list(told) == [replica_ports(job, role, index).first for index in range(len(told))]
    assert len(told) == job.replicas(role)
    other = tuple(port + 7 for port in told)
    env = role_env(job, Role.TRAINER, 0, hosts, Start(ports=other))
    assert assigned_ports(env) == other
    own = replica_ports(job, role, 1, other)
    assert own == ReplicaPorts(other[1], other[1] + job.nproc_per_node)
    uneven = (*other[:-1], other[-1] + 5000)
    assert assigned_ports(role_env(job, Role.TRAINER, 0, hosts, Start(ports=uneven))) == uneven


def test_ports_of_another_number_of_replicas_are_of_no_use():
    job = on_host()
    assert replica_ports(job, Role.PSERVER, 0, (30000,)) == replica_ports(job, Role.PSERVER, 0)
    assert assigned_ports({"PADDLE_PSERVERS_IP_PORT_LIST": "elsewhere"}) == ()
    assert assigned_ports({}) == ()


def test_the_ledgers_ports_are_the_jobs_whatever_this_build_would_choose():
    job = jobs.job(jobs.manifest(network={"hostNetwork": True, "portRange": {"first": 20000, "last": 20999}}))
    roles = {
        "pserver": StoredRole(ports=PortBlocks(first=20500, apart=2)),
        "trainer": StoredRole(ports=PortBlocks(first=20600, apart=2)),
    }
    started = job.with_status(FleetJobStatus(ledger=StoredLedger(roles=roles)))
    assert first_ports(started, Role.PSERVER) == [20500, 20502]
    assert replica_ports(started, Role.PSERVER, 1) == ReplicaPorts(20502, 20503)
    assert replica_ports(started, Role.TRAINER, 1) == ReplicaPorts(20602, 20603)
    assert replica_ports(started, Role.PSERVER, 1, (20010, 20020)).first == 20020, "peers know that one"
