"""The tensors that are replicated on every trainer: an optimizer's parameters and the rest of the model."""

import logging
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import torch

from fleet.collective.group import Group
from fleet.errors import ConfigurationError

__all__ = ["Copies", "is_sharded"]

_NAMED: Final = 3
_log = logging.getLogger(__name__)

_Shape = tuple[str, torch.Size, torch.dtype]
"""The shape of a buffer, with the buffer's name."""


class _Slot(NamedTuple):
    """A module attribute that holds a parameter or a buffer; the script may assign another tensor to it."""

    name: str
    module: torch.nn.Module
    attribute: str
    is_buffer: bool


class Copies:
    """The tensors that are replicated on every trainer.

    Parameters
    ----------
    named_parameters : sequence of (str, Tensor)
        The optimizer's parameters, in the same order on every trainer.
    model : torch.nn.Module, optional
        Provides buffers, and parameters that no optimizer steps.
    group : Group
    broadcast_buffers : bool
        True if trainer 0's buffers replace those of the other trainers throughout training.

    Raises
    ------
    ConfigurationError
        `broadcast_buffers` is true, and a buffer is sparse.
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
        """All parameters of the optimizer, including frozen ones."""
        self._slots = _slots(model) if model is not None else []
        self._buffers = [slot for slot in self._slots if slot.is_buffer] if broadcast_buffers else []
        if self._buffers and group.world.size > 1:
            self._refuse_sparse()
        self._first_shapes = self._shapes()

    @property
    def whole(self) -> list[tuple[str, torch.Tensor]]:
        """The optimizer's parameters that are not sharded."""
        return [(name, parameter) for name, parameter in self.named_parameters if not is_sharded(parameter)]

    @property
    def trained(self) -> list[tuple[str, torch.Tensor]]:
        """The parameters whose gradients fleet averages: all except sharded and frozen ones."""
        return [(name, parameter) for name, parameter in self.whole if parameter.requires_grad]

    @property
    def others(self) -> list[tuple[str, torch.Tensor]]:
        """The model's other tensors, which are copied from trainer 0 but never averaged."""
        seen = {id(parameter) for _, parameter in self.named_parameters}
        found: list[tuple[str, torch.Tensor]] = []
        for name, value in _present(self._slots):
            # A broadcast sends a tensor's bytes, and only a dense tensor can be viewed as bytes.
            if id(value) not in seen and value.layout is torch.strided:
                seen.add(id(value))
                found.append((name, value))
        return found

    def log_sharded(self) -> None:
        """Log which parameters fleet does not synchronize because another library has sharded them."""
        names = [name for name, parameter in self.named_parameters if is_sharded(parameter)]
        if names:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            _log.info(
                "%d of %d parameters are sharded (DTensor), so fleet does not average them: %s%s",
                len(names),
                len(self.named_parameters),
                ", ".join(names[:_NAMED]),
                more,
            )

    def describe(self) -> list[str]:
        """Return one line of text for each tensor; the lines must be equal on all trainers."""
        lines = [
            f"{name} {tuple(parameter.shape)} {parameter.dtype}"
            + ("" if parameter.is_contiguous() else f" in memory as {parameter.stride()}")
            + ("" if parameter.requires_grad else " frozen")
            for name, parameter in self.named_parameters
        ]
        return [*lines, "no more parameters", *_forms(self.others)]

    def share(self, what: str) -> None:
        """Copy all values from trainer 0, except sparse buffers and sharded tensors."""
        if self.group.world.size == 1:
            return
        for name, value in (*self.named_parameters, *self.others):
            if not is_sharded(value):
                self.group.broadcast_(value.detach(), f"{what}: {name}")

    def push(self, what: str) -> None:
        """Compare the tensors of all trainers, then copy trainer 0's values; every trainer must call this.

        Raises
        ------
        ConfigurationError
            Another trainer's model has different buffers or frozen parameters now.
        """
        found = self._difference(f"the tensors that {what} shares", _forms(self.others))
        if found is not None:
            raise ConfigurationError(
                f"{found}; expected the same in every trainer's model: {what} sends them"
            )
        self.share(what)

    @torch.no_grad()
    def share_buffers(self) -> None:
        """Copy trainer 0's buffers, such as BatchNorm's statistics; every trainer must call this."""
        if self.group.world.size == 1:
            return
        kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for value in self._present_buffers().values():
            kinds.setdefault((value.dtype, value.device), []).append(value)
        for (dtype, _), values in kinds.items():
            flat = torch.cat([value.reshape(-1) for value in values])
            self.group.broadcast_(flat, f"trainer 0's buffers of {dtype}")
            parts = torch.split(flat, [value.numel() for value in values])
            for value, part in zip(values, parts, strict=True):
                # By `data`, so that no version counter moves: a graph that was kept may run backward again.
                value.data.copy_(part.view(value.shape))

    @property
    def digest(self) -> int:
        """A 32-bit digest of the shapes of the buffers that trainer 0 shares; 0 until a shape changes."""
        shapes = self._shapes()
        return 0 if shapes == self._first_shapes else zlib.crc32("\n".join(_lines(shapes)).encode())

    def compare_buffers(self) -> None:
        """Compare the buffers' shapes on all trainers; every trainer must call this.

        Raises
        ------
        ConfigurationError
            Another trainer's shapes differ, so values would be written to the wrong buffers.
        """
        found = self._difference("the shapes of buffers", _lines(self._shapes()))
        if found is not None:
            raise ConfigurationError(
                f"{found}; expected buffers of the same shapes on every trainer: give them shapes that do "
                "not depend on a trainer's batches, or set DistributedStrategy(broadcast_buffers=False)"
            )

    def _difference(self, what: str, lines: Sequence[str]) -> str | None:
        """Describe the first tensor that differs between two trainers; return None if all are equal."""
        ours, world = "\n".join(lines), self.group.world
        for rank, theirs in self.group.agree(what, ours).items():
            if theirs != ours:
                of_other, own = set(theirs.splitlines()), set(lines)
                found = min(of_other - own, default="fewer buffers")
                expected = min(own - of_other, default="fewer buffers")
                return f"{world.name(rank)} has {found} where this trainer, {world.rank}, has {expected}"
        return None

    def _refuse_sparse(self) -> None:
        for name, value in self._present_buffers().items():
            if value.layout is not torch.strided:
                raise ConfigurationError(
                    f"the buffer {name} is {value.layout}, and only dense buffers can be copied from trainer "
                    "0; expected a dense buffer, or DistributedStrategy(broadcast_buffers=False), with "
                    "which each trainer keeps its own"
                )

    def _shapes(self) -> list[_Shape]:
        return [(name, value.shape, value.dtype) for name, value in self._present_buffers().items()]

    def _present_buffers(self) -> dict[str, torch.Tensor]:
        return {name: value for name, value in _present(self._buffers) if not is_sharded(value)}


def _forms(named: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    return [f"{name} {tuple(value.shape)} {value.dtype}" for name, value in named]


def _lines(shapes: Iterable[_Shape]) -> list[str]:
    return [f"the buffer {name} {tuple(shape)} {dtype}" for name, shape, dtype in shapes]


def is_sharded(value: torch.Tensor) -> bool:
    """Return True if each trainer holds only a shard of the tensor, as in FSDP2."""
    module = sys.modules.get("torch.distributed.tensor")  # if not imported, there is no DTensor
    return module is not None and isinstance(value, module.DTensor)


def _slots(model: torch.nn.Module) -> list[_Slot]:
    """Return the slots of a model's parameters, followed by those of its buffers."""
    parameters, buffers = [], []
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for name, _ in module.named_parameters(recurse=False):
            parameters.append(_Slot(prefix + name, module, name, is_buffer=False))
        for name, _ in module.named_buffers(recurse=False):
            buffers.append(_Slot(prefix + name, module, name, is_buffer=True))
    return [*parameters, *buffers]


def _present(slots: Iterable[_Slot]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the tensor of each slot that still holds a tensor."""
    for slot in slots:
        value = getattr(slot.module, slot.attribute, None)
        if isinstance(value, torch.Tensor):
            yield slot.name, value
