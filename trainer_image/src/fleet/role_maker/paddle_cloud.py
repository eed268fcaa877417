"""A role maker that reads the environment variables of the operator or a launcher."""

from fleet.environment.endpoints import endpoints_problem, split_endpoints
from fleet.errors import RoleError
from fleet.role_maker.role import JobIdentity, Role, RoleKind, RoleMaker
from fleet.role_maker.variables import Variables

__all__ = ["PaddleCloudRoleMaker"]

_DEFAULT_PORT = "6174"
_OF_TORCHRUN = "TORCHELASTIC_RUN_ID"
"""An environment variable that torchrun sets for its workers."""
_ROLE_VARIABLES = (
    *("TRAINING_ROLE", "PADDLE_TRAINING_ROLE", "PADDLE_TRAINER_ID", "PADDLE_PSERVER_ID"),
    *("PADDLE_TRAINERS", "PADDLE_TRAINERS_NUM", "PADDLE_PSERVERS_IP_PORT_LIST", "PADDLE_PSERVER_IPS"),
    *("PADDLE_PSERVER_PORT", "PADDLE_PORT", "PADDLE_TRAINER_ENDPOINTS", "PADDLE_CURRENT_ENDPOINT"),
    *("PADDLE_CURRENT_IP", "FLEET_JOB_NAME", "FLEET_JOB_UID", "FLEET_RESTARTS", "FLEET_MAX_TRAINERS"),
    *("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK"),
    *("NNODES", "NPROC_PER_NODE", "PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", _OF_TORCHRUN),
    *("OMPI_COMM_WORLD_RANK", "PMI_RANK"),
)
"""Variables that only a job sets. Kubernetes' users set POD_IP in other pods as well."""
_LOOPBACK = "127.0.0.1"
_HOSTS = "the parameter servers' hosts, comma separated, each once"


class PaddleCloudRoleMaker(RoleMaker):
    """Reads the role from environment variables.

    Parameters
    ----------
    is_collective : bool
        Whether to read the variables of collective training instead of those of parameter servers.

    Notes
    -----
    Two spellings exist for the servers; both may be set if they agree: ``PADDLE_PSERVERS_IP_PORT_LIST``, or
    ``PADDLE_PSERVER_IPS`` with ``PADDLE_PSERVER_PORT`` (6174). Collective workers of torchrun have the rank
    ``RANK`` of ``WORLD_SIZE``, which may differ from the index of their pod, because a rendezvous backend may
    order the nodes (c10d orders them by name). Such a worker has no endpoints, because the list of endpoints
    is in the order of the pods.

    If no variable gives this process a position in a job, it trains alone: as the only trainer of a server
    that runs inside it, or as the only collective worker.
    """

    def __init__(self, is_collective: bool = False) -> None:
        super().__init__()
        self._is_collective = is_collective

    def _make(self, variables: Variables, job: JobIdentity) -> Role:
        if not any(name in variables for name in _ROLE_VARIABLES):
            return _alone(job, collective=self._is_collective)
        return _collective(variables, job) if self._is_collective else _parameter_server(variables, job)


def _alone(job: JobIdentity, *, collective: bool) -> Role:
    """Return the role of a script that runs outside any job, for example in a debugger or a notebook."""
    endpoint = f"{_LOOPBACK}:{_DEFAULT_PORT}"
    return Role(
        kind=RoleKind.WORKER,
        index=0,
        worker_num=1,
        worker_endpoints=(endpoint,) if collective else (),
        server_endpoints=() if collective else (endpoint,),
        current_endpoint=endpoint if collective else "",
        current_host=_LOOPBACK,
        is_collective=collective,
        is_alone=True,
        job=job,
    )


