"""Datasets for training, which convert files to samples with a command that the script sets.

`set_pipe_command` names the command. It runs once per file, as a child process with the file as stdin, and
writes one line per sample: for each variable the number of its values, and the values
(`fleet.fluid.incubate.data_generator`). With n threads, thread i reads every n-th file, starting at the i-th,
and the batches of the threads alternate, so that their order does not depend on timing. The steps themselves
run one after another.
"""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from math import prod
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from fleet.errors import ConfigurationError, FleetError
from fleet.fluid.data_feeder import Fed
from fleet.fluid.lod import LoDTensor
from fleet.fluid.paddle.reader import batch as batched
from fleet.fluid.prefetcher import Prefetcher

__all__ = ["DatasetFactory", "FetchHandler", "InMemoryDataset", "QueueDataset", "run_from_dataset"]

Row = list[list[Any]]
"""A sample: the values of each variable."""

_CAPACITY: Final = 8
"""The number of batches that each thread reads ahead."""
_TAIL: Final = 5
"""The number of lines of stderr that an error shows."""
_MOMENT: Final = 0.5
"""The time in seconds to wait for the command to fail after a malformed line, which it may have cut off."""
_NUMBERS: Final = {"int64": int, "float32": float}


class DatasetFactory:
    """Creates datasets by class name.

    Notes
    -----
    Paddle's ``fluid.DatasetFactory``.
    """

    def create_dataset(self, datafeed_class: str = "QueueDataset") -> "QueueDataset | InMemoryDataset":
        """Return a dataset of the class with the given name.

        Parameters
        ----------
        datafeed_class : str
            ``QueueDataset``, which reads its files in each epoch, or ``InMemoryDataset``.

        Returns
        -------
        QueueDataset or InMemoryDataset

        Raises
        ------
        ConfigurationError
            Any other class.
        """
        classes = {"QueueDataset": QueueDataset, "InMemoryDataset": InMemoryDataset}
        if datafeed_class not in classes:
            raise ConfigurationError(
                f"create_dataset: datafeed_class is {datafeed_class!r}; expected {' or '.join(classes)}"
            )
        return classes[datafeed_class]()


