"""Half-async: a trainer never waits for its servers, as long as they keep up.

Gradients are copied into queues, one per block. A sending thread takes what has gathered, up to
`max_merge_var_num` steps at once, merges it and sends it as one step; a receiving thread asks for the values
that follow, and ``optimizer.step()`` adopts the newest that are complete. What gathers meanwhile leaves when
they have arrived: more is merged the slower the servers are, and one update of a trainer's is under way at a
time. A gradient holds its place in its queue until values that it has changed are adopted, and only a full
queue makes a step wait: values are never staler than `send_queue_size` of the trainer's own steps.

Merging follows the original: the gradients of plain SGD are summed, as several steps of it would sum them;
those of any other optimizer, momentum included, are averaged. Gradients of a table's rows are merged with
those of the same steps: added row by row, and averaged over the steps in which the table had some.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fleet.errors import ConfigurationError, FleetError
from fleet.parameter_server.modes.immediate import ImmediateServer
from fleet.parameter_server.modes.immediate_tables import ImmediateTables
from fleet.parameter_server.modes.interface import Mode, ServerMode, Session, TableServer, TrainerMode
from fleet.parameter_server.shard import Shard
from fleet.parameter_server.table_store import TableStore
from fleet.parameter_server.transport.arena import Arena, Extent, bytes_of, dtype_of
from fleet.plan.blocks import PlannedBlock
from fleet.plan.config import DistributedMode
from fleet.plan.job import TrainerPlan
from fleet.process.finite import NO_ROWS, OfRows
from fleet.tables import RowGradients, merge
from fleet.tables.rules import SGD
from fleet.wire import NO_STEP, HyperParameters

__all__ = ["GradientQueues", "HalfAsync", "HalfAsyncTrainer", "Merged"]


@dataclass(frozen=True)
class HalfAsync(Mode):
    """The half-async mode.

    Attributes
    ----------
    send_queue_size : int
        How many gradients of one block may be under way before a step waits. The original's 20 lets steps
        so short that twenty of them fit between two answers run far ahead of the values they train.
    max_merge_var_num : int
        How many of them are merged at most.
    """

    send_queue_size: int = 2
    max_merge_var_num: int = 20

    name: ClassVar[str] = "half_async"
    programs: ClassVar[DistributedMode] = DistributedMode.HALF_ASYNC
    elastic: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for field in ("send_queue_size", "max_merge_var_num"):
            if getattr(self, field) < 1:
                raise ConfigurationError(f"HalfAsync.{field} is {getattr(self, field)}; expected at least 1")

    def make_server(self, shard: Shard, num_trainers: int) -> ServerMode:
        """Build the server's half: as in async, but a trainer gets values when it asks for them."""
        return ImmediateServer(shard, num_trainers, answers_gradients=False)

    def make_tables(self, store: TableStore, num_trainers: int) -> TableServer:
        """Build what steps tables by each merged gradient that comes."""
        return ImmediateTables(store, num_trainers)

    def make_trainer(self, session: Session) -> TrainerMode:
        """Build the trainer's half."""
        return HalfAsyncTrainer(session, self.send_queue_size, self.max_merge_var_num)


@dataclass(frozen=True)
class Merged:
    """What leaves as one step: the last of the steps merged, its hyper-parameters, and their gradients."""

    step: int
    hyper_parameters: HyperParameters
    gradients: Mapping[int, Tensor]
    """By block."""
    of_rows: OfRows
    """By table."""


