from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from fleet_operator.local.container import (
    LocalCommand,
    container_variables,
    expand,
    field_value,
    is_mentioned,
    local_command,
    main_container,
    redirect,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

POD = {
    "metadata": {
        "name": "digits-trainer-0",
        "namespace": "team",
        "uid": "u-1",
        "labels": {"fleetjob.dev/index": "0"},
        "annotations": {"note": "hello"},
    },
    "spec": {"containers": [{"name": "fleet", "command": ["python", "train.py"]}]},
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("--role=$(ROLE)", "--role=TRAINER", id="a-known-variable"),
        pytest.param("$(ROLE)$(ROLE)", "TRAINERTRAINER", id="twice"),
        pytest.param("$(OTHER)", "$(OTHER)", id="an-unknown-one-stays"),
        pytest.param("$$(ROLE)", "$(ROLE)", id="two-dollars-escape"),
        pytest.param("$$$(ROLE)", "$TRAINER", id="an-escaped-dollar-before-a-variable"),
        pytest.param("$ROLE ${ROLE}", "$ROLE ${ROLE}", id="a-shell's-forms-stay"),
        pytest.param("$(ROLE", "$(ROLE", id="an-open-parenthesis-stays"),
        pytest.param("100$", "100$", id="a-dollar-at-the-end"),
    ],
)
def test_expand(text, expected):
    assert expand(text, {"ROLE": "TRAINER"}) == expected


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("metadata.name", "digits-trainer-0"),
        ("metadata.namespace", "team"),
        ("metadata.uid", "u-1"),
        ("metadata.labels['fleetjob.dev/index']", "0"),
        ("metadata.labels['absent']", ""),
        ("metadata.annotations['note']", "hello"),
        ("status.podIP", "127.1.2.3"),
        ("status.podIPs", "127.1.2.3"),
        ("status.hostIP", "127.1.2.3"),
        ("spec.nodeName", "localhost"),
        ("spec.serviceAccountName", "default"),
        ("status.phase", None),
    ],
)
def test_field_value(path, expected):
    assert field_value(POD, path, "127.1.2.3") == expected


def test_a_variable_sees_those_before_it_and_the_last_of_a_name_counts():
    container = {
        "env": [
            {"name": "LATER", "value": "$(A)"},
            {"name": "A", "value": "1"},
            {"name": "B", "value": "$(A)2"},
            {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "URL", "value": "http://$(IP)"},
            {"name": "A", "value": "3"},
            {"name": "EMPTY"},
        ]
    }
    assert container_variables(POD, container, "127.1.2.3", {}) == {
        "LATER": "$(A)",
        "A": "3",
        "B": "12",
        "IP": "127.1.2.3",
        "URL": "http://127.1.2.3",
        "EMPTY": "",
    }


def test_the_main_container_is_named_fleet_else_the_first():
    assert main_container({"containers": [{"name": "proxy"}, {"name": "fleet"}]})[0] == 1
    assert main_container({"containers": [{"name": "proxy"}, {"name": "other"}]})[0] == 0


def command(
    container: dict[str, Any],
    *,
    environ: dict[str, str] | None = None,
    defaults: dict[str, str] | None = None,
    overrides: dict[str, str] | None = None,
    **more: Mapping[str, str],
) -> LocalCommand:
    pod = {**POD, "spec": {"containers": [{"name": "fleet", **container}]}}
    return local_command(
        pod,
        host="127.1.2.3",
        environ=environ or {},
        python="/venv/bin/python",
        defaults=defaults or {},
        overrides=overrides or {},
        **more,
    )


def test_the_words_are_command_and_args_with_their_variables():
    env = [{"name": "SCRIPT", "value": "train.py"}, {"name": "ID", "value": "4"}]
    container = {"command": ["python3", "$(SCRIPT)"], "args": ["--id=$(ID)"], "env": env}
    assert command(container).argv == ("/venv/bin/python", "train.py", "--id=4")


@pytest.mark.parametrize("program", ["/usr/bin/python3", "python3.11", "torchrun"])
def test_only_the_bare_interpreter_is_replaced(program):
    assert command({"command": [program]}).argv == (program,)


def test_an_inherited_role_never_reaches_a_replica():
    shell = {
        "HOME": "/home/me",
        "CUDA_VISIBLE_DEVICES": "0",
        "FLAGS_rpc_deadline": "5000",
        "PADDLE_TRAINER_ID": "7",
        "TRAINING_ROLE": "PSERVER",
        "RANK": "7",
        "MASTER_ADDR": "elsewhere",
        "PET_NNODES": "3",
        "FLEET_RESTARTS": "2",
    }
    env = command({"command": ["x"], "env": [{"name": "RANK", "value": "0"}]}, environ=shell).env
    assert dict(env) == {
        "HOME": "/home/me",
        "CUDA_VISIBLE_DEVICES": "0",
        "FLAGS_rpc_deadline": "5000",
        "RANK": "0",
        "PATH": "/venv/bin:/usr/local/bin:/usr/bin:/bin",
    }


