"""What the launchers start: environments from flags, and errors that name the flag."""

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleet import launch_ps
from fleet.errors import ConfigurationError
from fleet.launch import collective, flags
from fleet.launch.supervisor import Command
from fleet.process.resources import COPY_PAST_CACHES


def ps_commands(*argv: str, environ: dict[str, str] | None = None) -> list[Command]:
    return launch_ps.commands(launch_ps.parse([*argv, "train.py", "--lr", "0.1"]), environ or {})


def collective_commands(*argv: str, environ: dict[str, str] | None = None, visible: int = 0) -> list[Command]:
    arguments = collective.parse([*argv, "train.py"])
    environ = environ or {}
    place = collective.node(arguments, environ, lambda _: visible, lambda: True)
    return collective.commands(place, arguments, environ)


def test_servers_come_first_and_every_process_knows_its_place():
    server0, server1, worker0, _, worker2 = ps_commands("--worker_num", "3", "--start_port", "7000")
    assert (server0.name, server1.log_name, worker0.name, worker2.log_name) == (
        "server 0",
        "serverlog.1",
        "worker 0",
        "workerlog.2",
    )
    assert server1.environ["PADDLE_PSERVERS_IP_PORT_LIST"] == "127.0.0.1:7000,127.0.0.1:7001"
    assert (server1.environ["TRAINING_ROLE"], server1.environ["PADDLE_PSERVER_ID"]) == ("PSERVER", "1")
    assert (server1.environ["POD_IP"], server1.environ["PADDLE_PORT"]) == ("127.0.0.1", "7001")
    assert (worker2.environ["TRAINING_ROLE"], worker2.environ["PADDLE_TRAINER_ID"]) == ("TRAINER", "2")
    assert worker2.environ["PADDLE_TRAINERS_NUM"] == "3"
    assert "PADDLE_TRAINER_IPS" not in worker2.environ
    assert list(worker2.argv[1:]) == ["train.py", "--lr", "0.1"]


def test_hosts_and_one_port_are_told_only_where_they_say_the_same_as_the_list():
    assert "PADDLE_PSERVER_IPS" not in ps_commands()[0].environ
    environ = ps_commands("--endpoints", "127.0.0.1:6174,127.0.0.2:6174")[3].environ
    assert environ["PADDLE_PSERVER_IPS"] == "127.0.0.1,127.0.0.2"
    assert environ["PADDLE_PSERVER_PORT"] == "6174"


def test_a_role_that_the_launcher_was_started_with_does_not_leak():
    inherited = {"PADDLE_TRAINER_ENDPOINTS": "a:1", "RANK": "3", "HOME": "/home/me", "FLEET_JOB_UID": "7"}
    environ = ps_commands(environ=inherited)[0].environ
    assert "PADDLE_TRAINER_ENDPOINTS" not in environ
    assert "RANK" not in environ
    assert (environ["HOME"], environ["FLEET_JOB_UID"]) == ("/home/me", "7")


TORCHRUN = {
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": "none",
    "PET_RDZV_BACKEND": "c10d",
    **dict.fromkeys(("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE"), "7"),
    "ROLE_NAME": "default",
}


@pytest.mark.parametrize("started", [ps_commands, collective_commands])
def test_what_a_surrounding_torchrun_says_of_its_own_workers_does_not_leak(started):
    assert not any(command.environ.items() & TORCHRUN.items() for command in started(environ=TORCHRUN))


def test_processes_that_share_memory_copy_past_the_caches_unless_the_user_says_otherwise():
    assert all(command.environ.items() >= COPY_PAST_CACHES.items() for command in ps_commands())
    own = {"GLIBC_TUNABLES": "glibc.malloc.check=1"}
    assert all(command.environ.items() >= own.items() for command in ps_commands(environ=own))
    assert not any("GLIBC_TUNABLES" in command.environ for command in collective_commands())


def test_processes_share_the_cores_that_the_launcher_may_run_on(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)  # macOS has none
    own = {"OMP_NUM_THREADS": "5"}
    for started in (ps_commands, collective_commands):
        assert {command.environ["OMP_NUM_THREADS"] for command in started()} == {"1"}
        assert all(command.environ.items() >= own.items() for command in started(environ=own))


def test_all_processes_of_a_run_share_one_uid_and_two_runs_do_not():
    first, second = ps_commands(), ps_commands()
    assert len({command.environ["FLEET_JOB_UID"] for command in first}) == 1
    assert first[0].environ["FLEET_JOB_UID"] != second[0].environ["FLEET_JOB_UID"]


