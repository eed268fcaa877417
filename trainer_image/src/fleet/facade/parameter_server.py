"""The `fleet` singleton of a parameter-server job, with Paddle's method names."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt
import torch

from fleet.checkpoint import Checkpoint, TrainerPart, TrainStatus, find_checkpoint
from fleet.errors import ConfigurationError
from fleet.facade.calls import FleetCalls, ProgramMinimizer, ProgramOptimizer
from fleet.fluid.execution import initialize_once, resume
from fleet.fluid.preview import preview_asked, previewed
from fleet.fluid.program import Program
from fleet.fluid.render import check_unedited, render_pserver, render_trainer
from fleet.fluid.transpiler import DistributeTranspiler
from fleet.parameter_server.certificates import certificates_of
from fleet.parameter_server.control.reduction import Contribution
from fleet.parameter_server.sessions import (
    complete,
    find_trainer,
    serve,
    start_server,
    start_trainer,
    train_as,
)
from fleet.parameter_server.settings import Settings
from fleet.parameter_server.trainer.optimizer import DistributedOptimizer
from fleet.parameter_server.trainer.trainer import Trainer
from fleet.plan.capture import capture_loop
from fleet.plan.config import DistributeTranspilerConfig
from fleet.plan.job import JobPlan, ServerPlan, plan_job
from fleet.plan.source import Source, find_module, without_wrapper
from fleet.process import lifecycle
from fleet.role_maker import PaddleCloudRoleMaker, Role, RoleMaker
from fleet.strategy import DistributedStrategy, strategy_of
from fleet.without_dynamo import defer_dynamo

if TYPE_CHECKING:
    from fleet.parameter_server.server.server import Server

__all__ = ["Fleet", "fleet"]


class Fleet(FleetCalls):
    """The interface of a job with parameter servers, for training scripts.

    Notes
    -----
    Paddle's ``DistributedTranspiler`` of
    ``fluid.incubate.fleet.parameter_server.distribute_transpiler``, whose singleton is also called ``fleet``.

    Examples
    --------
    ::

        fleet.init(role_maker.PaddleCloudRoleMaker())
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
        if fleet.is_server():
            fleet.run_server()
        else:
            fleet.init_worker()
            for epoch, loader in fleet.epochs(30, loader):
                ...  # the epoch's training loop
            fleet.stop_worker()
    """

    _role: Role | None = None

    def __init__(self) -> None:
        super().__init__()
        self._optimizer: DistributedOptimizer | None = None
        self._strategy = DistributedStrategy()
        self._plan: JobPlan | None = None
        self._source: Source | None = None
        self._origin: Program | None = None
        self._programs: tuple[Program, Program] | None = None
        self._server: Server | None = None
        self._served = False
        self._trainer: Trainer | None = None
        self._model_dir: str | None = None

    def init(self, role_maker: RoleMaker | None = None) -> None:
        """Determine this process's role.

        Parameters
        ----------
        role_maker : RoleMaker, optional
            ``PaddleCloudRoleMaker()``, the default, or ``UserDefinedRoleMaker(...)``. Without any variable of
            a job, the default makes this process train alone, with a parameter server inside it.

        Raises
        ------
        RoleError
            The environment does not describe a replica; the message names the variable.
        """
        maker = role_maker if role_maker is not None else PaddleCloudRoleMaker()
        role = self._find_role(maker, collective=False)
        # Validated here, so that malformed values are reported now, not minutes later.
        certificates_of(Settings.from_environ(os.environ))
        self._role = role
        lifecycle.start(role)
        defer_dynamo()

    def is_server(self, model_dir: str | os.PathLike[str] | None = None) -> bool:
        """Return whether this process is a parameter server.

        Parameters
        ----------
        model_dir : path, optional
            The default `model_dir` of `init_server`, as in Paddle's documentation.

        Returns
        -------
        bool
            True on a parameter server.

        Raises
        ------
        ConfigurationError
            ``fleet.init`` was not called.
        """
        if model_dir is not None:
            self._model_dir = os.fspath(model_dir)
        return self._started_role().is_server

    def server_index(self) -> int:
        """Return this server's index.

        Returns
        -------
        int
            Counted from 0.

        Raises
        ------
        ConfigurationError
            ``fleet.init`` was not called.
        """
        return self._started_role().index

    @property
    def main_program(self) -> Program:
        """The program that this replica runs; available after ``minimize``.

        Raises
        ------
        ConfigurationError
            ``fleet.init`` or ``fleet.distributed_optimizer`` was not called.
        """
        return self._rendered()[0]

    @property
    def server_program(self) -> Program:
        """The program that this parameter server runs, which is also its `main_program`.

        Raises
        ------
        ConfigurationError
            This process is a trainer.
        """
        if not self._started_role().is_server:
            raise ConfigurationError(
                "fleet.server_program exists only on parameter servers, and this process is a trainer, "
                "whose programs are fleet.startup_program and fleet.main_program"
            )
        return self.main_program

    @property
    def startup_program(self) -> Program:
        """The program that initializes the variables of `main_program`.

        Raises
        ------
        ConfigurationError
            ``fleet.init`` or ``fleet.distributed_optimizer`` was not called.
        """
        return self._rendered()[1]

    @property
    def step(self) -> int:
        """The number of steps since the start of the job, including those before a restart."""
        trainer = self._session()
        return trainer.current_step if trainer is not None else 0

    @overload
    def distributed_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        strategy: DistributedStrategy | DistributeTranspilerConfig | None = None,
        model: torch.nn.Module | None = None,
    ) -> DistributedOptimizer: ...
    @overload
    def distributed_optimizer(
        self,
        optimizer: ProgramOptimizer,
        strategy: DistributedStrategy | DistributeTranspilerConfig | None = None,
    ) -> ProgramMinimizer: ...
    def distributed_optimizer(
        self,
        optimizer: torch.optim.Optimizer | ProgramOptimizer,
        strategy: DistributedStrategy | DistributeTranspilerConfig | None = None,
        model: torch.nn.Module | None = None,
    ) -> DistributedOptimizer | ProgramMinimizer:
        """Return an optimizer whose parameters are distributed over the parameter servers.

        Trainers and servers must call this with the same arguments.

        Parameters
        ----------
        optimizer : torch.optim.Optimizer or fleet.fluid.optimizer.Optimizer
            The user's optimizer, of any class that steps each parameter independently. Or the optimizer of a
            program that is built with layers: ``minimize(loss)`` makes the programs of the job.
        strategy : DistributedStrategy or DistributeTranspilerConfig, optional
        model : torch.nn.Module, optional
            Provides the names of the parameters. By default the module that holds all parameters, if there is
            one.

        Returns
        -------
        DistributedOptimizer or ProgramMinimizer
            The former shares the param groups of `optimizer`.

        Raises
        ------
        ConfigurationError
            The optimizer or the strategy is not supported; the message names the part.
        """
        role = self._started_role()
        if self._describe is not None:
            raise ConfigurationError(
                "fleet.distributed_optimizer was called a second time; expected one optimizer per process, "
                "with a param group for each part of the model, as in torch.optim.Adam([{'params': "
                "discriminator.parameters()}, {'params': generator.parameters(), 'lr': 1e-4}]). To step "
                "only one part, as a GAN does alternately, clear the other part's gradients before "
                "optimizer.step(): generator.zero_grad()"
            )
        chosen = strategy_of(strategy).resolved(role.sync_mode)
        if isinstance(optimizer, ProgramOptimizer):
            return self._built_minimizer(optimizer, chosen)
        if model is None and isinstance(optimizer, torch.optim.Optimizer):
            model = find_module(optimizer)
        named = without_wrapper(model) if model is not None else None
        spec, source = capture_loop(optimizer, named, chosen.grad_clip)
        self._plan = plan_job(
            spec,
            source,
            chosen.transpiler,
            role.server_endpoints,
            role.worker_num,
            sync_mode=bool(chosen.sync_mode),
            custom=chosen.mode,
        )
        self._strategy, self._source = chosen, source
        train_as(source, chosen, self._server_within())

        def capture(module: torch.nn.Module, loss_fn: Callable[..., Any]) -> None:
            chosen.check_works(chosen.where(by_executor=True))
            self._transpile(Program.capture(module, loss_fn, optimizer, chosen.grad_clip))

        self._optimizer = DistributedOptimizer(optimizer, self._describes(model, capture))
        return self._optimizer

    def _built_minimizer(
        self, optimizer: ProgramOptimizer, strategy: DistributedStrategy
    ) -> ProgramMinimizer:
        if strategy.grad_clip is not None:
            raise ConfigurationError(
                f"strategy.grad_clip is {strategy.grad_clip!r}, and the program itself says how gradients "
                "are clipped; expected grad_clip of the optimizer of fluid.optimizer, or fluid.clip"
            )
        strategy.check_works(strategy.where(by_executor=True))
        self._strategy = strategy
        return self._minimizes(optimizer, self._transpile)

    def init_server(self, model_dir: str | os.PathLike[str] | None = None) -> None:
        """Initialize this server from the model or a checkpoint, and start accepting trainers.

        Parameters
        ----------
        model_dir : path, optional
            The checkpoint to resume from, written by `save_persistables` or `save_check_point`. In a folder
            of numbered checkpoints, the newest is used. By default ``FLEET_CHECKPOINT_DIR``, if it is set and
            contains a checkpoint.

        Raises
        ------
        CheckpointError
            There is no checkpoint, it is incomplete, or it was saved from another model.
        """
        self._server = self._start_serving(model_dir)

    def run_server(self) -> None:
        """Serve until every trainer has completed, after calling `init_server` if the script has not.

        Raises
        ------
        PeerLostError
            A trainer was lost.
        """
        if self._served:
            raise ConfigurationError("fleet.run_server was called a second time; expected once per process")
        server = self._server if self._server is not None else self._start_serving()
        self._server, self._served = None, True
        serve(server)

    def init_worker(self) -> None:
        """Join the parameter servers, and load their values into the model.

        Raises
        ------
        ConfigurationError
            A server refuses this trainer, because its job, script or id conflicts.
        PeerLostError
            A server does not answer before the deadline.
        """
        role = self._started_role()
        if not role.is_worker:
            raise ConfigurationError(
                "fleet.init_worker was called on a parameter server; expected fleet.is_worker()"
            )
        if self._trainer is not None or self._describe is None:
            raise ConfigurationError(
                "fleet.init_worker was called "
                + ("a second time" if self._trainer is not None else "before fleet.distributed_optimizer")
            )
        plan, source = self._ready()
        initialize_once(source, "cpu", tables=role.is_alone)
        self._trainer = start_trainer(plan.trainer(role.index, source, self._strategy.mode), source, role.job)
        resume(source, self._trainer, joined=True)
        if self._optimizer is not None:
            self._optimizer.bind(self._trainer)

    def barrier_worker(self) -> None:
        """Wait until every trainer that has not completed has called this.

        Raises
        ------
        ConfigurationError
            ``fleet.init_worker`` was not called.
        DeadlineExceededError
            A trainer did not call this; the message names it.
        """
        self._started_trainer().session.calls.barrier()

    def push_parameters(self) -> None:
        """Update the parameter servers with parameter values that the script has written to the model.

        In sync mode, every trainer must call this between the same two steps, and all receive the first
        trainer's values. In async and half-async mode, the caller's values replace the servers', and the
        other trainers get them with the next update. In GEO the call does nothing, because the next exchange
        includes the change. The optimizer's state is kept.

        Raises
        ------
        ConfigurationError
            There is no session, or the mode is user-defined.
        DeadlineExceededError
            Sync mode: a trainer did not call this; the message names it.
        FleetError
            Gradients have been sent since the last call of ``step()``.
        """
        self._started_trainer().push()

    def stop_worker(self) -> None:
        """Notify the servers that this trainer has finished; the model keeps its last values.

        Raises
        ------
        ConfigurationError
            ``fleet.init_worker`` was not called.
        PeerLostError
            A server does not answer before the deadline.
        """
        trainer = self._started_trainer()
        if not lifecycle.refuses("fleet.stop_worker()"):
            complete(trainer)

    def _start_serving(self, model_dir: str | os.PathLike[str] | None = None) -> "Server":
        role = self._started_role()
        if not role.is_server:
            raise ConfigurationError("fleet.init_server was called on a trainer; expected fleet.is_server()")
        directory = os.fspath(model_dir) if model_dir is not None else self._model_dir
        plan, source = self._ready()
        initialize_once(source, "cpu", tables=True)
        served = plan.server(role.current_endpoint, source, self._strategy.mode)
        server = start_server(served, source, role.job, directory)
        if self._optimizer is not None:
            self._optimizer.hand_over()
        return server

    def _transpile(self, program: Program, startup_program: Program | None = None) -> None:
        """Plan the training step of a program that an executor will run."""
        role = self._started_role()
        transpiler = DistributeTranspiler(self._strategy.transpiler, mode=self._strategy.mode)
        transpiler.transpile(
            role.index if role.is_worker else 0,
            program=program,
            pservers=",".join(role.server_endpoints),
            trainers=role.worker_num,
            sync_mode=bool(self._strategy.sync_mode),
            startup_program=startup_program or program.startup_program,
        )
        plan, source = transpiler.plan, program.source
        assert isinstance(plan, JobPlan)  # noqa: S101 - the strategy's config sets no collective mode
        assert source is not None  # noqa: S101 - it was captured
        self._plan, self._source, self._programs = plan, source, None
        self._origin = program.origin
        train_as(source, self._strategy, self._server_within())
        if role.is_worker:
            trained = transpiler.get_trainer_program()
            self._programs = trained, trained.startup_program or Program()

    def _server_within(self) -> ServerPlan | None:
        """Return the plan of the server in this process; None unless this process trains alone."""
        role = self._started_role()
        if not role.is_alone:
            return None
        plan, source = self._planned()
        return plan.server(role.server_endpoints[0], source, self._strategy.mode)

    def _planned(self) -> tuple[JobPlan, Source]:
        self._started_role()
        if self._plan is None or self._source is None:
            raise ConfigurationError(
                "fleet.distributed_optimizer was not called; every role calls it, after fleet.init"
                if self._describe is None
                else "minimize(loss) of the distributed optimizer was not called; every role calls it"
            )
        return self._plan, self._source

    def _ready(self) -> tuple[JobPlan, Source]:
        """Check for edited programs, print programs if requested, and return the plan and its source."""
        planned = self._planned()
        for each in self._programs or ():
            check_unedited(each)
        if preview_asked():
            previewed(self.main_program)
        return planned

    def _rendered(self) -> tuple[Program, Program]:
        """Return this replica's main and startup programs, which are rendered on the first call."""
        plan, source = self._planned()
        role = self._started_role()
        if self._programs is None:
            main, startup = (
                render_pserver(plan, role.current_endpoint, self._origin)
                if role.is_server
                else render_trainer(plan, role.index, self._origin)
            )
            for each in (main, startup):
                each.source, each.mode = source, self._strategy.mode
            main.startup_program = startup
            self._programs = main, startup
        return self._programs

    def _all_reduce(self, numbers: npt.NDArray[Any], operation: str) -> npt.NDArray[Any]:
        combined = self._started_trainer().session.calls.reduce(Contribution.of(numbers, operation))
        # A copy, because `frombuffer` gives a read-only array and the script may write to the result.
        return np.frombuffer(combined, dtype=numbers.dtype).reshape(numbers.shape).copy()

    def _steps_made(self) -> int:
        return self._started_trainer().current_step

    def _training(self, program: Program | None) -> Trainer:
        if self._started_role().is_server:
            raise ConfigurationError(
                "a parameter server saves when trainer 0 requests it; expected fleet.is_worker() first"
            )
        trainer = self._started_trainer()
        if program is not None and (program.source is None or find_trainer(program.source) is not trainer):
            raise ConfigurationError(
                "main_program is not the one that this replica trains; expected fleet.main_program, or None"
            )
        return trainer

    def _load(self, directory: str, program: Program | None) -> TrainStatus | None:
        if not self._started_role().is_server:
            trainer = self._training(program)
            status = trainer.load(directory)
            resume(self._planned()[1], trainer)
            return status
        if self._server is not None:
            found = self._server.loader.load(directory)
        else:  # when the server starts, it reads the shards and reports all damage
            found = find_checkpoint(Path(directory), Checkpoint.keep_parts)
        if found is None:
            return None
        self._model_dir = directory
        part = found.part_of(0)
        if part is None:
            return TrainStatus(step=found.manifest.step)
        return TrainerPart.from_bytes(part, str(found.directory)).status

    def _session(self) -> Trainer | None:
        """Return the trainer that `init_worker` or an executor has started, or None."""
        if self._trainer is None and self._source is not None and self._started_role().is_worker:
            self._trainer = find_trainer(self._source)
        return self._trainer

    def _started_trainer(self) -> Trainer:
        self._started_role()
        trainer = self._session()
        if trainer is None:
            raise ConfigurationError("fleet.init_worker was not called; trainers call it before they train")
        return trainer


fleet = Fleet()
