"""``--volume`` and ``--env-file``: local replacements for volumes and Secrets."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleet_operator.errors import OperatorError
from fleet_operator.local.container import CHECKPOINT, Given, folders_of, main_container, places
from fleet_operator.local.limits import templates

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from fleet_operator.api import FleetJob

_NAME = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")  # the name of a variable, as Kubernetes accepts it


class GivenError(OperatorError):
    """A command-line value cannot be used."""

    exit_status = 2


def read_given(volumes: Sequence[str], env_files: Sequence[Path]) -> Given:
    """Parse ``--volume NAME=FOLDER`` and ``--env-file FILE``; if an option is repeated, the last one wins.

    Raises
    ------
    GivenError
        A value or a line is invalid, or a file cannot be read.
    """
    folders = dict(_volume(text) for text in volumes)
    if not env_files:
        return Given(folders)
    return Given(folders, {name: value for path in env_files for name, value in _variables(path)})


def _volume(text: str) -> tuple[str, Path]:
    name, _, folder = text.partition("=")
    if not (name and folder):
        raise GivenError(f"--volume {text}: expected NAME=FOLDER, such as data=./data")
    return name, Path(os.path.abspath(Path(folder).expanduser()))  # noqa: PTH100  symbolic links are not resolved


def _variables(path: Path) -> Iterator[tuple[str, str]]:
    """Parse a file as ``kubectl create configmap --from-env-file`` does: without quotes or escapes."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise GivenError(f"cannot read {path}: {reason}; expected lines NAME=VALUE") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, equals, value = line.lstrip().partition("=")
        if not equals or _NAME.fullmatch(name) is None or "\0" in value:
            found = repr(name) if equals else "no ="  # do not quote the line, which may be part of a secret
            raise GivenError(f"{path}, line {number}: found {found}, expected NAME=VALUE or a comment (# …)")
        yield name, value


def check_folders(job: FleetJob, given: Given) -> None:
    """Reject unusable folders, and create missing folders for emptyDirs and checkpoints.

    Raises
    ------
    GivenError
        A folder is rejected.
    """
    spec = job.to_manifest()["spec"]
    volumes: dict[str, Mapping[str, Any]] = {CHECKPOINT: {}} if "checkpoint" in spec else {}
    for path, template in templates(spec).items():
        for volume in template["spec"].get("volumes") or ():
            if volume["name"] == CHECKPOINT and spec.get(CHECKPOINT):
                raise GivenError(
                    f"{path}.spec.volumes: found one named {CHECKPOINT}, expected another name: here"
                    f" --volume {CHECKPOINT}=FOLDER stands for spec.checkpoint"
                )
            volumes[volume["name"]] = volume
    for name, folder in given.volumes.items():
        if name not in volumes:
            known = ", ".join(volumes) or "none"
            raise GivenError(f"--volume {name}={folder}: the job has no volume {name} (it has: {known})")
        if folder.exists() and not folder.is_dir():
            raise GivenError(f"--volume {name}={folder}: found a file, expected a folder with it")
        if name == CHECKPOINT or "emptyDir" in volumes[name]:
            folder.mkdir(parents=True, exist_ok=True)
        elif not folder.exists():
            raise GivenError(
                f"--volume {name}={folder}: no such folder; expected one with the volume's files"
            )


def describe(job: FleetJob, given: Given) -> Iterator[str]:
    """Yield notes about replaced paths and about ignored lines of the ``--env-file``."""
    shown = dict[str, str]()
    for template in templates(job.to_manifest()["spec"]).values():
        shown |= places(template["spec"], folders_of(template["spec"], given.volumes))
    if job.spec.checkpoint is not None and CHECKPOINT in given.volumes:
        shown[job.spec.checkpoint.mount_path] = str(given.volumes[CHECKPOINT])
    if shown:
        yield f"volumes: {', '.join(f'{path} is {folder}' for path, folder in shown.items())}"
    unused = [name for name in given.variables or () if name in _set_by(job)]
    if unused:
        yield f"--env-file: the manifest's own values of {', '.join(unused)} take precedence"


def _set_by(job: FleetJob) -> set[str]:
    """Return the main containers' variables that the manifest sets by a value or a fieldRef."""
    containers = [main_container(each["spec"])[1] for each in templates(job.to_manifest()["spec"]).values()]
    return {
        entry["name"]
        for container in containers
        for entry in container.get("env") or ()
        if not entry.get("valueFrom") or "fieldRef" in entry["valueFrom"]
    }