def test_all_processes_of_a_run_share_one_key_and_two_runs_do_not():
    first, second = ps_commands(), ps_commands()
    [key] = {command.environ["FLEET_JOB_KEY"] for command in first}
    assert len(bytes.fromhex(key)) == 32
    assert second[0].environ["FLEET_JOB_KEY"] != key
    assert "FLEET_JOB_KEY" in collective_commands()[0].environ


@pytest.mark.parametrize("given", [{"FLEET_JOB_KEY": "aa" * 32}, {"FLEET_JOB_KEY_FILE": "key"}])
def test_a_key_that_the_launcher_was_given_is_handed_on(given):
    environ = ps_commands(environ=given)[0].environ
    assert {name: value for name, value in environ.items() if name.startswith("FLEET_JOB_KEY")} == given


def test_certificates_are_handed_on_to_servers_and_workers():
    given = {"FLEET_TLS_DIR": "/etc/fleet/tls", "FLEET_TLS_SERVER_NAME": "digits"}
    assert all(command.environ.items() >= given.items() for command in ps_commands(environ=given))


def test_the_launchers_of_several_hosts_make_no_key_as_each_would_be_another():
    argv = ("--cluster_node_ips", "10.0.0.1,10.0.0.2", "--node_ip", "10.0.0.1", "--worker_num", "1")
    assert "FLEET_JOB_KEY" not in collective_commands(*argv)[0].environ


def test_what_is_printed_of_a_run_does_not_show_its_key(capsys):
    commands = ps_commands()
    flags.print_commands(commands, "logs")
    assert commands[0].environ["FLEET_JOB_KEY"] not in capsys.readouterr().out + repr(commands[0].argv)


def test_collective_workers_get_torchruns_variables_and_the_originals():
    first, second = collective_commands("--worker_num", "2", "--started_port", "7000")
    assert (second.environ["RANK"], second.environ["LOCAL_RANK"], second.environ["WORLD_SIZE"]) == (
        "1",
        "1",
        "2",
    )
    assert (first.environ["MASTER_ADDR"], first.environ["MASTER_PORT"]) == ("127.0.0.1", "7000")
    assert second.environ["PADDLE_TRAINER_ENDPOINTS"] == "127.0.0.1:7000,127.0.0.1:7001"
    assert second.environ["PADDLE_CURRENT_ENDPOINT"] == "127.0.0.1:7001"


def test_the_second_of_two_nodes_counts_on():
    nodes = ("--cluster_node_ips", "10.0.0.1,10.0.0.2", "--node_ip", "10.0.0.2", "--worker_num", "2")
    first, second = collective_commands(*nodes)
    assert (first.environ["RANK"], second.environ["RANK"], second.environ["LOCAL_RANK"]) == ("2", "3", "1")
    assert (first.environ["NODE_RANK"], first.environ["MASTER_ADDR"]) == ("1", "10.0.0.1")
    assert "GLOO_SOCKET_IFNAME" not in first.environ


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        pytest.param("10.0.0.2", ["workerlog.0", "workerlog.1"], id="one-node-as-the-original"),
        pytest.param("10.0.0.1,10.0.0.2", ["workerlog.2", "workerlog.3"], id="nodes-may-share-a-folder"),
    ],
)
def test_no_two_workers_of_a_job_have_a_log_of_the_same_name(nodes, expected):
    argv = ("--cluster_node_ips", nodes, "--node_ip", "10.0.0.2", "--worker_num", "2")
    assert [command.log_name for command in collective_commands(*argv)] == expected


POD = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "2",
    "PET_MASTER_ADDR": "job-trainer-0.job",
    "PET_MASTER_PORT": "6175",
    "PADDLE_CURRENT_IP": "job-trainer-1.job",
    "PADDLE_TRAINER_ENDPOINTS": "t0:6175,t0:6176,t1:6175,t1:6176",
}


