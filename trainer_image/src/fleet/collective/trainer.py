"""A trainer of a collective job: joining the other trainers, distributing optimizers, and completing.

The `fleet` object and an `Executor` use the same trainer, `this_trainer`, which imports neither of them.
"""

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Final

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
from fleet.loop import Loops
from fleet.options import Where, refusal
from fleet.plan import DistributeTranspilerConfig
from fleet.plan.source import without_wrapper
from fleet.process import lifecycle, progress
from fleet.process.finite import FiniteCheck, tell_of_weights
from fleet.process.resources import keep_freed_memory
from fleet.role_maker import Role
from fleet.role_maker.variables import SYNC_MODES
from fleet.strategy import DistributedStrategy, strategy_of

__all__ = ["Trainer", "this_trainer"]

MAX_DIFFERENCE = 300
_HERE: Final = Where(servers=False)

_log = logging.getLogger(__name__)


class Trainer:
    """One trainer of a collective job, from joining to completion.

    Attributes
    ----------
    role : Role or None
        The role under which it joined; None before `join`.
    loops : Loops
        The script's loops, whose positions are part of checkpoints.
    program_strategy : DistributedStrategy or None
        How an `Executor` trains a program that was built with layers; None before `train_programs_as`.
    """

    def __init__(self) -> None:
        self.role: Role | None = None
        self.loops = Loops()
        self.program_strategy: DistributedStrategy | None = None
        self._group: Group | None = None
        self._completed = False
        self._backward: BackwardPass | None = None
        self._distributed: list[tuple[Copies, Synchronizer]] = []
        self._trainings: list[CollectiveTraining] = []

    def join(self, role: Role) -> None:
        """Wait for the other trainers, and connect to them; see `fleet.init`.

        Raises
        ------
        ConfigurationError
            This trainer has already joined, or the environment requests something that collective training
            does not support.
        DeadlineExceededError
            A trainer did not join before the deadline for starting; the message names it.
        """
        if self.role is not None:
            raise ConfigurationError("fleet.init was called a second time; expected once per process")
        reason = refusal("FLEET_SYNC_MODE", role.sync_mode, SYNC_MODES[0], _HERE)
        if reason is not None:
            raise ConfigurationError(f"{reason} (of a FleetJob: spec.syncMode)")
        if folder := os.environ.get("FLEET_TLS_DIR", "").strip():
            raise ConfigurationError(
                f"FLEET_TLS_DIR is {folder!r}, but gloo, NCCL and torch's store do not support TLS; leave it "
                "unset in collective training, and use an encrypted network, such as WireGuard in Cilium or "
                "Calico"
            )
        lifecycle.start(role)
        end_if_finished(os.environ)
        keep_freed_memory(os.environ)
        world, deadlines = find_world(role, os.environ), Deadlines.from_environ(os.environ)
        progress.waits_for("the other trainers to join")
        self._group = Group.connect(world, deadlines, os.environ)
        progress.waits_for(None)
        self.role = replace(role, worker_endpoints=self._group.world.endpoints)
        progress.follow(lambda: self.step)
        lifecycle.joined()
        _log.info(
            "trainer %d joined the %d trainers at %s:%d", role.index, world.size, world.host, world.port
        )

    @property
    def step(self) -> int:
        """The number of times that the first optimizer's gradients have been averaged."""
        return self._distributed[0][1].steps.number if self._distributed else 0

    @property
    def distributes(self) -> bool:
        """True if at least one optimizer is distributed."""
        return bool(self._distributed)

    @property
    def group(self) -> Group:
        """The connected group of all trainers.

        Raises
        ------
        ConfigurationError
            This trainer has not joined, or has completed.
        """
        return self._joined()[1]

    @property
    def training(self) -> CollectiveTraining:
        """The training state of the only distributed optimizer, for saving, loading and exporting.

        Raises
        ------
        ConfigurationError
            There is none, or several.
        """
        if len(self._trainings) != 1:
            raise ConfigurationError(
                f"fleet has {len(self._trainings)} distributed optimizers; expected exactly one, from "
                "fleet.distributed_optimizer, to save, load or export"
            )
        return self._trainings[0]

    def train_programs_as(self, strategy: DistributedStrategy | DistributeTranspilerConfig | None) -> None:
        """Set the strategy with which an `Executor` trains a program that was built with layers.

        Raises
        ------
        ConfigurationError
            This trainer has not joined, or the strategy requests something unsupported.
        """
        self._joined()
        self.program_strategy = _checked(strategy)

    def distribute(
        self,
        optimizer: torch.optim.Optimizer,
        strategy: DistributedStrategy | DistributeTranspilerConfig | None = None,
        model: torch.nn.Module | None = None,
    ) -> torch.optim.Optimizer:
        """Make every backward pass average the gradients; see `fleet.distributed_optimizer`.

        Parameters
        ----------
        optimizer
            Any torch optimizer; the gradients of its parameters are averaged.
        strategy : optional
            As for `fleet.distributed_optimizer`.
        model : torch.nn.Module, optional
            The module that holds the parameters, which gives them names and has buffers.

        Raises
        ------
        ConfigurationError
            Another trainer's parameters or optimizer differ, or the strategy requests something unsupported.
        """
        _check(optimizer)
        chosen = _checked(strategy)
        role, group = self._joined()
        model = without_wrapper(model) if model is not None else None
        named = named_parameters(optimizer, model)
        copies = Copies(named, model, group, broadcast_buffers=chosen.broadcast_buffers)
        self._compare(group, optimizer, copies)
        copies.log_sharded()
        synchronizer = self._synchronizer(copies, optimizer, chosen)
        # Before the first broadcast, because this compares the devices of all trainers and connects them.
        synchronizer.start()
        copies.share("the initial values")
        self._distributed.append((copies, synchronizer))
        claims = Claims(f"trainer-{role.index}", role.job)
        self._trainings.append(CollectiveTraining(optimizer, model, synchronizer, group, claims, self.loops))
        if len(self._trainings) == 1:  # fleet saves nothing if there are several
            self._trainings[0].log_unsavable()
        finite = FiniteCheck(chosen.non_finite, group.world.rank, lambda: synchronizer.step_of_gradients)
        return distribute(optimizer, copies, synchronizer, model, finite=finite)

    def push(self) -> None:
        """Copy trainer 0's parameters to all trainers; see `fleet.push_parameters`."""
        self._joined()
        if not self._distributed:
            raise ConfigurationError("fleet.push_parameters was called before fleet.distributed_optimizer")
        for copies, _ in self._distributed:
            copies.push("fleet.push_parameters")

    def equalize(self, call: str) -> None:
        """Average the parameters if the trainers' copies differ, in which case every trainer must call this.

        Parameters
        ----------
        call : str
            The call of the script, which names this exchange.
        """
        synchronizer = self._distributed[0][1]
        if synchronizer.apart:
            synchronizer.equalize(call)

    def complete(self) -> None:
        """Wait until every trainer has finished, leave the group, and write the final progress.

        Raises
        ------
        ConfigurationError
            This trainer has not joined, or has already completed.
        PeerLostError
            A trainer is lost, or does not make this call before the deadline; the message names it.
        """
        role, group = self._joined()
        # Before the barrier, so that a save that fails ends this trainer while the others still wait for it.
        for training in self._trainings:
            training.finish()
        if lifecycle.refuses("fleet.stop_worker()"):
            return
        group.barrier("stop_worker()")
        for number, (copies, synchronizer) in enumerate(self._distributed):
            synchronizer.equalize(f"the end of optimizer {number}")
            synchronizer.close()
            synchronizer.steps.compare(f"the steps of optimizer {number}")
            tell_of_weights(dict(copies.whole), synchronizer.steps.number)
        group.close()
        self._completed = True
        _log.info("trainer %d has completed, and so have all others", role.index)
        trainers = range(_pods(role.worker_num, os.environ))
        if role.is_first_worker:
            leave_mark(os.environ, trainers)
        lifecycle.finish(trainers)

    def _synchronizer(
        self, copies: Copies, optimizer: torch.optim.Optimizer, strategy: DistributedStrategy
    ) -> Synchronizer:
        """Return the synchronizer that the strategy selects."""
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
        """Raise an error if trainers would exchange different tensors; such an exchange would never end."""
        lines = [f"the optimizer {type(optimizer).__name__}"]
        lines += copies.describe()
        lines += [
            f"{option}={value} in param group {number}"
            for number, options in enumerate(hyper_parameters(optimizer))
            for option, value in options.items()
        ]
        all_texts = group.agree(f"parameters of optimizer {len(self._distributed)}", "\n".join(lines))
        for rank, text in all_texts.items():
            theirs = text.split("\n")
            if theirs != lines:
                pairs = zip([*theirs, "nothing more"], [*lines, "nothing more"], strict=False)
                found, ours = next((a, b) for a, b in pairs if a != b)
                raise ConfigurationError(
                    f"{group.world.name(rank)} has {found[:MAX_DIFFERENCE]} where this trainer, "
                    f"{group.world.rank}, has {ours[:MAX_DIFFERENCE]}; expected the same model and optimizer "
                    "in every trainer, with the same hyper-parameters"
                )

    def _joined(self) -> tuple[Role, Group]:
        if self.role is None or self._group is None:
            raise ConfigurationError("fleet.init was not called; call it before any other call of fleet")
        if self._completed:
            raise ConfigurationError(
                "fleet.stop_worker was called, so this trainer has left the job; call it once, after "
                "everything that needs the other trainers"
            )
        return self.role, self._group


