"""Command-line flags that both launchers share, and the validation of their values."""

import argparse
import errno
import ipaddress
import re
import secrets
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from fleet.errors import ConfigurationError
from fleet.launch.supervisor import Command
from fleet.process.resources import available_cores
from fleet.role_maker.variables import KEY_BYTES

__all__ = [
    "ROLE_VARIABLES",
    "add_common_flags",
    "base_environ",
    "check_free",
    "check_script",
    "endpoint",
    "give_key",
    "hosts",
    "print_commands",
    "script_argv",
    "truth",
    "whole_number",
]

HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")
ROLE_VARIABLES = frozenset(
    {
        *("PADDLE_TRAINING_ROLE", "TRAINING_ROLE", "PADDLE_PSERVER_ID", "PADDLE_TRAINER_ID"),
        *("PADDLE_PSERVER_IPS", "PADDLE_PSERVER_PORT", "PADDLE_PORT", "PADDLE_PSERVERS_IP_PORT_LIST"),
        *("PADDLE_TRAINERS", "PADDLE_TRAINERS_NUM", "PADDLE_TRAINER_IPS", "PADDLE_TRAINER_ENDPOINTS"),
        *("PADDLE_CURRENT_IP", "PADDLE_CURRENT_ENDPOINT", "POD_IP", "MASTER_ADDR", "MASTER_PORT"),
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        *("NODE_RANK", "GROUP_RANK", "NNODES", "NPROC_PER_NODE"),
        *("GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"),
    }
)
"""The variables that a launcher sets for each process instead of passing on those of its own environment."""
TORCHRUN_PREFIXES = ("PET_", "TORCHELASTIC_")
"""Prefixes of the variables that configure torchrun, and that torchrun sets for its own workers."""


def add_common_flags(parser: argparse.ArgumentParser, *, log_dir: str | None) -> None:
    """Add the flags and the positional arguments that both launchers accept."""
    parser.add_argument(
        "--log_dir", help=f"directory of the log files (default: {log_dir or 'no files'}; empty: no files)"
    )
    parser.add_argument(
        "--print_config",
        nargs="?",
        const="True",
        default="True",
        help="print each process and its address before it starts (default: %(default)s)",
    )
    parser.add_argument("training_script", help="the Python script that every process runs")
    parser.add_argument("script_args", nargs=argparse.REMAINDER, help="its arguments")


def whole_number(flag: str, text: str, *, least: int, most: int | None = None) -> int:
    """Parse a whole number; raise an error that names the flag if the text is invalid."""
    expected = f"a whole number, {least} or more" if most is None else f"a whole number, {least} to {most}"
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ConfigurationError(f"{flag} is {text!r}; expected {expected}")
    number = int(text)
    if number < least or (most is not None and number > most):
        raise ConfigurationError(f"{flag} is {number}; expected {expected}")
    return number


def truth(flag: str, text: str) -> bool:
    """Parse a Boolean value; raise an error that names the flag if the text is invalid."""
    values = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in values:
        raise ConfigurationError(f"{flag} is {text!r}; expected True or False")
    return values[text.lower()]


def hosts(flag: str, text: str) -> tuple[str, ...]:
    """Parse a comma-separated list of hosts; raise an error that names the flag if the text is invalid."""
    names = tuple(text.split(","))
    for name in names:
        if HOST.fullmatch(name) is None:
            raise ConfigurationError(f"{flag} is {text!r}, where {name!r} is not a host name or IPv4 address")
    if len(set(names)) != len(names):
        raise ConfigurationError(f"{flag} is {text!r}, which names a host twice; expected each host once")
    return names


def endpoint(flag: str, text: str) -> tuple[str, int]:
    """Parse ``host:port``; raise an error that names the flag if the text is invalid."""
    host, separator, port = text.rpartition(":")
    if not separator or HOST.fullmatch(host) is None:
        raise ConfigurationError(f"{flag} has {text!r}; expected host:port, as in 127.0.0.1:6170")
    return host, whole_number(f"the port of {text!r} in {flag}", port, least=1, most=65535)


def check_script(path: str) -> None:
    """Raise a ConfigurationError unless the training script is a file."""
    if not Path(path).is_file():
        raise ConfigurationError(
            f"training_script is {path!r}, which is not a file; expected a Python script, relative to "
            f"{Path.cwd()} or absolute"
        )


def check_free(flag: str, endpoints: Iterable[tuple[str, int]]) -> None:
    """Raise a ConfigurationError if one of the endpoints cannot be bound.

    Host names are not checked, because a pod's own name may resolve only after the pod has started.
    """
    for host, port in endpoints:
        if not _is_address(host):
            continue
        try:
            socket.create_server((host, port), backlog=1).close()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ConfigurationError(
                    f"{flag}: {host}:{port} is in use by another process; choose another port"
                ) from error
            raise ConfigurationError(
                f"{flag}: {host}:{port} cannot be bound ({error.strerror or error}); "
                "expected an address of this machine"
            ) from error


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def base_environ(environ: Mapping[str, str], num_processes: int) -> dict[str, str]:
    """Return the environment that all processes share, derived from the launcher's."""
    shared = {
        name: value
        for name, value in environ.items()
        if name not in ROLE_VARIABLES and not name.startswith(TORCHRUN_PREFIXES)
    }
    # Otherwise a killed process would lose the end of its log.
    shared.setdefault("PYTHONUNBUFFERED", "1")
    shared.setdefault("FLEET_SYNC_MODE", "Sync")
    shared.setdefault("FLEET_RESTARTS", "0")
    # By default every process would start a thread for each core.
    shared.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // num_processes)))
    return shared


def give_key(shared: dict[str, str]) -> None:
    """Add a random job key to the environment unless it already has a key."""
    if not shared.get("FLEET_JOB_KEY") and not shared.get("FLEET_JOB_KEY_FILE"):
        shared["FLEET_JOB_KEY"] = secrets.token_hex(KEY_BYTES)


def script_argv(arguments: argparse.Namespace) -> list[str]:
    """Return the command line of every process: this interpreter and the script."""
    return [sys.executable, arguments.training_script, *arguments.script_args]


def print_commands(commands: Sequence[Command], log_dir: str | None) -> None:
    """Print a line for each process: its name, address and log file."""
    for command in commands:
        where = command.environ.get("PADDLE_CURRENT_ENDPOINT") or command.environ["PADDLE_CURRENT_IP"]
        log = "" if log_dir is None else f"  {Path(log_dir) / command.log_name}"
        print(f"{command.name:<10}  {where}{log}", flush=True)
