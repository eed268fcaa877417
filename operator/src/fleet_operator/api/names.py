"""The roles of a job's replicas, and the names of its objects, derived from the job's name."""

from __future__ import annotations

from enum import StrEnum

__all__ = [
    "ANNOTATION_MADE_FROM",
    "ANNOTATION_MAIN",
    "API_GROUP",
    "API_VERSION",
    "CONTROLLER",
    "JOB_KEY",
    "JOB_KEY_FILE",
    "KIND",
    "KUEUE",
    "LABEL_ATTEMPT",
    "LABEL_INDEX",
    "LABEL_JOB_NAME",
    "LABEL_MANAGED_BY",
    "LABEL_QUEUE",
    "LABEL_ROLE",
    "MAIN_CONTAINER",
    "MANAGED_BY",
    "MAX_NAME_LENGTH",
    "METRICS_PORT",
    "NAME_PATTERN",
    "PLURAL",
    "TLS_DIR",
    "TLS_SERVER_NAME",
    "Role",
    "claim_name",
    "cluster_host",
    "gang_name",
    "pod_name",
    "server_claim_name",
    "service_name",
]


class Role(StrEnum):
    """The role of a replica; its value appears in pod names and labels."""

    PSERVER = "pserver"
    TRAINER = "trainer"


API_GROUP = "fleetjob.dev"
API_VERSION = f"{API_GROUP}/v1alpha1"
KIND = "FleetJob"
PLURAL = "fleetjobs"

LABEL_JOB_NAME = f"{API_GROUP}/job-name"
LABEL_ROLE = f"{API_GROUP}/role"
LABEL_INDEX = f"{API_GROUP}/index"
LABEL_ATTEMPT = f"{API_GROUP}/attempt"
LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGED_BY = "fleet-operator"
KUEUE = "kueue.x-k8s.io/"  # what the names of Kueue's labels, scheduling gates and finalizers begin with
LABEL_QUEUE = f"{KUEUE}queue-name"  # of a job, as on every object that Kueue queues, and of its pods
CONTROLLER = f"{API_GROUP}/fleet-operator"  # the name of this operator in spec.managedBy

ANNOTATION_MADE_FROM = f"{API_GROUP}/made-from"  # a digest of an object's desired state when it was created
ANNOTATION_MAIN = "kubectl.kubernetes.io/default-container"  # kubectl logs and exec use it too
MAIN_CONTAINER = "fleet"
JOB_KEY = "FLEET_JOB_KEY"  # the variable of the job key, by which replicas authenticate each other
JOB_KEY_FILE = "FLEET_JOB_KEY_FILE"  # or the variable of the path of a file that contains the key
TLS_DIR = "FLEET_TLS_DIR"  # the variable of the folder of the replicas' TLS certificates
TLS_SERVER_NAME = "FLEET_TLS_SERVER_NAME"  # the variable of the name in the servers' certificates
METRICS_PORT = 6180  # each replica serves its metrics and progress here

# A pod's name is also its host name, a DNS label of at most 63 characters: "-pserver-" and an index must
# fit after the job's name. The Service has the job's name, and the name of a Service starts with a letter.
MAX_NAME_LENGTH = 48
NAME_PATTERN = "^[a-z]([-a-z0-9]*[a-z0-9])?$"


def pod_name(job_name: str, role: Role, index: int) -> str:
    """Return the name of a replica's pod, which is also its host name."""
    return f"{job_name}-{role.value}-{index}"


def service_name(job_name: str) -> str:
    """Return the name of the headless Service, which is the subdomain of the job's pods."""
    return job_name


def cluster_host(job_name: str, namespace: str, role: Role, index: int) -> str:
    """Return the DNS name of a replica in a cluster, which is known before its pod exists.

    Notes
    -----
    ``{pod}.{service}.{namespace}.svc`` is not fully qualified, because the operator does not know the
    cluster's domain. It has three dots, fewer than a pod's ``ndots`` of five, so the pod's resolver tries its
    search path, whose last entry is the cluster's domain. Unlike ``{pod}.{service}``, the name resolves to
    the same pod from every namespace.
    """
    return f"{pod_name(job_name, role, index)}.{service_name(job_name)}.{namespace}.svc"


def claim_name(job_name: str, uid: str) -> str:
    """Return the name of a job's checkpoint claim, which no later job of the same name shares."""
    return f"{job_name}-checkpoint-{uid[:8]}"


def server_claim_name(claim: str, server: int) -> str:
    """Return the name of a parameter server's claim, for jobs in which each server has its own."""
    return f"{claim}-pserver-{server}"


def gang_name(job_name: str, life: int, uid: str = "") -> str:
    """Return the gang's name, made of the job's name, part of its uid if given, and its restart count."""
    return "-".join((job_name, *((uid[:8],) if uid else ()), str(life)))