def _checked(strategy: DistributedStrategy | DistributeTranspilerConfig | None) -> DistributedStrategy:
    """Return the strategy after checking that collective training supports all its options."""
    chosen = strategy_of(strategy)
    chosen.check()
    chosen.check_works(_HERE)
    return chosen


def _check(optimizer: torch.optim.Optimizer) -> None:
    """Raise an error if an optimizer cannot be distributed."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(
            f"distributed_optimizer: found {type(optimizer).__name__}; expected a torch.optim.Optimizer"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigurationError(
            "distributed_optimizer: LBFGS chooses its step from the loss on a trainer's own data, so the "
            "trainers' models would differ; expected an optimizer whose steps depend only on the gradients, "
            "such as SGD or Adam"
        )
    if hasattr(optimizer, "fleet_synchronizer"):  # a distributed optimizer shares its attributes
        raise ConfigurationError(
            f"distributed_optimizer: this {type(optimizer).__name__} was already passed to it, or returned "
            "by it; expected one call for each optimizer: use the result of the first call"
        )


def _refuse_shared(copies: Copies, averaged: Iterable[Copies]) -> None:
    """Raise an error if another optimizer already averages the gradient of one of these parameters."""
    taken = {id(parameter) for each in averaged for _, parameter in each.whole}
    for name, parameter in copies.trained:
        if id(parameter) in taken:
            raise ConfigurationError(
                f"distributed_optimizer: {name} is also a parameter of an earlier distributed optimizer, and "
                "its gradient is averaged once; expected one distributed optimizer that holds all "
                "parameters: the script's other optimizers can step on the gradients that it averages "
                "without being distributed"
            )


def _compression(strategy: DistributedStrategy, group: Group) -> Compression | None:
    if strategy.power_sgd is not None:
        return partial(factorizing, strategy.power_sgd, group)
    return partial(rounding, strategy.wire_dtype) if strategy.wire_dtype is not None else None


def _pods(processes: int, environ: Mapping[str, str]) -> int:
    """Return the number of pods that run the job's processes; the operator counts pods, not processes."""
    slots = environ.get("LOCAL_WORLD_SIZE", "")
    return processes // int(slots) if slots.isdecimal() and 0 < int(slots) <= processes else processes


this_trainer: Final = Trainer()
"""The trainer in this process, if its job is collective."""
