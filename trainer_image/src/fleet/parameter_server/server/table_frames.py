"""What a server does with a trainer's frames about tables."""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from fleet.errors import RemoteProtocolError
from fleet.parameter_server.modes import Answer, ServerMode, TabledServer, Work
from fleet.parameter_server.transport.stream import ResumableStream
from fleet.tables import RowGradients
from fleet.wire import Header, Kind
from fleet.wire.rows import MOST_ROW_BYTES, pack_rows, read_ids, read_row_gradient

__all__ = ["TableFrames"]

_FLOAT_BYTES = 4


class TableFrames:
    """Takes one trainer's frames about tables. Called by its receiving thread.

    Parameters
    ----------
    mode : ServerMode
    trainer : int
    stream : ResumableStream
        To the trainer.
    step_to_answer : callable
        Gives the step whose rows the trainer gets when it asks for those of one.
    """

    def __init__(
        self,
        mode: ServerMode,
        trainer: int,
        stream: ResumableStream,
        step_to_answer: Callable[[int], AbstractContextManager[int]],
    ) -> None:
        self._step_to_answer = step_to_answer
        self._mode = mode
        self._trainer = trainer
        self._stream = stream
        self._untaken: deque[tuple[int, int]] = deque()
        """Of each answer that the trainer is not known to have, its number among all frames and its bytes."""

    def look_up(self, header: Header, payload: memoryview, row_bytes: int) -> None:
        """Answer a look-up.

        Raises
        ------
        FleetError
            An id is none of the table's, or its rows are gone; or the trainer takes no answers.
        """
        self._check_taken(header)
        mode = self._with_tables(header)
        ids = read_ids(payload, row_bytes)
        with self._step_to_answer(header.step) as step:
            found = mode.look_up(self._trainer, header.block, step, ids)
        rows = pack_rows(found.numpy())
        number = self._stream.send(Kind.ROWS, rows, step=header.step, block=header.block)
        self._untaken.append((number, len(rows)))

    def take_gradient(self, header: Header, payload: memoryview, row_bytes: int) -> Sequence[Answer] | Work:
        """Take a gradient of rows; return what follows from it, or the work that it makes possible.

        Raises
        ------
        FleetError
            It is none that is awaited, or an id is none of the table's.
        """
        gradient = RowGradients.of(*read_row_gradient(payload, row_bytes // _FLOAT_BYTES))
        return self._with_tables(header).row_gradient(self._trainer, header.block, header.step, gradient)

    def _check_taken(self, header: Header) -> None:
        """Refuse to keep more answers for a trainer that had not taken those before when it asked."""
        while self._untaken and self._untaken[0][0] <= header.taken:
            self._untaken.popleft()
        kept = sum(num_bytes for _, num_bytes in self._untaken)
        if kept >= MOST_ROW_BYTES:
            raise RemoteProtocolError(
                f"trainer {self._trainer} asks for more rows, and has not taken {kept} bytes of answers; "
                f"expected it to wait for them from {MOST_ROW_BYTES} bytes on"
            )

    def _with_tables(self, header: Header) -> TabledServer:
        if not isinstance(self._mode, TabledServer):
            raise RemoteProtocolError(f"a {header.kind.name} frame came, and this server has no tables")
        return self._mode
