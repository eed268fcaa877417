"""Python clients for FleetJobs on a cluster: submit, wait, status, logs, scale, suspend and delete.

They log in as kubectl does, or as the service account of the pod in which they run, and return the models of
`fleet_operator.api`. A kubeconfig needs the extra ``fleet-operator[cli]``.
"""

from fleet_operator.client.asynchronous import AsyncFleetJobClient, JobFailedError
from fleet_operator.client.blocking import FleetJobClient
from fleet_operator.client.logs import LogLine
from fleet_operator.client.session import ClusterRefusal, JobNotFoundError, NotInTimeError

__all__ = [
    "AsyncFleetJobClient",
    "ClusterRefusal",
    "FleetJobClient",
    "JobFailedError",
    "JobNotFoundError",
    "LogLine",
    "NotInTimeError",
]
