"""How large the tables of a job are: what each server tells of its part, added up."""

from collections.abc import Iterable

from fleet.parameter_server.control.proto import control_pb2

__all__ = ["TableSizes"]


class TableSizes:
    """The sizes of tables, as the servers last told them. Any thread may call."""

    def __init__(self) -> None:
        self._told: dict[int, tuple[control_pb2.TableSize, ...]] = {}

    def take(self, server: int, tables: Iterable[control_pb2.TableSize]) -> None:
        """Take what a server tells, in place of what it told before."""
        self._told[server] = tuple(tables)

    def total(self) -> list[dict[str, str | int]]:
        """Return name, rows and bytes of each table over all servers, as JSON-ready data."""
        rows: dict[str, int] = {}
        sizes: dict[str, int] = {}
        for table in [table for tables in list(self._told.values()) for table in tables]:
            rows[table.name] = rows.get(table.name, 0) + table.rows
            sizes[table.name] = sizes.get(table.name, 0) + table.bytes
        return [{"name": name, "rows": rows[name], "bytes": sizes[name]} for name in rows]
