"""Trainer halves for modes whose servers answer each gradient of a step with a value.

`AnsweredTrainer` waits for the answers in ``optimizer.step()``. `CrossStepTrainer` postpones the wait: in the
next forward pass, each layer waits for its own parameters just before it runs, while the values of later
layers are still in transit. The computation is the same. A script that reads a parameter outside the
parameter's layer would read an old value, so the step fails if a gradient shows that this has happened.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module

from fleet.errors import FleetError
from fleet.parameter_server.modes.mode import Session, TrainerMode
from fleet.plan.blocks import PlannedBlock
from fleet.wire import HyperParameters

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

__all__ = ["AnsweredTrainer", "CrossStepTrainer"]


class AnsweredTrainer(TrainerMode):
    """A trainer half that sends each gradient as it is computed, and waits for all answers in the step.

    Parameters
    ----------
    session : Session
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        # Bound directly, which saves a call: the backward pass sends every block through it.
        self.send = session.send_gradient  # type: ignore[method-assign]

    def begin(self, hyper_parameters: HyperParameters) -> None:
        """Begin a step, just before its first gradient."""
        self._session.expect_values()
        self._session.begin_step(hyper_parameters)

    def finish(self, absent: Sequence[PlannedBlock]) -> None:
        """End the step, and wait until the parameters have the resulting values."""
        self._session.end_step(absent)
        self._session.wait_for_values()
        self._session.adopt_values()
        self._session.advance()

    def across_steps(self, module: Module) -> TrainerMode | None:
        """Return a trainer half that postpones the wait to the next forward pass of this module.

        A subclass has steps of its own, which the other half would silently replace: it gets None.
        """
        return CrossStepTrainer(self._session, module) if type(self) is AnsweredTrainer else None


class CrossStepTrainer(TrainerMode):
    """A trainer half that ends a step without waiting; layers wait in the next forward pass.

    Parameters
    ----------
    session : Session
    module : Module
        The module. Each layer waits for its own parameters before its forward pass, and before its
        ``state_dict()`` is read.
    """

    def __init__(self, session: Session, module: Module) -> None:
        self._session = session
        self._module = module
        self._handles: list[RemovableHandle] = []
        self._blocks: dict[str, list[int]] = {}
        for block in session.plan.blocks:
            self._blocks.setdefault(block.param, []).append(block.id)
        self._outstanding: set[str] = set()
        """Parameters for which the latest values have not been adopted yet."""
        self._stale: frozenset[str] = frozenset()
        """Parameters that no layer has used in the forward pass of the current step."""

    def start(self) -> None:
        """Make every layer wait for its parameters."""
        name_of = {parameter: name for name, parameter in self._session.store.parameters.items()}
        for layer in self._module.modules():
            own = [name_of[each] for each in layer.parameters(recurse=False) if each in name_of]
            if own:
                adopt = self._adopt_hook(own)
                self._handles += [
                    layer.register_forward_pre_hook(adopt),
                    layer.register_state_dict_pre_hook(adopt),  # type: ignore[no-untyped-call]
                ]

    def begin(self, hyper_parameters: HyperParameters) -> None:
        """Begin a step, just before its first gradient."""
        self._stale = frozenset(self._outstanding)
        self.settle()
        self._session.expect_values()
        self._session.begin_step(hyper_parameters)

    def send(self, block: PlannedBlock, payload: memoryview) -> None:
        """Send a block's gradient.

        Raises
        ------
        FleetError
            The gradient was computed from values of the previous step.
        """
        if block.param in self._stale:
            raise FleetError(
                f"{block.param} has a gradient, but the module that owns it has run no forward pass in this "
                "step: the parameter was used before its new value arrived. Use parameters only through the "
                "modules that own them, or set DistributedStrategy(cross_step=False)"
            )
        self._session.send_gradient(block, payload)

    def finish(self, absent: Sequence[PlannedBlock]) -> None:
        """End the step without waiting for its values."""
        self._session.end_step(absent)
        self._session.advance()
        self._outstanding = set(self._blocks)

    def settle(self) -> None:
        """Wait for all values that are in transit, and adopt them."""
        if self._outstanding:
            self._session.wait_for_values()
            self._session.adopt_values(sorted(self._outstanding))
            self._outstanding.clear()

    def check_settled(self, call: str) -> None:
        """Raise FleetError if values are in transit, because the script has seen older values."""
        if self._outstanding:
            raise FleetError(
                f"{call} was called while the values of the last step were still in transit: the script has "
                "written to older values. Before writing, call model.state_dict(), which waits for the new "
                "ones; or set DistributedStrategy(cross_step=False)"
            )

    def stop(self) -> None:
        """Adopt the last values."""
        self.settle()
        self.close()

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _adopt_hook(self, names: Sequence[str]) -> Callable[..., None]:
        """Return a hook that waits for the new values of these parameters and adopts them."""

        def adopt(*_: Any) -> None:
            outstanding = self._outstanding.intersection(names)
            if outstanding:
                self._session.wait_for_some([block for name in outstanding for block in self._blocks[name]])
                self._session.adopt_values(sorted(outstanding))
                self._outstanding -= outstanding

        # torch.compile must call the hook, not trace it, because the hook waits for other threads.
        hook: Callable[..., None] = torch.compiler.disable(adopt)  # type: ignore[no-untyped-call]
        return hook
