"""The `fleet` singleton of a collective job: one object per process, with Paddle's methods."""

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from fleet.checkpoint import Claims, end_if_finished, leave_mark
from fleet.collective.compression import factorizing, rounding
from fleet.collective.copies import Copies
from fleet.collective.gradients import BackwardPass, GradientAverager
from fleet.collective.group import Group
from fleet.collective.local_sgd import ParameterAverager
from fleet.collective.optimizer import distribute, named_parameters
from fleet.collective.reducer import Compression
from fleet.collective.steps import hyper_parameters
from fleet.collective.synchronizer import Alone, Synchronizer
from fleet.collective.training import CollectiveTraining
from fleet.collective.world import find_world
from fleet.environment.deadlines import Deadlines
from fleet.errors import ConfigurationError
from fleet.facade.calls import FleetCalls
from fleet.fluid.program import Program
from fleet.options import Where, refusal
from fleet.plan import DistributeTranspilerConfig
from fleet.plan.source import find_module, without_wrapper
from fleet.process import lifecycle, progress
from fleet.process.finite import FiniteCheck, tell_of_weights
from fleet.process.resources import keep_freed_memory
from fleet.role_maker import PaddleCloudRoleMaker, RoleMaker
from fleet.role_maker.variables import SYNC_MODES
from fleet.strategy import DistributedStrategy, strategy_of

__all__ = ["Fleet", "fleet"]

MAX_DIFFERENCE = 300
_HERE: Final = Where(servers=False)
_COMBINED = frozenset({"int64", "float16", "float32", "float64"})
_SUMMED = frozenset({"complex64", "complex128"})

_log = logging.getLogger(__name__)