class QueueDataset:
    """A dataset that reads its files during training.

    Notes
    -----
    Paddle's ``fluid.dataset.QueueDataset``.
    """

    def __init__(self) -> None:
        self.variables: list[Any] = []
        self._command = "cat"
        self._batch_size = 1
        self._threads = 1
        self._files: list[Path] = []

    def set_use_var(self, var_list: Sequence[Any]) -> None:
        """Set the variables of a sample, in the order of their values on a line.

        Parameters
        ----------
        var_list : sequence of Variable
            Their dtypes are int64 or float32. A variable with a lod_level takes any number of values, and any
            other variable takes as many as fill its shape.

        Raises
        ------
        ConfigurationError
            A variable has another dtype.
        """
        for variable in var_list:
            if variable.dtype not in _NUMBERS:
                raise ConfigurationError(
                    f"set_use_var: {variable.name} is {variable.dtype}; expected {' or '.join(_NUMBERS)}"
                )
        self.variables = list(var_list)

    def set_batch_size(self, batch_size: int) -> None:
        """Set the batch size (default 1); a thread's last batch may be smaller.

        Parameters
        ----------
        batch_size : int
        """
        self._batch_size = _positive("set_batch_size", batch_size)

    def set_thread(self, thread_num: int) -> None:
        """Set the number of threads that read files (default 1).

        Parameters
        ----------
        thread_num : int
        """
        self._threads = _positive("set_thread", thread_num)

    def set_filelist(self, filelist: Sequence[str]) -> None:
        """Set the files to read.

        Parameters
        ----------
        filelist : sequence of str or path
        """
        self._files = [Path(file) for file in filelist]

    def set_pipe_command(self, pipe_command: str) -> None:
        """Set the command that converts a file to samples, one per line (default ``cat``).

        Parameters
        ----------
        pipe_command : str
            A shell command, such as ``python generator.py``.
        """
        self._command = pipe_command

    def local_shuffle(self) -> None:
        """Raise an error, because a QueueDataset does not keep samples in memory.

        Raises
        ------
        ConfigurationError
            Always.
        """
        raise ConfigurationError(
            "a QueueDataset has no samples in memory to shuffle; expected create_dataset('InMemoryDataset'), "
            "or shuffle the list of files"
        )

    def global_shuffle(self, fleet: Any = None) -> None:
        """Raise an error, because a QueueDataset does not keep samples in memory.

        Parameters
        ----------
        fleet : optional

        Raises
        ------
        ConfigurationError
            Always.
        """
        del fleet
        self.local_shuffle()

    def batches(self, threads: int = 0) -> Iterator[Mapping[str, Fed]]:
        """Return an iterator over the batches as feeds.

        Parameters
        ----------
        threads : int
            The number of threads that read; 0 for the number set by `set_thread`.

        Yields
        ------
        dict of str to array or LoDTensor
            By variable.

        Raises
        ------
        ConfigurationError
            There are no files or no variables, a file is missing, or a line does not have the variables'
            values.
        FleetError
            The command failed; the message has its exit code and the last lines of its stderr.
        """
        return _alternating(
            [
                Prefetcher(partial(self._batches_of, share), _CAPACITY, "the dataset")
                for share in self._shares(threads)
            ]
        )

    def _batches_of(self, files: Iterable[Path]) -> Iterator[Mapping[str, Fed]]:
        return self._in_batches(self._rows(files))

    def _in_batches(self, rows: Iterable[Row]) -> Iterator[Mapping[str, Fed]]:
        for batch in batched(lambda: iter(rows), self._batch_size)():
            yield {
                variable.name: _column(variable, column)
                for variable, column in zip(self.variables, zip(*batch, strict=True), strict=True)
            }

    def _rows(self, files: Iterable[Path]) -> Iterator[Row]:
        for path in files:
            with _piped(path, self._command) as lines:
                for number, line in enumerate(lines, start=1):
                    try:
                        yield _row(line, self.variables)
                    except (ValueError, IndexError) as error:
                        raise ConfigurationError(
                            f"{path}: line {number} of the output of {self._command!r} is "
                            f"{line.strip()[:80]!r}: {error}; expected, for each of "
                            f"{', '.join(f'{each.name} ({each.dtype})' for each in self.variables)}, the "
                            "number of its values and the values"
                        ) from error

    def _shares(self, threads: int | None) -> list[list[Path]]:
        """Check the variables and files, and divide the files among the threads."""
        for what, given in (("set_use_var", self.variables), ("set_filelist", self._files)):
            if not given:
                raise ConfigurationError(f"the dataset is empty: expected {what}, with one or more, first")
        for path in self._files:
            if not path.is_file():
                raise ConfigurationError(f"set_filelist names {path}, which is not a file")
        count = min(threads or self._threads, len(self._files))
        return [self._files[index::count] for index in range(count)]


class InMemoryDataset(QueueDataset):
    """A dataset that reads its files into memory, where it can shuffle their samples.

    Notes
    -----
    Paddle's ``fluid.dataset.InMemoryDataset``. The order is drawn from Python's module `random`, so
    ``random.seed`` reproduces it; Paddle's order cannot be reproduced.
    """

    def __init__(self) -> None:
        super().__init__()
        self._samples: list[Row] | None = None
        self._loading: Prefetcher[list[Row]] | None = None

    def load_into_memory(self) -> None:
        """Read all files into memory.

        Raises
        ------
        ConfigurationError, FleetError
            As for `batches`.
        """
        self.preload_into_memory()
        self.wait_preload_done()

    def preload_into_memory(self, thread_num: int | None = None) -> None:
        """Start reading all files in the background; see `wait_preload_done`.

        Parameters
        ----------
        thread_num : int, optional
            Replaces the number set by `set_thread`.
        """
        shares = self._shares(thread_num)

        def read() -> Iterator[list[Row]]:
            loading = [Prefetcher(partial(self._all, share), 1, "the dataset") for share in shares]
            yield list(chain.from_iterable(_alternating(loading)))

        self._loading = Prefetcher(read, 1, "the dataset")

    def wait_preload_done(self) -> None:
        """Wait until `preload_into_memory` has read all files.

        Raises
        ------
        ConfigurationError, FleetError
            As for `batches`.
        """
        if self._loading is not None:
            (self._samples,), self._loading = list(self._loading), None

    def local_shuffle(self) -> None:
        """Shuffle the samples that this process has read.

        Raises
        ------
        ConfigurationError
            The samples were not loaded.
        """
        random.shuffle(self._loaded())

    def global_shuffle(self, fleet: Any = None, thread_num: int = 12) -> None:
        """Shuffle the samples; raise an error if the job has several trainers.

        Parameters
        ----------
        fleet : Fleet, optional
            A job with one trainer, because trainers do not exchange samples.
        thread_num : int
            Has no effect.

        Raises
        ------
        ConfigurationError
            `fleet` has several trainers, or the samples were not loaded.
        """
        del thread_num
        if fleet is not None and fleet.worker_num() > 1:
            raise ConfigurationError(
                f"global_shuffle: trainers do not exchange samples, and there are {fleet.worker_num()}; "
                "expected a list of files that every trainer shuffles in the same way before "
                "fleet.split_files, and local_shuffle()"
            )
        self.local_shuffle()

    def release_memory(self) -> None:
        """Discard the samples to free their memory."""
        self._samples = None

    def get_memory_data_size(self, fleet: Any = None) -> int:
        """Return the number of samples in memory.

        Parameters
        ----------
        fleet : Fleet, optional
            If given, count the samples of all its trainers.

        Returns
        -------
        int
        """
        return _over_trainers(len(self._loaded()), fleet)

    def get_shuffle_data_size(self, fleet: Any = None) -> int:
        """Return the number of samples in memory; see `get_memory_data_size`.

        Parameters
        ----------
        fleet : Fleet, optional
            If given, count the samples of all its trainers.
        """
        return self.get_memory_data_size(fleet)

    def batches(self, threads: int = 0) -> Iterator[Mapping[str, Fed]]:
        """Return an iterator over the batches as feeds; see `QueueDataset.batches`.

        Parameters
        ----------
        threads : int
            Has no effect: the samples are in memory.
        """
        del threads
        return self._in_batches(self._loaded())

    def _all(self, files: Sequence[Path]) -> list[list[Row]]:
        return [list(self._rows(files))]

    def _loaded(self) -> list[Row]:
        if self._samples is None:
            raise ConfigurationError("the dataset is not in memory; expected load_into_memory() first")
        return self._samples