@pytest.mark.parametrize(
    "name",
    ["RANK", "LOCAL_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"],
)
def test_a_replica_takes_nothing_from_the_torchrun_around_the_run(name):
    assert name not in command({"command": ["x"]}, environ={name: "1"}).env


def test_a_replica_takes_no_rank_from_the_job_of_slurm_around_the_run_but_keeps_its_cpus_and_gpus():
    place = (
        "NTASKS NTASKS_PER_NODE STEP_NUM_TASKS NPROCS TASKS_PER_NODE STEP_TASKS_PER_NODE NNODES JOB_NUM_NODES"
        " STEP_NUM_NODES NODELIST JOB_NODELIST STEP_NODELIST PROCID LOCALID NODEID GTIDS"
    )
    share = (
        "CPUS_ON_NODE CPUS_PER_TASK JOB_CPUS_PER_NODE GPUS GPUS_ON_NODE JOB_GPUS STEP_GPUS JOB_ID JOB_NAME"
    )
    shell = {f"SLURM_{name}": "2" for name in f"{place} {share}".split()}
    env = command({"command": ["x"], "env": [{"name": "SLURM_PROCID", "value": "0"}]}, environ=shell).env
    kept = {name: value for name, value in env.items() if name != "PATH"}
    assert kept == {f"SLURM_{name}": "2" for name in share.split()} | {"SLURM_PROCID": "0"}


def test_defaults_give_way_to_the_pod_and_overrides_do_not():
    container = {
        "command": ["echo", "$(B)"],
        "env": [{"name": "A", "value": "pod"}, {"name": "B", "value": "pod"}],
    }
    found = command(container, defaults={"A": "default", "C": "default"}, overrides={"B": "override"})
    assert {name: found.env[name] for name in "ABC"} == {"A": "pod", "B": "override", "C": "default"}
    assert found.argv == ("echo", "override")


def test_the_interpreters_folder_leads_the_search_path_once():
    environ = {"PATH": "/venv/bin:/usr/bin"}
    assert command({"command": ["x"]}, environ=environ).env["PATH"] == "/venv/bin:/usr/bin"
    own = {"command": ["x"], "env": [{"name": "PATH", "value": "/mine"}]}
    assert command(own, environ=environ).env["PATH"] == "/mine"


PLACES = {"/data": "/home/me/data", "/data/cache": "/scratch/cache", "/tmp": "/scratch/tmp"}  # noqa: S108  a mount


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("/data", "/home/me/data", id="the-mount"),
        pytest.param("/data/train/x.pt", "/home/me/data/train/x.pt", id="a-path-in-it"),
        pytest.param("--data=/data/", "--data=/home/me/data/", id="an-option"),
        pytest.param("/data:/libs:/data/b", "/home/me/data:/libs:/home/me/data/b", id="a-list-of-paths"),
        pytest.param("ls '/data' && cd /data;", "ls '/home/me/data' && cd /home/me/data;", id="a-shell"),
        pytest.param("/data/cache/x", "/scratch/cache/x", id="the-innermost-mount"),
        pytest.param("/database /data-2 /data.tar", "/database /data-2 /data.tar", id="longer-names"),
        pytest.param("my/data ../data ~/data", "my/data ../data ~/data", id="relative-paths"),
        pytest.param("http://host/data", "http://host/data", id="an-address"),
        pytest.param("/home/me/data", "/home/me/data", id="a-path-that-ends-like-it"),
    ],
)
def test_what_lies_in_a_mount_is_in_the_folder(text, expected):
    assert redirect(text, PLACES) == expected
    assert is_mentioned("/data", [text]) is (text != expected)


def test_paths_change_once_and_not_in_what_the_machine_says():
    env = [{"name": "ROOT", "value": "/data"}, {"name": "OUT", "value": "$(ROOT)/out"}]
    container = {"command": ["train", "$(ROOT)/data"], "args": ["$(OUT)"], "env": env}
    found = command(
        container,
        environ={"HOME": "/data/me"},
        overrides={"FLEET_TERMINATION_LOG": "/data/log"},
        places={"/data": "/data/of/mine"},
    )
    assert found.argv == ("train", "/data/of/mine/data", "/data/of/mine/out")
    assert (found.env["ROOT"], found.env["OUT"]) == ("/data/of/mine", "/data/of/mine/out")
    assert (found.env["HOME"], found.env["FLEET_TERMINATION_LOG"]) == ("/data/me", "/data/log")


def test_given_variables_stand_for_secrets_and_come_before_the_pods_own():
    env = [
        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
        {"name": "ABSENT", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k", "optional": True}}},
        {"name": "URL", "value": "http://$(TOKEN)@$(HOST)"},
        {"name": "EPOCHS", "value": "3"},
    ]
    given = {"TOKEN": "secret", "HOST": "tracker", "EPOCHS": "9"}
    found = command({"command": ["x"], "env": env}, environ={"HOST": "the shell's"}, given=given)
    assert {name: found.env[name] for name in ("TOKEN", "HOST", "URL", "EPOCHS")} == {
        "TOKEN": "secret",
        "HOST": "tracker",
        "URL": "http://secret@tracker",
        "EPOCHS": "3",
    }
    assert "ABSENT" not in found.env
