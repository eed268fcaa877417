"""A trainer's parameters in two arenas: one that the module reads, one in which new values land.

A write from a socket moves no version counter, and autograd and the user's code still need the old values
while new ones arrive. So they land beside, and `adopt` exchanges the two: no element is copied. A value that
lies in memory which a server shares needs no place beside: `adopt` copies it to where the module reads.
"""

import threading
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter

from fleet.parameter_server.arena import Arena, Extent, bytes_of
from fleet.parameter_server.shared_memory import copy_bytes
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
        self._extents = extents
        exchanged = {name for name, parameter in named.items() if _may_move(parameter)}
        present = Arena({name: extents[name] for name in extents if name in exchanged})
        self._lock = threading.Lock()
        self._landing: Arena[str] | None = None
        self._slots = [
            _Slot(
                named[name],
                of_param,
                partial(self._make_landing, name),
                present[name] if name in exchanged else None,
            )
            for name, of_param in by_name.items()
        ]
        self._slot_by_name = dict(zip(by_name, self._slots, strict=True))
        self._slot_of = {block.id: slot for slot in self._slots for block in slot.blocks}

    def landing(self, block: int) -> memoryview:
        """Return where the bytes of a block's next value belong."""
        return self._slot_of[block].landing(block)

    def lies(self, block: int, value: memoryview) -> None:
        """Take note that a block's next value lies elsewhere, where it stays as it is until it is adopted."""
        self._slot_of[block].elsewhere[block] = value

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

    def _make_landing(self, name: str) -> Tensor:
        """Return where a parameter's value lands, in memory that is made when something first lands."""
        with self._lock:
            if self._landing is None:
                pinned = any(parameter.is_cuda for parameter in self.parameters.values())
                self._landing = Arena(self._extents, pinned=pinned)
        return self._landing[name]


class _Slot:
    """One parameter."""

    def __init__(
        self,
        parameter: Parameter,
        blocks: Sequence[PlannedBlock],
        make_landing: Callable[[], Tensor],
        present: Tensor | None,
    ) -> None:
        self.blocks = blocks
        self.elsewhere: dict[int, memoryview] = {}
        """By block the values that have not landed here, and are not adopted."""
        self._parameter = parameter
        size = parameter.element_size()
        self._ranges = {block.id: slice(block.begin * size, block.end * size) for block in blocks}
        self._make_landing = make_landing
        self._landing: Tensor | None = None
        self._present = present
        if present is not None:
            present.copy_(parameter.detach())
            parameter.data = present

    @property
    def landed(self) -> Tensor:
        if self._landing is None:
            self._landing = self._make_landing()
        return self._landing

    def landing(self, block: int) -> memoryview:
        return bytes_of(self.landed)[self._ranges[block]]

    def value_bytes(self, block: int) -> memoryview:
        return bytes_of(self._parameter.detach().cpu().contiguous())[self._ranges[block]]

    @torch.no_grad()
    def adopt(self, unchanged: Collection[int]) -> None:
        kept = [block for block in self.blocks if block.id in unchanged]
        if len(kept) == len(self.blocks):
            return
        elsewhere, self.elsewhere = self.elsewhere, {}
        if elsewhere and self._present is not None:
            self._fill(self._present, elsewhere, unchanged)
        else:
            for number, found in elsewhere.items():
                copy_bytes(found, self.landing(number))
            for block in kept:
                flat, value = self.landed.view(-1), self._parameter.detach().reshape(-1)
                flat[block.begin : block.end].copy_(value[block.begin : block.end])
            if self._present is None:
                self._parameter.copy_(self.landed)
                return
            self._present, self._landing = self.landed, self._present
        self._parameter.data = self._present
        torch.autograd.graph.increment_version(self._parameter)

    def _fill(self, present: Tensor, elsewhere: Mapping[int, memoryview], unchanged: Collection[int]) -> None:
        """Copy new values to where the module reads: those from elsewhere, and those that have landed."""
        whole = bytes_of(present)
        for block in self.blocks:
            if block.id not in unchanged:
                value = elsewhere[block.id] if block.id in elsewhere else self.landing(block.id)
                copy_bytes(value, whole[self._ranges[block.id]])


def _may_move(parameter: Parameter) -> bool:
    """Whether nothing else can rely on where the parameter lies."""
    storage = parameter.untyped_storage()
    return (
        parameter.device.type == "cpu"
        and parameter.is_contiguous()
        and not parameter.is_shared()  # type: ignore[no-untyped-call]
        and storage.nbytes() == parameter.numel() * parameter.element_size()
    )
