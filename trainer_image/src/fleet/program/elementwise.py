"""Whether an optimizer may step a parameter slice by slice: a small tensor is stepped both ways."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from fleet.errors import TranspileError
from fleet.program.optimizers import KERNEL_FLAGS, HyperParameter, build_optimizer
from fleet.without_dynamo import step_directly

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["is_elementwise"]

# Two dimensions because Muon takes no other; enough steps for moments and bias corrections to matter.
_ROWS, _COLUMNS, _STEPS = 6, 4, 4
# A schedule may begin with a learning rate of zero, under which every optimizer looks element-wise.
_LEARNING_RATE = 0.01


def is_elementwise(optimizer_class: "type[Optimizer]", options: Mapping[str, HyperParameter]) -> bool:
    """Whether stepping two slices of a tensor gives, to the bit, what stepping the whole gives.

    Parameters
    ----------
    optimizer_class : type
        The user's optimizer class.
    options : mapping of option to value
        A param group's options. Kernel flags are left out: the question is the mathematics.

    Returns
    -------
    bool

    Raises
    ------
    TranspileError
        The class cannot be built from these options, or cannot step a dense gradient.
    """
    mathematics = {name: _neutral(name, value) for name, value in options.items()}
    generator = torch.Generator("cpu").manual_seed(0)
    start = torch.randn(_ROWS, _COLUMNS, generator=generator, device="cpu", dtype=torch.float32)
    grads = torch.randn(_STEPS, _ROWS, _COLUMNS, generator=generator, device="cpu", dtype=torch.float32)
    half = _ROWS // 2
    try:
        whole = _train(optimizer_class, mathematics, start, grads)
        first = _train(optimizer_class, mathematics, start[:half], grads[:, :half])
        second = _train(optimizer_class, mathematics, start[half:], grads[:, half:])
    except Exception as error:
        raise TranspileError(
            f"{optimizer_class.__name__} cannot step a dense parameter on a parameter server: {error}; "
            "its constructor must take its options by the names it gives them in param_groups"
        ) from error
    return torch.equal(whole, torch.cat((first, second)))


def _neutral(name: str, value: HyperParameter) -> HyperParameter:
    """Return the value to try an option with."""
    if name in KERNEL_FLAGS:
        return False
    return _LEARNING_RATE if name == "lr" else value


def _train(
    optimizer_class: "type[Optimizer]",
    options: Mapping[str, HyperParameter],
    start: torch.Tensor,
    grads: torch.Tensor,
) -> torch.Tensor:
    weight = torch.nn.Parameter(start.clone())
    optimizer = build_optimizer(optimizer_class, [weight], options)
    for grad in grads:
        weight.grad = grad.clone()
        step_directly(optimizer)
    return weight.detach()
