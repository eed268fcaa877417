"""What is told of a table while it is used: how often rows are found, and how even its shards are."""

from fleet.tables.memory import RowMemory

__all__ = ["TableStatistics"]


class TableStatistics:
    """Numbers of one table, or of one server's part of it.

    Any thread may read them while another one changes the table: each is read at once, and without a lock.

    Parameters
    ----------
    memory : RowMemory
        The table's.

    Attributes
    ----------
    looked_up : int
        Ids that were asked for.
    found : int
        Of these, ids that had a row; the others were read as their first values.
    """

    def __init__(self, memory: RowMemory) -> None:
        self.looked_up = 0
        self.found = 0
        self._memory = memory

    def count(self, looked_up: int, found: int) -> None:
        """Take note of a look-up."""
        self.looked_up += looked_up
        self.found += found

    @property
    def on_disk(self) -> int:
        """How many rows lie on a disk; see `RowMemory.num_on_disk`."""
        return self._memory.num_on_disk

    @property
    def rows_of_fullest_shard(self) -> int:
        """How many rows the virtual shard has that has most."""
        return int(self._memory.num_rows.max())

    def skew(self, num_shards: int) -> float:
        """Return how many times the mean's rows the fullest virtual shard has; 1 where there are no rows.

        Parameters
        ----------
        num_shards : int
            How many virtual shards the rows are of: all of a table's, or those of a server.
        """
        total = int(self._memory.num_rows.sum())
        return self.rows_of_fullest_shard * num_shards / total if total else 1.0
