"""One trainer's training: what the loop form and the program form both run on."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from fleet.parameter_server.arena import bytes_of, dtype_of
from fleet.parameter_server.client import Client
from fleet.parameter_server.gradients import GradientFlow
from fleet.parameter_server.local_steps import LocalSteps
from fleet.parameter_server.modes import mode_of_trainer
from fleet.parameter_server.parameters import ParameterStore
from fleet.parameter_server.settings import Settings
from fleet.program import Source
from fleet.transpiler.lowering import TrainerPlan

if TYPE_CHECKING:
    from fleet.role_maker import JobIdentity

__all__ = ["Trainer"]


class Trainer:
    """Follows the plan of a transpiled trainer program.

    Parameters
    ----------
    plan : TrainerPlan
    source : Source
        The module's parameters and the optimizer.
    job : JobIdentity
    settings : Settings
    overlap : bool
        Whether gradients leave during the backward pass.
    """

    def __init__(
        self, plan: TrainerPlan, source: Source, job: "JobIdentity", settings: Settings, *, overlap: bool
    ) -> None:
        self.plan = plan
        self._parameters: Mapping[str, Parameter] = source.parameters
        self._store = ParameterStore(self.plan.blocks, self._parameters)
        self._client = Client(self.plan, job, self._store, settings)
        self._optimizer = source.optimizer
        mode = mode_of_trainer(plan, settings)
        self.steps_locally = mode.steps_locally
        """Whether the user's own optimizer steps, and has the state."""
        self._mode = mode.make_trainer(self._client)
        self.flow: GradientFlow | LocalSteps
        if mode.steps_locally:
            self.flow = LocalSteps(source.optimizer, self._mode)
        else:
            self.flow = GradientFlow(plan, self._parameters, source.optimizer, self._mode, overlap=overlap)

    @property
    def current_step(self) -> int:
        """The number of steps made, from the job's beginning."""
        return self._client.step

    @property
    def names(self) -> Mapping[Parameter, str]:
        """The parameters' names in the program."""
        return {parameter: name for name, parameter in self._parameters.items()}

    def start(self) -> None:
        """Join the servers and take their values; see `Client.start`."""
        self._client.start()
        self._mode.start()
        self.flow.attach()

    def step(self) -> None:
        """Make one step; see `GradientFlow.step`."""
        self.flow.step()

    def barrier(self) -> None:
        """Wait for the other trainers."""
        self._client.barrier()

    def complete(self) -> None:
        """Finish: the servers go on without this trainer. The module keeps the last values.

        Raises
        ------
        FleetError
            Gradients have been sent, and ``step()`` was not called.
        """
        self.flow.check_nothing_in_flight("the training was ended")
        self.flow.detach()
        self._mode.stop()
        self._client.complete()

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
            own = self._optimizer.state
            return {
                name: dict(own[parameter]) for name, parameter in self._parameters.items() if parameter in own
            }
        pieces: dict[tuple[int, str], Tensor] = {}
        data = bytearray()
        for piece in self._client.optimizer_state():
            data += piece.data
            if piece.last:
                tensor = torch.empty(tuple(piece.shape), dtype=dtype_of(piece.dtype))
                bytes_of(tensor)[:] = data
                pieces[piece.block, piece.name] = tensor
                data.clear()
        return {name: state for name in self._parameters if (state := self._put_together(name, pieces))}

    def _put_together(self, name: str, pieces: Mapping[tuple[int, str], Tensor]) -> dict[str, Any]:
        blocks = self.plan.blocks_of(name)
        entries = [entry for block, entry in pieces if block == blocks[0].id]
        state: dict[str, Any] = {}
        for entry in entries:
            first = pieces[blocks[0].id, entry]
            if first.shape == blocks[0].shape and blocks[0].param_shape:
                parts = [pieces[block.id, entry].view(-1) for block in blocks]
                state[entry] = torch.cat(parts).view(blocks[0].param_shape)
            else:
                state[entry] = first
        return state
