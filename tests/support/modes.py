"""Both halves of a mode in one process: a server with scripted trainers, and a scripted session."""

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fleet.errors import FleetError
from fleet.fluid import DistributeTranspiler, Program
from fleet.fluid.render import server_plan, trainer_plan
from fleet.parameter_server.modes import Answer, LazyBytes, Mode
from fleet.parameter_server.receive_buffers import Turn
from fleet.parameter_server.shard import Shard
from fleet.parameter_server.trainer.parameters import ParameterStore
from fleet.parameter_server.transport.connection import NotYet
from fleet.plan import PlannedBlock, ServerPlan, TrainerPlan
from fleet.wire import HyperParameters

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
RATE_OF_ONE: HyperParameters = ({"lr": 1.0},)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Return an SGD optimizer with learning rate 1, which subtracts the gradient."""
    return torch.optim.SGD(parameters, lr=1.0)


def two_parameters() -> torch.nn.Module:
    """Return the parameters ``b`` (block 0) and ``w`` (block 1), both zero."""
    return torch.nn.ParameterDict({"b": torch.zeros(1), "w": torch.zeros(4, 1)})


def plans(
    mode: Mode, trainers: int, optimizer: MakeOptimizer = sgd
) -> tuple[ServerPlan, TrainerPlan, Mapping[str, Any]]:
    """Return the plan of a server, the plan of trainer 0, and the parameters."""
    model = two_parameters()
    program = Program.from_optimizer(optimizer(model.parameters()), model)
    transpiler = DistributeTranspiler(mode=mode)
    transpiler.transpile(
        0, program=program, pservers="a:1", trainers=trainers, startup_program=program.startup_program
    )
    assert program.source is not None
    server = server_plan(transpiler.get_pserver_program("a:1"))
    return server, trainer_plan(transpiler.get_trainer_program()), program.source.parameters


def wait_for_buffer(shard: Shard, trainer: int, block: int, turn: Callable[[int, int], Turn]) -> memoryview:
    """Return the receive buffer of a gradient, waiting until one is free."""
    while True:
        may_be_free = threading.Event()
        landing = shard.buffers.land(trainer, block, turn, may_be_free.set)
        if not isinstance(landing, NotYet):
            return landing
        assert may_be_free.wait(60.0)


class OneServer:
    """The server half of a mode, with scripted trainers that send it messages."""

    def __init__(self, mode: Mode, trainers: int, optimizer: MakeOptimizer = sgd) -> None:
        plan, _, parameters = plans(mode, trainers, optimizer)
        self.shard = Shard(plan, parameters, rule=mode.rule)
        self.mode = mode.make_server(self.shard, trainers)

    def begin(self, trainer: int, step: int = 0, hyper: HyperParameters = RATE_OF_ONE) -> None:
        """Begin a step of one trainer."""
        self.mode.begin(trainer, step, hyper)

    def send(self, trainer: int, block: int, value: float, step: int = 0) -> list[Answer]:
        """Deliver a gradient from one trainer; return the server's answers."""
        landing = wait_for_buffer(self.shard, trainer, block, self.mode.turn)
        np.frombuffer(landing, dtype=np.float32)[:] = value
        return [*self.mode.gradient(trainer, block, step), *self.mode.advance(block)]

    def value(self, block: int) -> float:
        """Return the current value of a block."""
        return float(np.frombuffer(self.shard.store.view(block), dtype=np.float32)[0])

    def pulled(self, trainer: int, step: int) -> list[float]:
        """Return the values of a step, by block, as a trainer receives them on request."""
        return [float(value[0]) for value in self.pulled_arrays(trainer, step)]

    def pulled_arrays(self, trainer: int, step: int) -> list[np.ndarray[Any, Any]]:
        """Return the values of `pulled` as arrays that share the server's memory."""
        values = []
        for answer in self.mode.pull(trainer, step):
            assert (answer.step, answer.trainers) == (step, (trainer,))
            assert answer.value is not None
            values.append(np.frombuffer(answer.value, dtype=np.float32))
        return values

    def sent(self, trainer: int, block: int) -> float:
        """Return the value of a block as it would be sent to a trainer now."""
        value = self.mode.value(trainer, block)
        if isinstance(value, LazyBytes):
            lazy, value = value, memoryview(bytearray(len(value)))
            lazy.read(0, value)
        return float(np.frombuffer(value or self.shard.store.view(block), dtype=np.float32)[0])