def _parameter_server(variables: Variables, job: JobIdentity) -> Role:
    kind = variables.one_of(
        "TRAINING_ROLE", "PADDLE_TRAINING_ROLE", choices=("TRAINER", "PSERVER"), meaning="the role"
    )
    servers = _servers(variables)
    worker_num = variables.number(
        "PADDLE_TRAINERS_NUM", "PADDLE_TRAINERS", least=1, meaning="the number of trainers"
    )
    if kind == "TRAINER":
        index = variables.number(
            "PADDLE_TRAINER_ID", least=0, below=worker_num, meaning="this trainer's index"
        )
        endpoint = ""
    else:
        endpoint = _own_server(variables, servers)
        index = servers.index(endpoint)
    return Role(
        kind=RoleKind.WORKER if kind == "TRAINER" else RoleKind.SERVER,
        index=index,
        worker_num=worker_num,
        server_endpoints=servers,
        current_endpoint=endpoint,
        current_host=variables.optional("POD_IP", "PADDLE_CURRENT_IP"),
        job=job,
    )


def _servers(variables: Variables) -> tuple[str, ...]:
    listed = "PADDLE_PSERVERS_IP_PORT_LIST"
    if "PADDLE_PSERVER_IPS" not in variables:
        _check_has_servers(variables, listed)
        return variables.endpoints(listed, meaning="the parameter servers (or PADDLE_PSERVER_IPS)")
    _, hosts = variables.text("PADDLE_PSERVER_IPS", expected=_HOSTS)
    port = variables.optional("PADDLE_PSERVER_PORT", default=_DEFAULT_PORT)
    servers = tuple(f"{host}:{port}" for host in split_endpoints(hosts))
    if (problem := endpoints_problem(servers)) is not None:
        raise RoleError(
            f"PADDLE_PSERVER_IPS is {hosts!r} and PADDLE_PSERVER_PORT {port!r}: {problem}; "
            f"expected {_HOSTS}, and a port number"
        )
    if (
        listed in variables
        and (others := variables.endpoints(listed, meaning="the parameter servers")) != servers
    ):
        raise RoleError(
            f"{listed} is {','.join(others)!r} but PADDLE_PSERVER_IPS and PADDLE_PSERVER_PORT give "
            f"{','.join(servers)!r}; expected the same servers in both"
        )
    return servers


def _check_has_servers(variables: Variables, listed: str) -> None:
    if listed not in variables and "PADDLE_TRAINER_ENDPOINTS" in variables:
        raise RoleError(
            f"{listed} is not set, but PADDLE_TRAINER_ENDPOINTS is: this job has the mode Collective, "
            "without parameter servers; expected `from fleet.collective import fleet`, with no role maker "
            "or PaddleCloudRoleMaker(is_collective=True)"
        )


def _own_server(variables: Variables, servers: tuple[str, ...]) -> str:
    """Return this server's entry in the list of servers."""
    host_name, host = variables.text(
        "POD_IP", "PADDLE_CURRENT_IP", expected="this server's host, as in the list of servers"
    )
    port_name = "PADDLE_PORT" if variables.optional("PADDLE_PORT") else "PADDLE_PSERVER_PORT"
    port = variables.optional(port_name, default=_DEFAULT_PORT)
    endpoint = f"{host}:{port}"
    if endpoint not in servers:
        raise RoleError(
            f"{host_name} is {host!r} and {port_name} is {port!r}, but {endpoint} is not among the parameter "
            f"servers; expected one of {', '.join(servers)}"
        )
    if "PADDLE_PSERVER_ID" in variables:
        index = variables.number(
            "PADDLE_PSERVER_ID", least=0, below=len(servers), meaning="this server's index"
        )
        if servers[index] != endpoint:
            raise RoleError(
                f"PADDLE_PSERVER_ID is {str(index)!r}, which is {servers[index]}, "
                f"but this server is {endpoint}; expected {servers.index(endpoint)}"
            )
    return endpoint