class GradientQueues:
    """The gradients that wait for the sending thread, by block. Any thread may call.

    Parameters
    ----------
    plan : TrainerPlan
    max_merge_var_num : int
        As in `HalfAsync`.
    """

    def __init__(self, plan: TrainerPlan, max_merge_var_num: int) -> None:
        self._summed = {block.id for block in plan.blocks if block.group in plan.merge_add}
        """Blocks whose gradients are summed, and not averaged."""
        self._at_most = max_merge_var_num
        self._queues: dict[int, deque[tuple[int, Tensor]]] = {block.id: deque() for block in plan.blocks}
        self._steps: deque[tuple[int, HyperParameters, OfRows]] = deque()
        self._summed_tables = {plan.name for plan in plan.tables if isinstance(plan.config.rule, SGD)}
        self._free: dict[int, list[Tensor]] = {block.id: [] for block in plan.blocks}
        self._merged = Arena({block.id: Extent(dtype_of(block.dtype), block.shape) for block in plan.blocks})
        self._lock = threading.Lock()

    def put(self, block: PlannedBlock, step: int, payload: memoryview) -> None:
        """Copy a block's gradient; it does not leave before its step is `complete`."""
        with self._lock:
            free = self._free[block.id]
            copy = free.pop() if free else torch.empty(block.shape, dtype=dtype_of(block.dtype))
        bytes_of(copy)[:] = payload
        with self._lock:
            self._queues[block.id].append((step, copy))

    def complete(self, step: int, hyper_parameters: HyperParameters, of_rows: OfRows = NO_ROWS) -> None:
        """Let a step's gradients leave, these of rows among them: there are no more of it."""
        with self._lock:
            self._steps.append((step, hyper_parameters, of_rows))

    @property
    def empty(self) -> bool:
        """Whether no step waits."""
        with self._lock:
            return not self._steps

    def merge(self) -> Merged | None:
        """Take the oldest complete steps, as many as may be merged.

        Returns
        -------
        Merged or None
            The gradients lie in memory that the next call writes to again. None when no step waits.
        """
        with self._lock:
            if not self._steps:
                return None
            taken = [self._steps.popleft() for _ in range(min(self._at_most, len(self._steps)))]
            step = taken[-1][0]
            hyper_parameters = next((each for _, each, _ in reversed(taken) if each != NO_STEP), NO_STEP)
            of_blocks = {block: self._take(queue, step) for block, queue in self._queues.items()}
        gradients = {
            block: self._merge_block(block, waiting) for block, waiting in of_blocks.items() if waiting
        }
        with self._lock:
            for block, waiting in of_blocks.items():
                self._free[block] += waiting
        return Merged(step, hyper_parameters, gradients, self._merge_rows([of for _, _, of in taken]))

    def _merge_rows(self, of_steps: Sequence[OfRows]) -> OfRows:
        merged = {}
        for name in dict.fromkeys(name for of_rows in of_steps for name in of_rows):
            given = [RowGradients(*of_rows[name]) for of_rows in of_steps if name in of_rows]
            total = merge(given) if len(given) > 1 else given[0]
            if len(given) > 1 and name not in self._summed_tables:
                total.values.div_(len(given))
            merged[name] = total.ids, total.values
        return merged

    @staticmethod
    def _take(queue: deque[tuple[int, Tensor]], step: int) -> list[Tensor]:
        taken = []
        while queue and queue[0][0] <= step:
            taken.append(queue.popleft()[1])
        return taken

    def _merge_block(self, block: int, gradients: Sequence[Tensor]) -> Tensor:
        total = self._merged[block].copy_(gradients[0])
        for gradient in gradients[1:]:
            total.add_(gradient)
        if len(gradients) > 1 and block not in self._summed:
            total.div_(len(gradients))
        return total


@dataclass(slots=True)
class Reached:
    """Up to which of its trainer's steps gradients have come; each count is of steps."""

    sent: int = 0
    """Those whose gradients have left."""
    arrived: int = 0
    """Those that are in the values that have arrived last."""
    adopted: int = 0
    """Those that are in the values that are the parameters."""
    landed: bool = False
    """Whether values have arrived and are not adopted."""

    @property
    def awaits_values(self) -> bool:
        """Whether gradients have left since the values were asked for that have arrived last."""
        return self.sent > self.arrived

    def land(self, sent: int) -> None:
        """Take note of values that were asked for when so many steps had left."""
        self.arrived, self.landed = sent, True

    def adopt(self) -> None:
        """Take note that the values that have arrived are the parameters."""
        self.adopted, self.landed = self.arrived, False


