"""The command ``python -m fleet.checkpoint``, which exports a checkpoint's tables for serving."""

import argparse
import sys

from fleet.checkpoint.export import export_tables
from fleet.errors import FleetError

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m fleet.checkpoint", description=__doc__)
    parser.add_argument(
        "checkpoint", help="a directory that save_check_point wrote, such as /checkpoints/checkpoint-3"
    )
    parser.add_argument(
        "directory", help="where to write {table}.safetensors, with the tensors ids, rows and removed"
    )
    parser.add_argument(
        "--since", help="an earlier checkpoint: write only the changed rows, and the ids of removed ones"
    )
    parser.add_argument(
        "--table", action="append", default=[], help="write only this table; may be given several times"
    )
    parser.add_argument("--dtype", default="float32", help="float32 or bfloat16 (default: %(default)s)")
    given = parser.parse_args(arguments)
    try:
        written = export_tables(
            given.checkpoint, given.directory, since=given.since, tables=given.table, dtype=given.dtype
        )
    except FleetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for table, path in written.items():
        print(f"{table}: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
