"""Reading variables: each mistake becomes a `RoleError` with the name, the value and what was expected."""

from collections.abc import Mapping, Sequence

from fleet.environment.endpoints import endpoints_problem, split_endpoints
from fleet.errors import RoleError

__all__ = ["SYNC_MODES", "Variables"]

SYNC_MODES = ("Sync", "Async", "HalfAsync", "Geo")


class Variables:
    """A mapping of environment variables, where several names may mean the same thing.

    Parameters
    ----------
    environ : mapping
        The environment; it is read, never kept beyond this object.
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
            Spellings of one fact, in order of preference.
        expected : str
            What the value should be, for the message.

        Returns
        -------
        tuple of str
            The name, and its value without blanks around it.

        Raises
        ------
        RoleError
            None is set, one is empty, or two say different things.
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
        """Return the value of the first of `names` that is set and not empty, else the default."""
        for name in names:
            if value := self._environ.get(name, "").strip():
                return value
        return default

    def number(self, *names: str, least: int, below: int | None = None, meaning: str) -> int:
        """Return a whole number.

        Parameters
        ----------
        *names : str
            As in `text`.
        least : int
            The smallest value allowed.
        below : int, optional
            The first value that is too large.
        meaning : str
            What the number is, for the message.

        Returns
        -------
        int

        Raises
        ------
        RoleError
            As in `text`, or the value is no such number.
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
        """Return one of a few words; RoleError otherwise."""
        expected = f"{meaning}: {' or '.join(choices)}"
        name, value = self.text(*names, expected=expected)
        if value not in choices:
            raise RoleError(f"{name} is {value!r}; expected {expected}")
        return value

    def endpoints(self, name: str, *, meaning: str) -> tuple[str, ...]:
        """Return a list of different endpoints; RoleError otherwise."""
        expected = f"{meaning}: host:port, comma separated, each once"
        _, value = self.text(name, expected=expected)
        endpoints = split_endpoints(value)
        if (problem := endpoints_problem(endpoints)) is not None:
            raise RoleError(f"{name} is {value!r}: {problem}; expected {expected}")
        return tuple(endpoints)
