"""What every trainer has a copy of: an optimizer's parameters, and the rest of its model."""

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
"""Of a buffer, with its name."""


class _Slot(NamedTuple):
    """Where a module keeps a parameter or a buffer."""

    name: str
    module: torch.nn.Module
    own_name: str
    is_buffer: bool


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
        self._slots = _slots(model) if model is not None else []
        self._buffers = [slot for slot in self._slots if slot.is_buffer] if broadcast_buffers else []
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

    @property
    def others(self) -> list[tuple[str, torch.Tensor]]:
        """What else the model has now: it takes trainer 0's values as well, and is nobody's to average."""
        seen = {id(parameter) for _, parameter in self.named_parameters}
        found: list[tuple[str, torch.Tensor]] = []
        for name, value in _present(self._slots):
            if id(value) not in seen and _is_dense(value):
                seen.add(id(value))
                found.append((name, value))
        return found

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

    def push(self, what: str) -> None:
        """Take every value from trainer 0, in a call that each trainer makes, if all have the same kinds.

        Raises
        ------
        ConfigurationError
            Another trainer's model has come to have other buffers or frozen parameters.
        """
        found = self._difference(f"what {what} shares", _forms(self.others))
        if found is not None:
            raise ConfigurationError(
                f"{found}; expected the same in every trainer's model: {what} sends them"
            )
        self.share(what)

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
        found = self._difference("the shapes of buffers", _lines(self._shapes()))
        if found is not None:
            raise ConfigurationError(
                f"{found}; expected buffers of the same shapes on every trainer: give them shapes that do "
                "not follow a trainer's own batches, or set DistributedStrategy(broadcast_buffers=False)"
            )

    def _difference(self, what: str, lines: Sequence[str]) -> str | None:
        """Say which line another trainer has that this one has not, and the other way round."""
        ours, place = "\n".join(lines), self.group.place
        for rank, theirs in self.group.agree(what, ours).items():
            if theirs != ours:
                of_other, own = set(theirs.splitlines()), set(lines)
                found = min(of_other - own, default="fewer buffers")
                expected = min(own - of_other, default="fewer buffers")
                return f"{place.name(rank)} has {found} where this trainer, {place.rank}, has {expected}"
        return None

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
        return {name: value for name, value in _present(self._buffers) if not is_sharded(value)}

    def describe(self) -> list[str]:
        """Return a line for each, which must be the same on every trainer."""
        lines = [
            f"{name} {tuple(parameter.shape)} {parameter.dtype}"
            + ("" if parameter.is_contiguous() else f" in memory as {parameter.stride()}")
            + ("" if parameter.requires_grad else " frozen")
            for name, parameter in self.named_parameters
        ]
        return [*lines, "no more parameters", *_forms(self.others)]


def _forms(named: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    return [f"{name} {tuple(value.shape)} {value.dtype}" for name, value in named]


def _lines(shapes: Iterable[_Shape]) -> list[str]:
    return [f"the buffer {name} {tuple(shape)} {dtype}" for name, shape, dtype in shapes]


def is_sharded(value: torch.Tensor) -> bool:
    """Whether each trainer has a part of it only, as of FSDP2: whoever has parted it averages it."""
    module = sys.modules.get("torch.distributed.tensor")  # whoever makes one has imported it
    return module is not None and isinstance(value, module.DTensor)


def _is_dense(value: torch.Tensor) -> bool:
    """Whether its elements lie in memory, which is what travels."""
    return value.layout is torch.strided


def _slots(model: torch.nn.Module) -> list[_Slot]:
    """Return the places of parameters, and then those of buffers: another tensor may come to lie there."""
    parameters, buffers = [], []
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for name, _ in module.named_parameters(recurse=False):
            parameters.append(_Slot(prefix + name, module, name, is_buffer=False))
        for name, _ in module.named_buffers(recurse=False):
            buffers.append(_Slot(prefix + name, module, name, is_buffer=True))
    return [*parameters, *buffers]


def _present(slots: Iterable[_Slot]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what lies in each place, but where it has been taken away."""
    for slot in slots:
        value = getattr(slot.module, slot.own_name, None)
        if isinstance(value, torch.Tensor):
            yield slot.name, value
