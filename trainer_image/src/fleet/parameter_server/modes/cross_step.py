"""Steps whose new values are awaited layer by layer in the next forward pass, and not in ``step()``.

While the first layers compute, the values of the later ones still travel. What is computed is the same: each
layer waits for its own parameters before it runs. Who reads a parameter elsewhere reads it too early, so
where a gradient shows that this has happened it is an error.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fleet.errors import FleetError
from fleet.parameter_server.modes.answered import AnsweredTrainer
from fleet.parameter_server.modes.interface import Session
from fleet.plan.blocks import PlannedBlock
from fleet.wire import HyperParameters

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.utils.hooks import RemovableHandle

__all__ = ["CrossStepTrainer"]


class CrossStepTrainer(AnsweredTrainer):
    """A trainer's half that ends a step once its gradients are enqueued; see `TrainerMode`.

    Parameters
    ----------
    session : Session
    module : Module
        Each of its layers waits for its own parameters, before its forward pass and before its
        ``state_dict()`` is read.
    """

    def __init__(self, session: Session, module: "Module") -> None:
        super().__init__(session)
        self._module = module
        self._handles: list[RemovableHandle] = []
        self._blocks = {name: [block.id for block in session.plan.blocks_of(name)] for name in self._names()}
        self._outstanding: set[str] = set()
        """Parameters whose newest values are not adopted yet."""
        self.send = self._send
        self._passed_over: frozenset[str] = frozenset()
        """Those of the step in progress: no layer of theirs has run in its forward pass."""

    def start(self) -> None:
        """Let every layer wait for its parameters from now on."""
        name_of = {parameter: name for name, parameter in self._session.store.parameters.items()}
        for layer in self._module.modules():
            own = [name_of[each] for each in layer.parameters(recurse=False) if each in name_of]
            if own:
                take = self._taker(own)
                self._handles += [
                    layer.register_forward_pre_hook(take),
                    layer.register_state_dict_pre_hook(take),  # type: ignore[no-untyped-call]
                ]

    def begin(self, hyper_parameters: HyperParameters) -> None:
        """Begin a step, just before its first gradient."""
        self._passed_over = frozenset(self._outstanding)
        self.settle()
        super().begin(hyper_parameters)

    def _send(self, block: PlannedBlock, payload: memoryview) -> None:
        """Send a block's gradient.

        Raises
        ------
        FleetError
            The gradient was computed from values of the step before.
        """
        if block.param in self._passed_over:
            raise FleetError(
                f"{block.param} has a gradient, but no forward pass of the module that owns it came before: "
                "it was used before its new value was there. Use parameters through the modules that own "
                "them, or DistributedStrategy(cross_step=False)"
            )
        self._session.send_gradient(block, payload)

    def finish(self, absent: Sequence[PlannedBlock]) -> None:
        """End the step; its values are awaited where they are needed."""
        self._session.end_step(absent)
        self._session.advance()
        self._outstanding = set(self._blocks)

    def settle(self) -> None:
        """Take every value that is still under way."""
        if self._outstanding:
            self._session.wait_for_values()
            self._session.adopt_values(sorted(self._outstanding))
            self._outstanding.clear()

    def check_settled(self, call: str) -> None:
        """Refuse what is about values that the script has seen, while newer ones are under way.

        Raises
        ------
        FleetError
            Some are.
        """
        if self._outstanding:
            raise FleetError(
                f"{call} came while the values of the last step were still under way: what the script has "
                "written, it has written to older ones. Call model.state_dict(), which waits for them, "
                "before writing; or use DistributedStrategy(cross_step=False)"
            )

    def stop(self) -> None:
        """Take the last values."""
        self.settle()
        self.close()

    def close(self) -> None:
        """Let no layer wait any more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _names(self) -> dict[str, None]:
        return dict.fromkeys(block.param for block in self._session.plan.blocks)

    def _taker(self, names: Sequence[str]) -> Callable[..., None]:
        """Return a hook that takes the new values of these parameters, if there are any."""

        def take(*_: Any) -> None:
            taken = self._outstanding.intersection(names)
            if taken:
                self._session.wait_for_some([block for name in taken for block in self._blocks[name]])
                self._session.adopt_values(sorted(taken))
                self._outstanding -= taken

        hook: Callable[..., None] = torch.compiler.disable(take)  # type: ignore[no-untyped-call]
        return hook
