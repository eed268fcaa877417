"""The sizes of tables over all servers."""

from fleet.parameter_server.control.proto import control_pb2
from fleet.parameter_server.control.table_sizes import TableSizes


def test_each_servers_latest_word_counts():
    def told(rows: int, name: str = "users") -> list[control_pb2.TableSize]:
        return [control_pb2.TableSize(name=name, rows=rows, bytes=100 * rows)]

    subject = TableSizes()
    assert subject.total() == []
    subject.take(0, told(3))
    subject.take(1, told(5) + told(1, "items"))
    subject.take(0, told(4))
    assert subject.total() == [
        {"name": "users", "rows": 9, "bytes": 900},
        {"name": "items", "rows": 1, "bytes": 100},
    ]
