"""The interface of training modes. Each mode has a server side and a trainer side.

A user-defined mode is a subclass of `Mode`, passed as ``DistributedStrategy(mode=MyMode())``. Its two sides
are subclasses of `ServerMode` and `TrainerMode`; the docstring of each method describes its default.
docs/modes.md has an example.

Two classes implement the trainer side of every mode whose servers answer each gradient of a step with a
value. `AnsweredTrainer` waits for the answers in ``optimizer.step()``. `CrossStepTrainer` postpones the wait:
in the next forward pass, each layer waits for its own parameters just before it runs, while the values of
later layers are still in transit. The computation is the same. A script that reads a parameter outside the
parameter's layer would read an old value, so the step fails if a gradient shows that this has happened.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Module

from fleet.errors import ConfigurationError, FleetError, RemoteProtocolError
from fleet.parameter_server.receive_buffers import Turn
from fleet.parameter_server.shard import NormPart, Shard
from fleet.parameter_server.store import Target, Update
from fleet.parameter_server.transport.arena import LazyBytes
from fleet.parameter_server.waits import name_servers, name_trainers
from fleet.plan.blocks import PlannedBlock
from fleet.plan.config import DistributedMode
from fleet.plan.job import TrainerPlan
from fleet.process.finite import NO_ROWS, OfRows
from fleet.tables import RowGradients
from fleet.wire import HyperParameters

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from fleet.parameter_server.trainer.parameters import ParameterStore

__all__ = [
    "Answer",
    "AnsweredTrainer",
    "CrossStepTrainer",
    "LocalRows",
    "Missing",
    "Mode",
    "ServerMode",
    "Session",
    "SessionRows",
    "TrainerMode",
]

Half = TypeVar("Half", bound="ServerMode | TrainerMode")


@dataclass(frozen=True, slots=True)
class Answer:
    """A server's answer to trainers: the state of a block or a table after `step` steps."""

    block: int
    """The number of the block or table."""
    step: int
    trainers: tuple[int, ...]
    changed: bool = True
    """False if the step did not change the block; no value is then sent."""
    value: memoryview | None = None
    """The bytes to send; None to call `ServerMode.value` when the answer is sent."""
    of_table: bool = False


@dataclass(frozen=True, slots=True)
class Missing:
    """The gradients or parts of norms that a step still lacks."""

    step: int
    trainers: tuple[int, ...]
    block: str
    """The name of the block or table whose gradient is missing, or of the norm that lacks parts."""
    servers: tuple[int, ...] = ()
    """The servers that have not sent their part of a norm."""

    def describe(self, endpoints: Sequence[str]) -> str:
        """Return a clause that names what is missing and who must send it, given the servers' endpoints."""
        if self.servers:
            named = name_servers(endpoints[each] for each in self.servers)
            return f"step {self.step} waits for the part of {named} in {self.block}"
        return f"step {self.step} waits for {self.block} from {name_trainers(self.trainers)}"


