"""A training run of one trainer, driven by a loop or by a program."""

import logging
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from fleet.checkpoint import TrainStatus, named_state
from fleet.errors import ConfigurationError
from fleet.parameter_server.control.reduction import Contribution
from fleet.parameter_server.facts import elastic_facts, initial_state_fact, state_of
from fleet.parameter_server.modes import (
    Mode,
    TrainerMode,
    mode_of_trainer,
)
from fleet.parameter_server.modes.mode import check_half
from fleet.parameter_server.settings import Settings
from fleet.parameter_server.trainer.agreement import note_steps_past
from fleet.parameter_server.trainer.checkpoints import TrainerCheckpoints
from fleet.parameter_server.trainer.gradients import GradientFlow
from fleet.parameter_server.trainer.local_steps import LocalSteps
from fleet.parameter_server.trainer.own_optimizer import Scaling
from fleet.parameter_server.trainer.parameters import check_dtype
from fleet.parameter_server.trainer.rows import rows_of_tables
from fleet.parameter_server.trainer.session import Session, join
from fleet.parameter_server.transport.arena import bytes_of, dtype_of
from fleet.parameter_server.waits import describe_blocks, name_servers
from fleet.plan import Source
from fleet.plan.config import DistributedMode
from fleet.plan.job import TrainerPlan
from fleet.plan.source import WITHOUT_NAMES, LeftOut
from fleet.process.finite import FiniteCheck, tell_of_weights
from fleet.tables.geo import server_config

if TYPE_CHECKING:
    from fleet.role_maker import JobIdentity

__all__ = ["Trainer"]

_PUSH: Final = "fleet.push_parameters"
_log = logging.getLogger(__name__)


