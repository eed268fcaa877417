"""``python -m fleet.launch``: starts a collective job's workers on this node.

If a FleetJob, torchrun or another scheduler describes the node in the environment (``PET_NNODES``,
``PET_NODE_RANK``, ``PET_MASTER_ADDR``, ``PET_MASTER_PORT``, ``PET_NPROC_PER_NODE``, or the same names
without the prefix), these values are the defaults of the flags, so that a pod with several slots needs no
arguments.

``--use_paddlecloud`` reads PaddleCloud's names, as Paddle's own launcher does: ``PADDLE_TRAINERS`` lists the
hosts of all nodes (in a job with parameter servers it is a number), ``PADDLE_TRAINER_ID`` counts nodes, not
workers, and ``PADDLE_PORT`` is the first of ``PADDLE_PORTS_NUM`` ports (later versions:
``TRAINER_PORTS_NUM``).
"""

import argparse
import logging
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from fleet.environment.deadlines import Deadlines
from fleet.environment.endpoints import split_endpoints
from fleet.environment.network import choose_interface
from fleet.errors import ConfigurationError
from fleet.launch import flags, supervisor
from fleet.launch.supervisor import STOP_SECONDS, Command
from fleet.process.lifecycle import POD_GRACE_SECONDS

__all__ = ["Node", "commands", "main", "node", "parse"]

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = "6170"
TORCH_SECONDS = 120.0
_DEVICE_FILES = ("nvidia[0-9]*", "dxg", "kfd")
"""Patterns of the device files of GPU drivers: NVIDIA's, WSL's and AMD's."""
_COUNT_GPUS = "import torch; print(torch.cuda.device_count())"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Node:
    """The launcher's node, in a job of `num_nodes` nodes with `num_local` workers on each.

    `port_name` is the flag or the variable that sets the port. `endpoints` has the endpoints of all workers
    as in the environment, where a pattern can abbreviate thousands of them. `gpus` are the selected GPUs, and
    `gpu_each` is True if each worker gets one of the visible GPUs.
    """

    host: str
    rank: int
    num_nodes: int
    num_local: int
    master_host: str
    port_name: str
    master_port: int
    endpoints: str
    gpus: str = ""
    gpu_each: bool = False


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; :func:`node` checks the values."""
    parser = argparse.ArgumentParser(
        prog="python -m fleet.launch",
        description="Run a training script as the workers of a collective job on this node. The exit status "
        "is 0 if every worker ended with status 0, otherwise that of the first worker that failed.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--cluster_node_ips", help="every node's address, comma separated (default: 127.0.0.1)"
    )
    parser.add_argument("--node_ip", help="this node's address (default: 127.0.0.1)")
    parser.add_argument(
        "--use_paddlecloud",
        action="store_true",
        help="require a scheduler's environment, and read PaddleCloud's variables: PADDLE_TRAINERS (the "
        "nodes' hosts), POD_IP, PADDLE_TRAINER_ID (this node's number), PADDLE_PORT",
    )
    parser.add_argument(
        "--started_port", help="the first worker's port, also used for the rendezvous (default: 6170)"
    )
    parser.add_argument("--start_port", help="the same as --started_port")
    parser.add_argument(
        "--worker_num", help="number of workers on this node (default: one per visible GPU, else 1)"
    )
    parser.add_argument("--nproc_per_node", help="the same as --worker_num")
    parser.add_argument(
        "--selected_gpus",
        help="the GPUs of this node to use, comma separated, with one worker each; indexes into "
        "CUDA_VISIBLE_DEVICES if it is set. An error if there is no GPU",
    )
    parser.add_argument(
        "--grace_seconds",
        help="how long workers may take to end after a signal to the launcher (default: 3; if a scheduler "
        "has described the node, five sixths of the pod's FLEET_GRACE_SECONDS, or of 30)",
    )
    parser.add_argument(
        "--log_level", default="20", help="level of the launcher's log (default: %(default)s)"
    )
    flags.add_common_flags(parser, log_dir=None)
    return parser.parse_args(argv)


def visible_gpus(environ: Mapping[str, str]) -> int:
    """Return the number of GPUs that a worker in this environment would see.

    Only CUDA can resolve ``CUDA_VISIBLE_DEVICES`` (UUIDs, MIG slices, missing indexes), so a separate process
    queries torch. On a machine without a GPU driver none is started, because torch takes seconds to import.

    Raises
    ------
    ConfigurationError
        torch reports no number; the message gives the alternative.
    """
    hidden = environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")
    if hidden or not has_device_files():
        return 0
    try:
        answer = subprocess.run(
            [sys.executable, "-c", _COUNT_GPUS],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TORCH_SECONDS,
            check=True,
        )
        return int(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        last = reason.strip().splitlines()[-1:] or [type(error).__name__]
        raise ConfigurationError(
            f"torch does not report how many GPUs this node has: {last[0]}; set --worker_num or "
            "--selected_gpus"
        ) from error


def has_device_files(devices: Path = Path("/dev")) -> bool:
    """Return whether this machine or container has the device files of a GPU driver."""
    return any(next(devices.glob(pattern), None) is not None for pattern in _DEVICE_FILES)


def node(
    arguments: argparse.Namespace,
    environ: Mapping[str, str],
    count_gpus: Callable[[Mapping[str, str]], int] = visible_gpus,
    has_gpu: Callable[[], bool] = has_device_files,
) -> Node:
    """Return this node as described by the flags or the environment, or else as the only node.

    Parameters
    ----------
    arguments
        The result of :func:`parse`.
    environ
        The environment of the launcher.
    count_gpus
        Counts the visible GPUs; called if nothing sets the number of workers.
    has_gpu
        Whether this machine can have a GPU; called if GPUs are selected.

    Raises
    ------
    ConfigurationError
        A flag or a variable has an invalid value, or they contradict each other; the message names it, its
        value and the expected one.
    """
    given = _num_local(arguments, environ)
    counted = count_gpus(environ) if given is None else 0
    found = _node(arguments, environ, max(1, counted) if given is None else given)
    gpus = _selected(arguments.selected_gpus or "", environ)
    if gpus and not has_gpu():
        raise ConfigurationError(
            f"--selected_gpus is {arguments.selected_gpus!r}, but this machine has no GPU: /dev has no files "
            f"of a driver; for workers on the CPU use --worker_num {given} instead"
        )
    return replace(found, gpus=gpus, gpu_each=bool(gpus) or counted > 0)


def _selected(gpus: str, environ: Mapping[str, str]) -> str:
    """Return the entries of CUDA_VISIBLE_DEVICES that --selected_gpus selects by index."""
    limit = environ.get("CUDA_VISIBLE_DEVICES")
    if not gpus or limit is None:
        return gpus
    visible = [each.strip() for each in limit.split(",") if each.strip() not in ("", "-1")]
    if not visible:
        raise ConfigurationError(
            f"--selected_gpus is {gpus!r}, but CUDA_VISIBLE_DEVICES is {limit!r}, which hides every GPU; "
            "expected GPUs in CUDA_VISIBLE_DEVICES, or no --selected_gpus"
        )
    for text in gpus.split(","):
        if int(text) >= len(visible):
            raise ConfigurationError(
                f"--selected_gpus is {gpus!r}, and CUDA_VISIBLE_DEVICES {limit!r}; expected numbers from 0 "
                f"to {len(visible) - 1}, which are indexes into that list"
            )
    return ",".join(visible[int(text)] for text in gpus.split(","))


def grace_seconds(arguments: argparse.Namespace, environ: Mapping[str, str]) -> float:
    """Return how many seconds workers have to end after a signal to the launcher."""
    if arguments.grace_seconds is not None:
        return flags.whole_number("--grace_seconds", arguments.grace_seconds, least=0)
    if _value(environ, "NNODES") is None and not arguments.use_paddlecloud:
        return STOP_SECONDS
    of_pod = environ.get("FLEET_GRACE_SECONDS") or str(POD_GRACE_SECONDS)
    return flags.whole_number("FLEET_GRACE_SECONDS", of_pod, least=0) * 5 / 6


def _node(arguments: argparse.Namespace, environ: Mapping[str, str], num_local: int) -> Node:
    described = _value(environ, "NNODES") is not None
    given = [name for name in ("cluster_node_ips", "node_ip") if getattr(arguments, name) is not None]
    if arguments.use_paddlecloud and given:
        raise ConfigurationError(
            f"--use_paddlecloud is set, and --{given[0]} is {getattr(arguments, given[0])!r}; expected "
            "either the scheduler's environment or the flags to describe the nodes"
        )
    if described and not given:
        return _described(arguments, environ, num_local)
    lists_nodes = "," in environ.get("PADDLE_TRAINERS", "")
    # Paddle's launcher starts the workers of a single node from its flags alone.
    one_node = environ.get("PADDLE_TRAINERS_NUM") == "1" and not lists_nodes
    if arguments.use_paddlecloud and not one_node:
        return _in_paddlecloud(arguments, environ, num_local)
    if not given and lists_nodes:
        _log.warning(
            "PADDLE_TRAINERS is %r, but is ignored without --use_paddlecloud: this node trains alone",
            environ["PADDLE_TRAINERS"],
        )
    ips = flags.hosts("--cluster_node_ips", arguments.cluster_node_ips or arguments.node_ip or LOOPBACK)
    host = arguments.node_ip or (ips[0] if len(ips) == 1 else LOOPBACK)
    if host not in ips:
        raise ConfigurationError(
            f"--node_ip is {host!r}; expected one of --cluster_node_ips, which are {','.join(ips)!r}"
        )
    return _at(ips, ips.index(host), _port(arguments, num_local), num_local)


def _at(hosts: Sequence[str], rank: int, port: tuple[str, int], num_local: int) -> Node:
    """Return a node of a job on the given hosts, all of which use the same ports."""
    name, first = port
    endpoints = ",".join(f"{host}:{first + i}" for host in hosts for i in range(num_local))
    return Node(hosts[rank], rank, len(hosts), num_local, hosts[0], name, first, endpoints)


def _in_paddlecloud(arguments: argparse.Namespace, environ: Mapping[str, str], num_local: int) -> Node:
    hosts, rank = _paddlecloud_hosts(environ)
    given = _paddlecloud_port(environ, num_local)
    if given is None:
        return _at(hosts, rank, _port(arguments, num_local), num_local)
    port = flags.whole_number("PADDLE_PORT", given, least=1, most=65536 - num_local)
    if (written := _either(arguments, "started_port", "start_port")) is not None and written[1] != given:
        _log.warning("PADDLE_PORT %s, which PaddleCloud sets, is used instead of %s %s", given, *written)
    return _at(hosts, rank, ("PADDLE_PORT", port), num_local)


def _paddlecloud_hosts(environ: Mapping[str, str]) -> tuple[tuple[str, ...], int]:
    """Return the hosts of all nodes and the index of this node."""
    listed = environ.get("PADDLE_TRAINERS", "")
    if not listed:
        raise ConfigurationError(
            "--use_paddlecloud is set, but PADDLE_TRAINERS, PET_NNODES and NNODES are not; expected a "
            "scheduler's environment"
        )
    if listed.isdigit():
        raise ConfigurationError(
            f"--use_paddlecloud is set, but PADDLE_TRAINERS is {listed!r}; expected the hosts of all nodes, "
            "comma separated"
        )
    hosts = flags.hosts("PADDLE_TRAINERS", listed)
    count = environ.get("PADDLE_TRAINERS_NUM") or str(len(hosts))
    if count != str(len(hosts)):
        raise ConfigurationError(
            f"PADDLE_TRAINERS_NUM is {count!r}, but PADDLE_TRAINERS {listed!r} names {len(hosts)} nodes; "
            "expected their number"
        )
    required = {}
    for name in ("PADDLE_TRAINER_ID", "POD_IP"):
        required[name] = environ.get(name, "")
        if not required[name]:
            raise ConfigurationError(
                f"--use_paddlecloud is set, and so is PADDLE_TRAINERS, but {name} is not; expected both"
            )
    rank = flags.whole_number(
        "PADDLE_TRAINER_ID", required["PADDLE_TRAINER_ID"], least=0, most=len(hosts) - 1
    )
    if (host := required["POD_IP"]) != hosts[rank]:
        raise ConfigurationError(
            f"POD_IP is {host!r}, but PADDLE_TRAINER_ID is {rank}, which is {hosts[rank]!r} in "
            f"PADDLE_TRAINERS {listed!r}; expected the same host"
        )
    return hosts, rank


def _paddlecloud_port(environ: Mapping[str, str], num_local: int) -> str | None:
    """Return the first port that PaddleCloud assigns to a node's workers, or None if it assigns too few."""
    first = environ.get("PADDLE_PORT")
    for name in ("PADDLE_PORTS_NUM", "TRAINER_PORTS_NUM"):
        if first and environ.get(name) and flags.whole_number(name, environ[name], least=0) < num_local:
            _log.warning(
                "PADDLE_PORT %s is not used: %s is %s, and this node has %d workers",
                *(first, name, environ[name], num_local),
            )
            return None
    return first or None


