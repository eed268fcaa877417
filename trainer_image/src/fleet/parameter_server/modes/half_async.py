"""Half-async mode: a trainer sends gradients in the background, and waits only if servers fall behind.

Gradients are copied into queues, one per block. A sending thread takes up to `max_merge_var_num` queued
steps, merges them and sends the result as one step. A pulling thread then requests the resulting values, and
``optimizer.step()`` adopts the latest complete values. The next merged step is sent when these values have
arrived. So a trainer has one update in flight at a time, and the slower its servers are, the more steps it
merges. A step counts as queued until values that include its gradients are adopted, and only a full queue
makes a step wait: values lack at most the last `send_queue_size` steps of the trainer itself.

Merging follows Paddle. Gradients for plain SGD are added, which is equivalent to several steps; gradients for
any other optimizer, including SGD with momentum, are averaged. Row gradients of the same steps are merged,
too: they are added row by row and, unless the table's rule is SGD, averaged over the steps in which the
table had gradients.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fleet.errors import ConfigurationError, FleetError
from fleet.parameter_server.modes.asynchronous import ImmediateServer
from fleet.parameter_server.modes.mode import Mode, ServerMode, Session, TrainerMode
from fleet.parameter_server.shard import Shard
from fleet.parameter_server.transport.arena import Arena, Extent, bytes_of, dtype_of
from fleet.plan.blocks import PlannedBlock
from fleet.plan.config import DistributedMode
from fleet.plan.job import TrainerPlan
from fleet.process.finite import NO_ROWS, OfRows
from fleet.tables import RowGradients, merge
from fleet.tables.rules import SGD, PaddleSGD
from fleet.wire import NO_STEP, HyperParameters

__all__ = ["GradientQueues", "HalfAsync", "HalfAsyncTrainer", "MergedStep"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HalfAsync(Mode):
    """Half-async mode: trainers send merged gradients and receive values in the background.

    Attributes
    ----------
    send_queue_size : int
        The number of steps that may be in flight before a step waits. With Paddle's default of 20, trainers
        with short steps would run far ahead of their values.
    max_merge_var_num : int
        The largest number of steps that are merged into one.
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
        """Create the server side of the mode, which sends values only on request."""
        return ImmediateServer(shard, num_trainers, answers_gradients=False)

    def make_trainer(self, session: Session) -> TrainerMode:
        """Create the trainer side of the mode."""
        return HalfAsyncTrainer(session, self.send_queue_size, self.max_merge_var_num)


@dataclass(frozen=True)
class MergedStep:
    """Several steps merged into one, which has the number of the last step.

    The hyper-parameters are those of the last step that has gradients.
    """

    step: int
    hyper_parameters: HyperParameters
    gradients: Mapping[int, Tensor]
    """The dense gradients, by block."""
    of_rows: OfRows
    """The gradients of rows, by table."""


class GradientQueues:
    """Queues of gradients to send, one for each block. Thread-safe.

    Parameters
    ----------
    plan : TrainerPlan
    max_merge_var_num : int
        See `HalfAsync`.
    """

    def __init__(self, plan: TrainerPlan, max_merge_var_num: int) -> None:
        self._summed = {block.id for block in plan.blocks if block.group in plan.merge_add}
        """The blocks whose gradients are added instead of averaged."""
        self._at_most = max_merge_var_num
        self._queues: dict[int, deque[tuple[int, Tensor]]] = {block.id: deque() for block in plan.blocks}
        self._steps: deque[tuple[int, HyperParameters, OfRows]] = deque()
        self._summed_tables = {
            plan.name for plan in plan.tables if isinstance(plan.config.rule, SGD | PaddleSGD)
        }
        self._free: dict[int, list[Tensor]] = {block.id: [] for block in plan.blocks}
        self._merged = Arena({block.id: Extent(dtype_of(block.dtype), block.shape) for block in plan.blocks})
        self._lock = threading.Lock()

    def put(self, block: PlannedBlock, step: int, payload: memoryview) -> None:
        """Enqueue a copy of a block's gradient, to be sent after `complete` is called for its step."""
        with self._lock:
            free = self._free[block.id]
            copy = free.pop() if free else torch.empty(block.shape, dtype=dtype_of(block.dtype))
        bytes_of(copy)[:] = payload  # without the lock, so that the sending thread can dequeue meanwhile
        with self._lock:
            self._queues[block.id].append((step, copy))

    def complete(self, step: int, hyper_parameters: HyperParameters, of_rows: OfRows = NO_ROWS) -> None:
        """Mark a step as ready to send, and enqueue its row gradients."""
        with self._lock:
            self._steps.append((step, hyper_parameters, of_rows))

    @property
    def empty(self) -> bool:
        """True if no step is ready to send."""
        with self._lock:
            return not self._steps

    def merge(self) -> MergedStep | None:
        """Dequeue the oldest steps that are ready, up to the limit, and merge their gradients.

        Returns
        -------
        MergedStep or None
            The merged step, whose memory the next call overwrites. None if no complete step is queued.
        """
        with self._lock:
            if not self._steps:
                return None
            steps = [self._steps.popleft() for _ in range(min(self._at_most, len(self._steps)))]
            step = steps[-1][0]
            # A step without gradients has no hyper-parameters; the last step with gradients determines them.
            hyper_parameters = next((each for _, each, _ in reversed(steps) if each != NO_STEP), NO_STEP)
            of_blocks = {block: self._take(queue, step) for block, queue in self._queues.items()}
        gradients = {block: self._merge_block(block, queued) for block, queued in of_blocks.items() if queued}
        with self._lock:
            for block, queued in of_blocks.items():
                self._free[block] += queued
        return MergedStep(step, hyper_parameters, gradients, self._merge_rows([of for _, _, of in steps]))

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
class Progress:
    """A trainer's progress in sending gradients and receiving values, in steps."""

    sent: int = 0
    """The number of steps whose gradients have been sent."""
    arrived: int = 0
    """The number of steps included in the values that arrived last."""
    adopted: int = 0
    """The number of steps included in the parameters."""
    landed: bool = False
    """Whether the values that arrived last must still be copied into the parameters."""

    @property
    def awaits_values(self) -> bool:
        """True if the values that arrived last do not include all gradients that were sent."""
        return self.sent > self.arrived


