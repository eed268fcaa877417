"""Detects the script and the launcher in the command of a template.

A pod of several processes has no rank of its own: a launcher assigns one to each process. A command that runs
a script with python directly would train each pod separately. The operator only warns about such a command,
because the script may start its processes itself. It also warns about launcher options for one machine in a
job of several pods.
"""

from __future__ import annotations

import re
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING

from fleet_operator.api import Mode, Role

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fleet_operator.api import FleetJob

__all__ = ["one_machine_sentence", "script_of", "unlaunched_sentence"]

_PYTHON = re.compile(r"python(\d(\.\d+)?)?")
_SHELLS = ("bash", "sh")
_TORCHRUN = ("torchrun", "torch.distributed.launch", "torch.distributed.run")
_ACCELERATE = ("accelerate", "accelerate-launch", "accelerate.commands.launch")
_ACCELERATE_SEVERAL = {"multi_gpu", "use_deepspeed", "use_fsdp", "use_megatron_lm"}  # these use torchrun
_LAUNCHERS = (*_TORCHRUN, *_ACCELERATE)  # the first argument that ends in .py is the script
_LAUNCHING_MODULES = ("fleet.launch", "fleet.launch_ps", *_LAUNCHERS)
_WITH_VALUE = "WX"  # python's one-letter options that take a value


def script_of(words: Sequence[str]) -> str | None:
    """Return the script that a command runs, or None if it cannot be determined.

    Parameters
    ----------
    words : sequence of str
        The container's ``command`` and ``args``.
    """
    if not words:
        return None
    program, *rest = words
    name = program.rpartition("/")[2]
    script: str | None = None
    if _PYTHON.fullmatch(name):
        module, left = _python_runs(rest)
        script = _launched(left) if module in _LAUNCHING_MODULES else _own_script(words)
    elif name in _LAUNCHERS:
        script = _launched(rest)
    elif name in _SHELLS:
        script = rest[0] if rest and not rest[0].startswith(("-", "+")) else None
    elif "/" in program and not program.startswith("/"):
        script = program
    return None if script is None or "$(" in script else script


def unlaunched_sentence(job: FleetJob) -> str | None:
    """Return a warning if python starts the script only once in a pod that should run several processes."""
    path, words = _trainers_command(job)
    script = _own_script(words) if words else None
    if job.nproc_per_node == 1 or script is None or not script.endswith(".py"):
        return None
    return (
        f"{path}: python starts {script} once in each pod, which has {job.nproc_per_node} processes and so"
        f" no RANK of its own; write [torchrun, {script}] or"
        f" [python, -m, fleet.launch, {script}], which start each process with its rank, or set"
        " trainer.nprocPerNode: 1 where one process of a pod does all"
    )


def one_machine_sentence(job: FleetJob) -> str | None:
    """Return a warning if the launcher of a multi-pod job is configured for one machine, else None."""
    path, words = _trainers_command(job)
    num_pods = job.replicas(Role.TRAINER)
    if job.spec.mode is not Mode.COLLECTIVE or num_pods == 1 or not words:
        return None
    launcher, options = _launcher_options(words)
    if launcher in _TORCHRUN and "standalone" in options:
        found, instead = "--standalone", "leave it out, because the job configures torchrun for all pods"
    elif launcher in _TORCHRUN and options.get("nnodes") in ("1", "1:1"):
        found, instead = "--nnodes=1", "leave it out, because the job configures torchrun for all pods"
    elif launcher in _ACCELERATE and _is_for_one_machine(options):
        found = "accelerate launch without --num_machines"
        instead = (
            "add --num_machines=$(NNODES), --machine_rank=$(NODE_RANK), --num_processes=$(WORLD_SIZE),"
            " --main_process_ip=$(MASTER_ADDR) and --main_process_port=$(MASTER_PORT)"
        )
    else:
        return None
    return (
        f"{path}: {found} is for one machine, but the job has {num_pods} pods, each of which would train or"
        f" wait alone; {instead}"
    )


def _is_for_one_machine(options: Mapping[str, str]) -> bool:
    """Return whether accelerate, without a config file, starts several processes on one host."""
    several = _ACCELERATE_SEVERAL & options.keys() and "config_file" not in options
    return bool(several) and options.get("num_machines", "1") == "1"


def _launcher_options(words: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Return a launcher's name and options; an option without ``=`` gets the next word as its value."""
    program, *rest = words
    name = program.rpartition("/")[2]
    if _PYTHON.fullmatch(name):
        name, rest = _python_runs(rest)
    own = takewhile(lambda word: not word.endswith(".py") and word not in ("-m", "--module"), rest)
    options = {}
    for word, following in pairwise([*own, ""]):
        option, has_value, value = word.partition("=")
        if option.startswith("--"):
            options[option[2:].replace("-", "_")] = value if has_value else following
    return name, options


def _trainers_command(job: FleetJob) -> tuple[str, list[str]]:
    """Return the path of the trainers' command in the manifest, and the command with its arguments, or []."""
    container = job.template(Role.TRAINER).main_container
    command, args = (_words((container.model_extra or {}).get(name)) for name in ("command", "args"))
    part = "template" if job.spec.trainer.template is None else "trainer.template"
    position = job.template(Role.TRAINER).spec.containers.index(container)
    path = f"spec.{part}.spec.containers[{position}].command"
    return path, [*command, *args] if command else []


def _words(written: object) -> list[str]:
    """Return the value if it is a list of strings, else []; the API server rejects other values."""
    words = written if isinstance(written, list) else []
    return words if all(isinstance(each, str) for each in words) else []


def _own_script(words: Sequence[str]) -> str | None:
    """Return the script that python runs directly, or None for a module, inline code or another program."""
    program, *rest = words
    module, left = _python_runs(rest)
    runs_script = _PYTHON.fullmatch(program.rpartition("/")[2]) and not module and left
    return left[0] if runs_script else None


def _python_runs(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the module that python runs and its arguments, or "" and the script with its arguments."""
    left = list(words)
    while left:
        word = left.pop(0)
        if not word.startswith("-") or word == "-":
            return "", [] if word == "-" else [word, *left]
        if word.startswith("--"):
            if word == "--check-hash-based-pycs":
                del left[:1]
            continue
        for position, letter in enumerate(word[1:], start=1):
            value = word[position + 1 :]
            if letter == "c":
                return "", []
            if letter == "m":
                return value or (left.pop(0) if left else ""), left
            if letter in _WITH_VALUE:
                if not value:
                    del left[:1]
                break
    return "", []


def _launched(words: Sequence[str]) -> str | None:
    return next((word for word in words if word.endswith(".py") and word[0] not in "-$"), None)
