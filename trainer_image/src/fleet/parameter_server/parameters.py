"""A trainer's parameters in two arenas: one that the module reads, one in which new values land.

A write from a socket moves no version counter, and autograd and the user's code still need the old values
while new ones arrive. So they land beside, and `adopt` exchanges the two: no element is copied.
"""

import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from fleet.parameter_server.arena import Arena, Extent, bytes_of
from fleet.transpiler.lowering import PlannedBlock

__all__ = ["ParameterStore"]


class ParameterStore:
    """Where the blocks of a job land on a trainer, and how they become the module's parameters.

    Parameters
    ----------
    blocks : sequence of PlannedBlock
        All blocks of the job.
    parameters : mapping of name to Parameter
        The module's own; their storage moves into an arena here.
    """

    def __init__(self, blocks: Sequence[PlannedBlock], parameters: Mapping[str, Parameter]) -> None:
        by_name: dict[str, list[PlannedBlock]] = {}
        for block in blocks:
            by_name.setdefault(block.param, []).append(block)
        named = {name: parameters[name] for name in by_name}
        self.parameters: Mapping[str, Parameter] = named
        extents = {name: Extent(parameter.dtype, tuple(parameter.shape)) for name, parameter in named.items()}
        exchanged = {name for name, parameter in named.items() if _may_move(parameter)}
        pinned = any(parameter.is_cuda for parameter in named.values())
        present = Arena({name: extents[name] for name in extents if name in exchanged})
        landing = Arena(extents, pinned=pinned)
        self._slots = [
            _Slot(named[name], of_param, landing[name], present[name] if name in exchanged else None)
            for name, of_param in by_name.items()
        ]
        self._slot_by_name = dict(zip(by_name, self._slots, strict=True))
        self._slot_of = {block.id: slot for slot in self._slots for block in slot.blocks}

    def landing(self, block: int) -> memoryview:
        """Return where the bytes of a block's next value belong."""
        return self._slot_of[block].landing(block)

    def landed(self, name: str) -> Tensor:
        """Return the value of a parameter that has landed and is not adopted; memory of the host."""
        return self._slot_by_name[name].landed

    def adopt(self, unchanged: Collection[int] = (), names: Iterable[str] | None = None) -> None:
        """Make the values that have landed the parameters.

        Parameters
        ----------
        unchanged : collection of int
            Blocks that did not land, as no trainer had a gradient for them: they keep their values.
        names : iterable of str, optional
            Of which parameters; of all otherwise.
        """
        for slot in self._slots if names is None else [self._slot_by_name[name] for name in names]:
            slot.adopt(unchanged)

    def checksums(self) -> dict[int, int]:
        """Return the CRC-32 of every block's present value."""
        return {block: zlib.crc32(slot.value_bytes(block)) for block, slot in self._slot_of.items()}


class _Slot:
    """One parameter."""

    def __init__(
        self, parameter: Parameter, blocks: Sequence[PlannedBlock], landing: Tensor, present: Tensor | None
    ) -> None:
        self.blocks = blocks
        self._parameter = parameter
        size = parameter.element_size()
        self._ranges = {block.id: slice(block.begin * size, block.end * size) for block in blocks}
        self._landing = landing
        self._present = present
        self._landing_bytes = bytes_of(landing)
        if present is not None:
            present.copy_(parameter.detach())
            parameter.data = present

    @property
    def landed(self) -> Tensor:
        return self._landing

    def landing(self, block: int) -> memoryview:
        return self._landing_bytes[self._ranges[block]]

    def value_bytes(self, block: int) -> memoryview:
        return bytes_of(self._parameter.detach().cpu().contiguous())[self._ranges[block]]

    @torch.no_grad()
    def adopt(self, unchanged: Collection[int]) -> None:
        kept = [block for block in self.blocks if block.id in unchanged]
        if len(kept) == len(self.blocks):
            return
        for block in kept:
            flat, value = self._landing.view(-1), self._parameter.detach().reshape(-1)
            flat[block.begin : block.end].copy_(value[block.begin : block.end])
        if self._present is None:
            self._parameter.copy_(self._landing)
            return
        self._present, self._landing = self._landing, self._present
        self._landing_bytes = bytes_of(self._landing)
        self._parameter.data = self._present
        torch.autograd.graph.increment_version(self._parameter)


def _may_move(parameter: Parameter) -> bool:
    """Whether nothing else can rely on where the parameter lies."""
    storage = parameter.untyped_storage()
    return (
        parameter.device.type == "cpu"
        and parameter.is_contiguous()
        and not parameter.is_shared()  # type: ignore[no-untyped-call]
        and storage.nbytes() == parameter.numel() * parameter.element_size()
    )
