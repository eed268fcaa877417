"""What a training mode is: two halves, one on each server and one on each trainer.

A mode of your own is a subclass of `Mode`, handed over as ``DistributedStrategy(mode=MyMode())``. Nothing in
this package needs to know it. docs/modes.md shows one.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fleet.errors import ConfigurationError, FleetError
from fleet.parameter_server.modes.norms import NormPart
from fleet.parameter_server.naming import name_servers, name_trainers
from fleet.parameter_server.receive_buffers import Turn
from fleet.parameter_server.store import Target, Update, step_by_optimizer
from fleet.parameter_server.transport.arena import LazyBytes
from fleet.plan.blocks import PlannedBlock
from fleet.plan.config import DistributedMode
from fleet.plan.job import TrainerPlan
from fleet.process.finite import NO_ROWS, OfRows
from fleet.tables import RowGradients
from fleet.wire import HyperParameters

if TYPE_CHECKING:
    from fleet.parameter_server.shard import Shard
    from fleet.parameter_server.table_store import TableStore
    from fleet.parameter_server.trainer.parameters import ParameterStore

__all__ = [
    "Answer",
    "Missing",
    "Mode",
    "NormExchange",
    "QueuesRows",
    "ResumesEach",
    "ServerMode",
    "Session",
    "Settling",
    "TableServer",
    "TellNorm",
    "TrainerMode",
    "Work",
]


@dataclass(frozen=True, slots=True)
class Answer:
    """What trainers learn about a block: its value after `step` steps, or that it was not stepped."""

    block: int
    step: int
    trainers: tuple[int, ...]
    changed: bool = True
    value: memoryview | None = None
    """Its bytes, where the mode has decided on them; else they are asked for when they are sent."""
    of_table: bool = False
    """Whether the number is that of a table, which has made so many steps; its rows are asked for."""


@dataclass(frozen=True, slots=True)
class Missing:
    """What a step still waits for."""

    step: int
    trainers: tuple[int, ...]
    block: str
    """One of the blocks waited for, by name; or what else is."""
    servers: tuple[int, ...] = ()
    """The servers whose part is awaited, where a norm is."""

    def describe(self, endpoints: Sequence[str]) -> str:
        """Return for what of whom a step waits; `endpoints` are the servers'."""
        if self.servers:
            named = name_servers(endpoints[each] for each in self.servers)
            return f"step {self.step} waits for the part of {named} in {self.block}"
        return f"step {self.step} waits for {self.block} of {name_trainers(self.trainers)}"


Work = Callable[[], Sequence[Answer]]
"""Sums and steps what is there for a block, and returns what follows."""


class ServerMode(Protocol):
    """When a block is stepped, and who gets the new value.

    Called by the receiving threads of all trainers at once; each call about one trainer comes from one
    thread. Nothing here waits for another trainer.
    """

    @property
    def step(self) -> int:
        """How far the training is: in sync mode the number of steps that every block has made."""

    def step_of(self, trainer: int) -> int:
        """Return the step that a trainer makes next; where a restarted one goes on."""

    def resume(self, step: int) -> None:
        """Go on at a step that a checkpoint holds; called before any trainer has sent a gradient."""

    def admit(self, trainer: int, incarnation: int = 0) -> None:
        """Begin anew with a trainer: what an earlier life of it has sent and is not applied is dropped.

        `incarnation` is the attempt under which it joins.
        """

    def pull(self, trainer: int, step: int) -> Sequence[Answer]:
        """Return the value of every block, for a trainer that asks for it.

        Where trainers are in step it is the value after so many steps; else the present one.
        """

    def turn(self, trainer: int, block: int) -> Turn:
        """Return when a gradient is used that is about to land; called with the receive buffers' lock."""

    def value(self, trainer: int, block: int) -> memoryview | LazyBytes | None:
        """Return the bytes that an answer carries to a trainer; None for the value's own.

        They are sent later, by another thread: they must not change before the trainer has them, or are lazy,
        and are read when their turn has come.
        """

    def begin(self, trainer: int, step: int, hyper_parameters: HyperParameters) -> None:
        """Take the hyper-parameters of a trainer's step.

        `fleet.wire.NO_STEP`, which is empty, where the trainer makes none, as its gradients are not finite:
        no gradient follows.
        """

    def gradient(self, trainer: int, block: int, step: int) -> Sequence[Answer] | Work:
        """Take a gradient that has landed in its receive buffer; return what follows from it.

        Or the work that it makes possible, which another thread may do while the trainer's next frame is
        taken.
        """

    def end(self, trainer: int, step: int, absent: Sequence[int]) -> Sequence[Answer]:
        """Take a trainer's word that it has no gradient for these blocks."""

    def complete(self, trainer: int) -> Sequence[Answer]:
        """Go on without a trainer that has finished, or that is lost for good."""

    def missing(self) -> Missing | None:
        """Return what the step in progress waits for; None while nothing has begun to wait.

        Raises
        ------
        FleetError
            A step has failed here, and no other follows: the server ends, and tells every trainer.
        """


