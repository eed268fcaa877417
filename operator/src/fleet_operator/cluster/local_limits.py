"""Pure: what of a job this machine refuses, and what it leaves out.

Refused is what would make the replica another program: files and values that only a cluster has. Left out,
and listed once, is what only says where and how carefully a cluster runs it.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from fleet_operator.api.names import CONTROLLER
from fleet_operator.cluster.local_env import field_value, main_container
from fleet_operator.errors import Problem

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path

ROLES = ("pserver", "trainer")
APPLIED_TO_POD = {
    "containers",
    "initContainers",  # refused
    "volumes",  # refused, or an emptyDir
    "restartPolicy",
    "terminationGracePeriodSeconds",
}
APPLIED_TO_CONTAINER = {
    "name",
    "command",
    "args",
    "env",
    "envFrom",  # refused
    "ports",
    "terminationMessagePath",
    "terminationMessagePolicy",
    "workingDir",  # refused where it is relative, applied where it is a folder here
}
NOT_APPLIED_TO_JOB = (
    "nodePool",
    "scheduling",
    "network",
    "pserver.podDisruptionBudget",
    "trainer.minReplicas",
    "trainer.maxReplicas",
    "runPolicy.ttlSecondsAfterFinished",
)


def templates(spec: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the pod templates that the job uses, by their path: a role's own, else the shared one."""
    used: dict[str, Mapping[str, Any]] = {}
    for role in ROLES:
        if (part := spec.get(role)) is None:
            continue
        if part.get("template"):
            used[f"spec.{role}.template"] = part["template"]
        elif spec.get("template"):
            used["spec.template"] = spec["template"]
    return used


def refusals(document: Mapping[str, Any]) -> tuple[Problem, ...]:
    """Return every field of a valid manifest that this machine cannot honour."""
    spec = document["spec"]
    return tuple(_job_refusals(spec)) + tuple(
        refusal
        for path, template in templates(spec).items()
        for refusal in _template_refusals(f"{path}.spec", template["spec"])
    )


def _job_refusals(spec: Mapping[str, Any]) -> Iterator[Problem]:
    policy = spec.get("runPolicy") or {}
    if policy.get("suspend"):
        yield Problem("spec.runPolicy.suspend", "true", "false: a suspended job starts nothing")
    if spec.get("checkpoint"):
        where = "nothing: volumes need a cluster; a script can keep its files in the working directory"
        yield Problem("spec.checkpoint", "a volume", where)
    if (manager := policy.get("managedBy")) not in (None, CONTROLLER):
        yield Problem("spec.runPolicy.managedBy", manager, "nothing: only a cluster has other controllers")


def _template_refusals(path: str, pod_spec: Mapping[str, Any]) -> Iterator[Problem]:
    for index, container in enumerate(pod_spec.get("initContainers") or ()):
        yield Problem(
            f"{path}.initContainers[{index}]",
            str(container.get("name")),
            "none: only the main container's command runs on this machine",
        )
    for index, volume in enumerate(pod_spec.get("volumes") or ()):
        for kind in sorted(volume.keys() - {"name", "emptyDir"}):
            yield Problem(
                f"{path}.volumes[{index}].{kind}",
                str(volume.get("name")),
                "emptyDir: other volumes need a cluster",
            )
    index, container = main_container(pod_spec)
    yield from _container_refusals(f"{path}.containers[{index}]", container)


def _container_refusals(path: str, container: Mapping[str, Any]) -> Iterator[Problem]:
    if not container.get("command"):
        yield Problem(
            f"{path}.command", "nothing", "the program to start: an image's ENTRYPOINT is not known here"
        )
    for name in ("command", "args"):
        words = container.get(name) or []
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            yield Problem(f"{path}.{name}", repr(words), "a list of texts (numbers in quotes)")
    workdir = container.get("workingDir")
    if workdir and not (isinstance(workdir, str) and workdir.startswith("/")):
        yield Problem(
            f"{path}.workingDir",
            repr(workdir),
            "an absolute path, without which no cluster starts the container; or none, and here --workdir",
        )
    sources = container.get("envFrom") or []
    for index, source in enumerate(sources if isinstance(sources, list) else [sources]):
        where = f"{path}.envFrom[{index}]"
        kind = repr(source)
        if isinstance(source, dict):
            kind = next((name for name in source if name != "prefix"), "an empty source")
            where += f".{kind}"
        yield Problem(where, kind, "env: secrets and config maps need a cluster")
    for index, entry in enumerate(container.get("env") or ()):
        yield from _variable_refusals(f"{path}.env[{index}]", entry)


def _variable_refusals(path: str, entry: Mapping[str, Any]) -> Iterator[Problem]:
    value = entry.get("value", "")
    if not isinstance(value, str):
        yield Problem(f"{path}.value", repr(value), "text (in quotes, where YAML would read something else)")
    sources = entry.get("valueFrom") or {}
    if not isinstance(sources, dict):
        yield Problem(f"{path}.valueFrom", repr(sources), "a map, such as {fieldRef: {fieldPath: …}}")
        return
    for kind, source in sources.items():
        where = f"{path}.valueFrom.{kind}"
        if not isinstance(source, dict):
            yield Problem(where, repr(source), "a map, such as {fieldPath: metadata.name}")
            continue
        if kind != "fieldRef":
            found = f"{entry.get('name')} from {source.get('name') or source.get('resource')}"
            yield Problem(where, found, "a value or a fieldRef: other sources need a cluster")
        elif field_value({}, str(source.get("fieldPath")), "") is None:
            known = "metadata.{name,namespace,uid,labels['…'],annotations['…']} or status.{podIP,hostIP}"
            yield Problem(f"{where}.fieldPath", str(source.get("fieldPath")), known)


def _at(spec: Mapping[str, Any], path: str) -> Any:
    """Return what a field of the spec holds, or None."""
    value: Any = spec
    for name in path.split("."):
        value = (value or {}).get(name)
    return value


def _is_asked(value: Any) -> bool:
    """Whether a field asks for something; a number may ask for it with 0."""
    return value is not None and value is not False and value != {}


def not_applied(document: Mapping[str, Any], workdirs: Collection[Path] = ()) -> tuple[str, ...]:
    """Return the names of what the manifest asks for and a run on this machine leaves out.

    Parameters
    ----------
    document : mapping
        The manifest.
    workdirs : collection of Path
        The working directories of the run: a ``workingDir`` among them is applied.
    """
    spec = document["spec"]
    names = [f"spec.{path}" for path in NOT_APPLIED_TO_JOB if _is_asked(_at(spec, path))]
    for template in templates(spec).values():
        pod_spec = template["spec"]
        main_index, main = main_container(pod_spec)
        names += [name for name in main if name not in APPLIED_TO_CONTAINER]
        if (workdir := main.get("workingDir")) and PurePath(workdir) not in workdirs:
            names.append("workingDir")
        names += [name for name in pod_spec if name not in APPLIED_TO_POD]
        names += [
            f"container {container['name']}"
            for index, container in enumerate(pod_spec["containers"])
            if index != main_index
        ]
    return tuple(dict.fromkeys(names))
