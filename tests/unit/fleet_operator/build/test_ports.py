"""Ports on a node's network: known before a pod is there, and never shared within a job."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_operator.api import FleetJob, Role
from fleet_operator.build import ClusterHosts, ReplicaPorts, replica_ports, role_env
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
    job = jobs.job(jobs.collective_manifest(network=network, trainer={"replicas": 2, "slotsPerPod": 2}))
    env = role_env(job, Role.TRAINER, 1, ClusterHosts(job))
    first, second = (replica_ports(job, Role.TRAINER, index).first for index in (0, 1))
    assert [each.rpartition(":")[2] for each in env["PADDLE_TRAINER_ENDPOINTS"].split(",")] == [
        str(port) for port in (first, first + 1, second, second + 1)
    ]
    assert env["MASTER_PORT"] == env["PET_MASTER_PORT"] == str(first)
