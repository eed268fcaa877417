"""What a gradient scaler (``torch.amp.GradScaler``) says before a step.

``scaler.step(optimizer)`` leaves two attributes on an optimizer that says it takes them, calls its ``step()``
even where it has found a gradient that is not finite, and removes them. Without that call the parameter
servers would wait for a trainer that has skipped its step.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["Scaling", "tell_scaler"]


@dataclass(frozen=True, slots=True)
class Scaling:
    """What a scaler has found.

    Attributes
    ----------
    scale : Tensor or None
        By what the gradients are multiplied; None where ``scaler.unscale_(optimizer)`` has undone it.
    found_inf : bool
        Whether one of them is infinite or no number.
    """

    scale: Tensor | None
    found_inf: bool

    @classmethod
    def of(cls, optimizer: Optimizer) -> "Scaling | None":
        """Return what a scaler has left on the optimizer whose ``step()`` it calls; None without a scaler."""
        found = getattr(optimizer, "found_inf", None)
        if found is None:
            return None
        return cls(getattr(optimizer, "grad_scale", None), bool(found))

    @torch.no_grad()
    def undo(self, gradients: Iterable[Tensor]) -> None:
        """Take the scale out of gradients, by the factor that the scaler itself would use."""
        if self.scale is None or self.found_inf:
            return
        factor = self.scale.double().reciprocal().float()
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.device))


def tell_scaler(optimizer: Optimizer) -> None:
    """Let the scaler that has called this step take note of gradients that are not finite on any trainer.

    Its scale then becomes what it would be in one process, and stays that of the other trainers' scalers. An
    optimizer is given no reference to the scaler, so it is looked for among the callers.
    """
    frame = sys._getframe().f_back  # noqa: SLF001 - the way there is
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, torch.amp.GradScaler):
            for found in caller._found_inf_per_device(optimizer).values():  # noqa: SLF001 - there is no other
                found.fill_(1.0)
            return
        frame = frame.f_back
