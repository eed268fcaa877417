"""Which gradients are this trainer's own, so that a step on them would train another model here."""

from collections.abc import Collection, Sequence

import torch

from fleet.errors import ConfigurationError

__all__ = ["OwnGradients"]


class OwnGradients:
    """Knows the gradients that were averaged since the last step.

    Parameters
    ----------
    named : sequence of (str, Tensor)
        The parameters.
    """

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._named = named
        self._everything = frozenset(range(len(named)))
        self._own = set(self._everything)
        self._handed_back: dict[int, int] = {}
        """The address of each average that was handed back last."""
        self._accumulated = False
        self._unknown = False

    def accumulate(self, position: int) -> None:
        """Take note of a gradient that is to be averaged with those of a later pass.

        Added to an average in place, it makes that this trainer's own.
        """
        self._accumulated = True
        gradient = self._named[position][1].grad
        if gradient is not None and gradient.data_ptr() == self._handed_back.get(position):
            del self._handed_back[position]
            self._own.add(position)

    def average(
        self, averages: Sequence[torch.Tensor], unused: Collection[int] = (), *, captured: bool
    ) -> None:
        """Take note of the averages, of all parameters but some that nobody uses.

        Where a graph captures them, its replays will make others of which nobody is told.
        """
        self._unknown |= captured
        self._accumulated = False
        self._handed_back = dict(enumerate(map(torch.Tensor.data_ptr, averages)))
        for position in unused:
            del self._handed_back[position]
        self._own.intersection_update(unused)

    def step(self) -> bool:
        """Take note of a step; return whether it can have changed something."""
        if self._own == self._everything and all(each.grad is None for _, each in self._named):
            return False
        self._own = set(self._everything)
        return True

    def check(self) -> None:
        """Check that a step is made on gradients that all trainers have in common.

        Those of the step before may be used again, and zeros are the same everywhere.

        Raises
        ------
        ConfigurationError
            A gradient is this trainer's own; the message says whose, and how it gets averaged.
        """
        if self._unknown:
            return
        for position in sorted(self._own):
            name, parameter = self._named[position]
            gradient = parameter.grad
            if gradient is not None and not self._is_common(position, gradient):
                raise ConfigurationError(self._sentence(name))

    def _is_common(self, position: int, gradient: torch.Tensor) -> bool:
        """Whether a gradient is what was handed back last, or zero."""
        if gradient.layout is not torch.strided:
            return False
        return gradient.data_ptr() == self._handed_back.get(position) or not gradient.any()

    def _sentence(self, name: str) -> str:
        found = (
            f"the gradient of {name} is this trainer's own, and a step on it would train another model here: "
        )
        if self._accumulated:
            return (
                f"{found}the last backward passes that reached it were in no_sync(); "
                "expected the last one before optimizer.step() to be outside of it"
            )
        return (
            f"{found}only backward() averages gradients over the trainers, and this one came without, as "
            "what torch.autograd.grad returns does; expected loss.backward(), or "
            "torch.autograd.backward(parameters, gradients) to add gradients of the script's own, averaged"
        )