@pytest.mark.parametrize("prefix", ["PET_", ""])
def test_a_pod_with_slots_needs_no_flags(prefix):
    environ = {name.replace("PET_", prefix): value for name, value in POD.items()}
    first, second = collective_commands(environ=environ)
    assert (first.environ["RANK"], second.environ["RANK"], second.environ["WORLD_SIZE"]) == ("2", "3", "4")
    assert (second.environ["MASTER_ADDR"], second.environ["MASTER_PORT"]) == ("job-trainer-0.job", "6175")
    assert second.environ["PADDLE_CURRENT_ENDPOINT"] == "t1:6176"
    assert second.environ["PADDLE_CURRENT_IP"] == "job-trainer-1.job"
    assert not [name for name in second.environ if name.startswith("PET_")]


def test_endpoints_that_a_pattern_tells_are_handed_on_as_they_are():
    pattern = "t-[0-1]:[6175-6176]"
    first, second = collective_commands(environ=POD | {"PADDLE_TRAINER_ENDPOINTS": pattern})
    own = [command.environ["PADDLE_CURRENT_ENDPOINT"] for command in (first, second)]
    assert own == ["t-1:6175", "t-1:6176"]
    assert {command.environ["PADDLE_TRAINER_ENDPOINTS"] for command in (first, second)} == {pattern}


CLOUD = {
    "PADDLE_TRAINERS": "10.0.0.1,10.0.0.2",
    "PADDLE_TRAINERS_NUM": "2",
    "PADDLE_TRAINER_ID": "1",
    "POD_IP": "10.0.0.2",
}


def test_a_node_of_paddlecloud_needs_its_flag_only():
    first, second = collective_commands("--use_paddlecloud", environ=CLOUD, visible=2)
    assert (first.environ["RANK"], second.environ["RANK"], second.environ["WORLD_SIZE"]) == ("2", "3", "4")
    assert (first.environ["NODE_RANK"], first.environ["PADDLE_TRAINERS_NUM"]) == ("1", "4")
    assert (first.environ["MASTER_ADDR"], first.environ["MASTER_PORT"]) == ("10.0.0.1", "6170")
    assert second.environ["PADDLE_CURRENT_ENDPOINT"] == "10.0.0.2:6171"


@pytest.mark.parametrize(
    ("argv", "ports", "port", "said"),
    [
        pytest.param((), {}, "6170", "", id="none-given"),
        pytest.param(("--started_port", "7000"), {}, "7000", "", id="the-flag-s"),
        pytest.param((), {"PADDLE_PORT": "8000"}, "8000", "", id="given"),
        pytest.param((), {"PADDLE_PORT": "8000", "PADDLE_PORTS_NUM": "2"}, "8000", "", id="enough"),
        pytest.param(
            ("--start_port", "7000"),
            {"PADDLE_PORT": "8000"},
            "8000",
            "PADDLE_PORT 8000, which PaddleCloud sets, is used instead of --start_port 7000",
            id="given-against-the-flag",
        ),
        pytest.param(
            (),
            {"PADDLE_PORT": "8000", "TRAINER_PORTS_NUM": "1"},
            "6170",
            "PADDLE_PORT 8000 is not used: TRAINER_PORTS_NUM is 1, and this node has 2 workers",
            id="too-few",
        ),
    ],
)
def test_paddlecloud_s_ports_are_used_where_it_gives_enough(caplog, argv, ports, port, said):
    first, _ = collective_commands("--use_paddlecloud", *argv, environ=CLOUD | ports, visible=2)
    assert first.environ["MASTER_PORT"] == port
    assert [record.getMessage() for record in caplog.records] == ([said] if said else [])


def test_one_node_of_paddlecloud_is_told_by_the_flags():
    one = {"PADDLE_TRAINERS": "10.0.0.2", "PADDLE_TRAINERS_NUM": "1", "POD_IP": "10.0.0.2"}
    [worker] = collective_commands("--use_paddlecloud", environ=one)
    assert worker.environ["PADDLE_CURRENT_ENDPOINT"] == "127.0.0.1:6170"


def test_paddlecloud_s_nodes_are_ignored_aloud_without_its_flag(caplog):
    [worker] = collective_commands(environ=CLOUD)
    assert worker.environ["WORLD_SIZE"] == "1"
    assert "PADDLE_TRAINERS is '10.0.0.1,10.0.0.2', but is ignored without --use_paddlecloud" in caplog.text
    caplog.clear()
    collective_commands("--node_ip", "10.0.0.2", environ=CLOUD)
    collective_commands(environ=CLOUD | {"PADDLE_TRAINERS": "2"})
    assert caplog.text == ""


