"""One trainer's training: what the loop form and the program form both run on."""

import logging
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from fleet import progress
from fleet.checkpoint import TrainStatus, named_state
from fleet.errors import ConfigurationError
from fleet.finite import tell_of_weights
from fleet.parameter_server.control.reduction import Contribution
from fleet.parameter_server.control.state_stream import join_states
from fleet.parameter_server.elastic import elastic_facts
from fleet.parameter_server.modes import (
    AnsweredTrainer,
    CrossStepTrainer,
    Settling,
    TrainerMode,
    mode_of_trainer,
)
from fleet.parameter_server.naming import describe_blocks, name_servers
from fleet.parameter_server.optimizer_state import initial_state_fact, state_of
from fleet.parameter_server.settings import Settings
from fleet.parameter_server.trainer.checkpoints import TrainerCheckpoints
from fleet.parameter_server.trainer.client import Client
from fleet.parameter_server.trainer.gradients import GradientFlow
from fleet.parameter_server.trainer.local_steps import LocalSteps
from fleet.parameter_server.trainer.parameters import ParameterStore
from fleet.parameter_server.trainer.pushing import push_alone, push_together
from fleet.parameter_server.trainer.scaling import Scaling
from fleet.program import Source
from fleet.program.left_out import LeftOut
from fleet.transpiler.config import DistributedMode
from fleet.transpiler.lowering import TrainerPlan

if TYPE_CHECKING:
    from fleet.role_maker import JobIdentity

__all__ = ["Trainer"]

_log = logging.getLogger(__name__)


