"""Pure functions that derive a local process and its volume folders from a pod's main container.

The rules of Kubernetes apply: ``$(NAME)`` in the command, args and variable values is replaced if the
variable is known, ``$$`` is a dollar sign, and a value can only refer to the variables before it.

Without privileges a process has no mounts of its own, so no folder can be mounted at a volume's path (user
namespaces would allow it, but many distributions and most containers forbid them). Instead, each path in the
command, the args and the variables that is inside a mount becomes the path in the folder. A path that is only
in the script itself cannot be changed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fleet_operator.api.names import MAIN_CONTAINER

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

INTERPRETERS = ("python", "python3")

_REFERENCE = re.compile(r"\$(?:\$|\(([^)]*)\))")
_SUBSCRIPT = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")

# Role variables of the runner's shell must not reach a replica, whose role comes from the manifest alone. In
# a Slurm job, for example, Lightning would use the task as the rank. Slurm's CPUs and GPUs are kept.
_ROLE_VARIABLE = re.compile(
    r"(PADDLE|FLEET|PET|TORCHELASTIC)_.*"
    r"|TRAINING_ROLE|POD_IP|MASTER_ADDR|MASTER_PORT|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE"
    r"|GROUP_RANK|GROUP_WORLD_SIZE|ROLE_RANK|ROLE_NAME|ROLE_WORLD_SIZE|NODE_RANK|NNODES|NPROC_PER_NODE"
    r"|SLURM_(JOB_|STEP_)?(NTASKS.*|NUM_TASKS|NPROCS|TASKS_PER_NODE|NNODES|NUM_NODES|NODELIST)"
    r"|SLURM_(PROCID|LOCALID|NODEID|GTIDS)"
)

NVIDIA = "nvidia.com/gpu"
"""The resource name of NVIDIA GPUs, the only devices that a local run divides among its trainers."""

CHECKPOINT = "checkpoint"
"""The name by which ``--volume`` refers to the volume of ``spec.checkpoint``."""


@dataclass(frozen=True, slots=True)
class LocalCommand:
    """The command and environment of a pod's process."""

    argv: tuple[str, ...]
    env: Mapping[str, str]


def main_container(pod_spec: Mapping[str, Any]) -> tuple[int, Mapping[str, Any]]:
    """Return the index and manifest of the container named ``fleet``, else of the first container."""
    containers: Sequence[Mapping[str, Any]] = pod_spec["containers"]
    for index, container in enumerate(containers):
        if container.get("name") == MAIN_CONTAINER:
            return index, container
    return 0, containers[0]


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace ``$(NAME)`` with the value of each known variable, and ``$$`` with a dollar sign."""

    def replacement(match: re.Match[str]) -> str:
        name = match.group(1)
        return "$" if name is None else variables.get(name, match.group())

    return _REFERENCE.sub(replacement, text)


def is_mentioned(path: str, texts: Iterable[str]) -> bool:
    """Return whether any of the texts contains `path` or a path inside it."""
    return any(_paths((path,)).search(text) for text in texts)


def redirect(text: str, places: Mapping[str, str]) -> str:
    """Replace each path in the text that is inside one of `places` with the corresponding local path."""
    return _paths(places).sub(lambda match: places[match.group()], text) if places else text


def _paths(paths: Iterable[str]) -> re.Pattern[str]:
    innermost_first = sorted(paths, key=len, reverse=True)
    return re.compile(rf"(?<![\w.~/-])(?:{'|'.join(map(re.escape, innermost_first))})(?![\w.~-])")


def field_value(pod: Mapping[str, Any], path: str, host: str) -> str | None:
    """Return the value of a ``fieldRef``, or None if local pods do not have the field.

    Parameters
    ----------
    pod : mapping
        The built pod.
    path : str
        The reference's ``fieldPath``.
    host : str
        The address to use as that of the pod and of its node.
    """
    metadata = pod.get("metadata", {})
    if (subscript := _SUBSCRIPT.fullmatch(path)) is not None:
        mapping, name = subscript.groups()
        return str((metadata.get(mapping) or {}).get(name, ""))
    values = {
        "metadata.name": metadata.get("name", ""),
        "metadata.namespace": metadata.get("namespace", ""),
        "metadata.uid": metadata.get("uid", ""),
        "spec.nodeName": "localhost",
        "spec.serviceAccountName": pod.get("spec", {}).get("serviceAccountName", "default"),
        "status.hostIP": host,
        "status.hostIPs": host,
        "status.podIP": host,
        "status.podIPs": host,
    }
    return values.get(path)


def container_variables(
    pod: Mapping[str, Any], container: Mapping[str, Any], host: str, given: Mapping[str, str]
) -> dict[str, str]:
    """Return the container's ``env`` with references expanded; for duplicate names, the last value wins.

    The variables in `given`, which come from other objects on a cluster, precede it, like ``envFrom``.
    """
    resolved = dict(given)
    for entry in container.get("env") or ():
        source = entry.get("valueFrom") or {}
        if "fieldRef" in source:
            resolved[entry["name"]] = field_value(pod, source["fieldRef"]["fieldPath"], host) or ""
        elif not source:
            resolved[entry["name"]] = expand(entry.get("value") or "", resolved)
    return resolved


def local_command(
    pod: Mapping[str, Any],
    *,
    host: str,
    environ: Mapping[str, str],
    python: str,
    defaults: Mapping[str, str],
    overrides: Mapping[str, str],
    given: Mapping[str, str] = MappingProxyType({}),
    places: Mapping[str, str] = MappingProxyType({}),
) -> LocalCommand:
    """Return the command and environment of a built pod's process.

    Parameters
    ----------
    pod : mapping
        The built pod; `fleet_operator.local.limits.refusals` must accept its job.
    host : str
        The pod's address on this machine.
    environ : mapping
        The runner's environment. The pod inherits it, without the variables of roles.
    python : str
        The interpreter for ``python`` and ``python3``, whose folder is first in PATH.
    defaults : mapping
        Variables for a pod that does not set them.
    overrides : mapping
        Variables that override the pod's own.
    given : mapping
        The values of variables from Secrets and ConfigMaps.
    places : mapping
        Paths of this machine by the pod's paths; see the function `places`.
    """
    _, container = main_container(pod["spec"])
    known = container_variables(pod, container, host, given)
    named = known | dict(overrides)
    words = [*container["command"], *(container.get("args") or ())]
    words = [redirect(expand(word, named), places) for word in words]
    own = {name: redirect(value, places) for name, value in known.items()} | dict(overrides)
    if words[0] in INTERPRETERS:
        words[0] = python
    inherited = {name: value for name, value in environ.items() if not _ROLE_VARIABLE.fullmatch(name)}
    if "PATH" not in own:
        inherited["PATH"] = _leading(python, inherited.get("PATH", "/usr/local/bin:/usr/bin:/bin"))
    return LocalCommand(argv=tuple(words), env=inherited | dict(defaults) | own)


def _leading(python: str, search_path: str) -> str:
    """Return `search_path` with the interpreter's folder first, so that scripts find its tools."""
    folder = python.rpartition("/")[0]
    return search_path if not folder or search_path.split(":")[0] == folder else f"{folder}:{search_path}"


