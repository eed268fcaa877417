"""Loaders, which run a script's generator in a thread and prepare batches in advance.

An iterable loader yields feeds for ``Executor.run``. Any other loader, and every `py_reader`, is an operator
``read`` of the program, and its outputs are the program's data: after ``start()``, each run without a feed
uses the next batch, or raises `EOFException` if there is none; ``reset()`` prepares the loader for another
epoch. If the generator raises an error, the run that lacks the next batch raises this error.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, Self

from fleet.errors import ConfigurationError, FleetError
from fleet.fluid import unique_name
from fleet.fluid.building import Layer, create_variable
from fleet.fluid.data_feeder import DataFeeder, Fed, named
from fleet.fluid.paddle.reader import batch as batched
from fleet.fluid.prefetcher import Prefetcher
from fleet.fluid.program import Program, default_main_program

__all__ = [
    "DataLoader",
    "EOFException",
    "GeneratorLoader",
    "PyReader",
    "create_py_reader_by_data",
    "double_buffer",
    "py_reader",
    "read_feed",
    "read_file",
]

_loaders: dict[str, "GeneratorLoader"] = {}
"""The loaders of ``read`` operators, by the name of the reader's variable, like Paddle's queues."""
_numbers = count()


class EOFException(FleetError):  # noqa: N818 - Paddle's name
    """A loader of a program has no more batches; call its ``reset()`` before the next epoch.

    Notes
    -----
    Paddle's ``fluid.core.EOFException``.
    """


class GeneratorLoader:
    """A loader of batches from a generator that runs in a thread.

    Parameters
    ----------
    feed_list : sequence of Variable
        The variables, in the order of a sample's fields.
    capacity : int
        The number of batches to read ahead.
    iterable : bool
        Whether scripts iterate over feeds instead of calling `start` and `reset`.
    return_list : bool
        Whether to yield a list of arrays instead of a dict.
    name : str, optional
        The name of the reader's variable, if the loader is not iterable.

    Notes
    -----
    The result of Paddle's ``fluid.io.DataLoader.from_generator``, ``fluid.io.PyReader`` and
    ``fluid.layers.py_reader``.
    """

    def __init__(
        self,
        feed_list: Sequence[Any],
        capacity: int,
        *,
        iterable: bool,
        return_list: bool = False,
        name: str = "",
    ) -> None:
        if not feed_list:
            raise ConfigurationError("a loader has no feed_list; expected the variables of a batch")
        if not isinstance(capacity, int) or capacity < 1:
            raise ConfigurationError(
                f"capacity is {capacity!r}; expected the number of batches to read ahead, at least 1"
            )
        self.iterable = iterable
        self.name = ""
        self.variables = list(feed_list)
        self._capacity = capacity
        self._return_list = return_list
        self._make: Callable[[], Iterable[Mapping[str, Fed]]] | None = None
        self._batches: Prefetcher[Mapping[str, Fed]] | None = None
        if not iterable:
            # A counter of its own, as in Paddle: two programs, each built under `unique_name.guard`, would
            # otherwise read from one loader.
            self.name = name or f"create_py_reader_{next(_numbers)}"
            _loaders[self.name] = self

    def set_sample_generator(
        self,
        reader: Callable[[], Iterator[Any]],
        batch_size: int,
        drop_last: bool = True,
        places: object = None,
    ) -> Self:
        """Set a generator of samples; the loader groups them into batches.

        Parameters
        ----------
        reader : callable
            Returns an iterator over samples, each with a field per variable.
        batch_size : int
        drop_last : bool
            Whether to drop a last batch that has fewer samples.
        places : optional
            Has no effect: an executor moves what it is fed to its own place.

        Returns
        -------
        GeneratorLoader
            This loader.
        """
        return self.set_sample_list_generator(batched(reader, batch_size, drop_last), places)

    def set_sample_list_generator(
        self, reader: Callable[[], Iterable[Iterable[Any]]], places: object = None
    ) -> Self:
        """Set a generator of batches, each given as a list of samples.

        Parameters
        ----------
        reader : callable
            Returns an iterator over lists of samples; for example a result of `paddle.batch`.
        places : optional
            As for `set_sample_generator`.

        Returns
        -------
        GeneratorLoader
            This loader.
        """
        return self._set(DataFeeder(self.variables).decorate_reader(reader), places)

    def set_batch_generator(self, reader: Callable[[], Iterable[Any]], places: object = None) -> Self:
        """Set a generator of batches, each given as one array per variable.

        Parameters
        ----------
        reader : callable
            Returns an iterator over lists of arrays or LoDTensors in the variables' order, or dicts by name.
        places : optional
            As for `set_sample_generator`.

        Returns
        -------
        GeneratorLoader
            This loader.
        """
        return self._set(lambda: (named(self.variables, each) for each in reader()), places)

    decorate_sample_generator = set_sample_generator
    decorate_sample_list_generator = set_sample_list_generator
    decorate_paddle_reader = set_sample_list_generator
    decorate_batch_generator = set_batch_generator
    decorate_tensor_provider = set_batch_generator

    def start(self) -> None:
        """Start running the generator in a thread.

        Raises
        ------
        ConfigurationError
            The loader is iterable, has no generator, or has been started and not reset.
        """
        self._require(iterable=False, call="start()")
        if self._batches is not None:
            raise ConfigurationError(
                f"{self._what}: start() was called a second time; expected reset() before it, once the "
                "batches have ended"
            )
        self._batches = self._started()

    def reset(self) -> None:
        """Stop the generator's thread and discard its batches, so that `start` begins a new epoch.

        Raises
        ------
        ConfigurationError
            The loader is iterable.
        """
        self._require(iterable=False, call="reset()")
        batches, self._batches = self._batches, None
        if batches is not None:
            batches.close()

    def next_feed(self) -> Mapping[str, Fed]:
        """Return the next batch as a feed; the loader must have been started.

        Raises
        ------
        EOFException
            The batches have ended.
        ConfigurationError
            The loader was not started.
        """
        if self._batches is None:
            raise ConfigurationError(
                f"the program reads from {self._what}, which was not started; call its start() first, or "
                "give feed"
            )
        try:
            return next(self._batches)
        except StopIteration:
            raise EOFException(
                f"{self._what} has no more batches; call its reset(), and start() for another epoch"
            ) from None

    def __call__(self) -> Self:
        """Return this loader, so that a script can iterate over ``loader()``."""
        return self

    def __iter__(self) -> Iterator[Any]:
        self._require(iterable=True, call="iteration")
        batches = self._started()
        try:
            for feed in batches:
                yield [list(feed.values())] if self._return_list else [feed]
        finally:
            # If the script leaves the loop early, the thread would otherwise wait for space in its queue.
            batches.close()

    @property
    def _what(self) -> str:
        return f"the loader {self.name or 'of ' + ', '.join(each.name for each in self.variables)}"

    def _set(self, make: Callable[[], Iterable[Mapping[str, Fed]]], places: object) -> Self:
        del places
        self._make = make
        return self

    def _started(self) -> Prefetcher[Mapping[str, Fed]]:
        if self._make is None:
            raise ConfigurationError(
                f"{self._what} has no generator; expected set_sample_generator, set_sample_list_generator, "
                "set_batch_generator or one of the older decorate_* calls first"
            )
        return Prefetcher(self._make, self._capacity, self._what)

    def _require(self, *, iterable: bool, call: str) -> None:
        if self.iterable != iterable:
            expected = "iteration over loader()" if self.iterable else "start() and runs without feed"
            raise ConfigurationError(
                f"{self._what}: {call} of a loader whose iterable is {self.iterable}; expected {expected}"
            )


class DataLoader:
    """Creates loaders, under the name of Paddle's ``fluid.io.DataLoader``.

    Notes
    -----
    Paddle's ``fluid.io.DataLoader``, but only for generators. For a map-style dataset, use
    ``torch.utils.data.DataLoader``, whose batches can be fed unchanged.
    """

    @staticmethod
    def from_generator(
        feed_list: Sequence[Any] | None = None,
        capacity: int | None = None,
        use_double_buffer: bool = True,
        iterable: bool = True,
        return_list: bool = False,
        use_multiprocess: bool = False,
        drop_last: bool = True,
    ) -> GeneratorLoader:
        """Create a loader; set its generator before use.

        Parameters
        ----------
        feed_list : sequence of Variable
            The variables, in the order of a sample's fields.
        capacity : int
            The number of batches to read ahead.
        use_double_buffer : bool
            Has no effect: a thread always reads ahead.
        iterable : bool
            Whether scripts iterate over feeds; otherwise the program reads between ``start()`` and
            ``reset()``.
        return_list : bool
            Whether to yield lists of arrays instead of dicts.
        use_multiprocess : bool
            Has no effect: in Paddle, too, only the imperative mode uses it.
        drop_last : bool
            Has no effect: it concerns the batches of several devices.

        Raises
        ------
        ConfigurationError
            There is no `feed_list` or no `capacity`.
        """
        del use_double_buffer, use_multiprocess, drop_last
        loader = GeneratorLoader(feed_list or (), capacity or 0, iterable=iterable, return_list=return_list)
        if not iterable:
            _append_read(loader)
        return loader


def PyReader(  # noqa: N802 - a class in Paddle
    feed_list: Sequence[Any] | None = None,
    capacity: int | None = None,
    use_double_buffer: bool = True,
    iterable: bool = True,
    return_list: bool = False,
) -> GeneratorLoader:
    """Create a loader, under the name of Paddle's ``fluid.io.PyReader``; see `DataLoader.from_generator`."""
    return DataLoader.from_generator(feed_list, capacity, use_double_buffer, iterable, return_list)


