"""Reads and validates the environment variables that describe a role."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from fleet.environment.endpoints import endpoints_problem, split_endpoints
from fleet.errors import RoleError

__all__ = ["KEY_BYTES", "SYNC_MODES", "Variables", "key_of", "sync_mode_of"]

SYNC_MODES = ("Sync", "Async", "HalfAsync", "Geo")
KEY_BYTES: Final = 32
_KEY: Final = f"{2 * KEY_BYTES} hexadecimal digits, as `openssl rand -hex {KEY_BYTES}` prints them"


class Variables:
    """Environment variables; a value may be available under several names.

    Parameters
    ----------
    environ : mapping
        The environment, which is not changed.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def __contains__(self, name: str) -> bool:
        return name in self._environ

    def text(self, *names: str, expected: str) -> tuple[str, str]:
        """Return the name and the value of the first of `names` that is set.

        Parameters
        ----------
        *names : str
            Synonymous names, in order of preference.
        expected : str
            The expected value, for the message.

        Returns
        -------
        tuple of str
            The name, and its value without blanks around it.

        Raises
        ------
        RoleError
            None is set, one is empty, or two contradict each other.
        """
        found = [(name, self._environ[name].strip()) for name in names if name in self._environ]
        if not found:
            raise RoleError(f"{' or '.join(names)} is not set; expected {expected}")
        for name, value in found:
            if not value:
                raise RoleError(f"{name} is empty; expected {expected}")
        (first, value), *others = found
        for other, contradiction in others:
            if contradiction != value:
                raise RoleError(
                    f"{first} is {value!r} but {other} is {contradiction!r}; expected both to be {expected}"
                )
        return first, value

    def optional(self, *names: str, default: str = "") -> str:
        """Return the first non-empty value among `names`, or else the default."""
        for name in names:
            if value := self._environ.get(name, "").strip():
                return value
        return default

    def number(self, *names: str, least: int, below: int | None = None, meaning: str) -> int:
        """Return a variable's value as a whole number.

        Parameters
        ----------
        *names : str
            As in `text`.
        least : int
            The smallest value allowed.
        below : int, optional
            The smallest value that is too large.
        meaning : str
            The meaning of the number, for the message.

        Returns
        -------
        int

        Raises
        ------
        RoleError
            As for `text`; or the value is not a number in this range.
        """
        bounds = f"from {least} to {below - 1}" if below is not None else f"of at least {least}"
        expected = f"{meaning}, a whole number {bounds}"
        name, value = self.text(*names, expected=expected)
        if (
            value.isascii()
            and value.isdigit()
            and int(value) >= least
            and (below is None or int(value) < below)
        ):
            return int(value)
        raise RoleError(f"{name} is {value!r}; expected {expected}")

    def one_of(self, *names: str, choices: Sequence[str], meaning: str) -> str:
        """Return a variable's value; raise RoleError unless it is one of the choices."""
        expected = f"{meaning}: {' or '.join(choices)}"
        name, value = self.text(*names, expected=expected)
        if value not in choices:
            raise RoleError(f"{name} is {value!r}; expected {expected}")
        return value

    def endpoints(self, name: str, *, meaning: str) -> tuple[str, ...]:
        """Return the endpoints in a variable; raise RoleError if one is malformed or duplicated."""
        expected = f"{meaning}: host:port, comma separated, each once"
        _, value = self.text(name, expected=expected)
        endpoints = split_endpoints(value)
        if (problem := endpoints_problem(endpoints)) is not None:
            raise RoleError(f"{name} is {value!r}: {problem}; expected {expected}")
        return tuple(endpoints)


def key_of(variables: Variables) -> bytes:
    """Return the key that a job's replicas share, from FLEET_JOB_KEY or the file named by FLEET_JOB_KEY_FILE.

    Returns
    -------
    bytes
        256 bits; empty if neither is set.

    Raises
    ------
    RoleError
        The value is not a key, or the file cannot be read. The message names the variable but not the value.
    """
    name, text = "FLEET_JOB_KEY", variables.optional("FLEET_JOB_KEY")
    if not text and (path := variables.optional("FLEET_JOB_KEY_FILE")):
        name = f"the file {path} (FLEET_JOB_KEY_FILE)"
        try:
            text = Path(path).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise RoleError(f"{name} cannot be read: {reason}; expected {_KEY}") from error
    elif not text:
        return b""
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise RoleError(f"{name} has {len(text)} characters; expected {_KEY}")
    return key


def sync_mode_of(variables: Variables) -> str:
    """Return the job's mode from ``FLEET_SYNC_MODE``; the default is ``Sync``."""
    if not variables.optional("FLEET_SYNC_MODE"):
        return SYNC_MODES[0]
    return variables.one_of("FLEET_SYNC_MODE", choices=SYNC_MODES, meaning="the job's mode")
