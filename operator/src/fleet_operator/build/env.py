"""The environment of each replica, which assigns its role; ``contract/env/*.yaml`` has examples.

Parameter-server variables are absent in mode Collective and vice versa, because PaddleCloudRoleMaker chooses
its path by the variables that it finds. For the same reason ``PADDLE_TRAINER_IPS`` is never set in
parameter-server mode.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

from fleet_operator.api import Mode, Role
from fleet_operator.api.names import JOB_KEY
from fleet_operator.build.ports import first_ports, listening_role, replica_ports
from fleet_operator.build.service import ClusterHosts
from fleet_operator.build.volumes import tls_env

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from fleet_operator.api import FleetJob
    from fleet_operator.build.service import Hosts


__all__ = ["FIRST_START", "Peers", "Start", "overwritten_sentence", "role_env"]

_RENDEZVOUS = "PET_RDZV_CONF"
_TORCHRUN_SECONDS = 900  # torchrun's default time limit for the other pods
# In bytes; a pattern replaces a longer list, which etcd would hold once for each container.
_LONGEST_LIST = 4 << 10
_TRAINING_ROLE = {Role.PSERVER: "PSERVER", Role.TRAINER: "TRAINER"}
_ROLE_INDEX = {Role.PSERVER: "PADDLE_PSERVER_ID", Role.TRAINER: "PADDLE_TRAINER_ID"}


@dataclass(frozen=True, slots=True)
class Start:
    """The environment values that may change each time a replica starts.

    Attributes
    ----------
    life : int
        The life of the job in which its current training run began.
    unseen : bool
        Whether the end of the previous pod was not observed, so that it may have completed.
    peers_run : bool
        Whether all other replicas have already run, so that this one need not wait for their start.
    key : str, optional
        The key of the job's current life; only the main container has it.
    ports : tuple of int
        With the nodes' network, the ports of the listening replicas, as stored in the pods of this life.
    """

    life: int = 0
    unseen: bool = False
    peers_run: bool = False
    key: str | None = field(default=None, repr=False)
    ports: tuple[int, ...] = ()


FIRST_START = Start()
"""The values for the first start of a replica, in a job without a key."""


@dataclass(frozen=True)
class Peers:
    """The hosts and endpoints of a job's replicas, which every replica's environment lists.

    One instance serves all replicas of a job: if each replica computed its own list, the time for a plan
    would be quadratic.

    Attributes
    ----------
    job : FleetJob
        The job.
    hosts : Hosts
        Maps each replica to its host.
    assigned_ports : tuple of int
        With the nodes' network, the ports of the listening replicas, as stored in the pods of this life.
    """

    job: FleetJob
    hosts: Hosts
    assigned_ports: tuple[int, ...] = ()

    @cached_property
    def ports(self) -> Sequence[int]:
        """The first port of each listening replica."""
        return first_ports(self.job, listening_role(self.job), self.assigned_ports)

    @cached_property
    def server_hosts(self) -> str:
        """The hosts of the parameter servers."""
        return _listed(self._names, lambda index: (self._names[index],), "")

    @cached_property
    def endpoints(self) -> str:
        """The endpoints of all parameter servers, or of all processes of a collective job."""
        ports, slots = self.ports, self.job.nproc_per_node
        is_even = len({later - port for port, later in pairwise(ports)}) <= 1
        return _listed(
            self._names,
            lambda index: (f"{self._names[index]}:{ports[index] + slot}" for slot in range(slots)),
            f":{_port_pattern(ports, slots)}" if is_even else None,
            slots=slots,
        )

    @cached_property
    def _names(self) -> Sequence[str]:
        role = listening_role(self.job)
        return [self.hosts(role, index) for index in range(self.job.replicas(role))]


def role_env(
    job: FleetJob,
    role: Role,
    index: int,
    hosts: Hosts,
    start: Start = FIRST_START,
    *,
    restarts: int = 0,
    peers: Peers | None = None,
) -> dict[str, str]:
    """Return the environment variables that assign a replica its role.

    Parameters
    ----------
    job : FleetJob
        The job.
    role, index : Role, int
        The replica.
    hosts : Hosts
        Maps each replica to its host.
    start : Start
        The values of the current start.
    restarts : int
        How often this replica was started before, alone or with the whole job.
    peers : Peers, optional
        The lists of this job, if several replicas share them.

    Returns
    -------
    dict of str to str
        ``PADDLE_CURRENT_IP`` and ``POD_IP`` equal this replica's entry in the lists of hosts.
    """
    host, peers = hosts(role, index), peers or Peers(job, hosts, start.ports)
    env = {
        "PADDLE_TRAINING_ROLE": _TRAINING_ROLE[role],
        "TRAINING_ROLE": _TRAINING_ROLE[role],
        "PADDLE_CURRENT_IP": host,
        "POD_IP": host,
        "FLEET_JOB_NAME": job.name,
        "FLEET_JOB_UID": job.metadata.uid,
        "FLEET_SYNC_MODE": job.spec.sync_mode.value,
        "FLEET_RESTARTS": str(restarts),
        "FLEET_METRICS_PORT": str(replica_ports(job, role, index, start.ports).metrics),
    }
    if start.key is not None:
        env[JOB_KEY] = start.key
    env |= tls_env(job)
    if not start.peers_run:
        env["FLEET_START_DEADLINE_SECONDS"] = str(job.start_deadline_seconds)
    if job.spec.checkpoint is not None:
        env["FLEET_CHECKPOINT_DIR"] = job.spec.checkpoint.mount_path
    env |= _grace(job, role)
    # A replica may find out that its training has already completed, from the servers or from a marker beside
    # the checkpoints.
    by_mark = job.spec.mode is Mode.COLLECTIVE and job.spec.checkpoint is not None
    by_servers = job.spec.mode is not Mode.COLLECTIVE and (start.unseen or role is Role.PSERVER)
    if by_mark or by_servers:
        env["FLEET_LIFE"] = str(start.life)
    if job.spec.mode is Mode.COLLECTIVE:
        if job.host_ports is not None:
            env["FLEET_HOST_NETWORK"] = "true"
        return env | _collective(job, index, peers)
    return env | _parameter_server(job, role, index, peers)


def _grace(job: FleetJob, role: Role) -> dict[str, str]:
    """Return a trainer's variable with its termination grace period, if the template sets one."""
    seconds = (job.template(role).spec.model_extra or {}).get("terminationGracePeriodSeconds")
    return {"FLEET_GRACE_SECONDS": str(seconds)} if role is Role.TRAINER and isinstance(seconds, int) else {}


