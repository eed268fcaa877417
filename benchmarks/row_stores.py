"""Compares on-disk row stores under a memory limit, reading and writing batches of rows.

``python -m benchmarks.row_stores`` puts rows of 124 bytes into each store. Each store runs in a separate
process, whose memory limit (cgroup) is a tenth of the rows in addition to the memory of the process. In
alternation, each store reads and writes back the distinct rows of Zipf-distributed batches. The stores are
the log of `fleet.tables.LocalDisk`, a memory-mapped file with each row at a fixed position, LMDB (``pip
install lmdb``) and RocksDB (``pip install rocksdict``); the last two are omitted if they are not installed.
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

STORES: Final = ("log", "mapped", "lmdb", "rocksdb")
PACKAGES: Final = {"lmdb": "lmdb", "rocksdb": "rocksdict"}
LOADED_AT_ONCE: Final = 1 << 16
_PAGE: Final = mmap.PAGESIZE

Numbers = NDArray[np.int64]
Bytes = NDArray[np.uint8]


class Store(Protocol):
    """The interface of a store of numbered rows, each of `ROW_BYTES` bytes."""

    def read(self, numbers: Numbers) -> Bytes:
        """Return copies of the given rows."""

    def write(self, numbers: Numbers, rows: Bytes) -> None:
        """Overwrite the given rows."""


class Log:
    """A row store on `fleet.tables.LocalDisk`, which is log-structured."""

    def __init__(self, num_rows: int, memory: int, directory: str) -> None:
        self._rows = LocalDisk(memory, directory).rows(ROW_BYTES // 4)
        self._rows.resize(num_rows)

    def read(self, numbers: Numbers) -> Bytes:
        """Return copies of the given rows."""
        return self._rows.read(numbers).numpy().view(np.uint8)

    def write(self, numbers: Numbers, rows: Bytes) -> None:
        """Overwrite the given rows."""
        self._rows.write(numbers, torch.from_numpy(rows.view(np.float32)))


class Mapped:
    """A row store in a memory-mapped file, which requests all pages of a batch before reading them."""

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
        """Return copies of the given rows."""
        begins = numbers * ROW_BYTES
        for page in np.unique(np.concatenate([begins, begins + ROW_BYTES - 1]) // _PAGE).tolist():
            self._map.madvise(mmap.MADV_WILLNEED, page * _PAGE, _PAGE)
        return self._rows.take(numbers).view(np.uint8).reshape(-1, ROW_BYTES)

    def write(self, numbers: Numbers, rows: Bytes) -> None:
        """Overwrite the given rows."""
        self._rows.put(numbers, rows.view(self._rows.dtype))


class Lmdb:
    """A row store on LMDB, with one transaction per batch that is not synced to disk."""

    def __init__(self, num_rows: int, memory: int, directory: str) -> None:
        del memory
        import lmdb  # type: ignore[import-not-found]

        self._folder = tempfile.TemporaryDirectory(dir=directory)
        size = 4 * num_rows * ROW_BYTES + (64 << 20)
        self._env = lmdb.open(
            self._folder.name, map_size=size, sync=False, metasync=False, writemap=True, readahead=False
        )

    def read(self, numbers: Numbers) -> Bytes:
        """Return copies of the given rows."""
        with self._env.begin() as transaction, transaction.cursor() as cursor:
            found = b"".join(value for _, value in cursor.getmulti(_keys(numbers)))
        return np.frombuffer(found, np.uint8).reshape(-1, ROW_BYTES)

    def write(self, numbers: Numbers, rows: Bytes) -> None:
        """Overwrite the given rows."""
        values = (row.tobytes() for row in rows)
        with self._env.begin(write=True) as transaction:
            transaction.cursor().putmulti(list(zip(_keys(numbers), values, strict=True)))


class RocksDb:
    """A row store on RocksDB without a write-ahead log, whose caches and buffers share one memory limit."""

    def __init__(self, num_rows: int, memory: int, directory: str) -> None:
        del num_rows
        import rocksdict  # type: ignore[import-not-found]

        self._folder = tempfile.TemporaryDirectory(dir=directory)
        options = rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_compression_type(rocksdict.DBCompressionType.none())
        options.set_use_direct_reads(True)
        options.set_use_direct_io_for_flush_and_compaction(True)
        options.set_write_buffer_size(max(4 << 20, memory // 8))
        options.set_max_write_buffer_number(2)
        options.set_max_open_files(64)
        blocks = rocksdict.BlockBasedOptions()
        blocks.set_block_cache(rocksdict.Cache(memory // 2))
        blocks.set_cache_index_and_filter_blocks(True)
        blocks.set_bloom_filter(10, False)
        options.set_block_based_table_factory(blocks)
        self._db = rocksdict.Rdict(self._folder.name, options)
        writes = rocksdict.WriteOptions()
        writes.disable_wal = True
        self._db.set_write_options(writes)
        self._batch = rocksdict.WriteBatch

    def read(self, numbers: Numbers) -> Bytes:
        """Return copies of the given rows."""
        found = b"".join(self._db.get(_keys(numbers)))
        return np.frombuffer(found, np.uint8).reshape(-1, ROW_BYTES)

    def write(self, numbers: Numbers, rows: Bytes) -> None:
        """Overwrite the given rows."""
        batch, whole = self._batch(raw_mode=True), rows.tobytes()
        for at, key in enumerate(_keys(numbers)):
            batch.put(key, whole[at * ROW_BYTES : (at + 1) * ROW_BYTES])
        self._db.write(batch)


def _keys(numbers: Numbers) -> list[bytes]:
    whole = numbers.astype(">i4").tobytes()
    return [whole[begin : begin + 4] for begin in range(0, len(whole), 4)]


def serve(arguments: argparse.Namespace) -> None:
    """Run the process of a store, which performs one timed batch for each line on standard input."""
    torch.set_num_threads(1)
    kinds: dict[str, Any] = {"log": Log, "mapped": Mapped, "lmdb": Lmdb, "rocksdb": RocksDb}
    store: Store = kinds[arguments.serve](arguments.rows, arguments.memory, arguments.directory)
    ones = np.ones((LOADED_AT_ONCE, ROW_BYTES), np.uint8)
    for begin in range(0, arguments.rows, LOADED_AT_ONCE):  # most frequent rows first
        numbers = np.arange(begin, min(begin + LOADED_AT_ONCE, arguments.rows))
        store.write(numbers, ones[: numbers.size])
    random = np.random.default_rng(1)
    for line in sys.stdin:
        reading = writing = processor = 0.0
        for _ in range(int(line)):
            numbers = np.unique(zipf_ranks(random, arguments.rows))
            used, begun = time.process_time(), time.perf_counter()
            rows = store.read(numbers)
            read = time.perf_counter()
            store.write(numbers, rows)
            reading, writing = reading + read - begun, writing + time.perf_counter() - read
            processor += time.process_time() - used
        turn = {"seconds": reading + writing, "writing": writing, "processor": processor}
        print(json.dumps({**turn, "bytes": anonymous_bytes()}), flush=True)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the stores in alternation; return the milliseconds per batch of each."""
    tenth = arguments.rows * ROW_BYTES // 10
    memory = int(0.8 * tenth)
    names = [name for name in STORES if importlib.util.find_spec(PACKAGES.get(name, "fleet"))]
    reads = {threads: random_reads(arguments.directory, threads) for threads in (1, 32)}
    groups, stores = [Cgroup(name) for name in names], []
    given = ["benchmarks.row_stores", f"--rows={arguments.rows}", f"--memory={memory}"]
    took: dict[str, dict[str, list[float]]] = {
        name: {part: [] for part in ("seconds", "reading", "writing", "processor")} for name in names
    }
    try:
        for name, group in zip(names, groups, strict=True):
            stores.append(Process([*given, f"--directory={arguments.directory}", f"--serve={name}"], group))
            stores[-1].turn(1)
            group.limit(stores[-1].bytes - (memory if name == "log" else 0) + PROGRAM_BYTES + tenth)
            stores[-1].turn(arguments.warm_batches)
        for _ in range(arguments.rounds):
            for name, store in zip(names, stores, strict=True):
                store.turn(arguments.batches)
                turn = {**store.last, "reading": store.last["seconds"] - store.last["writing"]}
                for part, found in took[name].items():
                    found.append(1e3 * turn[part] / arguments.batches)
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
        "anonymous_bytes": {name: store.bytes for name, store in zip(names, stores, strict=True)},
        "milliseconds_a_batch": took,
    }


def main() -> None:
    """Run the benchmark with the command-line options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.row_stores", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--batches", type=int, default=10, help="batches per turn (default: %(default)s)")
    parser.add_argument(
        "--warm-batches", type=int, default=60, help="batches before the first turn (default: %(default)s)"
    )
    parser.add_argument(
        "--directory", default=".", help="a directory on the disk to measure (default: the current one)"
    )
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
    print(f"{summary['rows']} rows, load average {summary['load_average']:.1f}")
    print("ms per batch, and the speed relative to the log in the same round")
    took = summary["milliseconds_a_batch"]
    for name, parts in took.items():
        print(f"{name}, {summary['anonymous_bytes'][name] / 1e6:.0f} MB of anonymous memory")
        for part, found in parts.items():
            ratios = sorted(log / own for log, own in zip(took["log"][part], found, strict=True))
            of_log = f"{statistics.median(ratios):.2f} [{ratios[0]:.2f}-{ratios[-1]:.2f}]"
            print(f"  {part:<10}{statistics.median(found):>8.0f}   {of_log}")


if __name__ == "__main__":
    main()