class TableServer(Protocol):
    """When the tables of a server are stepped, and which rows a trainer sees; called as `ServerMode` is."""

    @property
    def step(self) -> int:
        """How far the tables are; as of `ServerMode`."""

    def step_of(self, trainer: int) -> int:
        """Return the step whose gradients of tables are awaited from a trainer next."""

    def resume(self, step: int) -> None:
        """Go on at a step that a checkpoint holds."""

    def admit(self, trainer: int, incarnation: int) -> None:
        """Begin anew with a trainer: what its earlier life has sent and is not applied is dropped."""

    def begin(self, trainer: int, step: int, hyper_parameters: HyperParameters) -> None:
        """Take the hyper-parameters of a trainer's step."""

    def look_up(self, trainer: int, table: int, step: int, ids: NDArray[np.int64]) -> Tensor:
        """Return rows for a trainer that makes this step; where trainers are in step, those of the step.

        Raises
        ------
        FleetError
            They are gone, or an id is out of range.
        """

    def gradient(
        self, trainer: int, table: int, step: int, gradient: RowGradients
    ) -> Sequence[Answer] | Work:
        """Take a table's gradient; return what follows from it, or the work that it makes possible."""

    def end(self, trainer: int, step: int) -> None:
        """Check that a trainer which ends a step has sent every table's gradient; RemoteProtocolError."""

    def complete(self, trainer: int) -> Sequence[Answer]:
        """Go on without a trainer."""

    def missing(self) -> Missing | None:
        """Return what the step in progress waits for; as of `ServerMode`."""


TellNorm = Callable[[NormPart, Sequence[int]], None]
"""Tells a server's part of a norm to the servers of these indexes, without waiting for them."""


@runtime_checkable
class NormExchange(Protocol):
    """A server's half that clips gradients by norms over several servers; only the sync mode's does."""

    def connect(self, tell: TellNorm) -> None:
        """Tell other servers this one's part through `tell` from now on."""

    def norm(self, part: NormPart) -> Sequence[Answer]:
        """Take another server's part; return what follows from it."""


class TrainerMode(Protocol):
    """What becomes of a trainer's gradients, and when its parameters change.

    Called by the training thread: `start` once the servers' values are the parameters; per step `begin`,
    `send` for each gradient as it comes, `finish`; at the end `stop`, or `close` where it ends for a reason.
    Where the mode steps locally, a step is only `finish`, after the user's own optimizer has stepped.
    """

    def start(self) -> None:
        """Begin, with the servers' values as the parameters."""

    def begin(self, hyper_parameters: HyperParameters) -> None:
        """Begin a step, just before its first gradient."""

    def send(self, block: PlannedBlock, payload: memoryview) -> None:
        """Take a block's gradient; its memory does not change before `finish` returns."""

    def finish(self, absent: Sequence[PlannedBlock]) -> None:
        """End the step, without a gradient for these blocks; the parameters are then those to go on with."""

    def stop(self) -> None:
        """Let nothing be lost: send what is left, and take the last values."""

    def close(self) -> None:
        """End the threads of this half now, if it has some."""


@runtime_checkable
class ResumesEach(Protocol):
    """A server's half whose trainers are not in step: each goes on at its own; called after `resume`."""

    def resume_each(self, steps: Mapping[int, int]) -> None:
        """Go on with these trainers at these steps."""


@runtime_checkable
class Settling(Protocol):
    """A trainer's half that keeps back work of steps already made: it sends that before a save or an export.

    A half without this method has nothing to send between two steps, as `AnsweredTrainer`.
    """

    def settle(self) -> None:
        """Send what is left, and take the values that follow; training goes on afterwards."""


@runtime_checkable
class QueuesRows(Protocol):
    """A trainer's half that sends gradients of rows itself, with its own steps; others have them sent."""

    def queue_rows(self, gradients: OfRows) -> None:
        """Take the gradients of a step's rows, between the last `send` and `finish`; they are copied."""


class Waiting(Protocol):
    """What a trainer's half with threads of its own waits with; a part of `Session`."""

    def wait_until(self, done: Callable[[], bool], describe: Callable[[], str]) -> None:
        """Wait for something that another thread brings about, which then calls `wake`."""

    def wake(self) -> None:
        """Let who waits look again."""

    def fail(self, error: FleetError) -> None:
        """Hand an error to the training thread, which raises it when it next asks for something."""

    def check(self) -> None:
        """Raise the error that a thread has found, if there is one."""


class SessionRows(Protocol):
    """What a trainer's half has of the servers' tables; a part of `Session`."""

    @property
    def settled(self) -> bool:
        """Whether every server has stepped the rows whose gradients were sent last."""

    def wait(self, *, background: bool = False) -> None:
        """Wait until they have; in the background where training goes on meanwhile."""

    def adopt(self) -> None:
        """Make rows that servers have told those of this trainer; only the training thread may."""


