"""Pure: what stands for a pod's volumes on this machine, and the paths that change with it.

Without privileges a process has no mounts of its own, so no folder can be where a pod has its volume (user
namespaces would allow it, but many distributions and most containers forbid them). What
tells a script where that is changes instead: each path in the command, the args and the variables that lies
in a mount becomes the path in the folder. A path that only the script itself knows cannot be changed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from fleet_operator.cluster.local_env import main_container

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

CHECKPOINT = "checkpoint"
"""What the volume of ``spec.checkpoint`` is called where folders are given."""


@dataclass(frozen=True, slots=True)
class Given:
    """What a run is given in the place of what only a cluster has.

    Attributes
    ----------
    volumes : mapping
        Folders of this machine, absolute, by the names of the volumes for which they stand.
    variables : mapping, optional
        Values for variables that come from Secrets and ConfigMaps; None where nobody has given any.
    """

    volumes: Mapping[str, Path] = field(default_factory=dict)
    variables: Mapping[str, str] | None = None


def mounts(container: Mapping[str, Any]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Return the mounts of a container that name a volume and a path, with their index."""
    for index, mount in enumerate(container.get("volumeMounts") or ()):
        if isinstance(mount, dict) and mount.get("name") and str(mount.get("mountPath", "")).strip("/"):
            yield index, mount


def texts(container: Mapping[str, Any], variables: Mapping[str, str] | None) -> list[str]:
    """Return all that tells a container's program where something is."""
    values = [entry.get("value") for entry in container.get("env") or ()]
    words = [*(container.get("command") or ()), *(container.get("args") or ()), *values]
    words.append(container.get("workingDir"))
    return [word for word in words if isinstance(word, str)] + list((variables or {}).values())


def needs_no_mention(mount: Mapping[str, Any], folder: Path) -> bool:
    """Whether a folder is where the volume is mounted anyway."""
    return _inside(mount, folder) == PurePath(mount["mountPath"])


def folders_of(
    pod_spec: Mapping[str, Any], given: Mapping[str, Path], *, replica: str = "", own: Path | None = None
) -> dict[str, Path]:
    """Return the folders that stand for the volumes of a pod, by the volumes' names.

    Parameters
    ----------
    pod_spec : mapping
        The spec of a pod or of a template.
    given : mapping
        The folders that the run was given. All replicas share one, but an emptyDir is a replica's own: its
        folder is one of the replica's name in there.
    replica : str
        The replica's name, such as trainer-1.
    own : Path, optional
        Where the other emptyDirs have their folders; they are left out without it.
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
    """Return what the main container's mounts are on this machine, by their paths; see `redirect`."""
    _, container = main_container(pod_spec)
    return {
        str(mount["mountPath"]).rstrip("/"): str(_inside(mount, folders[mount["name"]]))
        for _, mount in mounts(container)
        if mount["name"] in folders
    }


def _inside(mount: Mapping[str, Any], folder: Path) -> Path:
    return folder / str(mount.get("subPath") or "")
