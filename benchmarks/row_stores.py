"""Which store of rows on a disk reads and writes the rows of batches fastest, under a memory limit.

``python -m benchmarks.row_stores`` puts rows of 124 bytes into each store, in a process each, under a memory
limit (cgroup) of a tenth of them on top of what the process takes, and in
turns reads and writes back the distinct rows of zipf distributed batches: a log with the newest rows in
memory (`fleet.tables.LocalDisk`), one memory-mapped file with each row at its place, and LMDB, which is left
out where ``pip install lmdb`` was not called.
"""

import argparse
import importlib.util
import json
import mmap
import os
import statistics
import sys
import tempfile
import time
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.limited import PROGRAM_BYTES, Cgroup, Process, anonymous_bytes, random_reads
from benchmarks.sparse_tier import ROW_BYTES, zipf_ranks
from fleet.tables import LocalDisk

__all__ = ["main"]

STORES: Final = ("log", "mapped", "lmdb")
LOADED_AT_ONCE: Final = 1 << 16
_PAGE: Final = mmap.PAGESIZE

Numbers = NDArray[np.int64]
Bytes = NDArray[np.uint8]


class Store(Protocol):
    """Rows of `ROW_BYTES` by number."""

    def read(self, numbers: Numbers) -> Bytes:
        """Return copies of rows."""

    def write(self, numbers: Numbers, rows: Bytes) -> None:
        """Put rows in the place of others."""


