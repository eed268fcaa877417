"""Converts a reader's samples to feeds for an executor."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fleet.errors import ConfigurationError
from fleet.fluid.lod import LoDTensor, flattened
from fleet.fluid.program import Program, default_main_program

__all__ = ["DataFeeder", "Fed", "converted"]

Fed = npt.NDArray[Any] | LoDTensor
"""The value fed for one variable: an array, or a LoDTensor if the variable has a lod_level."""


class DataFeeder:
    """Converts mini-batches of samples to feeds for an executor.

    Parameters
    ----------
    feed_list : sequence of Variable or str
        The variables, in the order of a sample's fields. Names refer to variables of `program`.
    place : CPUPlace or CUDAPlace, optional
        Has no effect: an executor moves what it is fed to its own place.
    program : Program, optional
        By default ``fluid.default_main_program()``.

    Raises
    ------
    ConfigurationError
        `program` has no variable of that name.

    Notes
    -----
    Paddle's ``fluid.DataFeeder``.
    """

    def __init__(
        self,
        feed_list: Sequence[Any],
        place: object = None,  # noqa: ARG002 - Paddle's signature
        program: Program | None = None,
    ) -> None:
        self._variables = [_variable(each, program) for each in feed_list]

    def feed(self, iterable: Iterable[Sequence[Any]]) -> dict[str, Fed]:
        """Convert a mini-batch of samples to a feed.

        Parameters
        ----------
        iterable : iterable of sequence
            The samples of a mini-batch. Each has one field per variable: numbers or an array that fill the
            variable's shape; for a variable with a lod_level, a sequence of values nested to that depth.

        Returns
        -------
        dict of str to array or LoDTensor
            By the variables' names.

        Raises
        ------
        ConfigurationError
            A sample has another number of fields, or the fields do not fill a variable's shape.
        """
        samples = list(iterable)
        for sample in samples:
            if len(sample) != len(self._variables):
                raise ConfigurationError(
                    f"a sample has {len(sample)} fields, but feed_list has {len(self._variables)} variables "
                    f"({', '.join(each.name for each in self._variables)}); expected the same number"
                )
        columns = zip(*samples, strict=True) if samples else ([] for _ in self._variables)
        return {
            variable.name: converted(column, variable)
            for variable, column in zip(self._variables, columns, strict=True)
        }

    def decorate_reader(
        self,
        reader: Callable[[], Iterable[Iterable[Sequence[Any]]]],
        multi_devices: bool = False,
        num_places: int | None = None,
        drop_last: bool = True,  # noqa: ARG002 - of several devices
    ) -> Callable[[], Iterator[dict[str, Fed]]]:
        """Return a reader that yields feeds instead of mini-batches.

        Parameters
        ----------
        reader : callable
            A reader of mini-batches, for example a result of `paddle.batch`.
        multi_devices : bool
            Has no effect, because a process has one device.
        num_places : int, optional
            Must be 1 if it is given.
        drop_last : bool
            Has no effect: with one device, no part of a batch is left over.

        Raises
        ------
        ConfigurationError
            `num_places` is more than 1.
        """
        if multi_devices and num_places not in (None, 1):
            raise ConfigurationError(
                f"DataFeeder.decorate_reader: num_places is {num_places}; expected 1: a process has one "
                "device, and python -m fleet.launch starts a process for each"
            )
        return lambda: map(self.feed, reader())


def converted(column: Iterable[Any], variable: Any) -> Fed:
    """Return the values of one variable in a mini-batch, converted to its dtype and shape.

    Parameters
    ----------
    column : iterable
        The variable's field of each sample.
    variable : Variable

    Returns
    -------
    array or LoDTensor
        A LoDTensor if the variable has a lod_level.

    Raises
    ------
    ConfigurationError
        The fields are ragged, are not numbers, or do not fill the variable's shape.
    """
    try:
        values, lengths = flattened(column, variable.lod_level)
        array = np.array(values, dtype=variable.dtype)
    except (TypeError, ValueError) as error:
        nested = (
            f"sequences nested {variable.lod_level} deep" if variable.lod_level else "fields of one shape"
        )
        raise ConfigurationError(
            f"the values of {variable.name} cannot be put into one array of {variable.dtype}: {error}; "
            f"expected {nested}"
        ) from error
    shape = tuple(variable.shape)
    if shape and sum(size < 0 for size in shape) <= 1 and array.ndim != len(shape):
        try:
            array = array.reshape(shape)
        except ValueError as error:
            raise ConfigurationError(
                f"{variable.name} has the shape {shape}, but its values in this batch have {array.shape}; "
                "expected values that fill the shape"
            ) from error
    return LoDTensor(array, lengths) if variable.lod_level else array


def named(variables: Sequence[Any], batch: Any) -> Mapping[str, Fed]:
    """Return the feed for a batch, which is a dict by variable name or a list in the variables' order.

    Raises
    ------
    ConfigurationError
        The batch has other variables.
    """
    names = [variable.name for variable in variables]
    if isinstance(batch, Mapping):
        found = set(batch)
        if found != set(names):
            raise ConfigurationError(
                f"a batch has {', '.join(sorted(found)) or 'nothing'}; expected {', '.join(names)}"
            )
        return batch
    values = list(batch) if isinstance(batch, list | tuple) else [batch]
    if len(values) != len(names):
        raise ConfigurationError(
            f"a batch has {len(values)} arrays; expected {len(names)}, of {', '.join(names)}"
        )
    return {
        name: value if isinstance(value, LoDTensor) else np.asarray(value)
        for name, value in zip(names, values, strict=True)
    }


def _variable(entry: Any, program: Program | None) -> Any:
    if not isinstance(entry, str):
        return entry
    block = (program if program is not None else default_main_program()).global_block()
    if not block.has_var(entry):
        raise ConfigurationError(
            f"DataFeeder: feed_list names {entry!r}, which the program does not have; it has "
            f"{', '.join(each.name for each in block.vars.values() if each.is_data) or 'no data'}"
        )
    return block.var(entry)
