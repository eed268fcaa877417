"""``python -m fleet.launch_ps``: starts a job's parameter servers and workers on this machine."""

import argparse
import os
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fleet.errors import ConfigurationError
from fleet.launch import flags, supervisor
from fleet.launch.supervisor import Command
from fleet.process.resources import COPY_PAST_CACHES

__all__ = ["commands", "main", "parse"]

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = "6170"
DEFAULT_LOGS = "logs"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; :func:`commands` checks the values."""
    parser = argparse.ArgumentParser(
        prog="python -m fleet.launch_ps",
        description="Run a training script as parameter servers and workers on this machine. The exit status "
        "is 0 if every worker ended with status 0, otherwise that of the first process that failed.",
        allow_abbrev=False,
    )
    parser.add_argument("--worker_num", default="2", help="number of workers (default: %(default)s)")
    parser.add_argument(
        "--server_num", default=None, help="number of servers (default: 2, or as many as --endpoints has)"
    )
    parser.add_argument("--start_port", help="the first server's port; others follow (default: 6170)")
    parser.add_argument(
        "--endpoints", default="", help="the servers' host:port list, in place of --start_port"
    )
    parser.add_argument(
        "--print_program",
        action="store_true",
        help="print the programs of each server and of worker 0, and do not train",
    )
    flags.add_common_flags(parser, log_dir=DEFAULT_LOGS)
    return parser.parse_args(argv)


def commands(arguments: argparse.Namespace, environ: Mapping[str, str]) -> list[Command]:
    """Return the processes to start: servers first, then workers.

    Parameters
    ----------
    arguments
        The result of :func:`parse`.
    environ
        The environment that the processes inherit.

    Raises
    ------
    ConfigurationError
        A flag has an invalid value; the message names the flag, its value and the expected one.
    """
    if arguments.print_program and arguments.log_dir:
        raise ConfigurationError(
            f"--log_dir is {arguments.log_dir!r}, but --print_program prints to the terminal and writes no "
            "logs; expected only one of them"
        )
    num_workers = flags.whole_number("--worker_num", arguments.worker_num, least=1, most=1024)
    servers = _servers(arguments)
    shared = COPY_PAST_CACHES | flags.base_environ(environ, num_workers + len(servers))
    shared |= _shared_roles(servers, num_workers)
    shared.setdefault("FLEET_JOB_NAME", "launch-ps")
    shared.setdefault("FLEET_JOB_UID", str(uuid.uuid4()))
    flags.give_key(shared)
    argv = flags.script_argv(arguments)
    return [
        Command(f"server {i}", True, argv, shared | _server_role(i, *address), f"serverlog.{i}")
        for i, address in enumerate(servers)
    ] + [
        Command(f"worker {i}", False, argv, shared | _worker_role(i), f"workerlog.{i}")
        for i in range(num_workers)
    ]


def _servers(arguments: argparse.Namespace) -> list[tuple[str, int]]:
    """Return each server's host and port, taken from --endpoints or counted from --start_port."""
    wanted = arguments.server_num
    number = None if wanted is None else flags.whole_number("--server_num", wanted, least=1, most=1024)
    if not arguments.endpoints:
        number = 2 if number is None else number
        wanted = DEFAULT_PORT if arguments.start_port is None else arguments.start_port
        first = flags.whole_number("--start_port", wanted, least=1, most=65536 - number)
        return [(LOOPBACK, first + i) for i in range(number)]
    if arguments.start_port is not None:
        raise ConfigurationError(
            f"--start_port is {arguments.start_port!r} and --endpoints is {arguments.endpoints!r}, which "
            "gives each server's port; expected only one of them"
        )
    servers = [flags.endpoint("--endpoints", text) for text in arguments.endpoints.split(",")]
    if len(set(servers)) != len(servers):
        raise ConfigurationError(
            f"--endpoints is {arguments.endpoints!r}, which names an endpoint twice; expected each once"
        )
    if number is not None and number != len(servers):
        raise ConfigurationError(
            f"--server_num is {number} but --endpoints names {len(servers)}; expected equal numbers, "
            "or --endpoints alone"
        )
    return servers


def _shared_roles(servers: Sequence[tuple[str, int]], num_workers: int) -> dict[str, str]:
    roles = {
        "PADDLE_PSERVERS_IP_PORT_LIST": ",".join(f"{host}:{port}" for host, port in servers),
        "PADDLE_TRAINERS": str(num_workers),
        "PADDLE_TRAINERS_NUM": str(num_workers),
    }
    ports = {port for _, port in servers}
    if len(ports) == 1:  # only then can hosts and a common port express the list
        roles["PADDLE_PSERVER_IPS"] = ",".join(host for host, _ in servers)
        roles["PADDLE_PSERVER_PORT"] = roles["PADDLE_PORT"] = str(ports.pop())
    return roles


def _server_role(index: int, host: str, port: int) -> dict[str, str]:
    return {
        "TRAINING_ROLE": "PSERVER",
        "PADDLE_TRAINING_ROLE": "PSERVER",
        "PADDLE_PSERVER_ID": str(index),
        "PADDLE_PORT": str(port),
        "POD_IP": host,
        "PADDLE_CURRENT_IP": host,
        "PADDLE_CURRENT_ENDPOINT": f"{host}:{port}",
    }


def _worker_role(index: int) -> dict[str, str]:
    return {
        "TRAINING_ROLE": "TRAINER",
        "PADDLE_TRAINING_ROLE": "TRAINER",
        "PADDLE_TRAINER_ID": str(index),
        "POD_IP": LOOPBACK,
        "PADDLE_CURRENT_IP": LOOPBACK,
    }


def _print_programs(started: Sequence[Command]) -> int:
    """Run each server, and then worker 0, only to print their programs; return the exit status."""
    for command in started:
        if not command.is_server and command.name != "worker 0":
            continue
        where = command.environ.get("PADDLE_CURRENT_ENDPOINT", "the others' differ in their trainer_id")
        print(f"// {command.name} ({where})", flush=True)
        environ = {**command.environ, "FLEET_PRINT_PROGRAM": "1"}
        # Supervised like a worker: a server that only prints ends by itself, instead of after the workers.
        status = supervisor.run([replace(command, is_server=False, environ=environ)], None)
        if status:
            return status
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the launcher; return its exit status."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    try:
        flags.check_script(arguments.training_script)
        started = commands(arguments, os.environ)
        show = flags.truth("--print_config", arguments.print_config)
        if arguments.print_program:
            return _print_programs(started)
        flags.check_free("--endpoints" if arguments.endpoints else "--start_port", _servers(arguments))
        log_dir = DEFAULT_LOGS if arguments.log_dir is None else arguments.log_dir
        if show:
            flags.print_commands(started, log_dir or None)
        return supervisor.run(started, Path(log_dir) if log_dir else None)
    except ConfigurationError as error:
        print(f"launch_ps: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
