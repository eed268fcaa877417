"""Benchmarks encodings of row ids: bytes on the wire, and processor time to encode and decode.

``python -m benchmarks.sparse_ids`` encodes the distinct ids of a batch in three ways: as 8 bytes each, as 4
bytes each if they fit, and as the gaps between ids, which frames contain (`fleet.wire.rows`). Decoding
includes the check that ids ascend. The result is the median processor time of one thread.
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.sparse_systems import DIMENSION, ROWS, id_batches
from fleet.tables import Placement
from fleet.wire.rows import pack_ids, read_ids

__all__ = ["main"]

Ids = NDArray[np.int64]

TURNS = 500
NUM_SERVERS = 2
ROW_BYTES: Final = 4 * DIMENSION


def batches() -> dict[str, Ids]:
    """Return, by kind, a batch of sorted ids such as a trainer sends to one of two servers."""
    random = np.random.default_rng(0)
    whole = np.unique(id_batches(0)[0])
    return {
        f"ctr, of {ROWS}": whole[Placement.over(NUM_SERVERS).positions(whole)[0]],
        "5000 of 10^9": np.unique(random.integers(0, 10**9, 5000)),
        "5000 of any 64 bits": np.unique(random.integers(-(2**63), 2**63 - 1, 5000)),
    }


def _check(ids: Ids) -> Ids:
    assert bool((ids[1:] > ids[:-1]).all())
    return ids


def _as_they_are(ids: Ids) -> tuple[Callable[[], Any], Callable[[], Any]]:
    packed = ids.tobytes()
    return ids.tobytes, lambda: _check(np.frombuffer(packed, dtype="<i8"))


def _narrowed(ids: Ids) -> tuple[Callable[[], Any], Callable[[], Any]]:
    dtype = "<u4" if ids[0] >= 0 and ids[-1] < 2**32 else "<i8"
    packed = ids.astype(dtype).tobytes()
    return (
        lambda: ids.astype(dtype).tobytes(),
        lambda: _check(np.frombuffer(packed, dtype=dtype).astype(np.int64)),
    )


def _gaps(ids: Ids) -> tuple[Callable[[], Any], Callable[[], Any]]:
    packed = pack_ids(ids)
    return lambda: pack_ids(ids), lambda: read_ids(packed, ROW_BYTES)


WAYS: dict[str, Callable[[Ids], tuple[Callable[[], Any], Callable[[], Any]]]] = {
    "8 bytes": _as_they_are,
    "4 bytes": _narrowed,
    "gaps": _gaps,
}


def _microseconds(work: Callable[[], Any]) -> float:
    took = []
    for _ in range(TURNS):
        begun = time.thread_time_ns()
        work()
        took.append(time.thread_time_ns() - begun)
    return float(np.median(took)) / 1000


def measure() -> list[dict[str, Any]]:
    """Return one row of results for each kind of ids and each encoding."""
    found = []
    for kind, ids in batches().items():
        for way, of in WAYS.items():
            pack, read = of(ids)
            found.append(
                {
                    "ids": kind,
                    "number": ids.size,
                    "way": way,
                    "bytes": len(pack()),
                    "pack_microseconds": _microseconds(pack),
                    "read_microseconds": _microseconds(read),
                }
            )
    return found


def main() -> None:
    """Run the benchmark with the command-line options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sparse_ids", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    found = measure()
    if options.json:
        print(json.dumps({"benchmark": "sparse_ids", "measured": found}))
        return
    print(f"{'ids':<24}{'number':>8}  {'way':<10}{'bytes':>8}{'pack us':>10}{'read us':>10}")
    for row in found:
        print(
            f"{row['ids']:<24}{row['number']:>8}  {row['way']:<10}{row['bytes']:>8}"
            f"{row['pack_microseconds']:>10.1f}{row['read_microseconds']:>10.1f}"
        )


if __name__ == "__main__":
    main()
