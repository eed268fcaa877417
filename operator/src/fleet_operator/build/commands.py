"""What the command of a template runs, as far as its words show: a script, and who starts it.

A pod of several slots has no rank of its own: a launcher gives one to each process. A command that starts
python on a script there would train in each pod alone. It is warned of and not refused: the script may start
its processes itself.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fleet_operator.api import Role

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fleet_operator.api import FleetJob

__all__ = ["script_of", "unlaunched_sentence"]

_PYTHON = re.compile(r"python(\d(\.\d+)?)?")
_SHELLS = ("bash", "sh")
_LAUNCHERS = ("torchrun", "accelerate")  # their first word that ends in .py is the script
_LAUNCHING_MODULES = ("fleet.launch", "fleet.launch_ps", "torch.distributed.launch", "torch.distributed.run")
_WITH_VALUE = "WX"  # python's options of one letter that a value follows


def script_of(words: Sequence[str]) -> str | None:
    """Return the script that a command runs, or None where it names none or cannot be read as one that does.

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
    """Say that python starts a trainer's script once where its pod has several slots; else None."""
    container = job.template(Role.TRAINER).main_container
    command, args = (_words((container.model_extra or {}).get(name)) for name in ("command", "args"))
    script = _own_script([*command, *args]) if command else None  # else the image has the command
    if job.slots_per_pod == 1 or script is None or not script.endswith(".py"):
        return None
    part = "template" if job.spec.trainer.template is None else "trainer.template"
    position = job.template(Role.TRAINER).spec.containers.index(container)
    return (
        f"spec.{part}.spec.containers[{position}].command: python starts {script} once in each pod, which has"
        f" {job.slots_per_pod} slots and so no RANK of its own; write [torchrun, {script}] or"
        f" [python, -m, fleet.launch, {script}], which start it in each slot with its rank, or set"
        " trainer.slotsPerPod: 1 where one process of a pod does all"
    )


def _words(written: object) -> list[str]:
    """Return a list of texts; what is none is for the API server to refuse."""
    words = written if isinstance(written, list) else []
    return words if all(isinstance(each, str) for each in words) else []


def _own_script(words: Sequence[str]) -> str | None:
    """Return the script that python runs itself; None where it runs a module or text, or another program."""
    program, *rest = words
    module, left = _python_runs(rest)
    runs_script = _PYTHON.fullmatch(program.rpartition("/")[2]) and not module and left
    return left[0] if runs_script else None


def _python_runs(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the module that is named to python, and its arguments; or no module, the script and its own."""
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