class HalfAsyncTrainer:
    """The trainer's half of the half-async mode; see `TrainerMode`.

    Parameters
    ----------
    session : Session
    send_queue_size, max_merge_var_num : int
        As in `HalfAsync`.
    """

    def __init__(self, session: Session, send_queue_size: int, max_merge_var_num: int) -> None:
        self._session = session
        self._queues = GradientQueues(session.plan, max_merge_var_num)
        self._size = send_queue_size
        self._hyper: HyperParameters = ()
        self._of_rows: OfRows = NO_ROWS
        self._work = threading.Condition()
        self._reached = Reached()
        self._sending = False
        self._draining = False
        self._stopping = False
        self._threads = [
            threading.Thread(target=self._guard, args=(loop,), name=f"fleet-{name}", daemon=True)
            for name, loop in (("communicate", self._send_loop), ("pull", self._pull_loop))
        ]

    def start(self) -> None:
        """Start both threads."""
        step = self._session.step
        self._reached = Reached(step, step, step)
        for thread in self._threads:
            thread.start()

    def begin(self, hyper_parameters: HyperParameters) -> None:
        """Begin a step, just before its first gradient."""
        self._hyper = hyper_parameters

    def send(self, block: PlannedBlock, payload: memoryview) -> None:
        """Copy a gradient into its queue."""
        self._queues.put(block, self._session.step, payload)

    def queue_rows(self, gradients: OfRows) -> None:
        """Copy the gradients of a step's rows."""
        self._of_rows = {name: (ids, rows.clone()) for name, (ids, rows) in gradients.items() if ids.size}

    def finish(self, absent: Sequence[PlannedBlock]) -> None:
        """End the step; adopt the newest values that are complete, and wait while the queues are full."""
        del absent
        session = self._session
        session.check()
        self._queues.complete(session.step, self._hyper, self._of_rows)
        self._of_rows = NO_ROWS
        session.advance()
        self._adopt_but(self._size)

    def settle(self) -> None:
        """Wait until every gradient that is queued is in values that are the parameters."""
        self._session.check()
        self._session.store.check_kept()
        self._adopt_but(0)

    def stop(self) -> None:
        """Send every gradient that waits, end the threads, and take the values that follow."""
        session = self._session
        session.store.check_kept()
        with self._work:
            self._draining = True
            self._work.notify_all()
        session.wait_until(
            lambda: self._queues.empty and not self._sending, lambda: "the queued gradients to leave"
        )
        self.close()
        session.request_values()
        session.wait_for_values()
        session.rows.wait()
        session.adopt_values()
        session.rows.adopt()

    def close(self) -> None:
        """End both threads."""
        with self._work:
            self._stopping = True
            self._work.notify_all()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def _adopt_but(self, steps: int) -> None:
        """Adopt the newest values that are complete; wait while more steps than so many are not in them."""
        session = self._session
        self._adopt()
        reached = self._reached
        while session.step - reached.adopted > steps:
            session.wait_until(
                lambda: reached.landed,
                lambda: f"values with step {reached.adopted} in them; {steps} steps may be under way",
            )
            self._adopt()

    def _adopt(self) -> None:
        """Make values that have arrived the parameters, and wake both threads."""
        with self._work:
            if self._reached.landed:
                self._session.adopt_values()
                self._session.rows.adopt()
                self._reached.adopt()
            self._work.notify_all()

    def _guard(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except FleetError as error:
            self._session.fail(error)

    def _send_loop(self) -> None:
        """Send what has gathered, whenever the values after what was sent before have arrived."""
        while True:
            with self._work:
                self._work.wait_for(lambda: self._stopping or self._may_send())
                if self._stopping:
                    return
                self._sending = True
            merged = self._queues.merge()
            if merged is not None:
                payloads = {block: bytes_of(gradient) for block, gradient in merged.gradients.items()}
                self._session.send_step(merged.step, merged.hyper_parameters, payloads, merged.of_rows)
                self._session.flush()
            with self._work:
                self._sending = False
                if merged is not None:
                    self._reached.sent = merged.step + 1
                self._work.notify_all()
            self._session.wake()

    def _may_send(self) -> bool:
        return not self._queues.empty and (self._draining or not self._reached.awaits_values)

    def _pull_loop(self) -> None:
        """Ask for values whenever gradients have left since, and the values before are the parameters."""
        while True:
            with self._work:
                self._work.wait_for(
                    lambda: self._stopping or (self._reached.awaits_values and not self._reached.landed)
                )
                if self._stopping:
                    return
                sent = self._reached.sent
            self._session.request_values()
            self._session.wait_for_values(background=True)
            self._session.rows.wait(background=True)
            with self._work:
                self._reached.land(sent)
                self._work.notify_all()
            self._session.wake()