class ServerMode(Protocol):
    """The server side of a mode: decides when blocks and tables are updated, and which trainers are answered.

    The server's threads call these methods concurrently, but calls about the same trainer one after the
    other. No method may wait for another trainer.
    """

    defers: ClassVar[bool] = False
    """Whether gradients are applied in `advance`, which the server may call on another thread."""

    @property
    def step(self) -> int:
        """The number of completed steps; in sync mode, those that all blocks and tables have completed."""

    def step_of(self, trainer: int) -> int:
        """Return a trainer's next step, from which it continues after a restart."""

    def resume(self, step: int) -> None:
        """Set the number of completed steps to a checkpoint's; called before any trainer sends a gradient."""

    def resume_each(self, steps: Mapping[int, int]) -> None:
        """Set the next step of each given trainer, after `resume`; does nothing by default."""
        del steps

    def admit(self, trainer: int, attempt: int = 0) -> None:
        """Reset the state of a trainer that joins with this attempt.

        Gradients of an earlier process of the trainer are dropped, unless they have already been applied.
        """

    def pull(self, trainer: int, step: int) -> Sequence[Answer]:
        """Return an answer for every block, for a trainer that requests all values.

        In modes with a common step, the answers have the values after `step` steps; in other modes, the
        current values.
        """

    def turn(self, trainer: int, block: int) -> Turn:
        """Return when to add an arriving gradient; the caller holds the lock of the receive buffers.

        By default, a gradient is used as soon as it has landed.
        """
        del trainer, block
        return Turn.NEXT

    def value(self, trainer: int, block: int) -> memoryview | LazyBytes | None:
        """Return the bytes to send as a block's value, or None (the default) to send its current value.

        Another thread sends the bytes later. Unless they are lazy, they must not change before the trainer
        has received them.
        """
        del trainer, block
        return None

    def begin(self, trainer: int, step: int, hyper_parameters: HyperParameters) -> None:
        """Record the hyper-parameters of a trainer's step, before the step's gradients arrive.

        `fleet.wire.NO_STEP`, which is empty, announces a step without gradients, because these were not
        finite.
        """

    def gradient(self, trainer: int, block: int, step: int) -> Sequence[Answer]:
        """Accept a gradient that is complete in its receive buffer; return the answers to send now."""

    def row_gradient(self, trainer: int, table: int, step: int, gradient: RowGradients) -> Sequence[Answer]:
        """Accept a gradient of a table's rows; return the answers to send now."""
        del step, gradient
        raise RemoteProtocolError(
            f"trainer {trainer} sent rows of table {table}; this mode does not update tables"
        )

    def advance(self, number: int, *, of_table: bool = False) -> Sequence[Answer]:
        """Apply the gradients that have arrived for a block or table; return the answers to send now.

        If `defers` is True, called after each `gradient` or `row_gradient`, on the same or another thread.
        """
        del number, of_table
        return ()

    def arrived_bytes(self, table: int, num_bytes: int) -> int | None:
        """Return the size of the row gradients that `advance` would apply now, or None if there are none.

        The server calls `advance` on another thread if they are large. Called after each `row_gradient` with
        the size of this gradient, which is the default.
        """
        del table
        return num_bytes

    def look_up(self, trainer: int, table: int, step: int, ids: NDArray[np.int64]) -> Tensor:
        """Return rows of a table to a trainer; in modes with a common step, the rows as of that step.

        Raises
        ------
        FleetError
            The rows no longer exist, or an id is out of range.
        """
        del step, ids
        raise RemoteProtocolError(
            f"trainer {trainer} looked up table {table}; this mode does not update tables"
        )

    def end(self, trainer: int, step: int, absent: Sequence[int]) -> Sequence[Answer]:
        """End a trainer's step, in which the trainer has no gradient for the `absent` blocks."""

    def complete(self, trainer: int) -> Sequence[Answer]:
        """Stop waiting for a trainer that has completed or was lost; return the answers to send now."""

    def norm(self, part: NormPart) -> Sequence[Answer]:
        """Add another server's part of a norm; return the answers to send now.

        Raises
        ------
        RemoteProtocolError
            The mode does not clip by norms (the default), or the norm covers no block of this server.
        """
        del part
        raise RemoteProtocolError("this parameter server's training mode does not clip by norms")

    def missing(self) -> Missing | None:
        """Return the input that the current step still needs, or None if nothing is missing.

        Raises
        ------
        FleetError
            A step has failed on this server. The server ends and reports the error to every trainer.
        """


