"""Pure functions that find the fields of a job that a local run refuses or ignores.

It refuses fields that determine what a replica does and that only a cluster can provide, such as files and
values from other objects. It ignores fields that only concern where and how a cluster runs the replica, and
lists them once.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from fleet_operator.api.names import CONTROLLER
from fleet_operator.errors import Problem
from fleet_operator.local.container import (
    CHECKPOINT,
    NVIDIA,
    Given,
    field_value,
    folders_of,
    is_mentioned,
    main_container,
    mounts,
    needs_no_mention,
    places,
    redirect,
    texts,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path

ROLES = ("pserver", "trainer")
APPLIED_TO_POD = {
    "containers",
    "initContainers",  # refused
    "volumes",  # refused, replaced, or an emptyDir
    "restartPolicy",
    "terminationGracePeriodSeconds",
}
APPLIED_TO_CONTAINER = {
    "name",
    "command",
    "args",
    "env",
    "envFrom",  # refused, or replaced
    "volumeMounts",  # for volumes that are replaced or refused; for an emptyDir if its path is mentioned
    "ports",
    "terminationMessagePath",
    "terminationMessagePolicy",
    "workingDir",  # refused if relative, applied if it is a folder here
}
NOT_APPLIED_TO_JOB = (
    "scheduling",
    "podGroupPolicy",
    "trainer.sharedMemory",
    "network",
    "pserver.disruptionBudget",
    "trainer.minReplicas",
    "trainer.maxReplicas",
    "runPolicy.ttlSecondsAfterFinished",
    "checkpoint.volumeClaimTemplate",
    "checkpoint.claimName",
    "checkpoint.scope",
    "checkpoint.retention",
)


def templates(spec: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the job's pod templates by path: each role's own template, or else the shared one."""
    used: dict[str, Mapping[str, Any]] = {}
    for role in ROLES:
        if (part := spec.get(role)) is None:
            continue
        if part.get("template"):
            used[f"spec.{role}.template"] = part["template"]
        elif spec.get("template"):
            used["spec.template"] = spec["template"]
    return used


def refusals(document: Mapping[str, Any], given: Given | None = None) -> tuple[Problem, ...]:
    """Return a problem for each field that a local run does not support."""
    spec, given = document["spec"], given or Given()
    return tuple(_job_refusals(spec, given)) + tuple(
        refusal
        for path, template in templates(spec).items()
        for refusal in _template_refusals(f"{path}.spec", template["spec"], given)
    )


def _job_refusals(spec: Mapping[str, Any], given: Given) -> Iterator[Problem]:
    if spec.get("suspend"):
        yield Problem("spec.suspend", "true", "false: a suspended job starts nothing")
    if spec.get("checkpoint") and CHECKPOINT not in given.volumes:
        yield Problem("spec.checkpoint", "a volume", _folder_for(CHECKPOINT))
    if (manager := spec.get("managedBy")) not in (None, CONTROLLER):
        yield Problem("spec.managedBy", manager, "nothing: only a cluster has other controllers")


def _folder_for(volume: str) -> str:
    return f"a folder on this machine instead: --volume {volume}=FOLDER"


def _template_refusals(path: str, pod_spec: Mapping[str, Any], given: Given) -> Iterator[Problem]:
    for index, container in enumerate(pod_spec.get("initContainers") or ()):
        yield Problem(
            f"{path}.initContainers[{index}]",
            str(container.get("name")),
            "none: only the main container's command runs on this machine",
        )
    for index, volume in enumerate(pod_spec.get("volumes") or ()):
        name = str(volume.get("name"))
        for kind in sorted(volume.keys() - {"name", "emptyDir"}):
            if name not in given.volumes:
                yield Problem(f"{path}.volumes[{index}].{kind}", name, _folder_for(name))
    index, container = main_container(pod_spec)
    yield from _container_refusals(f"{path}.containers[{index}]", container, given)


def _container_refusals(path: str, container: Mapping[str, Any], given: Given) -> Iterator[Problem]:
    if not container.get("command"):
        yield Problem(
            f"{path}.command", "nothing", "the program to start: an image's ENTRYPOINT is not known here"
        )
    for name in ("command", "args"):
        words = container.get(name) or []
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            yield Problem(f"{path}.{name}", repr(words), "a list of strings (numbers in quotes)")
    workdir = container.get("workingDir")
    if workdir and not (isinstance(workdir, str) and workdir.startswith("/")):
        yield Problem(
            f"{path}.workingDir",
            repr(workdir),
            "an absolute path, as on a cluster; or none, and --workdir on this machine",
        )
    sources = container.get("envFrom") or []
    for index, source in enumerate(sources if isinstance(sources, list) else [sources]):
        yield from _source_refusals(f"{path}.envFrom[{index}]", source, given)
    for index, entry in enumerate(container.get("env") or ()):
        yield from _variable_refusals(f"{path}.env[{index}]", entry, given)
    yield from _mount_refusals(f"{path}.volumeMounts", container, given)