@dataclass(frozen=True, slots=True)
class Given:
    """The local folders and variables that replace a cluster's volumes and Secrets.

    Attributes
    ----------
    volumes : mapping
        Absolute folders on this machine, by the names of the volumes that they replace.
    variables : mapping, optional
        Values for variables from Secrets and ConfigMaps; None if not given.
    """

    volumes: Mapping[str, Path] = field(default_factory=dict)
    variables: Mapping[str, str] | None = None


def mounts(container: Mapping[str, Any]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the index and manifest of each volume mount that has both a name and a path."""
    for index, mount in enumerate(container.get("volumeMounts") or ()):
        if isinstance(mount, dict) and mount.get("name") and str(mount.get("mountPath", "")).strip("/"):
            yield index, mount


def texts(container: Mapping[str, Any], variables: Mapping[str, str] | None) -> list[str]:
    """Return the strings in which paths may occur: those of a container, and the values of `variables`."""
    values = [entry.get("value") for entry in container.get("env") or ()]
    words = [*(container.get("command") or ()), *(container.get("args") or ()), *values]
    words.append(container.get("workingDir"))
    return [word for word in words if isinstance(word, str)] + list((variables or {}).values())


def needs_no_mention(mount: Mapping[str, Any], folder: Path) -> bool:
    """Return whether a folder has the same path as its mount, so that paths need no change."""
    return _inside(mount, folder) == PurePath(mount["mountPath"])


def folders_of(
    pod_spec: Mapping[str, Any], given: Mapping[str, Path], *, replica: str = "", own: Path | None = None
) -> dict[str, Path]:
    """Return the local folder of each of a pod's volumes, by volume name.

    Parameters
    ----------
    pod_spec : mapping
        The spec of a pod or of a template.
    given : mapping
        The given folders. All replicas share a folder, except for an emptyDir: each replica has a subfolder
        with its own name.
    replica : str
        The replica's name, such as trainer-1.
    own : Path, optional
        The parent folder for other emptyDirs; without it, they are left out.
    """
    found: dict[str, Path] = {}
    for volume in pod_spec.get("volumes") or ():
        name, is_own = volume.get("name"), "emptyDir" in volume
        if (folder := given.get(name)) is not None:
            found[name] = folder / replica if is_own else folder
        elif is_own and own is not None:
            found[name] = own / name
    return found


def places(pod_spec: Mapping[str, Any], folders: Mapping[str, Path]) -> dict[str, str]:
    """Return the local path that replaces each mount path of the main container."""
    _, container = main_container(pod_spec)
    return {
        str(mount["mountPath"]).rstrip("/"): str(_inside(mount, folders[mount["name"]]))
        for _, mount in mounts(container)
        if mount["name"] in folders
    }


def _inside(mount: Mapping[str, Any], folder: Path) -> Path:
    return folder / str(mount.get("subPath") or "")
