"""What a command runs, and whether a launcher is missing from it."""

import pytest

from fleet_operator.build import one_machine_sentence, script_of, unlaunched_sentence
from tests.support import jobs
from tests.support.pods import template


@pytest.mark.parametrize(
    ("command", "script"),
    [
        ("python train.py --epochs 2", "train.py"),
        ("/usr/bin/python3.12 -u -W ignore -Xdev -OB src/train.py other.py", "src/train.py"),
        ("python folder", "folder"),
        ("python -m package.train data.py", None),
        ("python -um fleet.launch --nproc_per_node=2 train.py", "train.py"),
        ("python -mtorch.distributed.run --nnodes 2 train.py", "train.py"),
        ("python -c pass train.py", None),
        ("python - train.py", None),
        ("python", None),
        ("torchrun --nproc-per-node 2 --log-dir=x.py train.py", "train.py"),
        ("accelerate launch --num_processes 2 train.py", "train.py"),
        ("python -m accelerate.commands.launch --cpu train.py", "train.py"),
        ("bash run.sh", "run.sh"),
        ("bash -c run.sh", None),
        ("./run.sh", "./run.sh"),
        ("/opt/run.sh", None),
        ("my-program train.py", None),
        ("python $(SCRIPT)", None),
    ],
)
def test_the_script_of_a_command(command, script):
    assert script_of(command.split()) == script


def said_of(command: object, slots: int = 8, **container: object) -> str | None:
    words = command.split() if isinstance(command, str) else command
    document = jobs.collective_manifest(
        trainer={"nprocPerNode": slots}, template=template({"command": words, **container})
    )
    return unlaunched_sentence(jobs.job(document))


def test_a_script_that_python_starts_once_for_several_slots_is_told_with_what_to_write_instead():
    assert said_of("python -u src/train.py --epochs 2") == (
        "spec.template.spec.containers[0].command: python starts src/train.py once in each pod, which has 8"
        " processes and so no RANK of its own; write [torchrun, src/train.py] or [python, -m, fleet.launch,"
        " src/train.py], which start each process with its rank, or set trainer.nprocPerNode: 1 where one"
        " process of a pod does all"
    )


@pytest.mark.parametrize(
    "command",
    [
        "torchrun train.py",
        "python -m torch.distributed.run train.py",
        "python -m fleet.launch train.py",
        "python -m package.train",
        "python -c pass",
        "python /opt/bin/torchrun train.py",
        "bash -c 'python train.py'",
        "./run.sh",
        "accelerate launch train.py",
        "python",
        None,
        "",
        5,
        ["python", 5],
    ],
)
def test_what_cannot_be_judged_or_has_a_launcher_is_not_told(command):
    assert said_of(command) is None


def test_one_slot_needs_no_launcher():
    assert said_of("python train.py", slots=1) is None


def test_devices_count_as_processes_and_the_main_container_may_be_the_second_of_the_trainers_template():
    fleet = {"name": "fleet", "image": "none", "command": ["python"], "args": ["train.py"]}
    containers = [{"name": "sidecar", "image": "none"}, fleet]
    document = jobs.collective_manifest(
        trainer={"devices": {"count": 2}, "template": {"spec": {"containers": containers}}}
    )
    text = unlaunched_sentence(jobs.job(document)) or ""
    assert text.startswith("spec.trainer.template.spec.containers[1].command: python starts train.py once")
    assert "which has 2 processes" in text


def said_of_pods(command: str, pods: int = 2) -> str | None:
    document = jobs.collective_manifest(
        trainer={"replicas": pods}, template=template({"command": command.split()})
    )
    return one_machine_sentence(jobs.job(document))


def test_a_launcher_of_one_machine_in_several_pods_is_told_with_what_to_write_instead():
    assert said_of_pods("torchrun --standalone train.py", pods=3) == (
        "spec.template.spec.containers[0].command: --standalone is for one machine, but the job has 3 pods,"
        " each of which would train or wait alone; leave it out, because the job configures torchrun for"
        " all pods"
    )
    assert said_of_pods("accelerate launch --multi_gpu --num_processes=2 train.py") == (
        "spec.template.spec.containers[0].command: accelerate launch without --num_machines is for one"
        " machine, but the job has 2 pods, each of which would train or wait alone; add"
        " --num_machines=$(NNODES), --machine_rank=$(NODE_RANK), --num_processes=$(WORLD_SIZE),"
        " --main_process_ip=$(MASTER_ADDR) and --main_process_port=$(MASTER_PORT)"
    )


@pytest.mark.parametrize(
    "command",
    [
        "/opt/bin/torchrun --nproc-per-node 2 --standalone train.py",
        "python -m torch.distributed.run --standalone -m package.train",
        "torchrun --nnodes=1 train.py",
        "torchrun --nnodes 1:1 train.py",
        "python -um accelerate.commands.launch --multi-gpu train.py",
        "accelerate launch --use_fsdp --num-machines 1 train.py",
    ],
)
def test_each_way_to_say_that_there_is_one_machine_is_told(command):
    assert "is for one machine" in (said_of_pods(command) or "")
    assert said_of_pods(command, pods=1) is None


@pytest.mark.parametrize(
    "command",
    [
        "torchrun train.py --standalone",
        "torchrun --nnodes 2 train.py",
        "torchrun --nnodes=$(NNODES) train.py",
        "torchrun -m package.train --nnodes=1",
        "python train.py --standalone",
        "python -m fleet.launch --standalone train.py",
        "bash -c 'torchrun --standalone train.py'",
        "accelerate launch train.py",
        "accelerate launch --num_processes=1 train.py --multi_gpu",
        "accelerate launch --multi_gpu --config_file accelerate.yaml train.py",
        "accelerate launch --multi_gpu --num_machines=$(NNODES) train.py",
    ],
)
def test_what_is_for_several_machines_or_cannot_be_judged_is_not_told(command):
    assert said_of_pods(command) is None


def test_servers_and_trainers_have_no_launcher_of_several_machines():
    command = ["torchrun", "--standalone", "train.py"]
    assert one_machine_sentence(jobs.job(jobs.manifest(template=template({"command": command})))) is None
