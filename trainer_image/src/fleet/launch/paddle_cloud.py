"""A node's place in PaddleCloud's own words, which the original's launcher reads with ``--use_paddlecloud``.

``PADDLE_TRAINERS`` lists the hosts of all nodes, where a job with parameter servers has a number;
``PADDLE_TRAINER_ID`` counts nodes, and not workers. ``PADDLE_PORT`` is the first of ``PADDLE_PORTS_NUM``
ports, or of ``TRAINER_PORTS_NUM`` in later versions.
"""

import logging
from collections.abc import Mapping

from fleet.errors import ConfigurationError
from fleet.launch import flags

__all__ = ["hosts_and_rank", "is_one_node", "lists_nodes", "port"]

_log = logging.getLogger(__name__)


def lists_nodes(environ: Mapping[str, str]) -> bool:
    """Whether the environment names several nodes."""
    return "," in environ.get("PADDLE_TRAINERS", "")


def is_one_node(environ: Mapping[str, str]) -> bool:
    """Whether the environment tells of one node, whose workers the original starts by its flags alone."""
    return environ.get("PADDLE_TRAINERS_NUM") == "1" and not lists_nodes(environ)


def hosts_and_rank(environ: Mapping[str, str]) -> tuple[tuple[str, ...], int]:
    """Return the hosts of all nodes, and which of them this one is.

    Raises
    ------
    ConfigurationError
        A variable is missing, has a value that cannot be used, or contradicts another.
    """
    listed = environ.get("PADDLE_TRAINERS", "")
    if not listed:
        raise ConfigurationError(
            "--use_paddlecloud is set, but PADDLE_TRAINERS, PET_NNODES and NNODES are not; expected a "
            "scheduler's environment"
        )
    if listed.isdigit():
        raise ConfigurationError(
            f"--use_paddlecloud is set, and PADDLE_TRAINERS is {listed!r}; expected the hosts of all nodes, "
            "comma separated"
        )
    hosts = flags.hosts("PADDLE_TRAINERS", listed)
    count = environ.get("PADDLE_TRAINERS_NUM") or str(len(hosts))
    if count != str(len(hosts)):
        raise ConfigurationError(
            f"PADDLE_TRAINERS_NUM is {count!r}, and PADDLE_TRAINERS {listed!r} names {len(hosts)} nodes; "
            "expected their number"
        )
    rank = flags.whole_number(
        "PADDLE_TRAINER_ID", _said(environ, "PADDLE_TRAINER_ID"), least=0, most=len(hosts) - 1
    )
    if (host := _said(environ, "POD_IP")) != hosts[rank]:
        raise ConfigurationError(
            f"POD_IP is {host!r}, and PADDLE_TRAINER_ID is {rank}, which is {hosts[rank]!r} in "
            f"PADDLE_TRAINERS {listed!r}; expected the same host"
        )
    return hosts, rank


def port(environ: Mapping[str, str], num_local: int) -> str | None:
    """Return the first port that PaddleCloud gives the workers of a node; None where it has too few."""
    first = environ.get("PADDLE_PORT")
    for name in ("PADDLE_PORTS_NUM", "TRAINER_PORTS_NUM"):
        if first and environ.get(name) and flags.whole_number(name, environ[name], least=0) < num_local:
            _log.warning(
                "PADDLE_PORT %s is not used: %s is %s, and this node has %d workers",
                *(first, name, environ[name], num_local),
            )
            return None
    return first or None


def _said(environ: Mapping[str, str], name: str) -> str:
    if not environ.get(name):
        raise ConfigurationError(
            f"--use_paddlecloud is set, and so is PADDLE_TRAINERS, but {name} is not; expected both"
        )
    return environ[name]