class NoRows:
    """The row storage of a session that has no tables."""

    settled = True

    def wait(self, *, background: bool = False) -> None:
        """Do nothing, because there are no rows."""

    def adopt(self) -> None:
        """Do nothing, because there are no rows."""


class ScriptedSession:
    """A trainer's session in which the test acts as the server."""

    def __init__(self, mode: Mode, trainers: int = 2, optimizer: MakeOptimizer = sgd) -> None:
        _, self.plan, parameters = plans(mode, trainers, optimizer)
        self.store = ParameterStore(self.plan.blocks, parameters)
        self.parameters = parameters
        self.rows = NoRows()
        self.local_rows = None
        self.step = 0
        self.sent: list[tuple[int, HyperParameters, dict[int, list[float]]]] = []
        self.requests = 0
        self.ends = 0
        self.failure: FleetError | None = None
        self.at_once: Mapping[str, float] | None = None
        """Values that are delivered as soon as the mode waits for them."""
        self._awaited = False

    def land(self, values: Mapping[str, float]) -> None:
        """Deliver values for all parameters, each filled with a single number."""
        for block in self.plan.blocks:
            np.frombuffer(self.store.landing(block.id), dtype=np.float32)[:] = values[block.param]
        self._awaited = False

    def advance(self) -> None:
        """Count one completed step."""
        self.step += 1

    def expect_values(self) -> None:
        """Record that the mode expects values."""
        self._awaited = True

    def begin_step(self, hyper_parameters: HyperParameters) -> None:
        """Record that a step has begun."""
        self.sent.append((self.step, hyper_parameters, {}))

    def send_gradient(self, block: PlannedBlock, payload: memoryview) -> None:
        """Record a sent gradient."""
        self.sent[-1][2][block.id] = np.frombuffer(payload, dtype=np.float32).tolist()

    def end_step(self, absent: Sequence[PlannedBlock]) -> None:
        """Do nothing at the end of a step."""

    def send_step(
        self,
        step: int,
        hyper_parameters: HyperParameters,
        gradients: Mapping[int, memoryview],
        of_rows: Any = None,
    ) -> None:
        """Record all messages of a step."""
        del of_rows
        read = {
            block: np.frombuffer(payload, dtype=np.float32).tolist() for block, payload in gradients.items()
        }
        self.sent.append((step, hyper_parameters, read))

    def flush(self) -> None:
        """Do nothing, because everything is sent immediately."""

    def request_values(self) -> None:
        """Count a request for values."""
        self.requests += 1
        self._awaited = True

    @property
    def values_arrived(self) -> bool:
        """True if `land` has delivered the values."""
        return not self._awaited

    def wait_for_values(self, *, background: bool = False) -> None:
        """Deliver `at_once` if it is set; otherwise fail unless expected values have arrived."""
        if self._awaited and self.at_once is not None:
            self.land(self.at_once)
        assert not self._awaited, "the mode waits for values that the script has not let land"

    def wait_for_some(self, blocks: Collection[int]) -> None:
        """Deliver or check values as `wait_for_values` does."""
        del blocks
        self.wait_for_values()

    def adopt_values(self, names: Iterable[str] | None = None) -> None:
        """Copy the delivered values into the parameters."""
        self.store.adopt((), names)

    def wait_for_ends(self) -> None:
        """Record that the mode waits for the ends of steps."""
        self.ends += 1

    def wait_until(self, done: Callable[[], bool], describe: Callable[[], str]) -> None:
        """Fail unless the condition is true, because a scripted test never waits."""
        assert done(), f"the mode waits for {describe()}"

    def wake(self) -> None:
        """Do nothing, because no thread waits."""

    def fail(self, error: FleetError) -> None:
        """Store an error for `check`."""
        self.failure = error

    def check(self) -> None:
        """Raise the stored error, if any."""
        if self.failure is not None:
            raise self.failure