@pytest.mark.skipif(sys.platform != "linux", reason="interfaces are looked up as Linux tells them")
@pytest.mark.parametrize(
    ("said", "names"),
    [
        pytest.param({"FLEET_HOST_NETWORK": "true"}, ("lo", "=lo"), id="on-the-nodes-network"),
        pytest.param(
            {"FLEET_HOST_NETWORK": "true", "NCCL_SOCKET_IFNAME": "ib0"}, ("lo", "ib0"), id="one-that-is-named"
        ),
        pytest.param({}, (None, None), id="on-a-network-of-their-own"),
    ],
)
def test_workers_of_pods_on_their_nodes_network_get_the_interface_to_the_first(said, names):
    first, second = collective_commands(environ=POD | {"PET_MASTER_ADDR": "localhost"} | said)
    for command in (first, second):
        found = [command.environ.get(name) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")]
        assert tuple(found) == names


def test_selected_gpus_give_one_worker_each():
    first, second = collective_commands("--selected_gpus", "2,3")
    assert first.environ["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert (first.environ["FLAGS_selected_gpus"], second.environ["FLAGS_selected_gpus"]) == ("0", "1")


def test_selected_gpus_count_among_the_visible_ones():
    visible = {"CUDA_VISIBLE_DEVICES": "4,GPU-b,6"}
    first, second = collective_commands("--selected_gpus", "1,2", environ=visible)
    assert first.environ["CUDA_VISIBLE_DEVICES"] == "GPU-b,6"
    assert (first.environ["FLAGS_selected_gpus"], second.environ["FLAGS_selected_gpus"]) == ("0", "1")


def test_selected_gpus_are_refused_on_a_machine_without_any():
    arguments = collective.parse(["--selected_gpus", "0,1,2,3", "train.py"])
    expected = r"--selected_gpus is '0,1,2,3', but this machine has no GPU.*--worker_num 4"
    with pytest.raises(ConfigurationError, match=expected):
        collective.node(arguments, {}, lambda _: 0, lambda: False)
    alone = collective.node(collective.parse(["train.py"]), {}, lambda _: 0, lambda: False)
    assert alone.num_local == 1


@pytest.mark.parametrize(
    ("argv", "environ", "workers"),
    [
        pytest.param((), {}, 4, id="one-each"),
        pytest.param(("--nproc_per_node", "2"), {}, 2, id="torchrun-s-flag"),
        pytest.param(("--worker_num", "2"), {}, 2, id="a-number-counts-first"),
        pytest.param((), {"NPROC_PER_NODE": "3"}, 3, id="a-scheduler-s-number-too"),
    ],
)
def test_visible_gpus_have_a_worker_each_where_nobody_says_a_number(argv, environ, workers):
    started = collective_commands(*argv, environ=environ, visible=4)
    assert len(started) == workers
    own = [command.environ.get("FLAGS_selected_gpus") for command in started]
    assert own == (["0", "1", "2", "3"] if workers == 4 else [None] * workers)
    assert "CUDA_VISIBLE_DEVICES" not in started[0].environ


@pytest.mark.parametrize(
    ("argv", "environ", "seconds"),
    [
        pytest.param((), {}, 3, id="by-itself"),
        pytest.param((), POD, 25, id="in-a-pod"),
        pytest.param((), {**POD, "FLEET_GRACE_SECONDS": "120"}, 100, id="in-a-pod-whose-template-says"),
        pytest.param((), {**POD, "FLEET_GRACE_SECONDS": "0"}, 0, id="in-a-pod-that-has-none"),
        pytest.param(("--use_paddlecloud",), CLOUD, 25, id="in-a-pod-of-paddlecloud"),
        pytest.param(("--grace_seconds", "90"), POD, 90, id="as-somebody-says"),
    ],
)
def test_workers_have_the_grace_of_their_pod_to_end(argv, environ, seconds):
    assert collective.grace_seconds(collective.parse([*argv, "train.py"]), environ) == seconds


# What a launcher has no word on: a job's own names, a port that only one process can have, torchrun's flags.
UNKNOWN_HERE = re.compile(
    "FLEET_JOB_NAME|FLEET_JOB_UID|FLEET_JOB_KEY|FLEET_LIFE|FLEET_METRICS_PORT|FLEET_MAX_TRAINERS"
    "|FLEET_START_DEADLINE_SECONDS|FLEET_TLS_.*|PET_.*"
)
CONTRACT = sorted((Path(__file__).parents[4] / "contract" / "env").glob("*.yaml"))


def launched(job: dict[str, Any], first: dict[str, str]) -> dict[tuple[str, int], Mapping[str, str]]:
    """Return what the launchers give each replica of a job of the contract, by role and index."""
    if job["spec"]["mode"] == "ParameterServer":
        endpoints, workers = first["PADDLE_PSERVERS_IP_PORT_LIST"], first["PADDLE_TRAINERS"]
        environ = {"FLEET_SYNC_MODE": job["spec"]["syncMode"]} if "syncMode" in job["spec"] else None
        commands = ps_commands("--endpoints", endpoints, "--worker_num", workers, environ=environ)
        return {
            ("pserver" if command.is_server else "trainer", int(command.name.split()[1])): command.environ
            for command in commands
        }
    listed = first["PADDLE_TRAINER_ENDPOINTS"].split(",")
    nodes = list(dict.fromkeys(endpoint.partition(":")[0] for endpoint in listed))
    argv = ("--cluster_node_ips", ",".join(nodes), "--worker_num", first["NPROC_PER_NODE"], "--node_ip")
    return {
        ("trainer", i): collective_commands(*argv, node, "--started_port", first["MASTER_PORT"])[0].environ
        for i, node in enumerate(nodes)
    }


@pytest.mark.parametrize("path", CONTRACT, ids=lambda path: path.stem)
def test_a_launched_process_has_what_a_replica_of_a_job_has(path):
    contract = yaml.safe_load(path.read_text())
    replicas = contract["replicas"]
    environs = launched(contract["job"], replicas[0]["env"])
    for replica in replicas:
        expected = {name: value for name, value in replica["env"].items() if not UNKNOWN_HERE.fullmatch(name)}
        environ = environs[replica["role"], replica["index"]]
        if "PADDLE_PSERVER_IPS" in expected and replica["role"] == "trainer":  # which runs on this machine
            expected |= {"PADDLE_CURRENT_IP": launch_ps.LOOPBACK, "POD_IP": launch_ps.LOOPBACK}
        assert {name: environ.get(name) for name in expected} == expected
        assert "PADDLE_TRAINER_IPS" not in environ


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--worker_num", "0"), "--worker_num is 0; expected a whole number, 1 to 1024"),
        (("--worker_num", "two"), "--worker_num is 'two'; expected a whole number, 1 to 1024"),
        (("--server_num", "-1"), "--server_num is '-1'; expected a whole number, 1 to 1024"),
        (("--start_port", "65535"), "--start_port is 65535; expected a whole number, 1 to 65534"),
        (
            ("--endpoints", "localhost"),
            "--endpoints has 'localhost'; expected host:port, as in 127.0.0.1:6170",
        ),
        (("--endpoints", "a:1,a:1"), "--endpoints is 'a:1,a:1', which names an endpoint twice"),
        (("--endpoints", "a:99999"), "the port of 'a:99999' in --endpoints is 99999; expected"),
        (("--endpoints", "a:1,"), "--endpoints has ''; expected host:port"),
        (
            ("--print_program", "--log_dir", "x"),
            "--log_dir is 'x', but --print_program prints to the",
        ),
        (
            ("--endpoints", "a:1", "--start_port", "7000"),
            "--start_port is '7000' and --endpoints is 'a:1', which gives each server's port",
        ),
        (
            ("--endpoints", "a:1", "--server_num", "2"),
            "--server_num is 2 but --endpoints names 1; expected equal",
        ),
    ],
)
def test_a_bad_flag_of_launch_ps_is_named(argv, message):
    with pytest.raises(ConfigurationError) as error:
        ps_commands(*argv)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("argv", "environ", "message"),
    [
        (
            ("--cluster_node_ips", "10.0.0.1,10.0.0.1"),
            {},
            "--cluster_node_ips is '10.0.0.1,10.0.0.1', which names",
        ),
        (("--cluster_node_ips", "10.0.0.1,"), {}, "where '' is not a host name"),
        (
            ("--cluster_node_ips", "10.0.0.1,10.0.0.2", "--node_ip", "10.0.0.3"),
            {},
            "--node_ip is '10.0.0.3'; expected one of --cluster_node_ips, which are '10.0.0.1,10.0.0.2'",
        ),
        (("--started_port", "x"), {}, "--started_port is 'x'; expected a whole number"),
        (
            ("--selected_gpus", "0,a"),
            {},
            "a GPU of --selected_gpus is 'a'; expected a whole number, 0 or more",
        ),
        (
            ("--selected_gpus", "1,2"),
            {"CUDA_VISIBLE_DEVICES": "4,5"},
            "CUDA_VISIBLE_DEVICES '4,5'; expected numbers from 0 to 1, which are indexes into that list",
        ),
        (
            ("--selected_gpus", "0"),
            {"CUDA_VISIBLE_DEVICES": ""},
            "--selected_gpus is '0', but CUDA_VISIBLE_DEVICES is '', which hides every GPU",
        ),
        (
            ("--selected_gpus", "0,1,0"),
            {},
            "--selected_gpus is '0,1,0', which names GPU 0 twice; expected each",
        ),
        (
            ("--selected_gpus", "0,1", "--worker_num", "1"),
            {},
            "--worker_num is 1 but --selected_gpus names 2",
        ),
        (
            ("--selected_gpus", "0,1", "--nproc_per_node", "1"),
            {},
            "--nproc_per_node is 1 but --selected_gpus names 2",
        ),
        (("--nproc_per_node", "0"), {}, "--nproc_per_node is 0; expected a whole number, 1 to 1024"),
        (
            ("--worker_num", "2", "--nproc_per_node", "3"),
            {},
            "--worker_num is '2' and --nproc_per_node is '3', but the two flags are synonyms",
        ),
        (("--start_port", "x"), {}, "--start_port is 'x'; expected a whole number"),
        (
            ("--start_port", "1", "--started_port", "2"),
            {},
            "--started_port is '2' and --start_port is '1', but",
        ),
        (
            ("--use_paddlecloud", "--cluster_node_ips", "a,b"),
            POD,
            "--use_paddlecloud is set, and --cluster_node_ips is 'a,b'; expected either the scheduler's",
        ),
        (("--use_paddlecloud",), {}, "PADDLE_TRAINERS, PET_NNODES and NNODES are not"),
        (
            ("--use_paddlecloud",),
            CLOUD | {"PADDLE_TRAINERS": "2"},
            "PADDLE_TRAINERS is '2'; expected the hosts of all nodes, comma separated",
        ),
        (
            ("--use_paddlecloud",),
            CLOUD | {"PADDLE_TRAINERS_NUM": "1"},
            "PADDLE_TRAINERS_NUM is '1', but PADDLE_TRAINERS '10.0.0.1,10.0.0.2' names 2 nodes",
        ),
        (
            ("--use_paddlecloud",),
            CLOUD | {"PADDLE_TRAINER_ID": "2"},
            "PADDLE_TRAINER_ID is 2; expected a whole number, 0 to 1",
        ),
        (
            ("--use_paddlecloud",),
            CLOUD | {"PADDLE_TRAINER_ID": "0"},
            "POD_IP is '10.0.0.2', but PADDLE_TRAINER_ID is 0, which is '10.0.0.1' in PADDLE_TRAINERS",
        ),
        (("--use_paddlecloud",), CLOUD | {"POD_IP": ""}, "POD_IP is not; expected both"),
        (("--use_paddlecloud",), CLOUD | {"PADDLE_PORT": "x"}, "PADDLE_PORT is 'x'; expected a whole number"),
        ((), POD | {"PET_NODE_RANK": "2"}, "PET_NODE_RANK is 2; expected a whole number, 0 to 1"),
        ((), POD | {"PET_NPROC_PER_NODE": "3"}, "PADDLE_TRAINER_ENDPOINTS has 4 endpoints; expected 6"),
        ((), {"PET_NNODES": "2"}, "NODE_RANK is not; expected both"),
        ((), {"NNODES": "1", "NODE_RANK": "0"}, "MASTER_ADDR is not; expected the first node's address"),
    ],
)
def test_a_bad_flag_or_variable_of_launch_is_named(argv, environ, message):
    with pytest.raises(ConfigurationError) as error:
        collective_commands(*argv, environ=environ)
    assert message in str(error.value)


@pytest.mark.parametrize(("text", "value"), [("True", True), ("1", True), ("false", False)])
def test_print_config_is_a_truth_value(text, value):
    assert flags.truth("--print_config", text) is value


def test_print_config_names_what_it_expects():
    with pytest.raises(ConfigurationError, match="--print_config is 'maybe'; expected True or False"):
        flags.truth("--print_config", "maybe")