class FetchHandler:
    """Receives the values of variables during training on a dataset, at most once per period.

    Parameters
    ----------
    var_dict : mapping of str to Variable
        The variables, by the names under which `handler` receives them.
    period_secs : float
        The period, in seconds.

    Notes
    -----
    Paddle's ``fluid.executor.FetchHandler``. This handler runs between two steps; Paddle's runs concurrently
    with them.
    """

    def __init__(self, var_dict: Mapping[str, Any] | None = None, period_secs: float = 60) -> None:
        if not var_dict:
            raise ConfigurationError("FetchHandler: var_dict is empty; expected variables, by name")
        self.var_dict = var_dict
        self.period_secs = period_secs

    def handler(self, res_dict: Mapping[str, Any]) -> None:
        """Print the values; override this method to process them differently.

        Parameters
        ----------
        res_dict : mapping of str to array
        """
        for name, value in res_dict.items():
            print(f"{name}: {value}")


def run_from_dataset(
    run: Callable[[Mapping[str, Fed], list[Any]], Sequence[Any]],
    dataset: QueueDataset | None,
    *,
    threads: int = 0,
    fetch_list: Sequence[Any] | None = None,
    fetch_info: Sequence[str] | None = None,
    print_period: int = 100,
    fetch_handler: FetchHandler | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Run a program on every batch of a dataset.

    Parameters
    ----------
    run : callable
        Runs the program with a feed, and returns the values of the given variables.
    dataset : QueueDataset or InMemoryDataset
    threads : int
        The number of threads that read; 0 for the dataset's number.
    fetch_list : sequence of Variable or str, optional
        The variables to print.
    fetch_info : sequence of str, optional
        The text to print before each variable; by default its name.
    print_period : int
        The number of batches between two printed lines.
    fetch_handler : FetchHandler, optional
    clock : callable
        Returns seconds, for `fetch_handler`.

    Raises
    ------
    ConfigurationError
        The arguments do not match, or see `QueueDataset.batches`.
    FleetError
        See `QueueDataset.batches`; or `run` raised it.
    """
    if not isinstance(dataset, QueueDataset):
        raise ConfigurationError(
            f"dataset is {dataset!r}; expected one that fluid.DatasetFactory().create_dataset made"
        )
    printed = list(fetch_list or ())
    infos = list(fetch_info) if fetch_info is not None else [getattr(each, "name", each) for each in printed]
    if len(infos) != len(printed):
        raise ConfigurationError(
            f"fetch_info has {len(infos)} texts, but fetch_list has {len(printed)} variables; expected one "
            "text for each variable"
        )
    period = _positive("print_period", print_period)
    handled = list(fetch_handler.var_dict.values()) if fetch_handler is not None else []
    last = clock()
    for number, feed in enumerate(dataset.batches(threads), start=1):
        prints = bool(printed) and number % period == 0
        handles = fetch_handler is not None and clock() - last >= fetch_handler.period_secs
        values = run(feed, [*(printed if prints else ()), *(handled if handles else ())])
        if prints:
            shown = (f"{info}: {np.asarray(value)}" for info, value in zip(infos, values, strict=False))
            print(", ".join((f"batch: {number}", *shown)), flush=True)
        if handles and fetch_handler is not None:
            last = clock()
            fetched = values[len(printed) if prints else 0 :]
            fetch_handler.handler(dict(zip(fetch_handler.var_dict, fetched, strict=True)))


def _alternating(sources: Sequence[Prefetcher[Any]]) -> Iterator[Any]:
    """Yield items from the sources in turn until all are exhausted; close them if the caller stops early."""
    turn = deque(sources)
    try:
        while turn:
            with suppress(StopIteration):
                yield next(turn[0])
                turn.rotate(-1)
                continue
            turn.popleft()
    finally:
        for source in sources:
            source.close()


@contextmanager
def _piped(path: Path, command: str) -> Iterator[Iterable[str]]:
    """Run a command with a file as stdin, and yield the lines of its output."""
    with path.open("rb") as file:
        child = subprocess.Popen(  # noqa: S602 - the script's own command, for the shell as in Paddle
            command,
            shell=True,
            stdin=file,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # so that processes started by the shell can be ended too
        )
    assert child.stdout is not None and child.stderr is not None  # noqa: S101, PT018 - for mypy
    said: deque[str] = deque(maxlen=_TAIL)
    # In a thread of its own: a command that fills the pipe of its stderr would wait forever.
    listener = threading.Thread(target=_listen, args=(child.stderr, said), daemon=True)
    listener.start()
    try:
        yield child.stdout
        child.wait()
    except ConfigurationError:  # a malformed line: perhaps the command is about to fail and has cut it off
        with suppress(subprocess.TimeoutExpired):
            child.wait(timeout=_MOMENT)
        if not child.returncode:
            raise
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        # A process that the command has left behind may keep stderr open.
        listener.join(timeout=1)
        child.stdout.close()
    if code := child.returncode:
        ended = f"signal {-code}" if code < 0 else f"exit code {code}"
        raise FleetError(
            f"the pipe_command {command!r} ended with {ended} on {path}; expected 0. Its stderr ends: "
            f"{' | '.join(said) or 'nothing'}"
        )


def _listen(stream: IO[str], said: deque[str]) -> None:
    """Copy a child's stderr to this process's stderr, and keep its last lines."""
    with stream:
        for line in stream:
            said.append(line.rstrip())
            sys.stderr.write(line)


def _row(line: str, variables: Sequence[Any]) -> Row:
    """Parse the line of a sample; raise ValueError or IndexError if it does not match the variables."""
    words = line.split()
    row, at = [], 0
    for variable in variables:
        end = at + 1 + int(words[at])
        values = list(map(_NUMBERS[variable.dtype], words[at + 1 : end]))
        if len(values) != end - at - 1:
            raise ValueError(f"it ends within the values of {variable.name}")
        wanted = None if variable.lod_level else prod(variable.shape[1:])
        if not values or (wanted is not None and len(values) != wanted):
            raise ValueError(f"it has {len(values)} values of {variable.name}, not {wanted or 'one or more'}")
        row.append(values)
        at = end
    if at != len(words):
        raise ValueError(f"it has {len(words) - at} more words")
    return row


def _column(variable: Any, values: Sequence[list[Any]]) -> Fed:
    flat = list(chain.from_iterable(values))
    try:
        array = np.array(flat, dtype=variable.dtype)
    except OverflowError:
        try:  # ids are uint64 in Paddle's files, and int64 in its programs
            array = np.array(flat, dtype=np.uint64).view(np.int64)
        except OverflowError as error:
            raise ConfigurationError(f"{variable.name} has an id of more than 64 bits: {error}") from error
    if variable.lod_level:
        return LoDTensor(array.reshape(-1, 1), [list(map(len, values))])
    return array.reshape(len(values), *variable.shape[1:])


def _over_trainers(number: int, fleet: Any) -> int:
    if fleet is None:
        return number
    total = np.zeros(1, dtype=np.int64)
    fleet.all_reduce_worker(np.array([number], dtype=np.int64), total)
    return int(total[0])


def _positive(call: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigurationError(f"{call}: the number is {value!r}; expected 1 or more")
    return value