class Trainer:
    """Follows the plan of a transpiled trainer program.

    Parameters
    ----------
    plan : TrainerPlan
    source : Source
        The module's parameters and the optimizer.
    job : JobIdentity
    settings : Settings
    overlap : bool or None
        Whether gradients leave during the backward pass; as of `GradientFlow`.
    cross_step : bool
        Whether values are awaited layer by layer in the next forward pass.

    Raises
    ------
    ConfigurationError
        `cross_step` cannot be honoured: the source has no module, or the mode does not wait for each step.
    """

    def __init__(
        self,
        plan: TrainerPlan,
        source: Source,
        job: "JobIdentity",
        settings: Settings,
        *,
        overlap: bool | None,
        cross_step: bool = False,
    ) -> None:
        self.plan = plan
        self._source = source
        self.completed = False
        """Whether the servers know that this trainer has finished."""
        self._joined_at = 0
        self._parameters: Mapping[str, Parameter] = source.parameters
        self._left_out = LeftOut(source.optimizer, source.parameters.values(), source.module)
        mode = mode_of_trainer(plan, settings)
        guarded = plan.custom is None and not mode.steps_locally
        self._store = ParameterStore(plan.blocks, self._parameters, guarded=guarded)
        facts = initial_state_fact(state_of(source))
        facts |= elastic_facts(mode, plan.trainers, settings.max_trainers)
        self._client = Client(self.plan, job, self._store, settings, facts)
        self.steps_locally = mode.steps_locally
        """Whether the user's own optimizer steps, and has the state."""
        self.checkpoints = TrainerCheckpoints(self._client, source, steps_locally=mode.steps_locally)
        self._overlap = overlap
        self._cross_step = cross_step
        self._kind = mode
        self._mode, self.flow = self._make_halves()

    @property
    def current_step(self) -> int:
        """The number of steps made, from the job's beginning."""
        return self._client.step

    @property
    def names(self) -> Mapping[Parameter, str]:
        """The parameters' names in the program."""
        return {parameter: name for name, parameter in self._parameters.items()}

    def start(
        self,
        look: Callable[[], None] = lambda: None,
        told: Callable[[Collection[int]], None] = lambda _: None,
    ) -> None:
        """Join the servers and take their values; see `Client.start`."""
        self._client.start(look, told)
        try:
            self.checkpoints.take_part()
        except BaseException:
            self._client.close()
            raise
        self._mode.start()
        self.flow.attach()
        _log.info(
            "trainer %d joined %s at step %d with %s in mode %s",
            self.plan.trainer_id,
            name_servers(self.plan.endpoints),
            self.current_step,
            describe_blocks(self.plan.blocks),
            self.plan.agreement["mode"],
        )
        self._joined_at = self.current_step
        if self._joined_at:
            _log.info(
                "trainer %d joins late, at step %d of the training: loops over fleet.epochs() and "
                "fleet.steps() go on there by themselves, any other has to begin at fleet.step",
                self.plan.trainer_id,
                self._joined_at,
            )
        if not self._source.named:
            _log.info(
                "parameters are told by their places in the optimizer (param_0_0, …), as no single module "
                "holds them all; model=model in fleet.distributed_optimizer, or an optimizer that is built "
                "from named parameters, gives them names"
            )

    def step(self, scaling: Scaling | None = None) -> bool:
        """Make one step; see `GradientFlow.step`.

        Returns
        -------
        bool
            Whether it is known that no parameter was stepped.

        Raises
        ------
        ConfigurationError
            Parameters have gradients that no server hears of; see `LeftOut.check`.
        FleetError
            The script has written to parameters; see `ParameterStore.check_kept`.
        """
        self._left_out.check()
        self._store.check_kept()
        self.flow.step(scaling)
        return (
            self.plan.mode is DistributedMode.SYNC and not self._cross_step and self._client.nothing_changed
        )

    def push(self) -> None:
        """Make the servers' values those that the script has written to parameters; see `pushing`.

        Raises
        ------
        ConfigurationError
            Nobody knows what that means in a mode of the script's own.
        FleetError
            Gradients have been sent, and ``step()`` was not called; or the last step's values are not here.
        """
        if self.plan.custom is not None:
            raise ConfigurationError(
                f"fleet.push_parameters() does nothing that the mode {self._kind.name!r} knows of; expected "
                "one of the modes sync, async, half_async and geo"
            )
        if self.steps_locally:
            return
        self.flow.check_nothing_in_flight("fleet.push_parameters() was called")
        if isinstance(self._mode, CrossStepTrainer):
            self._mode.check_settled("fleet.push_parameters()")
        if self.plan.mode is DistributedMode.SYNC:
            push_together(self._client)
        else:
            push_alone(self._client, self._settle)

    def barrier(self) -> None:
        """Wait for the other trainers."""
        self._client.meetings.barrier()

    def reduce(self, given: Contribution) -> bytes:
        """Combine numbers with those of the other trainers."""
        return self._client.meetings.reduce(given)

    def save(self, directory: str, status: TrainStatus) -> None:
        """Save a checkpoint; see `TrainerCheckpoints.save`.

        Raises
        ------
        FleetError
            Gradients have been sent, and ``step()`` was not called.
        """
        self.flow.check_nothing_in_flight("a checkpoint was asked for")
        self._settle()
        self.checkpoints.save(directory, status)

    def save_numbered(self, folder: str, status: TrainStatus, *, keep: int) -> int:
        """Save a checkpoint under a folder's next number; see `TrainerCheckpoints.save_numbered`.

        Raises
        ------
        FleetError
            As in `save`.
        """
        self.flow.check_nothing_in_flight("a checkpoint was asked for")
        self._settle()
        return self.checkpoints.save_numbered(folder, status, keep)

    def clean(self, folder: str, keep: int) -> None:
        """Remove a folder's checkpoints but the newest."""
        self.checkpoints.clean(folder, keep)

    def load(self, directory: str) -> TrainStatus | None:
        """Go on from a checkpoint; see `TrainerCheckpoints.load`.

        Raises
        ------
        FleetError
            Gradients have been sent, and ``step()`` was not called.
        """
        self.flow.check_nothing_in_flight("a checkpoint was to be loaded")
        status, other_values = self.checkpoints.load(directory)
        if other_values:
            self.flow.detach()
            self._mode.close()
            self._mode, self.flow = self._make_halves()
            self._mode.start()
            self.flow.attach()
        return status

    def complete(self) -> frozenset[int]:
        """Finish: the servers go on without this trainer. The module keeps the last values.

        Returns
        -------
        frozenset of int
            The trainers that have completed, as all servers know; see `Client.complete`.

        Raises
        ------
        FleetError
            Gradients have been sent, and ``step()`` was not called; or the script has written to parameters
            whose last values are still to come.
        """
        self.flow.check_nothing_in_flight("the training was ended")
        self.flow.detach()
        self._mode.stop()
        if isinstance(self.flow, GradientFlow):
            self.flow.check_earlier()
        self._note_steps_past()
        tell_of_weights(self._parameters, self.current_step)
        known = self._client.complete()
        self.completed = True
        _log.info("trainer %d has completed, at step %d", self.plan.trainer_id, self.current_step)
        return known

    def _note_steps_past(self) -> None:
        """Say how many steps this trainer has made past the others, if it has joined late."""
        if not self._joined_at:
            return
        replies = self._client.ask_all(lambda control, seconds: control.ask_steps_past(seconds))
        if past := max(reply.steps_past for reply in replies):
            progress.count("steps_past_the_others", past)
            _log.warning(
                "trainer %d, which joined late, has made %d steps past the others, on its data alone; a loop "
                "over fleet.epochs() or fleet.steps() makes none",
                self.plan.trainer_id,
                past,
            )

    def export(self) -> dict[str, Tensor]:
        """Return the model as one process's ``load_state_dict`` takes it; see `named_state`.

        The values are the servers'; once this trainer has completed, those that the module keeps.
        """
        if self.completed:
            values = {name: parameter.detach().cpu().clone() for name, parameter in self._parameters.items()}
        else:
            self._settle()
            values = self.checkpoints.values()
        return named_state(self._source, values)

    def close(self) -> None:
        """End without a word: to the servers this trainer is lost."""
        self.flow.detach()
        self._client.close()
        self._mode.close()

    def fetch_state(self) -> dict[str, dict[str, Any]]:
        """Fetch the optimizers' state from the servers, put together by parameter.

        Returns
        -------
        dict
            Per parameter's name the entries that torch.optim has for it. An entry of the blocks' shapes
            gets the parameter's; of any other, as a count of steps, the first block's stands for all.
            Where trainers step by themselves the state is this trainer's own.
        """
        if self.steps_locally:
            return {name: dict(state) for name, state in state_of(self._source).items() if state}
        self._settle()
        states = join_states(self._client.optimizer_state())
        return {name: state for name in self._parameters if (state := self._put_together(name, states))}

    def _settle(self) -> None:
        """Let the servers have all of the steps made so far."""
        if isinstance(self._mode, Settling):
            self._mode.settle()

    def _make_halves(self) -> tuple[TrainerMode, GradientFlow | LocalSteps]:
        """Make the mode's half, and what brings it the gradients."""
        mode, source = self._kind.make_trainer(self._client), self._source
        if self._cross_step:
            mode = self._across_steps(mode)
        if self.steps_locally:
            return mode, LocalSteps(source.optimizer, mode)
        flow = GradientFlow(
            self.plan,
            self._parameters,
            source.optimizer,
            mode,
            overlap=self._overlap,
            outlasting=self._cross_step,
        )
        return mode, flow

    def _across_steps(self, half: TrainerMode) -> TrainerMode:
        """Return what waits in the next forward pass in place of a half that waits in each step."""
        if type(half) is not AnsweredTrainer:
            raise ConfigurationError(
                f"strategy.cross_step is True, and in the mode {self._kind.name!r} optimizer.step() does not "
                "wait for its own values; use cross_step = False, or the mode 'sync' or 'async'"
            )
        if self._source.module is None:
            raise ConfigurationError(
                "strategy.cross_step is True, and the layers that are to wait are not known: give the model, "
                "as in fleet.distributed_optimizer(optimizer, strategy, model=model)"
            )
        return CrossStepTrainer(self._client, self._source.module)

    def _put_together(self, name: str, states: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
        blocks = self.plan.blocks_of(name)
        state: dict[str, Any] = {}
        for entry, first in states[blocks[0].id].items():
            one_each = isinstance(first, Tensor) and first.shape == blocks[0].shape
            if one_each and blocks[0].param_shape:
                parts = [states[block.id][entry].view(-1) for block in blocks]
                state[entry] = torch.cat(parts).view(blocks[0].param_shape)
            else:
                state[entry] = first
        return state
