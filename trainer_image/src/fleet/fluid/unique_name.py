"""Default names of variables, from one counter per kind of layer."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["generate", "guard", "switch"]

_counters: Counter[str] = Counter()
_prefix = ""


def generate(key: str) -> str:
    """Return ``key_0``, ``key_1`` and so on, preceded by the prefix of the innermost `guard`.

    Parameters
    ----------
    key : str
        The kind of layer, such as ``fc``, or the name of a layer followed by ``.w``, ``.b`` or ``.tmp``.

    Notes
    -----
    Paddle's ``fluid.unique_name.generate``.
    """
    number = _counters[key]
    _counters[key] += 1
    return f"{_prefix}{key}_{number}"


def switch() -> None:
    """Restart all counters from 0."""
    _counters.clear()


@contextmanager
def guard(new_generator: str | bytes | None = None) -> Iterator[None]:
    """Use separate counters within the ``with`` block.

    Parameters
    ----------
    new_generator : str or bytes, optional
        A prefix of the names that are generated within the block.

    Notes
    -----
    Paddle's ``fluid.unique_name.guard``.
    """
    global _counters, _prefix
    outer = _counters, _prefix
    given = new_generator.decode() if isinstance(new_generator, bytes) else new_generator
    _counters, _prefix = Counter(), given or ""
    try:
        yield
    finally:
        _counters, _prefix = outer
