"""The `fleet` singleton of a collective job, with Paddle's method names."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast, overload

import numpy as np
import numpy.typing as npt
import torch

from fleet.checkpoint import TrainStatus
from fleet.collective.trainer import Trainer, this_trainer
from fleet.collective.training import CollectiveTraining
from fleet.errors import ConfigurationError
from fleet.facade.calls import FleetCalls, ProgramMinimizer, ProgramOptimizer
from fleet.fluid.execution import share_optimizer_state
from fleet.fluid.program import Program
from fleet.fluid.transpiler import DistributeTranspiler
from fleet.plan import DistributeTranspilerConfig
from fleet.plan.source import find_module
from fleet.role_maker import PaddleCloudRoleMaker, Role, RoleMaker
from fleet.strategy import DistributedStrategy

if TYPE_CHECKING:
    from fleet.collective.optimizer import Distributed

__all__ = ["Fleet", "fleet"]

_COMBINED = frozenset({"int64", "float16", "float32", "float64"})
_SUMMED = frozenset({"complex64", "complex128"})


class Fleet(FleetCalls):
    """The interface of a collective job for training scripts; every process of the job is a trainer.

    Parameters
    ----------
    trainer : Trainer, optional
        The trainer that the calls control; by default one that has not joined a job.

    Notes
    -----
    Paddle's ``fluid.incubate.fleet.collective.Collective``, whose singleton is also called ``fleet``.
    """

    def __init__(self, trainer: Trainer | None = None) -> None:
        super().__init__()
        self._trainer = trainer if trainer is not None else Trainer()
        self._loops = self._trainer.loops
        self._program: Program | None = None

    @property
    def _role(self) -> Role | None:
        return self._trainer.role

    def init(self, role_maker: RoleMaker | None = None) -> None:
        """Determine this process's role, wait for the other trainers, and connect to them.

        Parameters
        ----------
        role_maker : RoleMaker, optional
            ``PaddleCloudRoleMaker(is_collective=True)``, the default, or
            ``UserDefinedCollectiveRoleMaker(current_id, worker_endpoints)``. Without any variable of a job,
            the default makes this process train alone, as the only trainer.

        Raises
        ------
        RoleError
            The environment does not describe a collective job; the message names the variable.
        ConfigurationError
            The environment requests something that collective training does not support, such as TLS.
        DeadlineExceededError
            A trainer did not join before the deadline for starting; the message names it.
        """
        maker = role_maker if role_maker is not None else PaddleCloudRoleMaker(is_collective=True)
        self._trainer.join(self._find_role(maker, collective=True))

    def is_server(self, model_dir: str | os.PathLike[str] | None = None) -> bool:
        """Return False, because a collective job has no servers.

        Parameters
        ----------
        model_dir : None
            Accepted for compatibility with the other fleet. Any other value is refused.

        Returns
        -------
        bool
            Always False.

        Raises
        ------
        ConfigurationError
            `model_dir` is given.
        """
        if model_dir is not None:
            raise ConfigurationError(
                f"is_server: model_dir is {str(model_dir)!r}, but a collective job has no servers to load "
                "it; expected fleet.load_persistables(dirname) on every trainer"
            )
        return False

    @property
    def step(self) -> int:
        """The number of times that the first optimizer's gradients have been averaged."""
        return self._trainer.step

    def server_index(self) -> int:
        """Raise an error, because a collective job has no servers.

        Raises
        ------
        ConfigurationError
            Always.
        """
        raise ConfigurationError(
            "server_index: a collective job has no servers; expected fleet.is_server() first"
        )

    def init_server(
        self,
        model_dir: str | os.PathLike[str] | None = None,  # noqa: ARG002 (as on the other fleet)
    ) -> None:
        """Raise an error, because a collective job has no servers.

        Parameters
        ----------
        model_dir : path, optional
            Accepted for compatibility with the other fleet.

        Raises
        ------
        ConfigurationError
            Always.
        """
        raise ConfigurationError(
            "init_server: a collective job has no servers; expected fleet.is_server() first"
        )

    def run_server(self) -> None:
        """Raise an error, because a collective job has no servers.

        Raises
        ------
        ConfigurationError
            Always.
        """
        raise ConfigurationError(
            "run_server: a collective job has no servers; expected fleet.is_server() first"
        )

    def init_worker(self) -> None:
        """Wait until every trainer has called this.

        Raises
        ------
        ConfigurationError
            ``fleet.init`` was not called, or ``fleet.stop_worker`` was.
        PeerLostError
            A trainer is lost, or does not make this call before the deadline; the message names it.
        """
        self.barrier_worker()

    def stop_worker(self) -> None:
        """Wait until every trainer has called this, leave the group, and write the final progress.

        Raises
        ------
        ConfigurationError
            ``fleet.init`` was not called, or ``fleet.stop_worker`` was.
        PeerLostError
            A trainer is lost, or does not make this call before the deadline; the message names it.
        """
        self._trainer.complete()

    def barrier_worker(self) -> None:
        """Wait until every trainer has called this.

        Raises
        ------
        ConfigurationError
            ``fleet.init`` was not called, or ``fleet.stop_worker`` was.
        PeerLostError
            A trainer is lost, or does not make this call before the deadline; the message names it.
        """
        self._trainer.group.barrier("a barrier")

    def push_parameters(self) -> None:
        """Copy trainer 0's parameters to all trainers; every trainer must call this after the same step.

        Raises
        ------
        ConfigurationError
            ``fleet.distributed_optimizer`` was not called.
        """
        self._trainer.push()

    @property
    def main_program(self) -> Program:
        """The program that a trainer runs in each step; available after ``minimize``.

        Raises
        ------
        ConfigurationError
            ``fleet.minimize`` was not called.
        """
        if self._program is None:
            raise ConfigurationError("fleet.main_program: fleet.minimize(loss_fn) was not called")
        return self._program

    @overload
    def distributed_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        strategy: DistributedStrategy | DistributeTranspilerConfig | None = None,
        model: torch.nn.Module | None = None,
    ) -> torch.optim.Optimizer: ...
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
    ) -> torch.optim.Optimizer | ProgramMinimizer:
        """Make every backward pass average the gradients over all trainers.

        All trainers first copy trainer 0's parameters. The returned optimizer shares all state with
        `optimizer`. It adds ``no_sync()``, for several backward passes before one exchange.

        Parameters
        ----------
        optimizer : torch.optim.Optimizer or fleet.fluid.optimizer.Optimizer
            Any torch optimizer; the gradients of its parameters are averaged. Or the optimizer of a program
            that is built with layers: ``minimize(loss)`` transpiles the program in place, and the startup
            program copies trainer 0's parameters.
        strategy : DistributedStrategy or DistributeTranspilerConfig, optional
            How to train.
        model : optional
            The model, which names parameters in messages. By default the module that holds all parameters.

        Raises
        ------
        ConfigurationError
            Another trainer's parameters or optimizer differ, or the strategy requests something unsupported
            (see `fleet.options`). The message names the cause.
        """
        if isinstance(optimizer, ProgramOptimizer):
            self._trainer.train_programs_as(strategy)
            return self._minimizes(optimizer, self._transpile)

        def capture(module: torch.nn.Module, loss_fn: Callable[..., Any]) -> None:
            self._program = Program.capture(module, loss_fn, optimizer)

        if model is None and isinstance(optimizer, torch.optim.Optimizer):
            model = find_module(optimizer)
        distributed = self._trainer.distribute(optimizer, strategy, model)
        # minimize() runs the model that was passed, even if it is compiled
        cast("Distributed", distributed).fleet_minimize = self._describes(model, capture)
        return distributed

    def _transpile(self, program: Program, startup_program: Program | None) -> None:
        """Transpile a program that was built with layers into this trainer's program."""
        role = self._started_role()
        # torchrun provides ranks but no endpoints; the program only displays the endpoints.
        endpoints = role.worker_endpoints or [f"trainer-{rank}:1" for rank in range(role.worker_num)]
        transpiler = DistributeTranspiler(DistributeTranspilerConfig(mode="collective"))
        transpiler.transpile(
            role.index,
            program=program,
            trainers=endpoints,
            startup_program=startup_program or program.startup_program,
            current_endpoint=endpoints[role.index],
        )
        self._program = transpiler.get_trainer_program()

    def _all_reduce(self, numbers: npt.NDArray[Any], operation: str) -> npt.NDArray[Any]:
        travelling = _travelling(numbers, operation)
        form = f"the {operation} of {numbers.dtype}{list(numbers.shape)}"
        self._trainer.group.reduce_(torch.from_numpy(travelling), operation, f"all_reduce_worker ({form})")
        return travelling.astype(numbers.dtype)

    def _steps_made(self) -> int:
        if not self._trainer.distributes:
            raise ConfigurationError(
                "fleet.distributed_optimizer was not called, but its optimizer counts the steps; call it "
                "before the loop"
            )
        return self.step

    def _training(self, program: Program | None) -> CollectiveTraining:
        training = self._trainer.training
        if program is not None and program is not self._program:
            raise ConfigurationError("main_program is not fleet.main_program; expected that, or None")
        return training

    def _load(self, directory: str, program: Program | None) -> TrainStatus | None:
        status = super()._load(directory, program)
        if self._program is not None and self._program.source is not None:
            share_optimizer_state(self._program, self._program.source)
        return status

    def _before_export(self, call: str) -> None:
        self._trainer.equalize(f"fleet.{call}")


def _travelling(array: npt.NDArray[Any], mode: str) -> npt.NDArray[Any]:
    """Return a contiguous copy in a dtype that gloo can reduce; integers under 64 bits become int64."""
    if array.dtype.kind in "iu" and array.dtype.itemsize < 8:
        return array.astype(np.int64, order="C")
    whole, complex_sum = array.dtype.name in _COMBINED, array.dtype.name in _SUMMED and mode == "sum"
    if not whole and not complex_sum:
        raise ConfigurationError(
            f"all_reduce_worker got {array.dtype} for the {mode}; expected integers up to int64, or float16, "
            "float32 or float64: convert it"
        )
    return array.astype(array.dtype.newbyteorder("="), order="C")


fleet = Fleet(this_trainer)
