"""Test cases for features that jobs have only on a cluster, in addition to the shared behaviours.

A case describes the expected pods and other objects on a cluster, and the reaction of `fleetjob run`: it
either refuses the job and names the field, or logs once that it ignores the field. Effects that take time
(resuming a job, losing a node) are checked in the cluster's own test, by the id of the case.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["CLUSTER_ONLY", "ClusterOnly", "filled", "holds"]

Manifest = dict[str, Any]


@dataclass(frozen=True)
class ClusterOnly:
    """A test case: a job, with two servers and two trainers or only two trainers, and its expected outcome.

    Attributes
    ----------
    spec, pod : mapping
        Additional fields of the job's spec, and of its pod template.
    sidecar : mapping, optional
        A second container of the template.
    refused : str, optional
        The field for which a run on this machine refuses the job.
    left_out : tuple of str
        The fields that the run reports as ignored.
    pods : mapping
        By role, the fields that a pod on a cluster must contain.
    objects : mapping
        The names of the objects other than pods, by their kind. UID stands for the start of the job's uid.
    """

    id: str
    spec: Manifest = field(default_factory=dict)
    pod: Manifest = field(default_factory=dict)
    sidecar: Manifest | None = None
    collective: bool = False
    refused: str | None = None
    left_out: tuple[str, ...] = ()
    pods: dict[str, Manifest] = field(default_factory=dict)
    objects: dict[str, tuple[str, ...]] = field(default_factory=dict)


def filled(case: ClusterOnly, document: Manifest) -> Manifest:
    """Return the job of a test case, with the case's additions in each pod template."""
    spec = _merged(document["spec"], case.spec)
    for holder in (spec, spec.get("pserver") or {}, spec["trainer"]):
        if "template" not in holder:
            continue
        pod = _merged(holder["template"]["spec"], case.pod)
        if case.sidecar is not None:
            pod["containers"] = [*pod["containers"], case.sidecar]
        holder["template"] = {**holder["template"], "spec": pod}
    return {**document, "spec": spec}


def _merged(one: Manifest, other: Manifest) -> Manifest:
    both = {key: _merged(one[key], value) for key, value in other.items() if isinstance(one.get(key), dict)}
    return {**one, **other, **both}


def holds(found: Any, wanted: Any) -> bool:
    """Return whether an object contains all entries of another object, recursively."""
    if isinstance(wanted, dict):
        return isinstance(found, dict) and all(holds(found.get(key), each) for key, each in wanted.items())
    if isinstance(wanted, list):
        return isinstance(found, list) and all(any(holds(has, each) for has in found) for each in wanted)
    return bool(found == wanted)


def _volume(claim: str) -> Manifest:
    return {"spec": {"volumes": [{"persistentVolumeClaim": {"claimName": claim}}]}}