class Fleet(FleetCalls):
    """The interface of a script to its collective job. Every process is a trainer; there are no servers.

    Notes
    -----
    Paddle's ``fluid.incubate.fleet.collective.Collective``, whose singleton is also called ``fleet``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._group: Group | None = None
        self._stopped = False
        self._backward: BackwardPass | None = None
        self._distributed: list[tuple[Copies, Synchronizer]] = []
        self._trainings: list[CollectiveTraining] = []
        self._program: Program | None = None

    def init(self, role_maker: RoleMaker | None = None) -> None:
        """Determine this process's role, wait for the other trainers and connect to them.

        Parameters
        ----------
        role_maker : RoleMaker, optional
            ``PaddleCloudRoleMaker(is_collective=True)``, the default, or
            ``UserDefinedCollectiveRoleMaker(current_id, worker_endpoints)``.

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
        role = self._find_role(maker, collective=True)
        reason = refusal("FLEET_SYNC_MODE", role.sync_mode, SYNC_MODES[0], _HERE)
        if reason is not None:
            raise ConfigurationError(f"{reason} (of a FleetJob: spec.syncMode)")
        if folder := os.environ.get("FLEET_TLS_DIR", "").strip():
            raise ConfigurationError(
                f"FLEET_TLS_DIR is {folder!r}, and gloo, NCCL and torch's store know no TLS; expected none "
                "in collective training, and a network that encrypts, by WireGuard in Cilium or Calico say"
            )
        lifecycle.start(role)
        end_if_finished(os.environ)
        keep_freed_memory(os.environ)
        world, deadlines = find_world(role, os.environ), Deadlines.from_environ(os.environ)
        progress.waits_for("the other trainers to join")
        self._group = Group.connect(world, deadlines, os.environ)
        progress.waits_for(None)
        self._role = replace(role, worker_endpoints=self._group.world.endpoints)
        progress.follow(lambda: self.step)
        lifecycle.joined()
        _log.info(
            "trainer %d joined the %d trainers at %s:%d", role.index, world.size, world.host, world.port
        )

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
                f"is_server: model_dir is {str(model_dir)!r}, and a collective job has no servers that would "
                "load it; expected fleet.load_persistables(dirname) on every trainer"
            )
        return False

    @property
    def step(self) -> int:
        """The number of times that gradients of the first optimizer were averaged."""
        return self._distributed[0][1].steps.number if self._distributed else 0

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
        """Wait until every trainer has made this call.

        Raises
        ------
        ConfigurationError
            ``fleet.init`` was not called, or ``fleet.stop_worker`` was.
        PeerLostError
            A trainer is lost, or does not make this call before the deadline; the message names it.
        """
        self.barrier_worker()

    def stop_worker(self) -> None:
        """Wait until every trainer has made this call, leave the group, and record the final progress.

        Raises
        ------
        ConfigurationError
            ``fleet.init`` was not called, or ``fleet.stop_worker`` was.
        PeerLostError
            A trainer is lost, or does not make this call before the deadline; the message names it.
        """
        group = self._started_group()
        for training in self._trainings:
            training.finish()
        if lifecycle.refuses("fleet.stop_worker()"):
            return
        group.barrier("stop_worker()")
        for number, (copies, synchronizer) in enumerate(self._distributed):
            synchronizer.settle(f"the end of optimizer {number}")
            synchronizer.close()
            synchronizer.steps.compare(f"the steps of optimizer {number}")
            tell_of_weights(dict(copies.whole), synchronizer.steps.number)
        group.close()
        self._stopped = True
        _log.info("trainer %d has completed, as every trainer has", self._started_role().index)
        trainers = range(_pods(self.worker_num(), os.environ))
        if self.is_first_worker():
            leave_mark(os.environ, trainers)
        lifecycle.finish(trainers)

    def barrier_worker(self) -> None:
        """Wait until every trainer has called this.

        Raises
        ------
        ConfigurationError
            ``fleet.init`` was not called, or ``fleet.stop_worker`` was.
        PeerLostError
            A trainer is lost, or does not make this call before the deadline; the message names it.
        """
        self._started_group().barrier("a barrier")

    def push_parameters(self) -> None:
        """Copy trainer 0's parameters to all trainers; every trainer must call this after the same step.

        Raises
        ------
        ConfigurationError
            ``fleet.distributed_optimizer`` was not called.
        """
        self._started_group()
        if not self._distributed:
            raise ConfigurationError("fleet.push_parameters was called before fleet.distributed_optimizer")
        for copies, _ in self._distributed:
            copies.push("fleet.push_parameters")

    @property
    def main_program(self) -> Program:
        """The program that a trainer runs in each step, after ``minimize``.

        Raises
        ------
        ConfigurationError
            ``fleet.minimize`` was not called.
        """
        if self._program is None:
            raise ConfigurationError("fleet.main_program: fleet.minimize(loss_fn) was not called")
        return self._program

    def distributed_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        strategy: DistributedStrategy | DistributeTranspilerConfig | None = None,
        model: torch.nn.Module | None = None,
    ) -> torch.optim.Optimizer:
        """Make every backward pass average the gradients over all trainers.

        All trainers first copy trainer 0's parameters. The returned optimizer shares everything with
        `optimizer`, and adds ``no_sync()`` for several backward passes before one exchange.

        Parameters
        ----------
        optimizer
            Any torch optimizer; the gradients of its parameters are averaged.
        strategy : DistributedStrategy or DistributeTranspilerConfig, optional
            How to train.
        model : optional
            The model, which names parameters in messages. By default the module that holds all of them.

        Raises
        ------
        ConfigurationError
            Another trainer's parameters or optimizer differ, or the strategy requests something unsupported
            (see `fleet.options`). The message names the cause.
        """
        _check(optimizer)
        chosen = strategy_of(strategy)
        chosen.check()
        chosen.check_works(_HERE)
        group = self._started_group()
        given = model if model is not None else find_module(optimizer)
        model = without_wrapper(given) if given is not None else None
        named = named_parameters(optimizer, model)
        copies = Copies(named, model, group, broadcast_buffers=chosen.broadcast_buffers)
        self._compare(group, optimizer, copies)
        copies.log_sharded()
        synchronizer = self._synchronizer(copies, optimizer, chosen)
        synchronizer.start()
        copies.share("the first values")
        self._distributed.append((copies, synchronizer))
        role = self._started_role()
        claims = Claims(f"trainer-{role.index}", role.job)
        self._trainings.append(CollectiveTraining(optimizer, model, synchronizer, group, claims, self._loops))
        if len(self._trainings) == 1:  # fleet saves nothing if there are several
            self._trainings[0].log_unsavable()

        def capture(module: torch.nn.Module, loss_fn: Callable[..., Any]) -> None:
            self._program = Program.capture(module, loss_fn, optimizer)

        finite = FiniteCheck(chosen.non_finite, group.world.rank, lambda: synchronizer.step_of_gradients)
        minimize = self._describes(given, capture)  # runs the model as it was given, even if it is compiled
        return distribute(optimizer, copies, synchronizer, minimize, model, finite=finite)

    def _synchronizer(
        self, copies: Copies, optimizer: torch.optim.Optimizer, strategy: DistributedStrategy
    ) -> Synchronizer:
        """Return the synchronizer that the strategy requests."""
        if (plan := strategy.parameters_averaged()) is not None:
            return ParameterAverager(copies, optimizer, plan)
        if copies.group.world.size == 1:
            return Alone(copies)
        _refuse_shared(
            copies, [other for other, each in self._distributed if isinstance(each, GradientAverager)]
        )
        self._backward = self._backward or BackwardPass(copies.group)
        return GradientAverager(
            copies,
            self._backward,
            compression=_compression(strategy, copies.group),
            stateful=strategy.power_sgd is not None,
        )

    def _compare(self, group: Group, optimizer: torch.optim.Optimizer, copies: Copies) -> None:
        """Raise an error if another trainer would exchange other tensors: such sums would never end."""
        lines = [f"the optimizer {type(optimizer).__name__}"]
        lines += copies.describe()
        lines += [
            f"{option}={value} in param group {number}"
            for number, options in enumerate(hyper_parameters(optimizer))
            for option, value in options.items()
        ]
        everybodys = group.agree(f"parameters of optimizer {len(self._distributed)}", "\n".join(lines))
        for rank, text in everybodys.items():
            theirs = text.split("\n")
            if theirs != lines:
                pairs = zip([*theirs, "nothing more"], [*lines, "nothing more"], strict=False)
                found, ours = next((a, b) for a, b in pairs if a != b)
                raise ConfigurationError(
                    f"{group.world.name(rank)} has {found[:MAX_DIFFERENCE]} where this trainer, "
                    f"{group.world.rank}, has {ours[:MAX_DIFFERENCE]}; expected the same model and optimizer "
                    "in every trainer, with the same hyper-parameters"
                )

    def _all_reduce(self, numbers: npt.NDArray[Any], operation: str) -> npt.NDArray[Any]:
        travelling = _travelling(numbers, operation)
        form = f"the {operation} of {numbers.dtype}{list(numbers.shape)}"
        self._started_group().reduce_(torch.from_numpy(travelling), operation, f"all_reduce_worker ({form})")
        return travelling.astype(numbers.dtype)

    def _steps_made(self) -> int:
        if not self._distributed:
            raise ConfigurationError(
                "fleet.distributed_optimizer was not called, and it is what counts the steps; expected it "
                "before the loop"
            )
        return self.step

    def _training(self, program: Program | None) -> CollectiveTraining:
        if len(self._trainings) != 1:
            raise ConfigurationError(
                f"fleet has {len(self._trainings)} distributed optimizers; expected one, called "
                "fleet.distributed_optimizer, whose training is saved, loaded or exported"
            )
        if program is not None and program is not self._program:
            raise ConfigurationError("main_program is not fleet.main_program; expected that, or None")
        return self._trainings[0]

    def _before_export(self, call: str) -> None:
        synchronizer = self._distributed[0][1]
        if synchronizer.apart:  # otherwise a single trainer may export, even after stop_worker()
            synchronizer.settle(f"fleet.{call}")

    def _started_group(self) -> Group:
        if self._group is None:
            raise ConfigurationError("fleet.init was not called; expected it before anything else of fleet")
        if self._stopped:
            raise ConfigurationError(
                "fleet.stop_worker was called, and this trainer has left the job; expected that call once, "
                "after everything that needs the other trainers"
            )
        return self._group


