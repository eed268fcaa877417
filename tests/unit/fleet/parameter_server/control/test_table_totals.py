"""The statistics of tables over all servers."""

from fleet.parameter_server.control.proto import control_pb2
from fleet.parameter_server.control.table_totals import TableTotals


def told(rows: int, name: str = "users", **others: int) -> control_pb2.TableStatistics:
    return control_pb2.TableStatistics(name=name, rows=rows, bytes=100 * rows, **others)


def test_each_servers_latest_word_counts():
    subject = TableTotals()
    assert subject.total() == []
    subject.take(0, [told(3)])
    subject.take(1, [told(5), told(0, "items")])
    subject.take(0, [told(4)])
    users, items = subject.total()
    assert (users["name"], users["rows"], users["bytes"]) == ("users", 9, 900)
    assert items == {"name": "items", "rows": 0, "bytes": 0, "rowsOnDisk": 0, "shardSkew": 1.0}


def test_hits_are_of_all_ids_that_were_asked_for_and_the_skew_is_of_the_fullest_shard_of_all():
    subject = TableTotals()
    subject.take(0, [told(384, rows_on_disk=7, looked_up=10, found=9, rows_of_fullest_shard=4)])
    subject.take(1, [told(128, rows_on_disk=1, looked_up=90, found=70, rows_of_fullest_shard=9)])
    (users,) = subject.total()
    assert (users["rowsOnDisk"], users["hitPercentage"], users["shardSkew"]) == (8, 79, 4.5)