class TrainerMode(Protocol):
    """The trainer side of a mode: sends gradients and decides when parameters change.

    The training thread calls `start` once the parameters have the servers' values. In each step it calls
    `begin`, `send` for each gradient as it is computed, and `finish`. At the end it calls `stop`, or `close`
    after a failure. If the mode steps locally, a step calls only `finish`, after the user's own optimizer has
    stepped.

    By default, every method except `finish` does nothing.
    """

    def start(self) -> None:
        """Start training, after the servers' values have been copied into the parameters."""
        return

    def begin(self, hyper_parameters: HyperParameters) -> None:
        """Begin a step, before its first gradient is sent."""
        del hyper_parameters

    def send(self, block: PlannedBlock, payload: memoryview) -> None:
        """Accept a block's gradient, whose memory stays unchanged until `finish` returns."""
        del block, payload

    def queue_rows(self, gradients: OfRows) -> bool:
        """Copy a step's row gradients and return True; called after the last `send` and before `finish`.

        If this returns False, the default, the trainer itself sends the row gradients immediately.
        """
        del gradients
        return False

    def finish(self, absent: Sequence[PlannedBlock]) -> None:
        """End the step and prepare the parameters for the next one; `absent` blocks have no gradient."""

    def settle(self) -> None:
        """Send delayed gradients and load the resulting values; called before a save or an export."""
        return

    def check_settled(self, call: str) -> None:
        """Raise FleetError if values are in transit; `call` is the public method to name in the message."""
        del call

    def across_steps(self, module: Module) -> "TrainerMode | None":
        """Return a `TrainerMode` in which each layer waits for its values in the next forward pass.

        Return None, the default, if ``optimizer.step()`` does not wait for the values of each step anyway.
        """
        del module
        return None

    def stop(self) -> None:
        """Finish training: send all remaining data and load the final values."""
        return

    def close(self) -> None:
        """Stop all threads."""
        return


class SessionRows(Protocol):
    """Access to the tables on the servers, for the trainer side of a mode."""

    @property
    def settled(self) -> bool:
        """True if every server has applied the row gradients that were sent last."""

    def wait(self, *, background: bool = False) -> None:
        """Wait until `settled` is True; set `background` if training continues during the wait."""

    def adopt(self) -> None:
        """Copy the servers' rows into this trainer's copies. Call this only in the training thread."""


class LocalRows(Protocol):
    """A trainer's copies of rows, which the trainer updates itself."""

    def begin(self) -> None:
        """Drop all copies; a row has the server's value until the trainer updates it."""

    @property
    def must_leave(self) -> bool:
        """True if the changes must be sent now, because after another step they may exceed one frame."""

    def leaving(self) -> OfRows:
        """Return the changes of rows since the last call, by table."""

    def arrived(self) -> None:
        """Add the other trainers' changes to the copies, based on the rows received from the servers."""

    def end(self) -> None:
        """Replace the copies with the servers' final rows."""


class Session(Protocol):
    """A trainer's session with the servers, for the trainer side of a mode. All waits have deadlines."""

    plan: TrainerPlan
    """The blocks, the trainers and the servers of the job."""
    store: "ParameterStore"
    """The parameters, and the memory for values that arrive from the servers."""
    step: int
    """The number of steps that this trainer has made; `advance` increments it."""

    @property
    def rows(self) -> SessionRows:
        """The tables on the servers."""

    @property
    def local_rows(self) -> LocalRows | None:
        """The trainer's copies of rows, or None unless the mode updates tables locally."""

    def advance(self) -> None:
        """Count a completed step."""

    def expect_values(self) -> None:
        """Register one expected answer for each block; call this before the request or gradients are sent."""

    def begin_step(self, hyper_parameters: HyperParameters) -> None:
        """Announce a step and its hyper-parameters, before its first gradient."""

    def send_gradient(self, block: PlannedBlock, payload: memoryview) -> None:
        """Enqueue a gradient. Its memory must not change until the servers have received it."""

    def end_step(self, absent: Sequence[PlannedBlock]) -> None:
        """Announce the end of a step, in which there is no gradient for the `absent` blocks."""

    def send_step(
        self,
        step: int,
        hyper_parameters: HyperParameters,
        gradients: Mapping[int, memoryview],
        of_rows: OfRows = NO_ROWS,
    ) -> None:
        """Enqueue a whole step: its gradients by block and by table. Threads of the mode may call this."""

    def flush(self) -> None:
        """Wait until the servers have received all enqueued data; its memory may be overwritten then."""

    def request_values(self) -> None:
        """Register the expected answers, and request each block's current value."""

    @property
    def values_arrived(self) -> bool:
        """True if all expected values have arrived."""

    def wait_for_values(self, *, background: bool = False) -> None:
        """Wait for all expected values; set `background` if training continues during the wait."""

    def wait_for_some(self, blocks: Collection[int]) -> None:
        """Wait for the values of the given blocks."""

    def adopt_values(self, names: Iterable[str] | None = None) -> None:
        """Copy arrived values into all or the given parameters. Call this only in the training thread."""

    def wait_for_ends(self) -> None:
        """Wait until no other trainer will run another step; raise DeadlineExceededError on a timeout."""

    def wait_until(self, done: Callable[[], bool], describe: Callable[[], str]) -> None:
        """Wait for a condition; the thread that makes it true must then call `wake`."""

    def wake(self) -> None:
        """Wake all threads in `wait_until`, which check their conditions again."""

    def fail(self, error: FleetError) -> None:
        """Record an error, which the training thread's next call raises."""

    def check(self) -> None:
        """Raise the error that another thread has recorded, if any."""


