"""Numbers in environment variables; the message of a mistake names the variable."""

import math
from collections.abc import Mapping

from fleet.errors import ConfigurationError

__all__ = ["count", "positive"]


def positive(environ: Mapping[str, str], name: str, default: float) -> float:
    """Return the positive number that a variable holds, or `default` where it is unset or empty.

    Raises
    ------
    ConfigurationError
        It holds something else.
    """
    text = environ.get(name, "")
    if not text:
        return default
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ConfigurationError(f"{name} is {text!r}; expected a positive number")
    return number


def count(environ: Mapping[str, str], name: str, default: int) -> int:
    """Return the positive whole number that a variable holds; otherwise as `positive`."""
    number = positive(environ, name, default)
    if number != int(number):
        raise ConfigurationError(f"{name} is {environ[name]!r}; expected a whole number")
    return int(number)