class Log:
    """`fleet.tables.LocalDisk`."""

    def __init__(self, num_rows: int, memory: int, directory: str) -> None:
        self._rows = LocalDisk(memory, directory).rows(ROW_BYTES // 4)
        self._rows.resize(num_rows)

    def read(self, numbers: Numbers) -> Bytes:
        """Return copies of rows."""
        return self._rows.read(numbers).numpy().view(np.uint8)

    def write(self, numbers: Numbers, rows: Bytes) -> None:
        """Put rows in the place of others."""
        self._rows.write(numbers, torch.from_numpy(rows.view(np.float32)))


class Mapped:
    """A memory-mapped file; what is read is asked for before, so that it comes together."""

    def __init__(self, num_rows: int, memory: int, directory: str) -> None:
        del memory
        self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 - closed with the process
        size = -(-num_rows * ROW_BYTES // _PAGE) * _PAGE
        os.posix_fallocate(self._file.fileno(), 0, size)
        self._map = mmap.mmap(self._file.fileno(), size)
        self._map.madvise(mmap.MADV_RANDOM)
        self._rows = np.frombuffer(self._map, np.uint8, num_rows * ROW_BYTES).view(
            np.dtype((np.void, ROW_BYTES))
        )

    def read(self, numbers: Numbers) -> Bytes:
        """Return copies of rows."""
        begins = numbers * ROW_BYTES
        for page in np.unique(np.concatenate([begins, begins + ROW_BYTES - 1]) // _PAGE).tolist():
            self._map.madvise(mmap.MADV_WILLNEED, page * _PAGE, _PAGE)
        return self._rows.take(numbers).view(np.uint8).reshape(-1, ROW_BYTES)

    def write(self, numbers: Numbers, rows: Bytes) -> None:
        """Put rows in the place of others."""
        self._rows.put(numbers, rows.view(self._rows.dtype))


class Lmdb:
    """LMDB with a transaction a batch that does not wait for the disk."""

    def __init__(self, num_rows: int, memory: int, directory: str) -> None:
        del memory
        import lmdb  # type: ignore[import-not-found]

        self._folder = tempfile.TemporaryDirectory(dir=directory)
        size = 4 * num_rows * ROW_BYTES + (64 << 20)
        self._env = lmdb.open(
            self._folder.name, map_size=size, sync=False, metasync=False, writemap=True, readahead=False
        )

    def read(self, numbers: Numbers) -> Bytes:
        """Return copies of rows."""
        with self._env.begin() as transaction:
            found = b"".join(transaction.get(key) for key in _keys(numbers))
        return np.frombuffer(found, np.uint8).reshape(-1, ROW_BYTES)

    def write(self, numbers: Numbers, rows: Bytes) -> None:
        """Put rows in the place of others."""
        values = (row.tobytes() for row in rows)
        with self._env.begin(write=True) as transaction:
            transaction.cursor().putmulti(list(zip(_keys(numbers), values, strict=True)))


def _keys(numbers: Numbers) -> list[bytes]:
    whole = numbers.astype(">i4").tobytes()
    return [whole[begin : begin + 4] for begin in range(0, len(whole), 4)]


def serve(arguments: argparse.Namespace) -> None:
    """Be the process of one store: make turns as lines of the standard input ask for them."""
    torch.set_num_threads(1)
    kinds: dict[str, Any] = {"log": Log, "mapped": Mapped, "lmdb": Lmdb}
    store: Store = kinds[arguments.serve](arguments.rows, arguments.memory, arguments.directory)
    ones = np.ones((LOADED_AT_ONCE, ROW_BYTES), np.uint8)
    for begin in range(0, arguments.rows, LOADED_AT_ONCE):  # the most frequent first
        numbers = np.arange(begin, min(begin + LOADED_AT_ONCE, arguments.rows))
        store.write(numbers, ones[: numbers.size])
    random = np.random.default_rng(1)
    for line in sys.stdin:
        seconds = 0.0
        for _ in range(int(line)):
            numbers = np.unique(zipf_ranks(random, arguments.rows))
            begun = time.perf_counter()
            store.write(numbers, store.read(numbers))
            seconds += time.perf_counter() - begun
        print(json.dumps({"seconds": seconds, "bytes": anonymous_bytes()}), flush=True)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure in turns; return the milliseconds a batch of each store."""
    tenth = arguments.rows * ROW_BYTES // 10
    memory = int(0.8 * tenth)
    names = [name for name in STORES if name != "lmdb" or importlib.util.find_spec("lmdb")]
    reads = {threads: random_reads(arguments.directory, threads) for threads in (1, 32)}
    groups, stores = [Cgroup(name) for name in names], []
    given = ["benchmarks.row_stores", f"--rows={arguments.rows}", f"--memory={memory}"]
    took: dict[str, list[float]] = {name: [] for name in names}
    try:
        for name, group in zip(names, groups, strict=True):
            stores.append(Process([*given, f"--directory={arguments.directory}", f"--serve={name}"], group))
            stores[-1].turn(1)
            group.limit(stores[-1].bytes - (memory if name == "log" else 0) + PROGRAM_BYTES + tenth)
            stores[-1].turn(arguments.warm_batches)
        for _ in range(arguments.rounds):
            for name, store in zip(names, stores, strict=True):
                took[name].append(1e3 * store.turn(arguments.batches) / arguments.batches)
    finally:
        for store in stores:
            store.close()
        for group in groups:
            group.close()
    return {
        "benchmark": "row_stores",
        "rows": arguments.rows,
        "tenth_bytes": tenth,
        "random_reads_per_second": reads,
        "load_average": os.getloadavg()[0],
        "milliseconds_a_batch": {name: sorted(found) for name, found in took.items()},
    }


def main() -> None:
    """Run the benchmark as the command line says."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.row_stores", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--batches", type=int, default=10, help="a turn (default: %(default)s)")
    parser.add_argument("--warm-batches", type=int, default=60, help="before (default: %(default)s)")
    parser.add_argument("--directory", default=".", help="on the disk (default: where you are)")
    parser.add_argument("--serve", choices=STORES, help=argparse.SUPPRESS)
    parser.add_argument("--memory", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments)
        return
    summary = measure(arguments)
    if arguments.json:
        print(json.dumps(summary))
        return
    for threads, reads in summary["random_reads_per_second"].items():
        print(f"random reads of 4 KiB a second, {threads} at once: {reads:.0f}")
    load = summary["load_average"]
    print(f"{summary['rows']} rows; ms a batch, read and written back (load average {load:.1f})")
    for name, found in summary["milliseconds_a_batch"].items():
        print(f"{name:<8}{statistics.median(found):>8.0f}   [{found[0]:.0f}-{found[-1]:.0f}]")


if __name__ == "__main__":
    main()