class Mode(ABC):
    """A training mode: a way of synchronizing trainers and servers.

    Instances are values: all processes build their halves from equal instances.

    Attributes
    ----------
    name : str
        The name of the mode, on which trainers and servers must agree.
    programs : DistributedMode
        The Paddle mode whose transpiled programs this mode runs; ASYNC by default.
    steps_locally : bool
        Whether a trainer updates its parameters with the user's own optimizer, as in GEO.
    survives_loss : bool
        Whether the other trainers continue when a trainer is lost. If not, the job ends.
    elastic : bool
        Whether trainers may join and leave while others train. Such a mode must not divide by the number of
        trainers, and no trainer may wait for all other trainers.
    """

    name: ClassVar[str]
    programs: ClassVar[DistributedMode] = DistributedMode.ASYNC
    steps_locally: ClassVar[bool] = False
    survives_loss: ClassVar[bool] = True
    elastic: ClassVar[bool] = False

    def agreement(self) -> Mapping[str, str]:
        """Return the mode's options that must be equal in all processes."""
        return {}

    def rule(self, target: Target, update: Update) -> None:
        """Apply an update to a block's value; by default, with the user's optimizer.

        The rule must depend only on its arguments, so that an update can be replayed.
        """
        target.step(update.gradient)

    @abstractmethod
    def make_server(self, shard: Shard, num_trainers: int) -> ServerMode:
        """Create the server side of the mode."""

    @abstractmethod
    def make_trainer(self, session: Session) -> TrainerMode:
        """Create the trainer side of the mode."""


