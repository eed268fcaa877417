"""Adapts a job to this machine: removes cluster settings, and determines settings of the replicas."""

from __future__ import annotations

import os
import sys
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fleet_operator.api import FailureAction, FailurePolicy, Mode, Role, StartupOrder, StartupPolicy
from fleet_operator.cli.lines import now
from fleet_operator.errors import InvalidJob
from fleet_operator.local.addresses import Claim, claim_ports
from fleet_operator.local.container import Given
from fleet_operator.local.limits import refusals
from fleet_operator.local.pod import LocalSettings, visible_gpus

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fleet_operator.api import FleetJob
    from fleet_operator.cli.display import Display
    from fleet_operator.cli.scalars import Scalars

# Trainers and servers on one machine share memory, so glibc should bypass the caches when copying tensors.
COPY_PAST_CACHES = {"GLIBC_TUNABLES": f"glibc.cpu.x86_non_temporal_threshold={2 << 20}"}


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of ``fleetjob run``.

    Attributes
    ----------
    workdirs : mapping
        The working directory of each role's replicas.
    logs : Path
        The folder of the replicas' logs; it is created.
    environ : mapping
        The environment that the replicas inherit.
    timeout_seconds : float, optional
        The time after which the run is stopped.
    given : Given
        The replacements of volumes, Secrets and ConfigMaps.
    follow : bool
        Whether to show the output of trainer 0.
    scalars : Scalars, optional
        Receives the trainers' progress.
    runs : Path, optional
        The folder of links to the user's runs, from which ``fleetjob ui`` finds them.
    """

    workdirs: Mapping[Role, Path]
    logs: Path
    environ: Mapping[str, str]
    timeout_seconds: float | None = None
    given: Given = field(default_factory=Given)
    follow: bool = False
    scalars: Scalars | None = None
    runs: Path | None = None


def prepare(job: FleetJob, given: Given | None = None, *, no_restart: bool = False) -> FleetJob:
    """Return a job adapted to this machine, including a uid.

    If the manifest has no ``startupPolicy.order``, all replicas start together. Trainers wait for servers'
    ports anyway, and starting them later saves nothing on one machine. With `no_restart`, the first failure
    fails the job.

    Raises
    ------
    InvalidJob
        The manifest requires features of a cluster; every such field is named.
    """
    if problems := refusals(job.to_manifest(), given):
        raise InvalidJob(f"{job.name}, as a run on this machine,", problems)
    metadata = {"uid": str(uuid.uuid4()), "resource_version": "1", "creation_timestamp": now()}
    spec = job.spec
    # With InOrder, a run would wait twice for the import of torch. On a cluster InOrder is the default,
    # because trainers would otherwise occupy their nodes while servers are still pulling their image.
    if "order" not in spec.startup_policy.model_fields_set:
        spec = spec.model_copy(update={"startup_policy": StartupPolicy(order=StartupOrder.ANY_ORDER)})
    if no_restart:
        policy = FailurePolicy(action=FailureAction.FAIL_JOB)
        spec = spec.model_copy(update={"failure_policy": policy})
    return job.model_copy(update={"metadata": job.metadata.model_copy(update=metadata), "spec": spec})


def without_cluster(job: FleetJob) -> FleetJob:
    """Return the job without settings that would have unwanted effects on one machine.

    Each pod has its own address, and can use all of the manifest's ports. The job ends with its run, and its
    servers exit by themselves before that.
    """
    policy = job.spec.run_policy.model_copy(update={"ttl_seconds_after_finished": None})
    spec = job.spec.model_copy(update={"network": None, "run_policy": policy})
    return job.model_copy(update={"spec": spec})


def claim_port(job: FleetJob, options: RunOptions, display: Display, claims: list[Claim]) -> FleetJob:
    """Assign a collective job a rendezvous port that no other local run uses."""
    if job.spec.mode is not Mode.COLLECTIVE:
        return job
    wanted = job.port(Role.TRAINER)
    claim = claim_ports(wanted, job.nproc_per_node, environ=options.environ)
    claims.append(claim)
    if claim.port == wanted:
        return job
    display.say(f"port {wanted} is in use on this machine: the trainers use {claim.port} instead")
    trainer = job.spec.trainer.model_copy(update={"port": claim.port})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"trainer": trainer})})


def local_settings(job: FleetJob, options: RunOptions, scratch: Path) -> LocalSettings:
    """Return the replicas' local settings, dividing the machine's cores among their processes."""
    loopback = "lo" if sys.platform == "linux" else "lo0"
    threads = max(1, _num_cores() // sum(job.replicas(role) * _processes(job, role) for role in job.roles))
    return LocalSettings(
        workdirs=options.workdirs,
        logs=options.logs,
        scratch=scratch,
        environ=options.environ,
        python=sys.executable,
        num_threads=threads,
        given=options.given,
        defaults=_defaults(job, options.environ),
        overrides={f"{library}_SOCKET_IFNAME": loopback for library in ("GLOO", "NCCL", "TP")},
        gpus=visible_gpus(options.environ, (each.name for each in Path("/dev").iterdir())),
    )


def _defaults(job: FleetJob, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the replicas' default environment variables, except those that the user has set."""
    defaults = {"PYTHONUNBUFFERED": "1"}
    if job.spec.mode is Mode.PARAMETER_SERVER and COPY_PAST_CACHES.keys().isdisjoint(environ):
        defaults |= COPY_PAST_CACHES
    return defaults


def _processes(job: FleetJob, role: Role) -> int:
    return job.nproc_per_node if role is Role.TRAINER else 1


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
