"""What is told of the tables of a job: what each server tells of its part, added up."""

from collections.abc import Iterable, Sequence

from fleet.parameter_server.control.proto import control_pb2
from fleet.tables.shards import SHARDS

__all__ = ["TableTotals"]


class TableTotals:
    """The statistics of tables, as the servers last told them. Any thread may call."""

    def __init__(self) -> None:
        self._told: dict[int, tuple[control_pb2.TableStatistics, ...]] = {}

    def take(self, server: int, tables: Iterable[control_pb2.TableStatistics]) -> None:
        """Take what a server tells, in place of what it told before."""
        self._told[server] = tuple(tables)

    def total(self) -> list[dict[str, str | int | float]]:
        """Return what is told of each table over all servers, as JSON-ready data.

        Returns
        -------
        list of dict
            ``name``, ``rows``, ``bytes`` and ``rowsOnDisk``; ``shardSkew``, how many times the mean's rows
            the fullest virtual shard has; and, once ids were asked for, ``hitPercentage``, those of them
            that had a row.
        """
        parts: dict[str, list[control_pb2.TableStatistics]] = {}
        for table in [table for tables in list(self._told.values()) for table in tables]:
            parts.setdefault(table.name, []).append(table)
        return [{"name": name, **_total(of_table)} for name, of_table in parts.items()]


def _total(parts: Sequence[control_pb2.TableStatistics]) -> dict[str, str | int | float]:
    rows = sum(part.rows for part in parts)
    fullest = max(part.rows_of_fullest_shard for part in parts)
    total: dict[str, str | int | float] = {
        "rows": rows,
        "bytes": sum(part.bytes for part in parts),
        "rowsOnDisk": sum(part.rows_on_disk for part in parts),
        "shardSkew": round(fullest * SHARDS / rows, 2) if rows else 1.0,
    }
    if looked_up := sum(part.looked_up for part in parts):
        total["hitPercentage"] = 100 * sum(part.found for part in parts) // looked_up
    return total
