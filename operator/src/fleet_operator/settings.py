"""The operator's settings, read from environment variables that the chart sets."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import TYPE_CHECKING, Any, TypeGuard

from fleet_operator.errors import OperatorError

if TYPE_CHECKING:
    from collections.abc import Mapping, Set

FEATURES = ("checkpointClaims", "networkPolicies", "podDisruptionBudgets", "volcano", "coscheduling", "kueue")
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
PEER_FIELDS = {"namespaceSelector", "podSelector", "ipBlock"}
OPERATORS_WITH_VALUES, OPERATORS_WITHOUT = ("In", "NotIn"), ("Exists", "DoesNotExist")


class SettingsError(OperatorError):
    """An environment variable has an invalid value."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The operator's settings.

    Attributes
    ----------
    namespaces : tuple of str
        ``FLEET_OPERATOR_NAMESPACES``, separated by commas: the namespaces of the FleetJobs. Default: all.
    features : tuple of str
        ``FLEET_OPERATOR_FEATURES``, separated by commas: the objects of jobs beyond pods and Services, of
        checkpointClaims, networkPolicies, podDisruptionBudgets, volcano and coscheduling; and kueue, to
        report why Kueue holds a job back. Default: none.
    metrics_readers : tuple of mapping
        ``FLEET_OPERATOR_METRICS_READERS``, a list in JSON: the readers of the metrics of jobs with a
        NetworkPolicy in addition to the operator's namespace, each a peer of a NetworkPolicy without other
        fields. Default: none.
    workers : int
        ``FLEET_OPERATOR_WORKERS``: how many jobs are reconciled concurrently; at most a quarter are new.
        Default: 8.
    resync : timedelta
        ``FLEET_OPERATOR_RESYNC_SECONDS``: how often every job is reconciled even without changes.
        Default: 600.
    writes_per_second : int
        ``FLEET_OPERATOR_WRITES_PER_SECOND``: the sustained rate of writes to the API server; a burst may have
        as many. Default: 500.
    lease : str
        ``FLEET_OPERATOR_LEASE``: the Lease, in the operator's own namespace, whose holder is active while the
        others stand by. Default: fleet-operator.
    lease_duration : timedelta
        ``FLEET_OPERATOR_LEASE_SECONDS``: how long after its last renewal the Lease expires.
        Default: 15.
    identity : str
        ``FLEET_OPERATOR_IDENTITY``: the unique name of this holder of the Lease, the pod's for example.
        Default: the host's name and a random suffix.
    http_host, http_port : str, int
        ``FLEET_OPERATOR_HTTP_HOST`` and ``_PORT``: the address of /metrics, /healthz and /readyz. Default:
        all interfaces, 8080. Port 0 selects a free one.
    log_level, log_format : str
        ``FLEET_OPERATOR_LOG_LEVEL``: debug, info, warning or error. Default: info.
        ``FLEET_OPERATOR_LOG_FORMAT``: text, or json for one object a line. Default: text.
    """

    namespaces: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    metrics_readers: tuple[Mapping[str, Any], ...] = ()
    workers: int = 8
    resync: timedelta = timedelta(minutes=10)
    writes_per_second: int = 500
    lease: str = "fleet-operator"
    lease_duration: timedelta = timedelta(seconds=15)
    identity: str = ""
    http_host: str = ""
    http_port: int = 8080
    log_level: str = "info"
    log_format: str = "text"

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Settings:
        """Read the settings from the environment.

        Raises
        ------
        SettingsError
            A value is invalid; the message names the variable, the value and the expected one.
        """
        default = cls()
        return cls(
            namespaces=_list(environ, "FLEET_OPERATOR_NAMESPACES"),
            features=_choices(environ, "FLEET_OPERATOR_FEATURES", FEATURES),
            metrics_readers=_peers(environ, "FLEET_OPERATOR_METRICS_READERS"),
            workers=_number(environ, "FLEET_OPERATOR_WORKERS", default.workers, 1, 256),
            resync=_seconds(environ, "FLEET_OPERATOR_RESYNC_SECONDS", default.resync, 1, 86400),
            writes_per_second=_number(
                environ, "FLEET_OPERATOR_WRITES_PER_SECOND", default.writes_per_second, 1, 100_000
            ),
            lease=environ.get("FLEET_OPERATOR_LEASE", "").strip() or default.lease,
            lease_duration=_seconds(environ, "FLEET_OPERATOR_LEASE_SECONDS", default.lease_duration, 2, 3600),
            identity=environ.get("FLEET_OPERATOR_IDENTITY", "").strip(),
            http_host=environ.get("FLEET_OPERATOR_HTTP_HOST") or default.http_host,
            http_port=_number(environ, "FLEET_OPERATOR_HTTP_PORT", default.http_port, 0, 65535),
            log_level=_choice(environ, "FLEET_OPERATOR_LOG_LEVEL", default.log_level, LOG_LEVELS),
            log_format=_choice(environ, "FLEET_OPERATOR_LOG_FORMAT", default.log_format, LOG_FORMATS),
        )


def _number(environ: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    text = environ.get(name, "").strip()
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and least <= int(text) <= most):
        raise SettingsError(f"{name}: found {text!r}, expected a whole number from {least} to {most}")
    return int(text)


def _seconds(environ: Mapping[str, str], name: str, default: timedelta, least: int, most: int) -> timedelta:
    return timedelta(seconds=_number(environ, name, round(default.total_seconds()), least, most))


def _choice(environ: Mapping[str, str], name: str, default: str, choices: tuple[str, ...]) -> str:
    text = environ.get(name, "").strip().lower() or default
    if text not in choices:
        raise SettingsError(f"{name}: found {text!r}, expected one of {', '.join(choices)}")
    return text


def _list(environ: Mapping[str, str], name: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(each.strip() for each in environ.get(name, "").split(",") if each.strip()))


def _choices(environ: Mapping[str, str], name: str, choices: tuple[str, ...]) -> tuple[str, ...]:
    listed = _list(environ, name)
    for each in listed:
        if each not in choices:
            raise SettingsError(f"{name}: found {each!r}, expected some of {', '.join(choices)}")
    return listed


def _peers(environ: Mapping[str, str], name: str) -> tuple[Mapping[str, Any], ...]:
    text = environ.get(name, "").strip() or "[]"
    try:
        listed = json.loads(text)
    except ValueError:
        listed = None
    if not isinstance(listed, list) or not all(_has_only(each, PEER_FIELDS) and each for each in listed):
        fields = ", ".join(sorted(PEER_FIELDS))
        raise SettingsError(f"{name}: found {text!r}, expected a JSON list of objects with some of {fields}")
    for peer in listed:
        if (expected := _expected(peer)) is not None:
            raise SettingsError(f"{name}: found {json.dumps(peer)}, expected {expected}")
    return tuple(listed)


def _expected(peer: Mapping[str, Any]) -> str | None:
    """Return a description of what an invalid NetworkPolicy peer should look like, or None for a valid one.

    A misspelt field must be refused here: the API server drops it, and a selector without fields selects
    all clients. The API server refuses other mistakes when a job's policy is created.
    """
    if "ipBlock" in peer:
        if len(peer) > 1:
            return "an ipBlock to be alone: another peer can have the selectors"
        if not _is_ip_block(peer["ipBlock"]):
            return "an ipBlock of a cidr such as 10.0.0.0/8 and, in a list named except, networks within it"
        return None
    for field, selector in peer.items():
        if not _is_selector(selector):
            return f"a {field} of matchLabels and matchExpressions only, as any label selector has them"
    return None


def _is_ip_block(value: object) -> bool:
    if not (_has_only(value, {"cidr", "except"}) and isinstance(parts := value.get("except", []), list)):
        return False
    try:
        whole = _network(value.get("cidr"))
        excepted = [_network(each) for each in parts]
    except ValueError:
        return False
    return all(each.prefixlen > whole.prefixlen and each.network_address in whole for each in excepted)


def _network(value: object) -> IPv4Network | IPv6Network:
    if not isinstance(value, str) or not value.rpartition("/")[2].isdecimal() or "/" not in value:
        raise ValueError(f"found {value!r}, expected a network such as 10.0.0.0/8")
    return ip_network(value)


def _is_selector(value: object) -> bool:
    if not _has_only(value, {"matchLabels", "matchExpressions"}):
        return False
    labels, expressions = value.get("matchLabels", {}), value.get("matchExpressions", [])
    return (
        isinstance(labels, dict)
        and all(isinstance(each, str) for each in labels.values())
        and isinstance(expressions, list)
        and all(map(_is_expression, expressions))
    )


def _is_expression(value: object) -> bool:
    if not _has_only(value, {"key", "operator", "values"}):
        return False
    values = value.get("values", [])
    return (
        isinstance(value.get("key"), str)
        and isinstance(values, list)
        and all(isinstance(each, str) for each in values)
        and value.get("operator") in (OPERATORS_WITH_VALUES if values else OPERATORS_WITHOUT)
    )


def _has_only(value: object, fields: Set[str]) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict) and value.keys() <= fields
