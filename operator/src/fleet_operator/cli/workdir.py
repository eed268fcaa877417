"""Selects the working directories of local replicas, and checks that their scripts exist.

The working directory is the root of the manifest's project, which the image has in WORKDIR, or the
manifest's own folder if the scripts exist only there. A template's ``workingDir`` takes precedence if
this machine has that folder, and the command line's option over both.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fleet_operator.api import Mode, Role
from fleet_operator.build import script_of
from fleet_operator.errors import InvalidJob, Problem
from fleet_operator.local.container import folders_of, main_container, places, redirect
from fleet_operator.local.limits import templates
from fleet_operator.manifests.manifest import STDIN

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fleet_operator.api import FleetJob

ROOT_MARKS = (".git", "pyproject.toml", "Dockerfile")


class Workdirs(NamedTuple):
    """The replicas' working directories, with notes for the user."""

    folders: Mapping[Role, Path]
    remarks: tuple[str, ...]


class _Command(NamedTuple):
    """A template's command and its working directory."""

    field: str  # the path of the container
    script: str | None
    folder: Path | None  # the template's workingDir, if it is applied


def project_root(manifest: Path) -> Path:
    """Return the root of a manifest's project, which becomes WORKDIR in the image.

    This is the nearest folder above the manifest that contains ``.git``, ``pyproject.toml`` or
    ``Dockerfile``, or else the manifest's own folder.
    """
    folder = own_folder(manifest)
    for candidate in (folder, *folder.parents):
        if any((candidate / mark).exists() for mark in ROOT_MARKS):
            return candidate
    return folder


def own_folder(manifest: Path) -> Path:
    """Return the folder of a manifest, or the current folder for standard input."""
    return Path.cwd() if manifest == STDIN else manifest.resolve().parent


def choose_workdirs(
    job: FleetJob, manifest: Path, asked: Path | None = None, volumes: Mapping[str, Path] | None = None
) -> Workdirs:
    """Choose the working directory of each role.

    Parameters
    ----------
    job : FleetJob
        A job that `fleet_operator.local.limits.refusals` accepts.
    manifest : Path
        The manifest's file; ``-`` is standard input.
    asked : Path, optional
        The working directory from the command line.
    volumes : mapping, optional
        The folders that replace volumes, which may contain scripts.

    Raises
    ------
    InvalidJob
        A script does not exist; the message names the tried paths and the working directory.
    """
    used = templates(job.to_manifest()["spec"])
    commands = {
        path: _command(f"{path}.spec", template["spec"], asked, volumes or {})
        for path, template in used.items()
    }
    scripts = [each.script for each in commands.values() if each.script and each.folder is None]
    folders = (asked,) if asked else (project_root(manifest), own_folder(manifest))
    complete = [
        folder for folder in dict.fromkeys(folders) if all((folder / script).exists() for script in scripts)
    ]
    folder = complete[0] if complete else folders[0]
    problems = [_problem(each, folder, folders) for each in commands.values()]
    if found := [problem for problem in problems if problem is not None]:
        raise InvalidJob(f"{job.name}, as a run on this machine,", found)
    own = {path: each.folder or folder for path, each in commands.items()}
    shared = own.get("spec.template", folder)
    by_role = {role: own.get(f"spec.{role.value}.template", shared) for role in job.roles}
    return Workdirs(by_role, (_told(by_role), *_twice(scripts, complete), *_shared(job)))


def _command(
    path: str, pod_spec: Mapping[str, Any], asked: Path | None, volumes: Mapping[str, Path]
) -> _Command:
    index, container = main_container(pod_spec)
    here = places(pod_spec, folders_of(pod_spec, volumes))
    words = [*(container.get("command") or ()), *(container.get("args") or ())]
    words = [redirect(word, here) for word in words]
    wanted = redirect(container.get("workingDir") or "", here)
    folder = None
    if asked is None and wanted and os.path.isdir(wanted):  # noqa: PTH112  Path.is_dir may raise PermissionError
        folder = Path(wanted)
    return _Command(f"{path}.containers[{index}]", script_of(words), folder)


def _problem(command: _Command, folder: Path, folders: Sequence[Path]) -> Problem | None:
    """Return a problem if a command's script does not exist, else None."""
    workdir = command.folder or folder
    if command.script is None or (workdir / command.script).exists():
        return None
    looked_in = [workdir] if command.folder else folders
    tried = " and ".join(dict.fromkeys(str(each / command.script) for each in looked_in))
    there = (
        f"an existing script (tried: {tried}); the working directory is {workdir}: write the path of the"
        " script relative to it, or choose another folder with --workdir"
    )
    return Problem(f"{command.field}.command", repr(command.script), there)


def _told(folders: Mapping[Role, Path]) -> str:
    if len(set(folders.values())) == 1:
        return f"working directory: {next(iter(folders.values()))}"
    return f"working directories: {', '.join(f'{folder} ({role.value})' for role, folder in folders.items())}"


def _shared(job: FleetJob) -> tuple[str, ...]:
    """Return a warning if trainers share a working directory, in which each local rank 0 may save files."""
    replicas = job.replicas(Role.TRAINER)
    if job.spec.mode is not Mode.COLLECTIVE or replicas < 2:
        return ()
    told = (
        f"{replicas} trainers share the working directory: if a script saves where LOCAL_RANK is 0, one "
        "process of each trainer writes to the same files; save where RANK is 0"
    )
    return (told,)


def _twice(scripts: Sequence[str], complete: Sequence[Path]) -> tuple[str, ...]:
    """Return a warning if the manifest's folder contains a different script with the same name."""
    if len(complete) < 2:
        return ()
    runs, other = complete
    for script in scripts:
        if not (runs / script).samefile(other / script):
            return (f"{runs / script} is used, not {other / script}; to use that one, add --workdir {other}",)
    return ()
