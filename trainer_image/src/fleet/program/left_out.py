"""The parameters of an optimizer that are not exchanged: frozen ones, and none that comes later."""

from typing import TYPE_CHECKING

from fleet.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

__all__ = ["LeftOut"]


class LeftOut:
    """Finds parameters that are trained although no other trainer, and no server, hears of it.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
    exchanged : iterable of Tensor
        The optimizer's parameters that are not left out.
    module : torch.nn.Module, optional
        Gives names.
    """

    def __init__(
        self,
        optimizer: "torch.optim.Optimizer",
        exchanged: "Iterable[torch.Tensor]",
        module: "torch.nn.Module | None" = None,
    ) -> None:
        self._optimizer = optimizer
        known = {id(parameter) for parameter in exchanged}
        names = {id(each): name for name, each in module.named_parameters()} if module is not None else {}
        self._frozen = [
            (names.get(id(parameter), _position(number, index)), parameter)
            for number, group in enumerate(optimizer.param_groups)
            for index, parameter in enumerate(group["params"])
            if id(parameter) not in known
        ]
        self._number = self._count()

    def check(self) -> None:
        """Check that a step changes only what is exchanged.

        Raises
        ------
        ConfigurationError
            It would change another parameter, which is named.
        """
        for name, parameter in self._frozen:
            if parameter.grad is not None:
                raise ConfigurationError(
                    f"{name} has a gradient, and was frozen when fleet.distributed_optimizer was called, so "
                    "the gradient is not exchanged; let the parameter require gradients there, and freeze it "
                    "after fleet.init_worker() for as long as it is not to learn"
                )
        if self._count() != self._number:
            raise ConfigurationError(
                f"the optimizer has {self._count()} parameters, and had {self._number} when "
                "fleet.distributed_optimizer was called, so those that have come since are not exchanged; "
                "call add_param_group() before it"
            )

    def _count(self) -> int:
        return sum(len(group["params"]) for group in self._optimizer.param_groups)


def _position(group: int, index: int) -> str:
    return f"parameter {index} of param group {group}"