class LocalRows(Protocol):
    """A trainer's own copies of rows, which it steps by itself."""

    def begin(self) -> None:
        """Have no copies: rows are the servers' until they are stepped."""

    @property
    def must_leave(self) -> bool:
        """Whether what has changed may be more than one exchange takes after another step."""

    def leaving(self) -> OfRows:
        """Return what has changed since the last call, by table."""

    def arrived(self) -> None:
        """Take the rows that servers have told."""

    def end(self) -> None:
        """End with the servers' rows."""


class Session(Waiting, Protocol):
    """What a trainer's half has of the servers. Every wait has a deadline, and raises what has failed."""

    plan: TrainerPlan
    """The blocks, the trainers, the servers."""
    store: "ParameterStore"
    """The parameters, and where values land."""
    step: int
    """The number of steps that this trainer has made; `advance` counts on."""

    @property
    def rows(self) -> SessionRows:
        """The tables on the servers."""

    @property
    def local_rows(self) -> LocalRows | None:
        """The trainer's copies of rows, where it steps them itself and there are tables."""

    def advance(self) -> None:
        """Count a step as made."""

    def expect_values(self) -> None:
        """Register the expected answers, one per block, before the request is sent."""

    def begin_step(self, hyper_parameters: HyperParameters) -> None:
        """Announce a step with its hyper-parameters, before its first gradient."""

    def send_gradient(self, block: PlannedBlock, payload: memoryview) -> None:
        """Enqueue a gradient; its memory must not change until the servers have it."""

    def end_step(self, absent: Sequence[PlannedBlock]) -> None:
        """Announce that nothing more comes, and for which blocks nothing came."""

    def send_step(
        self,
        step: int,
        hyper_parameters: HyperParameters,
        gradients: Mapping[int, memoryview],
        of_rows: OfRows = NO_ROWS,
    ) -> None:
        """Enqueue a whole step at once, gradients by block and table; a thread of the mode's own may."""

    def flush(self) -> None:
        """Wait until the servers have what was enqueued: its memory may change then."""

    def request_values(self) -> None:
        """Expect values, and ask for the present one of each block."""

    @property
    def values_arrived(self) -> bool:
        """Whether all the values expected have landed."""

    def wait_for_values(self, *, background: bool = False) -> None:
        """Wait until they have; in the background where training goes on meanwhile."""

    def wait_for_some(self, blocks: Collection[int]) -> None:
        """Wait until the values of these blocks have landed."""

    def adopt_values(self, names: Iterable[str] | None = None) -> None:
        """Make the values that have landed the parameters, all or some; only the training thread may."""

    def wait_for_ends(self) -> None:
        """Wait until no other trainer makes a step any more; DeadlineExceededError if that takes too long."""


class Mode(ABC):
    """A training mode: how trainers and servers keep step.

    Instances are values: both halves of every process are made from equal ones.

    Attributes
    ----------
    name : str
        Trainers and servers must agree on it.
    programs : DistributedMode
        The mode of the original whose transpiled programs this one runs on; ASYNC unless said otherwise.
    steps_locally : bool
        Whether a trainer steps its parameters with the user's own optimizer, as in GEO.
    survives_loss : bool
        Whether the others go on when a trainer is lost for good. Otherwise all end.
    elastic : bool
        Whether trainers may come and go while others train: nothing is divided by their number, and nobody
        waits for all of them.
    """

    name: ClassVar[str]
    programs: ClassVar[DistributedMode] = DistributedMode.ASYNC
    steps_locally: ClassVar[bool] = False
    survives_loss: ClassVar[bool] = True
    elastic: ClassVar[bool] = False

    def agreement(self) -> Mapping[str, str]:
        """Return what every process must have in common beside the name, fact by fact."""
        return {}

    def rule(self, target: Target, update: Update) -> None:
        """Change a value by what trainers have sent; the user's optimizer steps it, unless a mode overrides.

        A function of its arguments alone, so that an update can be applied again.
        """
        step_by_optimizer(target, update)

    def make_tables(self, store: "TableStore", num_trainers: int) -> TableServer:
        """Build what keeps the tables of one server in step; of a mode that knows no tables, refuse."""
        del num_trainers
        raise ConfigurationError(
            f"the mode {self.name!r} steps no tables, and the model has {store.describe()}; expected one of "
            "the modes sync, async, half_async and geo, or torch.nn.Embedding in place of the table"
        )

    @abstractmethod
    def make_server(self, shard: "Shard", num_trainers: int) -> ServerMode:
        """Build the half of one server."""

    @abstractmethod
    def make_trainer(self, session: Session) -> TrainerMode:
        """Build the half of one trainer."""