def _source_refusals(path: str, source: Any, given: Given) -> Iterator[Problem]:
    """Yield a problem for each Secret or ConfigMap whose variables have no local replacement."""
    kind = repr(source)
    if isinstance(source, dict):
        kind = next((name for name in source if name != "prefix"), "an empty source")
        path += f".{kind}"
        of = source.get(kind)
        if isinstance(of, dict) and (given.variables is not None or of.get("optional")):
            return
    yield Problem(path, kind, "variables on this machine instead: --env-file FILE")


def _mount_refusals(path: str, container: Mapping[str, Any], given: Given) -> Iterator[Problem]:
    """Yield a problem for each mount whose replacement folder the script could not find."""
    told = texts(container, given.variables)
    for index, mount in mounts(container):
        folder = given.volumes.get(mount["name"])
        if folder is None:
            continue
        where = str(mount["mountPath"])
        if "subPathExpr" in mount:
            yield Problem(f"{path}[{index}].subPathExpr", str(mount["subPathExpr"]), "a subPath, or none")
        elif not (is_mentioned(where.rstrip("/"), told) or needs_no_mention(mount, folder)):
            yield Problem(
                f"{path}[{index}].mountPath",
                where,
                f"a path that occurs in the command, the args or a variable, where {folder} can replace it,"
                " because a process has no mounts; or a link at this path, and"
                f" --volume {mount['name']}={where}",
            )


def _variable_refusals(path: str, entry: Mapping[str, Any], given: Given) -> Iterator[Problem]:
    value = entry.get("value", "")
    if not isinstance(value, str):
        yield Problem(f"{path}.value", repr(value), "text (in quotes, where YAML would read something else)")
    sources = entry.get("valueFrom") or {}
    if not isinstance(sources, dict):
        yield Problem(f"{path}.valueFrom", repr(sources), "a map, such as {fieldRef: {fieldPath: …}}")
        return
    name = entry.get("name")
    for kind, source in sources.items():
        where = f"{path}.valueFrom.{kind}"
        if not isinstance(source, dict):
            yield Problem(where, repr(source), "a map, such as {fieldPath: metadata.name}")
        elif kind == "fieldRef":
            if field_value({}, str(source.get("fieldPath")), "") is None:
                known = "metadata.{name,namespace,uid,labels['…'],annotations['…']} or status.{podIP,hostIP}"
                yield Problem(f"{where}.fieldPath", str(source.get("fieldPath")), known)
        elif name not in (given.variables or {}) and not source.get("optional"):
            found = f"{name} from {source.get('name') or source.get('resource')}"
            yield Problem(where, found, f"a value or a fieldRef, or a line {name}=… in an --env-file")


def _at(spec: Mapping[str, Any], path: str) -> Any:
    """Return the value of a field of the spec, or None."""
    value: Any = spec
    for name in path.split("."):
        value = (value or {}).get(name)
    return value


def _is_asked(path: str, value: Any) -> bool:
    """Return whether a field is set; 0 and an empty disruptionBudget count as set."""
    return value is not None and value is not False and (value != {} or path == "pserver.disruptionBudget")


def not_applied(
    document: Mapping[str, Any], workdirs: Collection[Path] = (), given: Given | None = None
) -> tuple[str, ...]:
    """Return the names of the fields that a local run ignores.

    Parameters
    ----------
    document : mapping
        The manifest.
    workdirs : collection of Path
        The working directories of the run: a ``workingDir`` among them is applied.
    given : Given, optional
        The replacements of volumes.
    """
    spec = document["spec"]
    names = [f"spec.{path}" for path in NOT_APPLIED_TO_JOB if _is_asked(path, _at(spec, path))]
    if _at(spec, "trainer.devices.resourceName") not in (None, NVIDIA):
        names.append("spec.trainer.devices")
    for template in templates(spec).values():
        pod_spec = template["spec"]
        main_index, main = main_container(pod_spec)
        names += [name for name in main if name not in APPLIED_TO_CONTAINER]
        names += _volume_limits(pod_spec, main, given or Given())
        here = places(pod_spec, folders_of(pod_spec, (given or Given()).volumes))
        if (workdir := main.get("workingDir")) and PurePath(redirect(workdir, here)) not in workdirs:
            names.append("workingDir")
        names += [name for name in pod_spec if name not in APPLIED_TO_POD]
        names += [
            f"container {container['name']}"
            for index, container in enumerate(pod_spec["containers"])
            if index != main_index
        ]
    return tuple(dict.fromkeys(names))


def _volume_limits(pod_spec: Mapping[str, Any], container: Mapping[str, Any], given: Given) -> Iterator[str]:
    """Yield the volume settings that a local run ignores, and emptyDirs that the container never mentions."""
    told = texts(container, given.variables)
    empty = [volume for volume in pod_spec.get("volumes") or () if "emptyDir" in volume]
    for volume in empty:
        yield from (f"emptyDir.{name}" for name in sorted(volume["emptyDir"] or {}))
    for _, mount in mounts(container):
        where = str(mount["mountPath"]).rstrip("/")
        if any(mount["name"] == volume.get("name") for volume in empty) and not is_mentioned(where, told):
            yield f"the emptyDir at {where}"
    if any(mount.get("readOnly") for _, mount in mounts(container)):
        yield "volumeMounts.readOnly"
