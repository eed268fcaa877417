"""The values that a trainer awaits from its servers: one answer for each block."""

import sys
from collections.abc import Callable, Collection, Sequence

from fleet.errors import RemoteProtocolError
from fleet.parameter_server.trainer.waits import Waits
from fleet.plan.blocks import PlannedBlock
from fleet.process import progress

__all__ = ["AwaitedValues"]


class AwaitedValues:
    """Which blocks still have to be answered, and which of the answers say that nothing has changed.

    Parameters
    ----------
    blocks : sequence of PlannedBlock
        All blocks of the job.
    waits : Waits
    """

    def __init__(self, blocks: Sequence[PlannedBlock], waits: Waits) -> None:
        self.waiting_for: Callable[[], str] = str
        """Returns for whom the servers wait in turn; empty when for nobody."""
        self.unchanged: set[int] = set()
        """Blocks that were not stepped, as no trainer had a gradient for them."""
        self._waits = waits
        self._awaited: set[int] = set()
        self._steps = range(0)
        """Of which steps an answer may be."""
        self._step = 0
        self._wanted: frozenset[int] = frozenset()
        """Blocks for which the training thread waits before the others."""
        self.place(blocks)

    def place(self, blocks: Sequence[PlannedBlock]) -> None:
        """Await these blocks from now on; called while none is awaited."""
        self._blocks = {block.id: block for block in blocks}

    @property
    def all_landed(self) -> bool:
        """Whether all the values expected have landed."""
        with self._waits.changed:
            return not self._awaited

    @property
    def nothing_changed(self) -> bool:
        """Whether the answers say that no block was stepped."""
        with self._waits.changed:
            return len(self.unchanged) == len(self._blocks)

    def expect(self, step: int, *, present: bool = False, exactly: bool = False) -> None:
        """Register the expected answers, one per block, before the request is sent.

        Parameters
        ----------
        step : int
            How many steps this trainer has made.
        present : bool
            Whether the present values are asked for, of whatever step. Otherwise an answer must be of this
            step or a later one.
        exactly : bool
            Whether the values of this step are asked for: those of another one do not go with them.
        """
        with self._waits.changed:
            self._awaited = set(self._blocks)
            self._step = step
            self._steps = range(0 if present and not exactly else step, step + 1 if exactly else sys.maxsize)
            self.unchanged = set()

    def landed(self, block: int, step: int, *, changed: bool) -> None:
        """Take a block's answer.

        Raises
        ------
        RemoteProtocolError
            Nobody awaits it.
        """
        with self._waits.changed:
            if block not in self._awaited or step not in self._steps:
                raise RemoteProtocolError(
                    f"a server sent {self._blocks[block].name} of step {step}, which nobody awaits at "
                    f"step {self._step}"
                )
            self._awaited.remove(block)
            if not changed:
                self.unchanged.add(block)
            if not self._awaited or block in self._wanted:
                self._waits.changed.notify_all()

    def wait(self, *, background: bool = False) -> None:
        """Wait until all have landed.

        Parameters
        ----------
        background : bool
            Training goes on meanwhile: the time does not count as waited.

        Raises
        ------
        FleetError
            A server reported an error, came back without its state, or vanished.
        """
        waited = self._waits.wait_until(lambda: not self._awaited, self._describe)
        if not background:
            progress.count("wait_seconds", waited)

    def wait_for(self, blocks: Collection[int]) -> None:
        """Wait until the values of these blocks have landed; raises as `wait` does."""
        self._wanted = frozenset(blocks)
        try:
            waited = self._waits.wait_until(lambda: self._awaited.isdisjoint(self._wanted), self._describe)
        finally:
            self._wanted = frozenset()
        progress.count("wait_seconds", waited)

    def _describe(self) -> str:
        """Name the servers and a variable that the step waits for, and whom they wait for in turn."""
        blocks = [self._blocks[block] for block in sorted(self._awaited)]
        servers = ", ".join(sorted({block.endpoint for block in blocks}))
        because = self.waiting_for()
        return f"{blocks[0].name} of step {self._step} from {servers}" + (f" ({because})" if because else "")