def py_reader(
    capacity: int,
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[str],
    lod_levels: Sequence[int] | None = None,
    name: str | None = None,
    use_double_buffer: bool = True,
) -> GeneratorLoader:
    """Create a loader that feeds the program; `read_file` returns the loader's variables.

    Parameters
    ----------
    capacity : int
        The number of batches to read ahead.
    shapes : sequence of sequence of int
        The shape of each variable, with -1 for the batch size.
    dtypes : sequence of str
    lod_levels : sequence of int, optional
        By default 0 for each variable.
    name : str, optional
    use_double_buffer : bool
        Has no effect: a thread always reads ahead.

    Raises
    ------
    ConfigurationError
        The numbers of dtypes or levels and of shapes differ, or `capacity` is below 1.

    Notes
    -----
    Paddle's ``fluid.layers.py_reader``.
    """
    del use_double_buffer
    levels = lod_levels if lod_levels is not None else [0] * len(shapes)
    if not len(shapes) == len(dtypes) == len(levels):
        raise ConfigurationError(
            f"py_reader: {len(shapes)} shapes, {len(dtypes)} dtypes and {len(levels)} lod_levels; expected "
            "the same number of each"
        )
    return _read_by(capacity, list(zip(shapes, dtypes, levels, strict=True)), name)