def _check(optimizer: torch.optim.Optimizer) -> None:
    """Raise if an optimizer cannot be distributed, before anything is exchanged."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(
            f"distributed_optimizer: found {type(optimizer).__name__}; expected a torch.optim.Optimizer"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigurationError(
            "distributed_optimizer: LBFGS steps as far as the loss of a trainer's own data says, so each "
            "trainer would come to another model; expected an optimizer whose steps follow from the "
            "gradients, such as SGD or Adam"
        )
    if hasattr(optimizer, "fleet_synchronizer"):  # a distributed optimizer shares its attributes
        raise ConfigurationError(
            f"distributed_optimizer: this {type(optimizer).__name__} was given to it before, or is what it "
            "has returned; expected one call for each optimizer: go on with what the first has returned"
        )


def _refuse_shared(copies: Copies, averaged: Iterable[Copies]) -> None:
    """Refuse a parameter whose gradient another optimizer averages: reducers cannot share a parameter."""
    taken = {id(parameter) for each in averaged for _, parameter in each.whole}
    for name, parameter in copies.trained:
        if id(parameter) in taken:
            raise ConfigurationError(
                f"distributed_optimizer: {name} is a parameter of an earlier distributed optimizer, too, and "
                "its gradient is averaged once; expected one distributed optimizer that holds all "
                "parameters: the script's others step as they are, on the gradients that it averages"
            )


def _compression(strategy: DistributedStrategy, group: Group) -> Compression | None:
    if strategy.power_sgd is not None:
        return partial(factorizing, strategy.power_sgd, group)
    return partial(rounding, strategy.wire_dtype) if strategy.wire_dtype is not None else None


def _pods(processes: int, environ: Mapping[str, str]) -> int:
    """Return the number of pods that run the job's processes; the operator counts each pod as one trainer."""
    slots = environ.get("LOCAL_WORLD_SIZE", "")
    return processes // int(slots) if slots.isdecimal() and 0 < int(slots) <= processes else processes


def _travelling(array: npt.NDArray[Any], mode: str) -> npt.NDArray[Any]:
    """Return a row-major copy in a dtype that gloo can reduce; narrow integers become int64."""
    if array.dtype.kind in "iu" and array.dtype.itemsize < 8:
        return array.astype(np.int64, order="C")
    whole, complex_sum = array.dtype.name in _COMBINED, array.dtype.name in _SUMMED and mode == "sum"
    if not whole and not complex_sum:
        raise ConfigurationError(
            f"all_reduce_worker got {array.dtype} for the {mode}; expected integers up to int64, or float16, "
            "float32 or float64: convert it"
        )
    return array.astype(array.dtype.newbyteorder("="), order="C")


fleet = Fleet()