def _collective(variables: Variables, job: JobIdentity) -> Role:
    _check_has_no_servers(variables)
    if "TRAINING_ROLE" in variables or "PADDLE_TRAINING_ROLE" in variables:
        variables.one_of(
            "TRAINING_ROLE",
            "PADDLE_TRAINING_ROLE",
            choices=("TRAINER",),
            meaning="the role in collective mode",
        )
    _check_launched(variables)
    endpoints: tuple[str, ...] = ()
    if "PADDLE_TRAINER_ENDPOINTS" in variables or not ("RANK" in variables and "WORLD_SIZE" in variables):
        endpoints = variables.endpoints("PADDLE_TRAINER_ENDPOINTS", meaning="all workers")
        worker_num = len(endpoints)
        _check_count(variables, worker_num)
    else:
        worker_num = variables.number("WORLD_SIZE", least=1, meaning="the number of workers")
    # torchrun may order the nodes differently, and passes on the pod's PADDLE_TRAINER_ID unchanged.
    ranks = ("RANK",) if _OF_TORCHRUN in variables else ("PADDLE_TRAINER_ID", "RANK")
    index = variables.number(*ranks, least=0, below=worker_num, meaning="this worker's rank")
    if _in_another_order(variables):
        endpoints = ()
    return Role(
        kind=RoleKind.WORKER,
        index=index,
        worker_num=worker_num,
        worker_endpoints=endpoints,
        current_endpoint=_own_worker(variables, endpoints, index),
        current_host=variables.optional("POD_IP", "PADDLE_CURRENT_IP"),
        is_collective=True,
        job=job,
    )


def _check_has_no_servers(variables: Variables) -> None:
    found = [name for name in ("PADDLE_PSERVERS_IP_PORT_LIST", "PADDLE_PSERVER_IPS") if name in variables]
    if found and "PADDLE_TRAINER_ENDPOINTS" not in variables and "RANK" not in variables:
        raise RoleError(
            f"PADDLE_TRAINER_ENDPOINTS is not set, but {found[0]} is: this job has the mode ParameterServer; "
            "expected `from fleet.parameter_server import fleet`, with no role maker or "
            "PaddleCloudRoleMaker()"
        )


def _check_launched(variables: Variables) -> None:
    """Raise an error if the pod has several slots and no launcher has given this process a rank."""
    slots = variables.optional("NPROC_PER_NODE", "PET_NPROC_PER_NODE", default="1")
    if slots != "1" and "PADDLE_TRAINER_ID" not in variables and "RANK" not in variables:
        raise RoleError(
            f"PADDLE_TRAINER_ID or RANK is not set, but NPROC_PER_NODE is {slots!r}: this pod has several "
            "slots (trainer.nprocPerNode), and a launcher sets the rank of each; start the script with "
            "torchrun SCRIPT, or python -m fleet.launch SCRIPT"
        )


def _in_another_order(variables: Variables) -> bool:
    """Return whether torchrun's rank of this node differs from the node's index in the job."""
    number, listed = variables.optional("GROUP_RANK"), variables.optional("NODE_RANK")
    return _OF_TORCHRUN in variables and bool(number and listed) and number != listed


def _check_count(variables: Variables, worker_num: int) -> None:
    names = [name for name in ("PADDLE_TRAINERS_NUM", "WORLD_SIZE") if name in variables]
    for name in names:
        if (said := variables.number(name, least=1, meaning="the number of workers")) != worker_num:
            raise RoleError(
                f"{name} is {str(said)!r} but PADDLE_TRAINER_ENDPOINTS has {worker_num} endpoints; "
                "expected one endpoint per worker"
            )


def _own_worker(variables: Variables, endpoints: tuple[str, ...], index: int) -> str:
    if not endpoints:
        return ""
    if "PADDLE_CURRENT_ENDPOINT" not in variables:
        return endpoints[index]  # torchrun knows ranks, not endpoints
    name, endpoint = variables.text(
        "PADDLE_CURRENT_ENDPOINT", expected="this worker's entry in PADDLE_TRAINER_ENDPOINTS"
    )
    if endpoint != endpoints[index]:
        raise RoleError(
            f"{name} is {endpoint!r}, but this worker's rank is {index} and entry {index} of "
            f"PADDLE_TRAINER_ENDPOINTS is {endpoints[index]!r}; expected the two to be the same"
        )
    return endpoint