class HalfAsyncTrainer(TrainerMode):
    """The trainer side of half-async mode.

    Parameters
    ----------
    session : Session
    send_queue_size, max_merge_var_num : int
        See `HalfAsync`.
    """

    def __init__(self, session: Session, send_queue_size: int, max_merge_var_num: int) -> None:
        self._session = session
        self._queues = GradientQueues(session.plan, max_merge_var_num)
        self._size = send_queue_size
        self._hyper: HyperParameters = ()
        self._of_rows: OfRows = NO_ROWS
        self._work = threading.Condition()
        self._progress = Progress()
        self._sending = False
        self._draining = False
        self._stopping = False
        self._threads = [
            threading.Thread(target=self._guard, args=(loop,), name=f"fleet-{name}", daemon=True)
            for name, loop in (("communicate", self._send_loop), ("pull", self._pull_loop))
        ]

    def start(self) -> None:
        """Start the threads that send gradients and receive values."""
        step = self._session.step
        self._progress = Progress(step, step, step)
        for thread in self._threads:
            thread.start()

    def begin(self, hyper_parameters: HyperParameters) -> None:
        """Record the hyper-parameters of a step, before its first gradient."""
        self._hyper = hyper_parameters

    def send(self, block: PlannedBlock, payload: memoryview) -> None:
        """Copy a gradient into its queue."""
        self._queues.put(block, self._session.step, payload)

    def queue_rows(self, gradients: OfRows) -> bool:
        """Copy the row gradients of a step, which are sent with its dense gradients."""
        self._of_rows = {name: (ids, rows.clone()) for name, (ids, rows) in gradients.items() if ids.size}
        return True

    def finish(self, absent: Sequence[PlannedBlock]) -> None:
        """End the step, copy the latest values into the parameters, and wait while the queues are full."""
        del absent
        session = self._session
        session.check()
        self._queues.complete(session.step, self._hyper, self._of_rows)
        self._of_rows = NO_ROWS
        session.advance()
        self._adopt_until(self._size)

    def settle(self) -> None:
        """Wait until the parameters include every queued gradient."""
        self._session.check()
        self._session.store.check_kept()
        self._adopt_until(0)

    def stop(self) -> None:
        """Send every queued gradient, stop the threads, and copy the final values into the parameters."""
        session = self._session
        session.store.check_kept()
        with self._work:
            self._draining = True
            self._work.notify_all()
        session.wait_until(
            lambda: self._queues.empty and not self._sending, lambda: "the queued gradients to be sent"
        )
        self.close()
        session.request_values()
        session.wait_for_values()
        session.rows.wait()
        session.adopt_values()
        session.rows.adopt()

    def close(self) -> None:
        """Stop both threads."""
        with self._work:
            self._stopping = True
            self._work.notify_all()
        for thread in self._threads:
            # A thread that was never started cannot be joined.
            if thread.is_alive():
                thread.join()

    def _adopt_until(self, steps: int) -> None:
        """Copy the latest values into the parameters until they lag by at most `steps` steps."""
        session = self._session
        self._adopt()
        progress = self._progress
        while session.step - progress.adopted > steps:
            session.wait_until(
                lambda: progress.landed,
                lambda: f"values that include step {progress.adopted}; {steps} steps may be in flight",
            )
            self._adopt()

    def _adopt(self) -> None:
        """Copy arrived values into the parameters, and wake both threads."""
        # The pulling thread requests the next values, into the same memory, as soon as `landed` is False
        # under this lock.
        with self._work:
            if self._progress.landed:
                self._session.adopt_values()
                self._session.rows.adopt()
                self._progress.adopted, self._progress.landed = self._progress.arrived, False
            self._work.notify_all()

    def _guard(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except FleetError as error:
            self._session.fail(error)
        except Exception as raised:  # noqa: BLE001 - the training thread raises it
            # Otherwise the training thread would wait for `stalled_seconds`, by default half an hour.
            _log.exception("half-async communication has failed")
            self._session.fail(
                FleetError(
                    f"half-async communication has failed ({type(raised).__name__}: {raised}); the traceback "
                    "is in the log"
                )
            )

    def _send_loop(self) -> None:
        """Merge and send the queued steps whenever the values of the previous update have arrived."""
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
                # The next merge overwrites the memory from which the gradients are sent.
                self._session.flush()
            with self._work:
                self._sending = False
                if merged is not None:
                    self._progress.sent = merged.step + 1
                self._work.notify_all()
            self._session.wake()

    def _may_send(self) -> bool:
        return not self._queues.empty and (self._draining or not self._progress.awaits_values)

    def _pull_loop(self) -> None:
        """Request values whenever gradients were sent and the previous values have been copied."""
        while True:
            with self._work:
                self._work.wait_for(
                    lambda: self._stopping or (self._progress.awaits_values and not self._progress.landed)
                )
                if self._stopping:
                    return
                # Before the request: values may lack the gradients of steps that are sent after it.
                sent = self._progress.sent
            self._session.request_values()
            self._session.wait_for_values(background=True)
            self._session.rows.wait(background=True)
            with self._work:
                self._progress.arrived, self._progress.landed = sent, True
                self._work.notify_all()
            self._session.wake()