def _parameter_server(job: FleetJob, role: Role, index: int, peers: Peers) -> dict[str, str]:
    num_trainers = str(job.replicas(Role.TRAINER))
    env = {
        "PADDLE_PSERVERS_IP_PORT_LIST": peers.endpoints,
        "PADDLE_TRAINERS": num_trainers,
        "PADDLE_TRAINERS_NUM": num_trainers,
        _ROLE_INDEX[role]: str(index),
    }
    if job.host_ports is None:  # with the nodes' network, the servers have no common port
        port = str(job.port(Role.PSERVER))
        env |= {"PADDLE_PSERVER_IPS": peers.server_hosts, "PADDLE_PSERVER_PORT": port, "PADDLE_PORT": port}
    elif role is Role.PSERVER:
        env["PADDLE_PORT"] = str(peers.ports[index])
    if job.elastic:  # PADDLE_TRAINERS is the number at this replica's start
        env["FLEET_MAX_TRAINERS"] = str(job.most_trainers)
    return env


def _collective(job: FleetJob, index: int, peers: Peers) -> dict[str, str]:
    """Return the variables for Paddle's launcher, torch.distributed and torchrun (``PET_*``).

    With one process, the pod's process is the rank. With more, the command is a launcher that starts the
    ranks, so the pod gets only the variables that all of its processes share.
    """
    num_nodes, slots = job.replicas(Role.TRAINER), job.nproc_per_node
    hosts, ports = peers.hosts, peers.ports
    num_processes = str(num_nodes * slots)
    node = {
        "MASTER_ADDR": hosts(Role.TRAINER, 0),
        "MASTER_PORT": str(ports[0]),
        "NODE_RANK": str(index),
        "NNODES": str(num_nodes),
        "NPROC_PER_NODE": str(slots),
    }
    env = {
        "PADDLE_TRAINERS": num_processes,
        "PADDLE_TRAINERS_NUM": num_processes,
        "PADDLE_TRAINER_ENDPOINTS": peers.endpoints,
        "WORLD_SIZE": num_processes,
        "LOCAL_WORLD_SIZE": str(slots),
        **node,
        **{f"PET_{name}": value for name, value in node.items()},
    }
    if all(variable.name != _RENDEZVOUS for variable in job.template(Role.TRAINER).main_container.env or ()):
        env[_RENDEZVOUS] = _patience(job)
    if slots == 1:
        env |= {
            "PADDLE_TRAINER_ID": str(index),
            "PADDLE_CURRENT_ENDPOINT": f"{hosts(Role.TRAINER, index)}:{ports[index]}",
            "RANK": str(index),
            "LOCAL_RANK": "0",
        }
    return env