class Trainer:
    """A training run of one trainer, in a session with the servers; see `Trainer.join`.

    Parameters
    ----------
    session : Session
    source : Source
        The module's parameters and the optimizer.
    kind : Mode
    overlap : bool or None
        Whether gradients are sent during the backward pass; see `GradientFlow`.
    cross_step : bool
        Whether the layers of the next forward pass, instead of ``step()``, wait for values.
    non_finite : str
        The action if gradients are not finite; see `FiniteCheck`.
    """

    def __init__(
        self,
        session: Session,
        source: Source,
        kind: Mode,
        *,
        overlap: bool | None,
        cross_step: bool,
        non_finite: str,
    ) -> None:
        self.session = session
        self.plan = session.plan
        """The plan that assigns the blocks to the servers."""
        self.completed = False
        """Whether the servers know that this trainer has completed."""
        self.steps_locally = kind.steps_locally
        """Whether this trainer's optimizer, not the servers, runs the steps and has the optimizer state."""
        self.checkpoints = TrainerCheckpoints(session, source, steps_locally=kind.steps_locally)
        self._source = source
        self._own_tables = source.own_tables
        self._kind = kind
        self._overlap = overlap
        self._cross_step = cross_step
        self._waits_for_values = session.plan.mode is DistributedMode.SYNC and not cross_step
        exchanged = (*source.parameters.values(), *self._own_tables.values())
        self._left_out = LeftOut(source.optimizer, exchanged, source.module)
        self._finite = FiniteCheck(non_finite, self.plan.trainer_id, lambda: session.step)
        self.mode, self.flow = self._make_steps()
        self._joined_at = session.step

    @classmethod
    def join(
        cls,
        plan: TrainerPlan,
        source: Source,
        job: "JobIdentity",
        settings: Settings,
        *,
        overlap: bool | None,
        cross_step: bool = False,
        non_finite: str = "warn",
        look: Callable[[], None] = lambda: None,
        completed: Callable[[Collection[int]], None] = lambda _: None,
    ) -> "Trainer":
        """Join the servers of a plan and load their values.

        Parameters
        ----------
        plan : TrainerPlan
        source : Source
        job : JobIdentity
        settings : Settings
        overlap, cross_step, non_finite
            See `Trainer`.
        look, completed : callable
            See `session.join`.

        Raises
        ------
        ConfigurationError
            `cross_step` is impossible, because the source has no module or the mode does not wait for each
            step; the script has converted the model; or a server refuses the trainer.
        PeerLostError
            A server does not answer in time.
        """
        kind = mode_of_trainer(plan, settings)
        facts = initial_state_fact(state_of(source))
        facts |= elastic_facts(kind, plan.trainers, settings.max_trainers)
        # Check this trainer for mistakes before it joins, while the others are not yet waiting for it.
        for block in plan.blocks:
            check_dtype(block.param, source.parameters[block.param], dtype_of(block.dtype))
        if plan.mode is DistributedMode.GEO:
            for table in plan.tables:
                server_config(table.config)
        if cross_step and source.module is None:
            raise ConfigurationError(
                "strategy.cross_step is True, but the layers that have to wait are unknown; pass the model, "
                "as in fleet.distributed_optimizer(optimizer, strategy, model=model)"
            )
        guarded = plan.custom is None and not kind.steps_locally
        session = join(
            plan, source.parameters, job, settings, facts, guarded=guarded, look=look, completed=completed
        )
        try:
            trainer = cls(
                session, source, kind, overlap=overlap, cross_step=cross_step, non_finite=non_finite
            )
        except BaseException:
            session.close()
            raise
        try:
            trainer.start()
        except BaseException:
            trainer.close()
            raise
        return trainer

    @property
    def current_step(self) -> int:
        """The number of steps completed since the start of the job."""
        return self.session.step

    def start(self) -> None:
        """If servers have loaded a checkpoint, restore trainer 0's part of the newest; start the mode."""
        self.checkpoints.restore_own_part()
        self.mode.start()
        self.flow.attach()
        for table in self._source.tables:
            if table.name not in self._own_tables:
                table.declared.bind(self.session.local_rows or self.session.rows)
        _log.info(
            "trainer %d joined %s at step %d with %s in mode %s",
            self.plan.trainer_id,
            name_servers(self.plan.endpoints),
            self.current_step,
            describe_blocks(self.plan.blocks),
            self.plan.agreement["mode"],
        )
        if self._joined_at:
            _log.info(
                "trainer %d joins late, at step %d: loops over fleet.epochs() and fleet.steps() resume "
                "there; any other loop must begin at fleet.step",
                self.plan.trainer_id,
                self._joined_at,
            )
        if not self._source.named:
            _log.info(WITHOUT_NAMES)

    @property
    def stepped_nothing(self) -> bool:
        """True if the last step is known to have changed no parameter."""
        return self._waits_for_values and self.session.nothing_changed

    def step(self, scaling: Scaling | None = None) -> None:
        """Run a step; see `GradientFlow.step`.

        Raises
        ------
        ConfigurationError
            Parameters have gradients that no server receives (see `LeftOut.check`), or have dtypes that
            differ from those on the servers (see `check_dtype`).
        FleetError
            The script has written to parameters; see `ParameterStore.check_kept`.
        """
        self._left_out.check()
        self.session.store.check_kept()
        for name, weight in self._own_tables.items():
            check_dtype(name, weight, torch.float32)
        self.flow.step(scaling)

    def step_as_the_own(self) -> None:
        """Run a step in place of the user's own optimizer, between that optimizer's step hooks."""
        self.flow.guard.replace(self.step)

    def settle(self) -> None:
        """Send all unsent data of completed steps, and load the resulting values."""
        self.mode.settle()
        self.session.rows.wait()
        self.session.rows.adopt()

    def push(self) -> None:
        """Overwrite the servers' values with the values that the script has written to the parameters.

        The values are sent block by block in control calls, which is fast enough for scripts that rarely
        write. As in a single process, the optimizer state, such as momentum, does not change.

        Raises
        ------
        ConfigurationError
            The mode is user-defined, or servers update rows of a table that trainers also store.
        FleetError
            Gradients have been sent, and ``step()`` was not called; or the last step's values are missing.
        """
        if self.plan.custom is not None:
            raise ConfigurationError(
                f"fleet.push_parameters() does not support the mode {self._kind.name!r}; expected sync, "
                "async, half_async or geo"
            )
        self._check_dtypes()
        if self._own_tables:
            raise ConfigurationError(
                f"fleet.push_parameters() cannot push {', '.join(self._own_tables)}, whose rows are stepped "
                "on the servers; write the values before fleet.init_worker(), in every role"
            )
        if self.steps_locally:
            return
        self.flow.check_nothing_in_flight(f"{_PUSH}() was called")
        self.mode.check_settled(f"{_PUSH}()")
        if self.plan.mode is DistributedMode.SYNC:
            self._push_together()
        else:
            self._push_alone()

    def _push_together(self) -> None:
        """Copy the first trainer's values to all trainers; all that have not completed must call this."""
        session, blocks, trainer = self.session, self.plan.blocks, self.plan.trainer_id
        held = session.store.checksums()
        own = np.array([held[block.id] for block in blocks] + [trainer], dtype=np.int64)
        # One reduction gives the maximum and, as the maximum of the negative numbers, the minimum.
        combined = session.calls.reduce(Contribution.of(np.stack([own, -own]), "max"), _PUSH)
        most, least = np.frombuffer(combined, dtype=np.int64).reshape(2, -1)
        first, unequal = -int(least[-1]), most[:-1] != -least[:-1]
        if first == trainer:
            self._write(session.store.value_bytes)
        # No trainer may request or keep the values before the first one has written all of them.
        session.calls.barrier()
        if not unequal.any():
            session.store.keep()
            return
        names = sorted({block.param for block, other in zip(blocks, unequal, strict=True) if other})
        _log.warning(
            "%s(): the trainers have written different values to %s%s; all trainers now have the values of "
            "trainer %d",
            _PUSH,
            ", ".join(names[:3]),
            " …" if len(names) > 3 else "",
            first,
        )
        session.take_values()

    def _push_alone(self) -> None:
        """Overwrite the servers' values with this trainer's, which other trainers receive later."""
        store = self.session.store
        written = {name: each.detach().cpu().contiguous().clone() for name, each in store.parameters.items()}
        store.forget()
        self.settle()  # may adopt earlier values, so copy the written ones first
        values: dict[int, memoryview] = {}
        for block in self.plan.blocks:
            value = written[block.param]
            size = value.element_size()
            values[block.id] = bytes_of(value)[block.begin * size : block.end * size]
        self._write(values.__getitem__)
        self.session.take_values()

    def _write(self, value_of: Callable[[int], memoryview]) -> None:
        """Send all blocks' values one at a time, because each may need a copy."""
        for block in self.plan.blocks:
            value = value_of(block.id)
            self.session.calls.ask(
                block.server,
                lambda control, seconds: control.write(block.id, value, seconds),  # noqa: B023
            )

    def save(self, directory: str, status: TrainStatus) -> None:
        """Save a checkpoint; see `Saver.save`.

        Raises
        ------
        FleetError
            Gradients have been sent, and ``step()`` was not called.
        """
        self._settle_for_checkpoint()
        self.checkpoints.save(directory, status)

    def save_numbered(self, folder: str, status: TrainStatus, *, keep: int, incremental: bool = False) -> int:
        """Save a checkpoint under the next number in a folder; see `Saver.save_numbered`.

        Raises
        ------
        FleetError
            See `save`.
        """
        self._settle_for_checkpoint()
        return self.checkpoints.save_numbered(folder, status, keep=keep, incremental=incremental)

    def submit_status(self, status: TrainStatus) -> None:
        """Send this trainer's script status to the servers; see `TrainerCheckpoints.submit_status`.

        Raises
        ------
        FleetError
            See `save`.
        """
        self._settle_for_checkpoint()
        self.checkpoints.submit_status(status)

    def _settle_for_checkpoint(self) -> None:
        self.flow.check_nothing_in_flight("a checkpoint was requested")
        self.settle()

    def clean(self, folder: str, keep: int) -> None:
        """Remove all checkpoints in a folder except the newest ones."""
        self.checkpoints.clean(folder, keep)

    def load(self, directory: str) -> TrainStatus | None:
        """Load a checkpoint and continue from it; see `TrainerCheckpoints.load`.

        Raises
        ------
        FleetError
            Gradients have been sent, and ``step()`` was not called.
        """
        self.flow.check_nothing_in_flight("a checkpoint was about to be loaded")
        self.checkpoints.wait()
        status, other_values = self.checkpoints.load(directory)
        if other_values:
            self._finite.restart()
            # A mode and a flow start from the servers' values and keep some of them, so both are rebuilt.
            self.flow.detach()
            self.mode.close()
            self.mode, self.flow = self._make_steps()
            self.mode.start()
            self.flow.attach()
        return status

    def complete(self) -> frozenset[int]:
        """Report this trainer's completion to the servers; the module keeps its last values.

        Returns
        -------
        frozenset of int
            The trainers that have completed according to all servers; see `Session.complete`.

        Raises
        ------
        FleetError
            Gradients have been sent, and ``step()`` was not called; or the script has written to parameters
            whose last values have not arrived.
        """
        if self.steps_locally:  # the last changes have not been sent yet
            self._check_dtypes()
        self.checkpoints.finish()
        self.flow.check_nothing_in_flight("training was ended")
        self.flow.detach()
        self.mode.stop()
        self.flow.check_earlier()
        if self._joined_at:
            note_steps_past(self.plan.trainer_id, self.session.calls)
        tell_of_weights(self._source.parameters, self.current_step, self._finite.lost_rows)
        known = self.session.complete()
        self.completed = True
        _log.info("trainer %d has completed, at step %d", self.plan.trainer_id, self.current_step)
        return known

    def export(self, table_ids: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
        """Return a state dict for ``load_state_dict`` in a single process; see `named_state`.

        The values are the servers' or, once this trainer has completed, those of the module.

        Parameters
        ----------
        table_ids : mapping of str to int[n], optional
            For each table on the servers, the ids of the rows to include; see `rows_of_tables`.

        Raises
        ------
        ConfigurationError
            No ids are given for a table, there is no table with a given name, or this trainer has completed.
        """
        if self.completed:
            values = {name: each.detach().cpu().clone() for name, each in self._source.parameters.items()}
        else:
            self.settle()
            values = self.checkpoints.values()
        return named_state(self._source, values) | rows_of_tables(self._source, table_ids or {})

    def fetch_state(self) -> dict[str, dict[str, Any]]:
        """Fetch the optimizer state of all parameters from the servers.

        Returns
        -------
        dict
            See `ServerCalls.optimizer_state`. If trainers step locally, the state is this trainer's own.
        """
        if self.steps_locally:
            return {name: dict(state) for name, state in state_of(self._source).items() if state}
        self.settle()
        return self.session.calls.optimizer_state()

    @property
    def names(self) -> Mapping[Parameter, str]:
        """The name of each parameter in the program."""
        return {parameter: name for name, parameter in self._source.parameters.items()}

    def close(self) -> None:
        """End the session without completing, so that servers treat this trainer as lost."""
        self.flow.detach()
        # Before the mode, whose threads wait for the session and are joined when the mode closes.
        self.session.close()
        self.mode.close()

    def _check_dtypes(self) -> None:
        """Raise an error if the script has converted a parameter; see `check_dtype`."""
        self.session.store.check_dtypes()
        for name, weight in self._own_tables.items():
            check_dtype(name, weight, torch.float32)

    def _make_steps(self) -> tuple[TrainerMode, GradientFlow | LocalSteps]:
        session, source = self.session, self._source
        half = self._kind.make_trainer(session)
        mode = check_half(half, TrainerMode, self._kind)  # type: ignore[type-abstract]
        if self._cross_step:
            crossing = None if source.module is None else mode.across_steps(source.module)
            if crossing is None:
                raise ConfigurationError(
                    f"strategy.cross_step is True, but in the mode {self._kind.name!r} optimizer.step() does "
                    "not wait for the values of its own step; expected cross_step=False, or the mode 'sync' "
                    "or 'async'"
                )
            mode = crossing
        if self._kind.steps_locally:
            return mode, LocalSteps(source.optimizer, mode, self._finite, session.local_rows)
        return mode, GradientFlow(
            self.plan,
            source.parameters,
            source.optimizer,
            mode,
            overlap=self._overlap,
            outlasting=self._cross_step,
            finite=self._finite,
            rows=session.rows,
        )
