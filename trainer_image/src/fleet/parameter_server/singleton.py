"""The `fleet` of a parameter-server job: one object per process, with the original's methods."""

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import numpy.typing as npt
import torch

import fleet as package
from fleet import lifecycle
from fleet.errors import ConfigurationError
from fleet.loop import LoopCalls
from fleet.numbers import like, numbers_of
from fleet.parameter_server.control.reduction import Contribution
from fleet.parameter_server.saving import Saving
from fleet.parameter_server.sessions import find_trainer, serve, start_server, start_trainer, train_as
from fleet.parameter_server.settings import Settings
from fleet.parameter_server.trainer.optimizer import DistributedOptimizer
from fleet.parameter_server.trainer.trainer import Trainer
from fleet.program import Program
from fleet.program.owner import find_module
from fleet.role_maker import PaddleCloudRoleMaker, Role, RoleMaker, share_of_files
from fleet.strategy import DistributedStrategy, strategy_of
from fleet.transpiler import DistributeTranspiler, DistributeTranspilerConfig
from fleet.without_dynamo import defer_dynamo

if TYPE_CHECKING:
    from fleet.parameter_server.server.server import Server

__all__ = ["Fleet"]


class Fleet(Saving, LoopCalls):
    """The place of this process in a job with parameter servers, and the way to train in it.

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

    def __init__(self) -> None:
        self._role: Role | None = None
        self._optimizer: DistributedOptimizer | None = None
        self._transpiler: DistributeTranspiler | None = None
        self._server: Server | None = None
        self._served = False
        self._trainer: Trainer | None = None
        self._model_dir: str | None = None

    def __getattr__(self, name: str) -> Any:
        """Resolve what is no method here as a public name of the package, as in ``fleet.report``."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(package, name)

    def init(self, role_maker: RoleMaker | None = None) -> None:
        """Find this process's role.

        Parameters
        ----------
        role_maker : RoleMaker, optional
            ``PaddleCloudRoleMaker()``, which is the default, or ``UserDefinedRoleMaker(...)``.

        Raises
        ------
        RoleError
            The environment does not describe a replica; the message names the variable.
        """
        if self._role is not None:
            raise ConfigurationError("fleet.init was called a second time; expected once per process")
        role = (role_maker if role_maker is not None else PaddleCloudRoleMaker()).generate_role()
        if role.is_collective:
            raise ConfigurationError(
                "fleet.parameter_server was given the role of a collective job; expected "
                "PaddleCloudRoleMaker() without is_collective, or the fleet of fleet.collective"
            )
        Settings.from_environ(os.environ)  # a malformed variable is found here, not after minutes
        self._role = role
        lifecycle.start(role)
        defer_dynamo()

    def is_worker(self) -> bool:
        """Whether this process trains."""
        return self._started_role().is_worker

    def is_server(self, model_dir: str | os.PathLike[str] | None = None) -> bool:
        """Whether this process holds parameters.

        Parameters
        ----------
        model_dir : path, optional
            As the original's documentation has it: what `init_server` begins with, where it names nothing.
        """
        if model_dir is not None:
            self._model_dir = os.fspath(model_dir)
        return self._started_role().is_server

    def is_first_worker(self) -> bool:
        """Whether this process is trainer 0, which acts for all where one must."""
        return self._started_role().is_first_worker

    def worker_index(self) -> int:
        """Return this trainer's index."""
        return self._started_role().index

    def worker_num(self) -> int:
        """Return the number of trainers."""
        return self._started_role().worker_num

    def worker_endpoints(self, to_string: bool = False) -> list[str] | str:
        """Return the trainers' endpoints: none, as trainers do not listen in this mode."""
        endpoints = list(self._started_role().worker_endpoints)
        return ",".join(endpoints) if to_string else endpoints

    def server_num(self) -> int:
        """Return the number of parameter servers."""
        return self._started_role().server_num

    def server_index(self) -> int:
        """Return this server's index."""
        return self._started_role().index

    @overload
    def server_endpoints(self, to_string: Literal[False] = False) -> list[str]: ...
    @overload
    def server_endpoints(self, to_string: Literal[True]) -> str: ...
    def server_endpoints(self, to_string: bool = False) -> list[str] | str:
        """Return every parameter server's host:port, as a list or comma separated."""
        endpoints = list(self._started_role().server_endpoints)
        return ",".join(endpoints) if to_string else endpoints

    @property
    def main_program(self) -> Program:
        """What this replica runs at each step, after ``minimize``; of a server, what it serves."""
        transpiler, role = self._started_transpiler(), self._started_role()
        if role.is_server:
            return transpiler.get_pserver_program(role.current_endpoint)
        return transpiler.get_trainer_program()

    @property
    def server_program(self) -> Program:
        """What this parameter server serves; the same as `main_program` there.

        Raises
        ------
        ConfigurationError
            This process is a trainer.
        """
        if not self._started_role().is_server:
            raise ConfigurationError(
                "fleet.server_program is a parameter server's, and this process is a trainer; its programs "
                "are fleet.startup_program and fleet.main_program"
            )
        return self.main_program

    @property
    def startup_program(self) -> Program:
        """What prepares `main_program`."""
        transpiler, role = self._started_transpiler(), self._started_role()
        if role.is_server:
            return transpiler.get_startup_program(role.current_endpoint)
        startup = transpiler.get_trainer_program().startup_program
        return startup if startup is not None else Program()

    @property
    def step(self) -> int:
        """The number of steps made, from the job's beginning: where a restarted trainer goes on."""
        trainer = self._session()
        return trainer.current_step if trainer is not None else 0

    def distributed_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        strategy: DistributedStrategy | DistributeTranspilerConfig | None = None,
        model: torch.nn.Module | None = None,
    ) -> DistributedOptimizer:
        """Distribute what an optimizer steps over the parameter servers.

        Every role calls this alike.

        Parameters
        ----------
        optimizer : torch.optim.Optimizer
            The user's, of any class that steps parameters one by one.
        strategy : DistributedStrategy or DistributeTranspilerConfig, optional
        model : torch.nn.Module, optional
            Gives the parameters their names. By default the module that holds them all, if there is one.

        Returns
        -------
        DistributedOptimizer
            Shares the param groups of `optimizer`.

        Raises
        ------
        ConfigurationError
            The optimizer or the strategy cannot be honoured; the message says which part.
        """
        role = self._started_role()
        if self._optimizer is not None:
            raise ConfigurationError(
                "fleet.distributed_optimizer was called a second time; expected one optimizer per process, "
                "with a param group for each part of the model, as in torch.optim.Adam([{'params': "
                "discriminator.parameters()}, {'params': generator.parameters(), 'lr': 1e-4}]). To step one "
                "part alone, as a GAN does in turn, drop the other's gradients before optimizer.step(): "
                "generator.zero_grad()"
            )
        if model is None and isinstance(optimizer, torch.optim.Optimizer):
            model = find_module(optimizer)
        chosen = strategy_of(strategy).resolved(role.sync_mode)
        self._transpile(Program.from_optimizer(optimizer, model, chosen.grad_clip), chosen)

        def minimize(loss_fn: Callable[..., Any]) -> None:
            if model is None:
                raise ConfigurationError(
                    "minimize() runs the model: give it, as in "
                    "fleet.distributed_optimizer(optimizer, model=model)"
                )
            chosen.check_works(chosen.where(by_executor=True))
            self._transpile(Program.capture(model, loss_fn, optimizer, chosen.grad_clip), chosen)

        self._optimizer = DistributedOptimizer(optimizer, minimize)
        return self._optimizer

    def init_server(self, model_dir: str | os.PathLike[str] | None = None) -> None:
        """Cut this server's slices from the model that this process built, and begin to accept trainers.

        Parameters
        ----------
        model_dir : path, optional
            A checkpoint, or a folder of numbered ones of which the newest counts, to go on from: one that
            `save_persistables` or `save_check_point` wrote. Otherwise ``FLEET_CHECKPOINT_DIR``, where it is
            set and there is a checkpoint in it.

        Raises
        ------
        CheckpointError
            There is no checkpoint, it is not whole, or it is of another model.
        """
        self._server = self._start_serving(model_dir)

    def run_server(self) -> None:
        """Serve until every trainer has completed; calls `init_server` first where the script has not.

        Raises
        ------
        PeerLostError
            A trainer vanished for good.
        """
        if self._served:
            raise ConfigurationError("fleet.run_server was called a second time; expected once per process")
        server = self._server if self._server is not None else self._start_serving()
        self._server, self._served = None, True
        serve(server)

    def init_worker(self) -> None:
        """Join the parameter servers, and take the values that they hold.

        Raises
        ------
        ConfigurationError
            A server refuses: another job, another script, another trainer of this id.
        PeerLostError
            A server does not answer before the deadline.
        """
        role = self._started_role()
        if not role.is_worker:
            raise ConfigurationError(
                "fleet.init_worker was called on a parameter server; expected fleet.is_worker()"
            )
        if self._trainer is not None or self._optimizer is None:
            raise ConfigurationError(
                "fleet.init_worker was called "
                + ("a second time" if self._trainer is not None else "before fleet.distributed_optimizer")
            )
        self._trainer = start_trainer(self.main_program, role.job)
        self._optimizer.bind(self._trainer)

    def barrier_worker(self) -> None:
        """Wait until every trainer that has not completed calls this."""
        self._started_trainer().barrier()

    def all_reduce_worker(
        self, values: Any, output: npt.NDArray[Any] | None = None, mode: str = "sum"
    ) -> Any:
        """Combine numbers over all trainers that have not completed, in the order of the trainers.

        Parameters
        ----------
        values
            A number, an array or a tensor; of the same shape and type on every trainer, and small.
        output : numpy.ndarray, optional
            Receives the result as well.
        mode : str
            ``sum``, ``min`` or ``max``.

        Returns
        -------
        numpy.ndarray or Tensor
            The same on every trainer.

        Raises
        ------
        ConfigurationError
            Another trainer gives something else, or these are no numbers.
        DeadlineExceededError
            A trainer did not call this; the message names it.
        """
        given = Contribution.of(values, mode)
        data = self._started_trainer().reduce(given)
        numbers = np.frombuffer(data, dtype=numbers_of(values).dtype).reshape(given.shape).copy()
        return like(values, numbers, output)

    def push_parameters(self) -> None:
        """Give the parameter servers the values that the script has written to parameters.

        Sync mode: every trainer calls this alike, between two steps, and the first trainer's values become
        everybody's. Async and half-async: the caller's values replace the servers', and the others get them
        with their next ones. GEO: nothing is to be done, as the next exchange carries them. The optimizer's
        state stays.

        Raises
        ------
        ConfigurationError
            There is no session, or the mode is one of your own.
        DeadlineExceededError
            Sync mode: a trainer did not call this; the message names it.
        FleetError
            Gradients have been sent, and ``step()`` was not called.
        """
        self._started_trainer().push()

    def split_files(self, files: Sequence[str]) -> list[str]:
        """Return this trainer's share: contiguous blocks, what remains goes to the lowest indexes."""
        role = self._started_role()
        if not role.is_worker:
            raise ConfigurationError(
                "fleet.split_files: a parameter server reads no files; expected a trainer"
            )
        return share_of_files(files, role.index, role.worker_num)

    def minimize(self, loss_fn: Callable[..., Any]) -> None:
        """Describe the training step as a program; the same as the distributed optimizer's ``minimize``."""
        if self._optimizer is None:
            raise ConfigurationError("fleet.minimize was called before fleet.distributed_optimizer")
        self._optimizer.minimize(loss_fn)

    def stop_worker(self) -> None:
        """Tell the servers that this trainer has finished; the model keeps the last values."""
        lifecycle.finish(self._started_trainer().complete())

    def _start_serving(self, model_dir: str | os.PathLike[str] | None = None) -> "Server":
        role = self._started_role()
        if not role.is_server:
            raise ConfigurationError("fleet.init_server was called on a trainer; expected fleet.is_server()")
        directory = os.fspath(model_dir) if model_dir is not None else self._model_dir
        server = start_server(self.main_program, role.job, directory)
        if self._optimizer is not None:
            self._optimizer.hand_over()
        return server

    def _transpile(self, program: Program, strategy: DistributedStrategy) -> None:
        role = self._started_role()
        self._transpiler = DistributeTranspiler(strategy.transpiler, mode=strategy.mode)
        self._transpiler.transpile(
            role.index if role.is_worker else 0,
            program=program,
            pservers=",".join(role.server_endpoints),
            trainers=role.worker_num,
            sync_mode=bool(strategy.sync_mode),
            startup_program=program.startup_program,
        )
        train_as(program, strategy)

    def _started_role(self) -> Role:
        if self._role is None:
            raise ConfigurationError("fleet.init was not called; expected it before anything else of fleet")
        return self._role

    def _started_transpiler(self) -> DistributeTranspiler:
        if self._transpiler is None:
            raise ConfigurationError(
                "fleet.distributed_optimizer was not called; every role calls it, after fleet.init"
            )
        return self._transpiler

    def _steps_made(self) -> int:
        return self._started_trainer().current_step

    def _loading_server(self) -> "Server | None":
        return self._server

    def _load_first(self, directory: str) -> None:
        self._model_dir = directory

    def _session(self) -> Trainer | None:
        """Return the session that `init_worker`, or an executor with this replica's program, has started."""
        if self._trainer is None and self._transpiler is not None and self._started_role().is_worker:
            self._trainer = find_trainer(self.main_program)
        return self._trainer

    def _started_trainer(self) -> Trainer:
        trainer = self._session()
        if trainer is None:
            raise ConfigurationError("fleet.init_worker was not called; trainers call it before they train")
        return trainer