def _patience(job: FleetJob) -> str:
    """Return torchrun's rendezvous options; their time-outs allow the other pods to pull their images.

    ``timeout`` is for the static backend; c10d has one limit until all have joined, and one for its store.
    """
    seconds = max(job.start_deadline_seconds, _TORCHRUN_SECONDS)
    return ",".join(f"{name}={seconds}" for name in ("timeout", "join_timeout", "read_timeout"))


def _listed(
    names: Sequence[str],
    entries: Callable[[int], Iterable[str]],
    ports: str | None,
    *,
    slots: int = 1,
) -> str:
    """Return a list with an entry for each replica, or a pattern if the list would be long.

    Linux limits an environment variable to 128 KiB, and a pod's manifest repeats the variable in each
    container.

    Parameters
    ----------
    names : sequence of str
        The hosts of the replicas.
    entries : callable
        Returns the entries of a replica.
    ports : str, optional
        What follows the pattern of the hosts; None if no pattern describes the ports.
    slots : int
        The number of entries of a replica.
    """
    last = len(names) - 1
    before, _, after = names[last].rpartition(f"-{last}.")
    is_long = len(names) * slots * len(names[0]) > _LONGEST_LIST
    if (
        is_long
        and ports is not None
        and all(name == f"{before}-{index}.{after}" for index, name in enumerate(names))
    ):
        return f"{before}-[0-{last}].{after}{ports}"
    return ",".join(entry for index in range(len(names)) for entry in entries(index))


def _port_pattern(ports: Sequence[int], slots: int) -> str:
    """Return a pattern with the ports of the first pod's processes, and the offset of each further pod."""
    apart = ports[1] - ports[0] if len(ports) > 1 else 0
    if slots == 1 and apart == 0:
        return str(ports[0])
    return f"[{ports[0]}-{ports[0] + slots - 1}{f'+{apart}' if apart else ''}]"


def overwritten_sentence(job: FleetJob) -> str | None:
    """Return a warning about variables in the template that the job overrides, or None."""
    fields = dict.fromkeys(field for role in job.roles for field in _overwritten(job, role))
    if not fields:
        return None
    return (
        f"{', '.join(fields)}: the job itself sets a variable of this name, and the template's value is not"
        " used; remove it from the template, or rename it"
    )


def _overwritten(job: FleetJob, role: Role) -> Iterator[str]:
    """Yield the variables in a role's template that the job overrides, as ``FIELD (NAME)``."""
    names = role_env(job, role, 0, ClusterHosts(job)).keys()
    part = job.spec.trainer if role is Role.TRAINER else job.spec.pserver
    shared = part is None or part.template is None
    path = f"spec.{'' if shared else f'{role.value}.'}template.spec"
    spec = job.template(role).spec
    for kind, containers in (("initContainers", spec.init_containers), ("containers", spec.containers)):
        for index, container in enumerate(containers or ()):
            for position, variable in enumerate(container.env or ()):
                if variable.name in names:
                    yield f"{path}.{kind}[{index}].env[{position}] ({variable.name})"
