"""Parameter servers inside the test process, with real loopback sockets and one thread per server."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fleet.errors import FleetError
from fleet.fluid import DistributeTranspiler, Program
from fleet.fluid.render import server_plan, trainer_plan
from fleet.parameter_server.facts import state_of
from fleet.parameter_server.modes import Mode
from fleet.parameter_server.pieces import in_pieces
from fleet.parameter_server.server.server import Server
from fleet.parameter_server.settings import Settings
from fleet.parameter_server.trainer.trainer import Trainer
from fleet.plan import DistributeTranspilerConfig, GradClip, TrainerPlan
from fleet.role_maker import JobIdentity
from tests.support.processes import free_ports

HOST = "127.0.0.1"
QUICK = Settings(heartbeat_seconds=0.05, deadline_seconds=30.0)
PATIENT = replace(QUICK, deadline_seconds=60.0)
"""For servers that outlive a test: on a busy machine, the next test's trainer may join late."""

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def small_model() -> Any:
    """Return a model with 12 blocks on two servers, in which only some parameters are sliced."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(20, 1000), torch.nn.Tanh(), torch.nn.Linear(1000, 10), torch.nn.Linear(10, 1)]
    return torch.nn.Sequential(*layers)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Return the SGD optimizer that most tests use."""
    return torch.optim.SGD(parameters, lr=0.1)


class JoiningTrainer:
    """A trainer that joins the servers in `start` and then has the methods of a joined trainer.

    Parameters
    ----------
    plan : TrainerPlan
        The plan before joining.
    join : callable
        Joins the servers and returns the trainer.
    """

    def __init__(self, plan: TrainerPlan, join: Callable[[], Trainer]) -> None:
        self.plan = plan
        self._join = join
        self._joined: Trainer | None = None

    def start(self) -> None:
        """Join the servers and load their values into the model."""
        self._joined = self._join()
        self.plan = self._joined.plan

    def close(self) -> None:
        """Disconnect without reporting completion, if the trainer has joined."""
        if self._joined is not None:
            self._joined.close()

    def __getattr__(self, name: str) -> Any:
        assert self._joined is not None, f"{name} of a trainer that has not joined"
        return getattr(self._joined, name)


@dataclass
class RunningServer:
    """A server and the thread in which it serves."""

    server: Server
    thread: threading.Thread
    failure: FleetError | None = None

    def join(self, seconds: float = 60.0) -> None:
        """Wait until the server has stopped serving."""
        self.thread.join(seconds)
        assert not self.thread.is_alive(), "the server still serves"


class Loopback:
    """A parameter-server job whose servers and trainers all run in this process.

    Parameters
    ----------
    servers, trainers : int
    optimizer : callable
        Returns an optimizer of the given parameters.
    model : callable
        Returns the model; called once per replica.
    settings : Settings, optional
        The default is `QUICK`.
    server_settings : Settings, optional
        The servers' settings if different, such as a shorter deadline for lost trainers.
    grad_clip : ClipGradByValue, ClipGradByNorm or ClipGradByGlobalNorm, optional
    groups : callable
        Returns the model's parameters or param groups, from which the optimizer is made.
    config : DistributeTranspilerConfig
        Selects the mode.
    mode : Mode, optional
        A user-defined mode, which a config cannot select.
    key : bytes
        The job's key.
    """

    def __init__(
        self,
        servers: int = 1,
        trainers: int = 1,
        optimizer: MakeOptimizer = sgd,
        model: Callable[[], torch.nn.Module] = small_model,
        settings: Settings | None = None,
        server_settings: Settings | None = None,
        grad_clip: GradClip | None = None,
        groups: Callable[[Any], Any] = lambda model: model.parameters(),
        config: DistributeTranspilerConfig | None = None,
        mode: Mode | None = None,
        key: bytes = b"",
    ) -> None:
        self.num_trainers = trainers
        self.settings = settings if settings is not None else QUICK
        self.server_settings = server_settings if server_settings is not None else self.settings
        self.job = JobIdentity("loopback", "uid-1", key=key)
        self.endpoints = [f"{HOST}:{port}" for port in free_ports(servers)]
        self._optimizer = optimizer
        self._model = model
        self._grad_clip = grad_clip
        self._groups = groups
        self._config = config if config is not None else DistributeTranspilerConfig()
        self._mode = mode
        self.servers: list[RunningServer] = []
        self.trainers: list[JoiningTrainer] = []

    def transpile(self, trainer: int = 0, **changes: Any) -> tuple[DistributeTranspiler, Program]:
        """Return the transpiler and the program of a replica; `changes` replace settings of the job."""
        model = changes.get("model", self._model)()
        optimizer = changes.get("optimizer", self._optimizer)(self._groups(model))
        program = Program.from_optimizer(optimizer, model, changes.get("grad_clip", self._grad_clip))
        transpiler = DistributeTranspiler(changes.get("config", self._config), mode=self._mode)
        transpiler.transpile(
            trainer,
            program=program,
            pservers=",".join(self.endpoints),
            trainers=changes.get("trainers", self.num_trainers),
            startup_program=program.startup_program,
        )
        return transpiler, program

    def start_server(self, index: int, directory: Path | None = None) -> RunningServer:
        """Start a server, from a checkpoint if a directory is given."""
        transpiler, program = self.transpile()
        plan = in_pieces(
            server_plan(transpiler.get_pserver_program(self.endpoints[index])), self.server_settings
        )
        assert program.source is not None
        state = state_of(program.source)
        server = Server(plan, program.source.parameters, self.job, self.server_settings, state)
        if directory is not None:
            assert server.loader.load(str(directory)) is not None
        server.start()

        def serve() -> None:
            try:
                server.serve()
            except FleetError as error:
                running.failure = error

        running = RunningServer(server, threading.Thread(target=serve, name=f"serve-{index}", daemon=True))
        running.thread.start()
        self.servers.append(running)
        return running

    def make_trainer(
        self,
        index: int = 0,
        *,
        attempt: int = 0,
        overlap: bool | None = True,
        cross_step: bool = False,
        non_finite: str = "warn",
        job: Mapping[str, str] | None = None,
        **changes: Any,
    ) -> tuple[Any, Any, torch.optim.Optimizer]:
        """Return a trainer that has not joined, with its module and the user's optimizer."""
        transpiler, program = self.transpile(index, **changes)
        source = program.source
        assert source is not None
        assert source.module is not None
        identity = {"name": self.job.name, "uid": self.job.uid, **(job or {})}
        plan = trainer_plan(transpiler.get_trainer_program())
        join = partial(
            Trainer.join,
            plan,
            source,
            JobIdentity(identity["name"], identity["uid"], attempt, key=self.job.key),
            self.settings,
            overlap=overlap,
            cross_step=cross_step,
            non_finite=non_finite,
        )
        trainer = JoiningTrainer(plan, join)
        self.trainers.append(trainer)
        return trainer, source.module, source.optimizer

    def close(self) -> None:
        """Close all trainers and servers that are still running."""
        for trainer in self.trainers:
            trainer.close()
        for running in self.servers:
            running.server.close()
        for running in self.servers:
            running.join()


@contextmanager
def loopback(directory: Path | None = None, **arguments: Any) -> Iterator[Loopback]:
    """Yield a job whose servers are running; stop the job after the block."""
    made = Loopback(**arguments)
    try:
        for index in range(len(made.endpoints)):
            made.start_server(index, directory)
        yield made
    finally:
        made.close()