def create_py_reader_by_data(
    capacity: int, feed_list: Sequence[Any], name: str | None = None, use_double_buffer: bool = True
) -> GeneratorLoader:
    """Create a loader for variables like those in `feed_list`; `read_file` returns the loader's variables.

    Parameters
    ----------
    capacity : int
        The number of batches to read ahead.
    feed_list : sequence of Variable
    name : str, optional
    use_double_buffer : bool
        Has no effect: a thread always reads ahead.

    Notes
    -----
    Paddle's ``fluid.layers.create_py_reader_by_data``.
    """
    del use_double_buffer
    return _read_by(capacity, [(each.shape, each.dtype, each.lod_level) for each in feed_list], name)


def read_file(reader: GeneratorLoader) -> Any:
    """Return the variables that a `py_reader` feeds.

    Returns
    -------
    Variable or list of Variable
        A single variable if there is only one.
    """
    _append_read(reader)
    return reader.variables[0] if len(reader.variables) == 1 else reader.variables


def double_buffer(reader: GeneratorLoader, place: object = None, name: str | None = None) -> GeneratorLoader:
    """Return the loader unchanged, because every loader already prefetches in a thread.

    Parameters
    ----------
    reader : GeneratorLoader
    place, name : optional
        Have no effect.
    """
    del place, name
    return reader


def read_feed(program: Program) -> dict[str, Fed]:
    """Return the next batch of each of a program's loaders as one feed; empty for a program without loaders.

    Raises
    ------
    EOFException
        A loader has no more batches.
    ConfigurationError
        A loader was not started.
    """
    feed: dict[str, Fed] = {}
    for op in program.global_block().ops:
        if op.type == "read":
            (name,) = op.input("Reader")
            if name not in _loaders:
                raise ConfigurationError(
                    f"the program reads from the loader {name}, which this process has not created; give feed"
                )
            feed.update(_loaders[name].next_feed())
    return feed


def _read_by(capacity: int, described: Sequence[tuple[Any, str, int]], name: str | None) -> GeneratorLoader:
    layer = Layer("read_file")
    variables = [
        create_variable(
            layer.block,
            unique_name.generate(f"{layer.name}.tmp"),
            shape,
            dtype,
            lod_level=level,
            is_data=True,
            stop_gradient=True,
        )
        for shape, dtype, level in described
    ]
    return GeneratorLoader(variables, capacity, iterable=False, name=f"{name}_reader" if name else "")


def _append_read(loader: GeneratorLoader) -> None:
    """Append the operator that reads the variables of a loader."""
    block = default_main_program().current_block()
    create_variable(block, loader.name, (), "float32", type="READER", stop_gradient=True)
    block.append_op(
        "read",
        {"Reader": [loader.name]},
        {"Out": [each.name for each in loader.variables]},
        {"drop_last": True, "op_role": 0, "op_role_var": []},
    )