def _described(arguments: argparse.Namespace, environ: Mapping[str, str], num_local: int) -> Node:
    """Return this node as described by a scheduler's environment variables."""
    num_nodes = _number(environ, "NNODES", least=1)
    rank = _number(environ, "NODE_RANK", least=0, most=num_nodes - 1)
    master = _value(environ, "MASTER_ADDR")
    if master is None:
        raise ConfigurationError("NNODES is set, but MASTER_ADDR is not; expected the first node's address")
    port = _port(arguments, num_local, _value(environ, "MASTER_PORT"))
    host = environ.get("PADDLE_CURRENT_IP") or environ.get("POD_IP") or master[1]
    endpoints = environ.get("PADDLE_TRAINER_ENDPOINTS", "")
    if endpoints and (found := len(split_endpoints(endpoints))) != num_nodes * num_local:
        raise ConfigurationError(
            f"PADDLE_TRAINER_ENDPOINTS has {found} endpoints; expected {num_nodes * num_local}, "
            f"for {num_nodes} nodes with {num_local} workers each"
        )
    return Node(host, rank, num_nodes, num_local, master[1], *port, endpoints)


def _num_local(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int | None:
    """Return the number of workers on this node, or None if unset; raise an error if flags disagree."""
    gpus = None
    if arguments.selected_gpus is not None:
        texts = arguments.selected_gpus.split(",")
        numbers = [flags.whole_number("a GPU of --selected_gpus", text, least=0) for text in texts]
        if twice := [number for number in numbers if numbers.count(number) > 1]:
            raise ConfigurationError(
                f"--selected_gpus is {arguments.selected_gpus!r}, which names GPU {twice[0]} twice; expected "
                "each GPU once, because each has one worker"
            )
        gpus = len(texts)
    if (written := _either(arguments, "worker_num", "nproc_per_node")) is not None:
        number = flags.whole_number(*written, least=1, most=1024)
        if gpus is not None and number != gpus:
            raise ConfigurationError(
                f"{written[0]} is {number} but --selected_gpus names {gpus}; expected one worker per GPU"
            )
        return number
    if gpus is None and _value(environ, "NPROC_PER_NODE") is not None:
        return _number(environ, "NPROC_PER_NODE", least=1)
    return gpus


def _value(environ: Mapping[str, str], name: str) -> tuple[str, str] | None:
    """Return a variable's full name and value; torchrun's ``PET_`` spelling takes precedence."""
    for full in (f"PET_{name}", name):
        if environ.get(full):
            return full, environ[full]
    return None


def _number(environ: Mapping[str, str], name: str, *, least: int, most: int | None = None) -> int:
    found = _value(environ, name)
    if found is None:
        raise ConfigurationError(f"NNODES is set, but {name} is not; expected both, or neither")
    return flags.whole_number(*found, least=least, most=most)


def _port(
    arguments: argparse.Namespace, num_local: int, default: tuple[str, str] | None = None
) -> tuple[str, int]:
    """Return the first worker's port and the flag or variable that sets it; a flag takes precedence."""
    written = _either(arguments, "started_port", "start_port")
    name, text = written or default or ("--started_port", DEFAULT_PORT)
    return name, flags.whole_number(name, text, least=1, most=65536 - num_local)


def _either(arguments: argparse.Namespace, *names: str) -> tuple[str, str] | None:
    """Return whichever of two synonymous flags is set, with its value; raise an error if they differ."""
    given = [
        (f"--{name}", getattr(arguments, name)) for name in names if getattr(arguments, name) is not None
    ]
    if len({text for _, text in given}) > 1:
        both = " and ".join(f"{flag} is {text!r}" for flag, text in given)
        raise ConfigurationError(
            f"{both}, but the two flags are synonyms; expected one of them, or equal values"
        )
    return given[0] if given else None


def commands(place: Node, arguments: argparse.Namespace, environ: Mapping[str, str]) -> list[Command]:
    """Return the commands of the workers to start on this node."""
    shared = flags.base_environ(environ, place.num_local)
    shared |= {
        "TRAINING_ROLE": "TRAINER",
        "PADDLE_TRAINING_ROLE": "TRAINER",
        "PADDLE_TRAINERS_NUM": str(place.num_nodes * place.num_local),
        "PADDLE_TRAINERS": str(place.num_nodes * place.num_local),
        "PADDLE_CURRENT_IP": place.host,
        "POD_IP": place.host,
        "MASTER_ADDR": place.master_host,
        "MASTER_PORT": str(place.master_port),
        "WORLD_SIZE": str(place.num_nodes * place.num_local),
        "LOCAL_WORLD_SIZE": str(place.num_local),
        "NODE_RANK": str(place.rank),
        "GROUP_RANK": str(place.rank),
        "NNODES": str(place.num_nodes),
        "NPROC_PER_NODE": str(place.num_local),
    }
    if place.endpoints:
        shared["PADDLE_TRAINER_ENDPOINTS"] = place.endpoints
    if place.gpus:
        shared["CUDA_VISIBLE_DEVICES"] = place.gpus
    # By default gloo listens at the address of the host's name, which may not resolve or may be on another
    # interface.
    if sys.platform == "linux" and place.master_host.startswith("127."):
        shared.setdefault("GLOO_SOCKET_IFNAME", "lo")
    patience_seconds = Deadlines.from_environ(environ).starting_seconds
    choose_interface(place.master_host, place.master_port, shared, patience_seconds)
    shared.setdefault("FLEET_JOB_NAME", "launch")
    shared.setdefault("FLEET_JOB_UID", str(uuid.uuid4()))
    if place.num_nodes == 1:  # the launchers of several nodes could not agree on a new key
        flags.give_key(shared)
    argv = flags.script_argv(arguments)
    endpoints = split_endpoints(place.endpoints) if place.endpoints else ()
    return [_worker(place, i, argv, shared, endpoints) for i in range(place.num_local)]


def _worker(
    place: Node, local_rank: int, argv: list[str], shared: Mapping[str, str], endpoints: Sequence[str]
) -> Command:
    rank = place.rank * place.num_local + local_rank
    environ = dict(shared) | {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "PADDLE_TRAINER_ID": str(rank),
    }
    if endpoints:
        environ["PADDLE_CURRENT_ENDPOINT"] = endpoints[rank]
    if place.gpu_each:  # an index into the visible devices
        environ["FLAGS_selected_gpus"] = str(local_rank)
    return Command(f"worker {rank}", False, argv, environ, f"workerlog.{rank}")  # nodes may share a folder


def _end(number: int, _: FrameType | None) -> None:
    """Exit on a signal before any worker runs; as PID 1, the launcher would otherwise ignore the signal."""
    raise SystemExit(128 + number)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the launcher; return its exit status."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    try:
        level = flags.whole_number("--log_level", arguments.log_level, least=0, most=50)
        logging.basicConfig(level=level)
        flags.check_script(arguments.training_script)
        place = node(arguments, os.environ)
        started = commands(place, arguments, os.environ)
        show = flags.truth("--print_config", arguments.print_config)
        if place.rank == 0:
            flags.check_free(place.port_name, [(place.host, place.master_port)])
        if show:
            flags.print_commands(started, arguments.log_dir)
        log_dir = Path(arguments.log_dir) if arguments.log_dir else None
        return supervisor.run(started, log_dir, grace_seconds(arguments, os.environ))
    except ConfigurationError as error:
        print(f"launch: {error}", file=sys.stderr)
        return error.exit_code
