"""The environment contract: what ``contract/env`` says is what the replicas get, no more and no less."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from fleet.environment.endpoints import split_endpoints
from fleet_operator.api import FleetJob, Role, parse_job
from fleet_operator.build import (
    ClusterHosts,
    Start,
    assigned_ports,
    build_pod,
    overwritten_sentence,
    replica_ports,
    role_env,
)
from fleet_operator.plan.model import Attempt
from tests.support import jobs
from tests.support.local import job_manifest
from tests.support.manifests import at
from tests.support.pods import template

CONTRACT = sorted((Path(__file__).parents[4] / "contract" / "env").glob("*.yaml"))


def replicas(path: Path) -> tuple[FleetJob, list[tuple[Role, int, dict[str, str]]]]:
    document = yaml.safe_load(path.read_text())
    assert all(each["env"]["FLEET_JOB_KEY"] == document["key"] for each in document["replicas"])
    job = parse_job(document["job"])
    return job, [(Role(each["role"]), each["index"], each["env"]) for each in document["replicas"]]


def test_the_contract_has_jobs_of_both_modes_and_of_several_sizes():
    assert [path.stem for path in CONTRACT] == [
        *(f"{mode}-{size}" for mode in ("collective", "parameter-server") for size in ("1x1", "2x2", "3x5")),
        "parameter-server-elastic",
        "parameter-server-geo",
        "parameter-server-tls",
    ]


@pytest.mark.parametrize("path", CONTRACT, ids=lambda path: path.stem)
def test_role_env_is_the_contract(path):
    job, expected = replicas(path)
    assert [(role, index) for role, index, _ in expected] == [
        (role, index) for role in job.roles for index in range(job.replicas(role))
    ]
    for role, index, env in expected:
        assert role_env(job, role, index, ClusterHosts(job), Start(key=env["FLEET_JOB_KEY"])) == env


def test_a_job_of_an_operator_without_keys_has_none():
    job = jobs.job()
    assert "FLEET_JOB_KEY" not in role_env(job, Role.TRAINER, 0, ClusterHosts(job))


@pytest.mark.parametrize("path", CONTRACT, ids=lambda path: path.stem)
def test_each_replica_finds_itself_in_the_lists_to_the_letter(path):
    _, expected = replicas(path)
    for role, index, env in expected:
        assert env["POD_IP"] == env["PADDLE_CURRENT_IP"]
        if role is Role.PSERVER:
            assert env["PADDLE_PSERVER_IPS"].split(",")[index] == env["POD_IP"]
            endpoint = f"{env['POD_IP']}:{env['PADDLE_PORT']}"
            assert env["PADDLE_PSERVERS_IP_PORT_LIST"].split(",")[index] == endpoint
        if "RANK" in env:
            assert env["PADDLE_TRAINER_ENDPOINTS"].split(",")[index] == env["PADDLE_CURRENT_ENDPOINT"]
            assert env["PADDLE_CURRENT_ENDPOINT"] == f"{env['POD_IP']}:{env['MASTER_PORT']}"


@pytest.mark.parametrize("path", CONTRACT, ids=lambda path: path.stem)
def test_no_mode_sees_the_other_modes_variables(path):
    """Set at all, PADDLE_TRAINER_IPS makes the original choose its NCCL path."""
    _, expected = replicas(path)
    collective = path.stem.startswith("collective")
    for _, _, env in expected:
        assert "PADDLE_TRAINER_IPS" not in env
        assert ("PADDLE_PSERVER_IPS" in env) is not collective
        assert ("MASTER_ADDR" in env) is collective


def test_hosts_may_be_addresses():
    job = jobs.job()
    env = role_env(job, Role.PSERVER, 1, lambda role, index: f"127.8.{len(role.value)}.{index + 1}")
    assert env["PADDLE_PSERVERS_IP_PORT_LIST"] == "127.8.7.1:6174,127.8.7.2:6174"
    assert env["POD_IP"] == "127.8.7.2"


def test_ports_are_the_manifests():
    job = jobs.job(jobs.manifest(pserver={"replicas": 1, "port": 7000}))
    env = role_env(job, Role.TRAINER, 0, ClusterHosts(job))
    assert (env["PADDLE_PORT"], env["PADDLE_PSERVER_PORT"]) == ("7000", "7000")


def test_a_replica_knows_how_often_it_was_started_before():
    job = jobs.job()
    assert role_env(job, Role.TRAINER, 0, ClusterHosts(job), restarts=3)["FLEET_RESTARTS"] == "3"


def test_a_pod_of_several_processes_gets_nothing_that_differs_between_them():
    job = jobs.job(jobs.collective_manifest(trainer={"replicas": 2, "devices": {"count": 8}}))
    env = role_env(job, Role.TRAINER, 1, ClusterHosts(job))
    assert not {"RANK", "LOCAL_RANK", "PADDLE_TRAINER_ID", "PADDLE_CURRENT_ENDPOINT"} & env.keys()
    assert (env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"], env["PET_NPROC_PER_NODE"]) == ("16", "8", "8")


@pytest.mark.parametrize(("replicas", "slots", "port"), [(1000, 8, "[6175-6182]"), (1000, 1, "6175")])
def test_thousands_of_processes_are_told_by_a_pattern(replicas, slots, port):
    job = jobs.job(jobs.collective_manifest(trainer={"replicas": replicas, "nprocPerNode": slots}))
    hosts = ClusterHosts(job)
    env = role_env(job, Role.TRAINER, 7, hosts)
    listed = env["PADDLE_TRAINER_ENDPOINTS"]
    assert listed == f"digits-trainer-[0-{replicas - 1}].digits.default.svc:{port}"
    assert split_endpoints(listed) == [
        f"{hosts(Role.TRAINER, node)}:{6175 + slot}" for node in range(replicas) for slot in range(slots)
    ]
    assert len(str(env)) < 4096


@pytest.mark.parametrize(("replicas", "slots"), [(1000, 8), (1000, 1), (88, 8)])
def test_thousands_are_told_ports_that_differ_from_pod_to_pod(replicas, slots):
    network = {"hostNetwork": True, "portRange": {"first": 20000, "last": 28999}}
    trainer = {"replicas": replicas, "nprocPerNode": slots}
    job = jobs.job(jobs.collective_manifest(network=network, trainer=trainer))
    hosts = ClusterHosts(job)
    env = role_env(job, Role.TRAINER, 7, hosts)
    ports = [replica_ports(job, Role.TRAINER, node).first for node in range(replicas)]
    assert split_endpoints(env["PADDLE_TRAINER_ENDPOINTS"]) == [
        f"{hosts(Role.TRAINER, node)}:{ports[node] + slot}"
        for node in range(replicas)
        for slot in range(slots)
    ]
    assert len(env["PADDLE_TRAINER_ENDPOINTS"]) <= 4 << 10


@pytest.mark.parametrize("network", [{}, {"hostNetwork": True, "portRange": {"first": 20000, "last": 29999}}])
@pytest.mark.parametrize("replicas", [50, 700])
def test_a_pattern_stands_for_hundreds_of_servers(replicas, network):
    job = jobs.job(jobs.manifest(pserver={"replicas": replicas}, network=network))
    hosts = ClusterHosts(job)
    env = role_env(job, Role.TRAINER, 0, hosts)
    servers = range(replicas)
    assert split_endpoints(env["PADDLE_PSERVERS_IP_PORT_LIST"]) == [
        f"{hosts(Role.PSERVER, server)}:{replica_ports(job, Role.PSERVER, server).first}"
        for server in servers
    ]
    if not network:
        names = [hosts(Role.PSERVER, server) for server in servers]
        assert split_endpoints(env["PADDLE_PSERVER_IPS"]) == names
    assert len(str(env)) < 8 << 10
    assert ("[" in env["PADDLE_PSERVERS_IP_PORT_LIST"]) is (replicas == 700)
    ports = tuple(replica_ports(job, Role.PSERVER, server).first for server in servers)
    if network:
        assert assigned_ports(env) == ports


def test_names_that_no_pattern_can_tell_stay_a_list():
    job = jobs.job(jobs.collective_manifest(trainer={"replicas": 1000, "nprocPerNode": 8}))
    env = role_env(job, Role.TRAINER, 0, lambda _, index: f"10.{index >> 8}.{index & 255}.1")
    assert len(set(env["PADDLE_TRAINER_ENDPOINTS"].split(","))) == 8000


def test_collective_trainers_on_their_nodes_network_are_told_so():
    network = {"hostNetwork": True, "portRange": {"first": 20000, "last": 39999}}
    for said, expected in ((network, "true"), ({}, None)):
        job = jobs.job(jobs.collective_manifest(network=said))
        assert role_env(job, Role.TRAINER, 0, ClusterHosts(job)).get("FLEET_HOST_NETWORK") == expected


@pytest.mark.parametrize(
    ("deadline", "seconds"),
    [
        pytest.param(None, 3600, id="an-hour"),
        pytest.param(7200, 7200, id="the-manifests"),
        pytest.param(60, 900, id="not-less-than-torchrun-waits-by-itself"),
    ],
)
def test_torchrun_waits_for_pods_that_start_slowly_as_long_as_other_replicas_do(deadline, seconds):
    policy = {} if deadline is None else {"pendingDeadlineSeconds": deadline}
    job = jobs.job(jobs.collective_manifest(runPolicy=policy))
    told = role_env(job, Role.TRAINER, 0, ClusterHosts(job))["PET_RDZV_CONF"]
    assert told == f"timeout={seconds},join_timeout={seconds},read_timeout={seconds}"


def test_a_template_may_tell_torchrun_itself_how_to_find_the_others():
    env = [{"name": "PET_RDZV_CONF", "value": "timeout=5"}]
    job = jobs.job(jobs.collective_manifest(template=template({"env": env})))
    assert "PET_RDZV_CONF" not in role_env(job, Role.TRAINER, 0, ClusterHosts(job))
    (container,) = build_pod(job, Role.TRAINER, 0, Attempt(), ClusterHosts(job))["spec"]["containers"]
    assert [each["value"] for each in container["env"] if each["name"] == "PET_RDZV_CONF"] == ["timeout=5"]
    assert overwritten_sentence(job) is None


@pytest.mark.parametrize("seconds", [120, 0])
@pytest.mark.parametrize("plain", [jobs.collective_manifest(), jobs.manifest()], ids=["collective", "not"])
def test_a_trainer_is_told_the_grace_that_the_template_gives(plain, seconds):
    path = "spec.template.spec.terminationGracePeriodSeconds"
    for manifest, expected in ((at(path, seconds, plain), str(seconds)), (plain, None)):
        job = jobs.job(manifest)
        env = role_env(job, Role.TRAINER, 0, ClusterHosts(job))
        assert env.get("FLEET_GRACE_SECONDS") == expected


def variables(*names: str) -> list[dict[str, Any]]:
    return [{"name": name, "value": "3"} for name in names]


@pytest.mark.parametrize(
    ("server", "names", "fields"),
    [
        pytest.param(
            None, ["EPOCHS", "RANK"], ["trainer.template.spec.containers[0].env[1] (RANK)"], id="rank"
        ),
        pytest.param("", ["RANK", "OMP_NUM_THREADS", "FLEET_HEARTBEAT_SECONDS"], [], id="none-of-this-mode"),
        pytest.param(
            "",
            ["PADDLE_TRAINER_ID", "POD_IP"],
            [
                "pserver.template.spec.containers[0].env[1] (POD_IP)",
                "trainer.template.spec.containers[0].env[0] (PADDLE_TRAINER_ID)",
                "trainer.template.spec.containers[0].env[1] (POD_IP)",
            ],
            id="only-in-the-role-that-gets-it",
        ),
    ],
)
def test_what_a_template_sets_in_vain_is_named_by_its_field(server, names, fields):
    sentence = overwritten_sentence(parse_job(job_manifest("", server=server, env=variables(*names))))
    told = None if sentence is None else sentence.partition(": ")[0]
    assert told == (", ".join(f"spec.{field}" for field in fields) or None)


def test_a_shared_template_is_told_once_and_every_container_is_looked_at():
    document = job_manifest("", env=variables("PADDLE_PSERVER_ID", "PADDLE_TRAINERS"))
    template = document["spec"]["trainer"].pop("template")
    del document["spec"]["pserver"]["template"]
    template["spec"]["initContainers"] = [{"name": "data", "image": "none", "env": variables("POD_IP")}]
    document["spec"]["template"] = template
    told = overwritten_sentence(parse_job(document))
    assert told is not None
    assert told.partition(": ")[0].split(", ") == [
        "spec.template.spec.initContainers[0].env[0] (POD_IP)",
        "spec.template.spec.containers[0].env[0] (PADDLE_PSERVER_ID)",
        "spec.template.spec.containers[0].env[1] (PADDLE_TRAINERS)",
    ]