_CLAIM = {"spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}}
_UNREACHABLE = {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute"}

CLUSTER_ONLY = (
    ClusterOnly(
        "a-suspended-job-has-no-pods-until-it-is-resumed",
        {"suspend": True},
        refused="spec.suspend",
    ),
    ClusterOnly(
        "a-job-of-another-controller-is-left-alone",
        {"managedBy": "kueue.x-k8s.io/multikueue"},
        refused="spec.managedBy",
    ),
    ClusterOnly(
        "each-server-keeps-its-checkpoint-in-a-claim",
        {"checkpoint": {"volumeClaimTemplate": _CLAIM, "scope": "Pserver", "retention": "Retain"}},
        refused="spec.checkpoint",
        pods={"pserver": _volume("digits-checkpoint-UID-pserver-0")},
        objects={
            "persistentvolumeclaims": ("digits-checkpoint-UID-pserver-0", "digits-checkpoint-UID-pserver-1")
        },
    ),
    ClusterOnly(
        "all-pods-keep-their-checkpoint-in-one-claim",
        {
            "checkpoint": {
                "volumeClaimTemplate": _CLAIM,
                "scope": "Job",
                "mountPath": "/state",
                "retention": "Delete",
            }
        },
        refused="spec.checkpoint",
        pods={"pserver": _volume("digits-checkpoint-UID")},
        objects={"persistentvolumeclaims": ("digits-checkpoint-UID",)},
    ),
    ClusterOnly(
        "a-claim-that-is-there-is-mounted",
        {"checkpoint": {"claimName": "shared"}},
        refused="spec.checkpoint",
        pods={"pserver": _volume("shared")},
        objects={"persistentvolumeclaims": ()},
    ),
    ClusterOnly(
        "a-finished-job-is-deleted-when-its-time-is-over",
        {"runPolicy": {"ttlSecondsAfterFinished": 1}},
        left_out=("spec.runPolicy.ttlSecondsAfterFinished",),
    ),
    ClusterOnly(
        "a-pod-on-a-node-that-is-lost-is-replaced-and-nobody-has-failed",
        {"scheduling": {"tolerations": [{**_UNREACHABLE, "tolerationSeconds": 1}]}},
        left_out=("spec.scheduling",),
    ),
    ClusterOnly(
        "a-collective-job-is-scaled-and-starts-anew",
        {"trainer": {"minReplicas": 1, "maxReplicas": 3}},
        collective=True,
        left_out=("spec.trainer.minReplicas", "spec.trainer.maxReplicas"),
    ),
    ClusterOnly(
        "a-trainer-joins-servers-that-wait-for-nobody",
        {"syncMode": "Async", "trainer": {"minReplicas": 1, "maxReplicas": 3}},
        left_out=("spec.trainer.minReplicas", "spec.trainer.maxReplicas"),
    ),
    ClusterOnly(
        "volcano-places-all-pods-together",
        {"podGroupPolicy": {"volcano": {"queue": "research", "minMember": 4}}},
        left_out=("spec.podGroupPolicy",),
        pods={
            "trainer": {
                "metadata": {"annotations": {"scheduling.k8s.io/group-name": "digits-0"}},
                "spec": {"schedulerName": "volcano"},
            }
        },
        objects={"podgroups.scheduling.volcano.sh": ("digits-0",)},
    ),
    ClusterOnly(
        "scheduler-plugins-place-all-pods-together",
        {"podGroupPolicy": {"coscheduling": {"minMember": 4, "scheduleTimeoutSeconds": 60}}},
        left_out=("spec.podGroupPolicy",),
        pods={"trainer": {"metadata": {"labels": {"scheduling.x-k8s.io/pod-group": "digits-0"}}}},
        objects={"podgroups.scheduling.x-k8s.io": ("digits-0",)},
    ),
    ClusterOnly(
        "kueue-admits-all-pods-together",
        {"podGroupPolicy": {"kueue": {"queueName": "research"}}},
        left_out=("spec.podGroupPolicy",),
        pods={"trainer": {"metadata": {"labels": {"kueue.x-k8s.io/pod-group-name": "digits-UID-0"}}}},
    ),
    ClusterOnly(
        "a-network-policy-keeps-others-out",
        {"network": {"policy": {"type": "Isolated"}}},
        left_out=("spec.network",),
        objects={"networkpolicies": ("digits",)},
    ),
    ClusterOnly(
        "replicas-that-encrypt-have-the-certificates-of-a-secret",
        {"network": {"tls": {"secretName": "digits-tls"}}},
        left_out=("spec.network",),
        pods={
            role: {
                "spec": {
                    "volumes": [
                        {"name": "fleet-tls", "secret": {"secretName": "digits-tls", "defaultMode": 0o444}}
                    ]
                }
            }
            for role in ("pserver", "trainer")
        },
    ),
    ClusterOnly(
        "replicas-on-the-network-of-their-node-have-ports-of-their-own",
        {"network": {"hostNetwork": True, "portRange": {"first": 23000, "last": 23099}}},
        left_out=("spec.network",),
        pods={"trainer": {"spec": {"hostNetwork": True}}},
    ),
    ClusterOnly(
        "a-budget-keeps-servers-from-being-evicted",
        {"pserver": {"disruptionBudget": {}}},
        left_out=("spec.pserver.disruptionBudget",),
        objects={"poddisruptionbudgets": ("digits-pserver",)},
    ),
    ClusterOnly(
        "trainers-get-devices-and-shared-memory-on-the-nodes-that-are-selected",
        {
            "scheduling": {"nodeSelector": {"kubernetes.io/os": "linux"}},
            "trainer": {"devices": {"count": 2, "resourceName": "example.com/gpu"}, "sharedMemory": "1Gi"},
        },
        left_out=("spec.scheduling", "spec.trainer.sharedMemory", "spec.trainer.devices"),
        pods={
            "pserver": {"spec": {"nodeSelector": {"kubernetes.io/os": "linux"}}},
            "trainer": {
                "spec": {
                    "containers": [
                        {
                            "resources": {"limits": {"example.com/gpu": "2"}},
                            "env": [{"name": "NCCL_DEBUG", "value": "WARN"}],
                            "volumeMounts": [{"mountPath": "/dev/shm"}],  # noqa: S108  shared memory has this path,
                        }
                    ],
                    "volumes": [{"emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}],
                }
            },
        },
    ),
    ClusterOnly(
        "pods-have-the-priority-of-their-job",
        {"scheduling": {"priorityClassName": "system-cluster-critical"}},
        left_out=("spec.scheduling",),
        pods={"trainer": {"spec": {"priority": 2_000_000_000}}},
    ),
    ClusterOnly(
        "images-are-pulled-with-the-secrets-of-the-template",
        pod={"imagePullSecrets": [{"name": "registry"}]},
        left_out=("imagePullSecrets",),
        pods={"trainer": {"spec": {"imagePullSecrets": [{"name": "registry"}]}}},
    ),
    ClusterOnly(
        "pods-run-under-the-account-of-the-template-without-its-token",
        pod={"serviceAccountName": "trainer"},
        left_out=("serviceAccountName",),
        pods={"trainer": {"spec": {"serviceAccountName": "trainer", "automountServiceAccountToken": False}}},
    ),
    ClusterOnly(
        "a-sidecar-that-goes-on-does-not-hold-the-end-up",
        sidecar={"name": "proxy", "image": "example.com/proxy:1"},
        left_out=("container proxy",),
        pods={"trainer": {"spec": {"containers": [{"name": "fleet"}, {"name": "proxy"}]}}},
    ),
)
