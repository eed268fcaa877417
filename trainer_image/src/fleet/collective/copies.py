"""What every trainer has a copy of: an optimizer's parameters, and the rest of its model."""

import logging
import sys
import zlib
from collections.abc import Iterable, Sequence
from typing import Final

import torch

from fleet.collective.group import Group
from fleet.errors import ConfigurationError

__all__ = ["Copies", "is_sharded"]

_NAMED: Final = 3
_log = logging.getLogger(__name__)

_Shape = tuple[str, torch.Size, torch.dtype]
"""Of a buffer, with its name."""


class Copies:
    """What all trainers have a copy of.

    Parameters
    ----------
    named_parameters : sequence of (str, Tensor)
        The optimizer's, in the same order on every trainer.
    model : torch.nn.Module, optional
        Has buffers, and parameters that no optimizer steps.
    group : Group
    broadcast_buffers : bool
        Whether the model's buffers follow trainer 0's all through the training.

    Raises
    ------
    ConfigurationError
        They are to, and one is sparse.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, torch.Tensor]],
        model: torch.nn.Module | None,
        group: Group,
        *,
        broadcast_buffers: bool = True,
    ) -> None:
        self.group = group
        self.named_parameters = list(named_parameters)
        """All of the optimizer's, also those that take no gradient."""
        known = {id(parameter) for _, parameter in named_parameters}
        self.others = _others(model, known) if model is not None else []
        """What else the model has: it takes trainer 0's values as well, and is nobody's to average."""
        self._buffers = _buffers(model) if model is not None and broadcast_buffers else []
        if self._buffers and group.place.size > 1:
            self._refuse_sparse()
        self._agreed = self._shapes()

    @property
    def trained(self) -> list[tuple[str, torch.Tensor]]:
        """Those whose gradients are averaged here: they take one, and are not sharded."""
        return [(name, parameter) for name, parameter in self.whole if parameter.requires_grad]

    @property
    def whole(self) -> list[tuple[str, torch.Tensor]]:
        """Those that are not sharded."""
        return [(name, parameter) for name, parameter in self.named_parameters if not is_sharded(parameter)]

    def tell_of_sharded(self) -> None:
        """Say in the log what is left to whoever has sharded it, and how many tensors that is."""
        names = [name for name, parameter in self.named_parameters if is_sharded(parameter)]
        if names:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            _log.info(
                "%d of %d parameters are sharded (DTensor), and left to what has sharded them: %s%s",
                len(names),
                len(self.named_parameters),
                ", ".join(names[:_NAMED]),
                more,
            )

    def share(self, what: str) -> None:
        """Take every value from trainer 0, if that is another one; a sparse buffer is each trainer's own."""
        if self.group.place.size == 1:
            return
        for name, value in (*self.named_parameters, *self.others):
            if not is_sharded(value):
                self.group.broadcast_(value.detach(), f"{what}: {name}")

    @torch.no_grad()
    def share_buffers(self) -> None:
        """Take trainer 0's buffers, such as BatchNorm's statistics; every trainer calls this alike."""
        if self.group.place.size == 1:
            return
        kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for value in self._present_buffers().values():
            kinds.setdefault((value.dtype, value.device), []).append(value)
        for (dtype, _), values in kinds.items():
            flat = torch.cat([value.reshape(-1) for value in values])
            self.group.broadcast_(flat, f"trainer 0's buffers of {dtype}")
            parts = torch.split(flat, [value.numel() for value in values])
            for value, part in zip(values, parts, strict=True):
                value.data.copy_(part.view(value.shape))  # a graph that was kept may go back once more

    @property
    def digest(self) -> int:
        """A number of 32 bits for what `share_buffers` takes to be everybody's: 0 for what all began with."""
        shapes = self._shapes()
        return 0 if shapes == self._agreed else zlib.crc32("\n".join(_lines(shapes)).encode())

    def compare_buffers(self) -> None:
        """Compare the buffers' shapes with every trainer's, in a call that each makes.

        Raises
        ------
        ConfigurationError
            Another trainer's differ, so that its values would come to lie in other buffers.
        """
        ours, place = "\n".join(_lines(self._shapes())), self.group.place
        for rank, theirs in self.group.agree("the shapes of buffers", ours).items():
            if theirs != ours:
                of_other, own = set(theirs.splitlines()), set(ours.splitlines())
                found = min(of_other - own, default="fewer buffers")
                expected = min(own - of_other, default="fewer buffers")
                raise ConfigurationError(
                    f"{place.name(rank)} has {found} where this trainer, {place.rank}, has {expected}; "
                    "expected buffers of the same shapes on every trainer: give them shapes that do not "
                    "follow a trainer's own batches, or set DistributedStrategy(broadcast_buffers=False)"
                )

    def _refuse_sparse(self) -> None:
        for name, value in self._present_buffers().items():
            if not _is_dense(value):
                raise ConfigurationError(
                    f"the buffer {name} is {value.layout}, and only dense ones follow trainer 0's; expected "
                    "a dense one, or DistributedStrategy(broadcast_buffers=False), with which it stays as "
                    "each trainer's script has built it"
                )

    def _shapes(self) -> list[_Shape]:
        return [(name, value.shape, value.dtype) for name, value in self._present_buffers().items()]

    def _present_buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers by name, but those that have been taken away since."""
        found = ((name, getattr(module, own, None)) for name, module, own in self._buffers)
        return {name: value for name, value in found if isinstance(value, torch.Tensor)}

    def describe(self) -> list[str]:
        """Return a line for each, which must be the same on every trainer."""
        lines = [
            f"{name} {tuple(parameter.shape)} {parameter.dtype}"
            + ("" if parameter.is_contiguous() else f" in memory as {parameter.stride()}")
            + ("" if parameter.requires_grad else " frozen")
            for name, parameter in self.named_parameters
        ]
        others = [f"{name} {tuple(value.shape)} {value.dtype}" for name, value in self.others]
        return [*lines, "no more parameters", *others]


def _lines(shapes: Iterable[_Shape]) -> list[str]:
    return [f"the buffer {name} {tuple(shape)} {dtype}" for name, shape, dtype in shapes]


def is_sharded(value: torch.Tensor) -> bool:
    """Whether each trainer has a part of it only, as of FSDP2: whoever has parted it averages it."""
    module = sys.modules.get("torch.distributed.tensor")  # whoever makes one has imported it
    return module is not None and isinstance(value, module.DTensor)


def _is_dense(value: torch.Tensor) -> bool:
    """Whether its elements lie in memory, which is what travels."""
    return value.layout is torch.strided


def _buffers(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module, str]]:
    """Return each buffer's name, its module and its name there: another tensor may take its place."""
    return [
        (f"{path}.{name}" if path else name, module, name)
        for path, module in model.named_modules()
        for name, value in module.named_buffers(recurse=False)
        if not is_sharded(value)
    ]


def _others(model: torch.nn.Module, known: Iterable[int]) -> list[tuple[str, torch.Tensor]]:
    everything = [*model.named_parameters(), *model.named_buffers()]
    return [(name, value) for name, value in everything if id(value) not in known and _is_dense(value)]