class AnsweredTrainer(TrainerMode):
    """A `TrainerMode` that sends gradients during the backward pass and waits for values in the step.

    Parameters
    ----------
    session : Session
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        # Bound directly, which saves a call: the backward pass sends every block through it.
        self.send = session.send_gradient  # type: ignore[method-assign]

    def begin(self, hyper_parameters: HyperParameters) -> None:
        """Begin a step, before its first gradient is sent."""
        self._session.expect_values()
        self._session.begin_step(hyper_parameters)

    def finish(self, absent: Sequence[PlannedBlock]) -> None:
        """End the step, wait for the new values, and copy them into the parameters."""
        self._session.end_step(absent)
        self._session.wait_for_values()
        self._session.adopt_values()
        self._session.advance()

    def across_steps(self, module: Module) -> TrainerMode | None:
        """Return a `TrainerMode` in which each layer waits for its values in the next forward pass.

        Return None for a subclass, because a `CrossStepTrainer` would silently replace the subclass's own
        steps.
        """
        return CrossStepTrainer(self._session, module) if type(self) is AnsweredTrainer else None


class CrossStepTrainer(TrainerMode):
    """A `TrainerMode` that does not wait in the step: each layer waits in the next forward pass.

    Parameters
    ----------
    session : Session
    module : Module
        The module. Each layer waits for its own parameters before its forward pass, and before its
        ``state_dict()`` is read.
    """

    def __init__(self, session: Session, module: Module) -> None:
        self._session = session
        self._module = module
        self._handles: list[RemovableHandle] = []
        self._blocks: dict[str, list[int]] = {}
        for block in session.plan.blocks:
            self._blocks.setdefault(block.param, []).append(block.id)
        self._outstanding: set[str] = set()
        """Parameters into which the latest values have not been copied yet."""
        self._stale: frozenset[str] = frozenset()
        """Parameters that no layer has used in the forward pass of the current step."""

    def start(self) -> None:
        """Add hooks that make each layer wait for the values of its parameters."""
        name_of = {parameter: name for name, parameter in self._session.store.parameters.items()}
        for layer in self._module.modules():
            own = [name_of[each] for each in layer.parameters(recurse=False) if each in name_of]
            if own:
                adopt = self._adopt_hook(own)
                self._handles += [
                    layer.register_forward_pre_hook(adopt),
                    layer.register_state_dict_pre_hook(adopt),  # type: ignore[no-untyped-call]
                ]

    def begin(self, hyper_parameters: HyperParameters) -> None:
        """Begin a step, before its first gradient is sent."""
        self._stale = frozenset(self._outstanding)
        self.settle()
        self._session.expect_values()
        self._session.begin_step(hyper_parameters)

    def send(self, block: PlannedBlock, payload: memoryview) -> None:
        """Send a block's gradient.

        Raises
        ------
        FleetError
            The gradient was computed from values of the previous step.
        """
        if block.param in self._stale:
            raise FleetError(
                f"{block.param} has a gradient, but the module that owns it has run no forward pass in this "
                "step: the parameter was used before its new value arrived. Use parameters only through the "
                "modules that own them, or set DistributedStrategy(cross_step=False)"
            )
        self._session.send_gradient(block, payload)

    def finish(self, absent: Sequence[PlannedBlock]) -> None:
        """End the step without waiting for the new values."""
        self._session.end_step(absent)
        self._session.advance()
        self._outstanding = set(self._blocks)

    def settle(self) -> None:
        """Wait for all values in transit and copy them into the parameters."""
        if self._outstanding:
            self._session.wait_for_values()
            self._session.adopt_values(sorted(self._outstanding))
            self._outstanding.clear()

    def check_settled(self, call: str) -> None:
        """Raise FleetError if values are in transit, because the script would read old values."""
        if self._outstanding:
            raise FleetError(
                f"{call} was called while the values of the last step were still in transit: the script has "
                "written to older values. Before writing, call model.state_dict(), which waits for the new "
                "ones; or set DistributedStrategy(cross_step=False)"
            )

    def stop(self) -> None:
        """Wait for the last values and copy them into the parameters."""
        self.settle()
        self.close()

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _adopt_hook(self, names: Sequence[str]) -> Callable[..., None]:
        """Return a hook that waits for new values of some parameters, and copies the values into them."""

        def adopt(*_: Any) -> None:
            outstanding = self._outstanding.intersection(names)
            if outstanding:
                self._session.wait_for_some([block for name in outstanding for block in self._blocks[name]])
                self._session.adopt_values(sorted(outstanding))
                self._outstanding -= outstanding

        # torch.compile must call the hook, not trace it, because the hook waits for other threads.
        hook: Callable[..., None] = torch.compiler.disable(adopt)  # type: ignore[no-untyped-call]
        return hook


def check_half(half: Half, base: type[Half], kind: Mode) -> Half:
    """Check that the server or trainer side of a mode implements `base`, and return that side.

    Raises
    ------
    ConfigurationError
        The object is not an instance of a subclass.
    """
    if base not in type(half).__mro__:  # isinstance() does not work with these Protocols
        raise ConfigurationError(
            f"the mode {kind.name!r} made a {type(half).__name__}; expected a subclass of "
            f"fleet.parameter_server.modes.{base.__name__}, whose methods have defaults"
        )
    return half
