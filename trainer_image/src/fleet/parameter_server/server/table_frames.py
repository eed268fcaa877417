"""What a server does with a trainer's frames about tables."""

from collections.abc import Sequence

from fleet.errors import RemoteProtocolError
from fleet.parameter_server.modes import Answer, ServerMode, TabledServer, Work
from fleet.tables import RowGradients
from fleet.wire import Header
from fleet.wire.rows import pack_rows, read_ids, read_row_gradient

__all__ = ["look_up", "take_row_gradient"]

_FLOAT_BYTES = 4


def look_up(mode: ServerMode, trainer: int, header: Header, payload: memoryview) -> memoryview:
    """Return the payload that answers a look-up.

    Raises
    ------
    FleetError
        An id is none of the table's, or its rows are gone.
    """
    rows = _with_tables(mode, header).look_up(trainer, header.block, header.step, read_ids(payload))
    return pack_rows(rows.numpy())


def take_row_gradient(
    mode: ServerMode, trainer: int, header: Header, payload: memoryview, row_bytes: int
) -> Sequence[Answer] | Work:
    """Take a gradient of rows; return what follows from it, or the work that it makes possible.

    Raises
    ------
    FleetError
        It is none that is awaited, or an id is none of the table's.
    """
    gradient = RowGradients.of(*read_row_gradient(payload, row_bytes // _FLOAT_BYTES))
    return _with_tables(mode, header).row_gradient(trainer, header.block, header.step, gradient)


def _with_tables(mode: ServerMode, header: Header) -> TabledServer:
    if not isinstance(mode, TabledServer):
        raise RemoteProtocolError(f"a {header.kind.name} frame came, and this server has no tables")
    return mode
