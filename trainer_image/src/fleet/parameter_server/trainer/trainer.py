"""One trainer's training: what the loop form and the program form both run on."""

import logging
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fleet.checkpoint import TrainStatus, named_state
from fleet.errors import ConfigurationError
from fleet.parameter_server.elastic import elastic_facts
from fleet.parameter_server.modes import mode_of_trainer
from fleet.parameter_server.naming import describe_blocks, name_servers
from fleet.parameter_server.optimizer_state import initial_state_fact, state_of
from fleet.parameter_server.settings import Settings
from fleet.parameter_server.trainer.agreement import note_steps_past
from fleet.parameter_server.trainer.checkpoints import TrainerCheckpoints
from fleet.parameter_server.trainer.client import Client
from fleet.parameter_server.trainer.parameters import ParameterStore, check_dtype
from fleet.parameter_server.trainer.pushing import push_alone, push_together
from fleet.parameter_server.trainer.scaling import Scaling
from fleet.parameter_server.trainer.served_rows import rows_of_tables
from fleet.parameter_server.trainer.state import read_state
from fleet.parameter_server.trainer.steps import Steps
from fleet.plan import Source
from fleet.plan.config import DistributedMode
from fleet.plan.job import TrainerPlan
from fleet.plan.source import WITHOUT_NAMES, LeftOut
from fleet.process.finite import FiniteCheck, tell_of_weights

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
    non_finite : str
        What is done about gradients that are not finite; as of `FiniteCheck`.

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
        non_finite: str = "warn",
    ) -> None:
        self.completed = False
        """Whether the servers know that this trainer has finished."""
        self._source = source
        self._joined_at = 0
        exchanged = (*source.parameters.values(), *source.own_tables.values())
        self._left_out = LeftOut(source.optimizer, exchanged, source.module)
        self._kind = mode_of_trainer(plan, settings)
        self.steps_locally = self._kind.steps_locally
        """Whether the user's own optimizer steps, and has the state."""
        guarded = plan.custom is None and not self.steps_locally
        store = ParameterStore(plan.blocks, source.parameters, guarded=guarded)
        facts = initial_state_fact(state_of(source))
        facts |= elastic_facts(self._kind, plan.trainers, settings.max_trainers)
        self._client = Client(plan, job, store, settings, facts)
        self.barriers = self._client.barriers
        """Where this trainer waits for the others."""
        self.checkpoints = TrainerCheckpoints(self._client, source, steps_locally=self.steps_locally)
        self._finite = FiniteCheck(non_finite, plan.trainer_id, lambda: self.current_step)
        self.steps = Steps(
            self._kind,
            self._client.session,
            source,
            overlap=overlap,
            cross_step=cross_step,
            finite=self._finite,
            rows=self._client.rows,
        )

    @property
    def plan(self) -> TrainerPlan:
        """What this trainer follows: once it has joined, with the blocks that the servers hold."""
        return self._client.session.plan

    @property
    def current_step(self) -> int:
        """The number of steps made, from the job's beginning."""
        return self._client.session.step

    def start(
        self,
        look: Callable[[], None] = lambda: None,
        told: Callable[[Collection[int]], None] = lambda _: None,
    ) -> None:
        """Join the servers and take their values; see `Client.start`."""
        self._client.start(look, told)
        try:
            self.checkpoints.restore_own_part()
        except BaseException:
            self._client.close()
            raise
        self.steps.restart()  # with the blocks that the servers hold
        for table in self._source.tables:
            if table.name not in self._source.own_tables:
                table.declared.bind(self._client.session.local_rows or self._client.rows)
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
            _log.info(WITHOUT_NAMES)

    def step(self, scaling: Scaling | None = None) -> bool:
        """Make one step; see `GradientFlow.step`.

        Returns
        -------
        bool
            Whether it is known that no parameter was stepped.

        Raises
        ------
        ConfigurationError
            Parameters have gradients that no server hears of, see `LeftOut.check`; or other dtypes than on
            the servers, see `check_dtype`.
        FleetError
            The script has written to parameters; see `ParameterStore.check_kept`.
        """
        self._left_out.check()
        self._client.session.store.check_kept()
        self._check_tables()
        self.steps.step(scaling)
        in_step = self.plan.mode is DistributedMode.SYNC and not self.steps.crosses
        return in_step and self._client.values.nothing_changed

    def step_as_the_own(self) -> None:
        """Make one step in the place of that of the script's own optimizer, within the hooks on it."""
        self.steps.flow.own_step.replace(self.step)

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
        self._check_dtypes()
        if self._source.own_tables:
            raise ConfigurationError(
                f"fleet.push_parameters() carries no rows of {', '.join(self._source.own_tables)}, which the "
                "servers step by row; write before fleet.init_worker(), in every role alike"
            )
        if self.steps_locally:
            return
        self.steps.check_settled("fleet.push_parameters()")
        if self.plan.mode is DistributedMode.SYNC:
            push_together(self._client)
        else:
            push_alone(self._client, self.steps.settle)

    def save(self, directory: str, status: TrainStatus) -> None:
        """Save a checkpoint; see `Saver.save`.

        Raises
        ------
        FleetError
            Gradients have been sent, and ``step()`` was not called.
        """
        self.steps.flow.check_nothing_in_flight("a checkpoint was asked for")
        self.steps.settle()
        self.checkpoints.save(directory, status)

    def save_numbered(self, folder: str, status: TrainStatus, *, keep: int, incremental: bool = False) -> int:
        """Save a checkpoint under a folder's next number; see `Saver.save_numbered`.

        Raises
        ------
        FleetError
            As in `save`.
        """
        self.steps.flow.check_nothing_in_flight("a checkpoint was asked for")
        self.steps.settle()
        return self.checkpoints.save_numbered(folder, status, keep=keep, incremental=incremental)

    def hand_in(self, status: TrainStatus) -> None:
        """Say how far this trainer's script has come; see `TrainerCheckpoints.hand_in`.

        Raises
        ------
        FleetError
            As in `save`.
        """
        self.steps.flow.check_nothing_in_flight("a checkpoint was asked for")
        self.steps.settle()
        self.checkpoints.hand_in(status)

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
        self.steps.flow.check_nothing_in_flight("a checkpoint was to be loaded")
        self.checkpoints.wait()
        status, other_values = self.checkpoints.load(directory)
        if other_values:
            self._finite.lost_rows.clear()
            self.steps.restart()
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
        if self.steps_locally:  # the last changes are still to leave
            self._check_dtypes()
        self.checkpoints.finish()
        self.steps.stop()
        if self._joined_at:
            note_steps_past(self.plan.trainer_id, self._client.calls)
        tell_of_weights(self._source.parameters, self.current_step, self._finite.lost_rows)
        known = self._client.complete()
        self.completed = True
        _log.info("trainer %d has completed, at step %d", self.plan.trainer_id, self.current_step)
        return known

    def export(self, table_ids: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
        """Return the model as one process's ``load_state_dict`` takes it; see `named_state`.

        The values are the servers'; once this trainer has completed, those that the module keeps.

        Parameters
        ----------
        table_ids : mapping of str to int[n], optional
            By table on the servers, the ids whose rows are to be there too; see `rows_of_tables`.

        Raises
        ------
        ConfigurationError
            A table has no ids, or there is none of that name; or this trainer has completed.
        """
        if self.completed:
            values = {
                name: parameter.detach().cpu().clone() for name, parameter in self._source.parameters.items()
            }
        else:
            self.steps.settle()
            values = self.checkpoints.values()
        return named_state(self._source, values) | rows_of_tables(self._source, table_ids or {})

    def close(self) -> None:
        """End without a word: to the servers this trainer is lost."""
        self.steps.flow.detach()
        self._client.close()
        self.steps.mode.close()

    def _check_dtypes(self) -> None:
        """Check that the script has converted nothing since; see `check_dtype`."""
        self._client.session.store.check_dtypes()
        self._check_tables()

    def _check_tables(self) -> None:
        for name, weight in self._source.own_tables.items():
            check_dtype(name, weight, torch.float32)

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
        self.steps.settle()
        return read_state(self.plan, self._client.calls, self._source.parameters)
