"""A trainer's parameters, and the memory beside them in which new values land.

A write from a socket moves no version counter, and autograd and the user's code still need the old values
while new ones arrive. So they land beside, or stay in memory which a server shares, and `adopt` copies them
to where the parameter lies. That place never changes: whoever has another view of it, an entry of a
``state_dict()`` or a numpy array, sees whole values, the old ones before `adopt` and the new ones after.
"""

import threading
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter

from fleet.errors import FleetError
from fleet.parameter_server.trainer.marks import Mark
from fleet.parameter_server.transport.arena import Arena, Extent, bytes_of
from fleet.parameter_server.transport.shared_memory import copy_bytes
from fleet.transpiler.lowering import PlannedBlock

__all__ = ["ParameterStore"]


class ParameterStore:
    """Where the blocks of a job land on a trainer, and how they become the module's parameters.

    Parameters
    ----------
    blocks : sequence of PlannedBlock
        All blocks of the job.
    parameters : mapping of name to Parameter
        The module's own.
    """

    def __init__(self, blocks: Sequence[PlannedBlock], parameters: Mapping[str, Parameter]) -> None:
        by_name: dict[str, list[PlannedBlock]] = {}
        for block in blocks:
            by_name.setdefault(block.param, []).append(block)
        named = {name: parameters[name] for name in by_name}
        self.parameters: Mapping[str, Parameter] = named
        extents = {name: Extent(parameter.dtype, tuple(parameter.shape)) for name, parameter in named.items()}
        self._extents = extents
        self._lock = threading.Lock()
        self._landing: Arena[str] | None = None
        self._slots = [
            _Slot(name, named[name], of_param, partial(self._make_landing, name))
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

    def check_kept(self) -> None:
        """Check that parameters which have gradients hold what was adopted last, as far as marks of it tell.

        Raises
        ------
        FleetError
            The script has written to one, which the next values would overwrite.
        """
        for slot in self._slots:
            slot.check_kept()

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
        name: str,
        parameter: Parameter,
        blocks: Sequence[PlannedBlock],
        make_landing: Callable[[], Tensor],
    ) -> None:
        self.blocks = blocks
        self.elsewhere: dict[int, memoryview] = {}
        """By block the values that have not landed here, and are not adopted."""
        self._name = name
        self._parameter = parameter
        size = parameter.element_size()
        self._ranges = {block.id: slice(block.begin * size, block.end * size) for block in blocks}
        self._make_landing = make_landing
        self._landing: Tensor | None = None
        self._adopted = 0
        """How many times values were adopted."""
        self._kept: tuple[int, memoryview, Mark] | None = None
        """Where the values adopted last lie, and their mark; None where a comparison would cost a copy."""

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
        changed = [block.id for block in self.blocks if block.id not in unchanged]
        if not changed:
            return
        elsewhere, self.elsewhere = self.elsewhere, {}
        parameter = self._parameter
        if parameter.device.type == "cpu" and parameter.is_contiguous():
            whole = bytes_of(parameter)
            for block in changed:
                copy_bytes(
                    elsewhere[block] if block in elsewhere else self.landing(block),
                    whole[self._ranges[block]],
                )
            torch.autograd.graph.increment_version(parameter)
            self._kept = parameter.data_ptr(), whole, Mark.of(whole, self._adopted)
            self._adopted += 1
            return
        self._kept = None
        for block, found in elsewhere.items():
            copy_bytes(found, self.landing(block))
        flat, value = self.landed.view(-1), parameter.detach().reshape(-1)
        for kept in self.blocks:
            if kept.id in unchanged:
                flat[kept.begin : kept.end].copy_(value[kept.begin : kept.end])
        parameter.copy_(self.landed)

    def check_kept(self) -> None:
        parameter = self._parameter
        if self._kept is None or parameter.grad is None:
            return
        address, content, mark = self._kept
        if parameter.data_ptr() != address:
            if parameter.device.type != "cpu" or not parameter.is_contiguous():
                return  # laid out anew by the script, as by model.to(memory_format=…)
            content = bytes_of(parameter)
        if not mark.matches(content):
            raise FleetError(
                f"the parameter {self._name} was written to after its values had come from the parameter "
                "servers, whose next values would overwrite that. Load or set weights before "
                "fleet.init_worker(), in every role alike; put back to the bit what an evaluation had "
                "exchanged, before the next step; and to clamp or reset weights while training, use the mode "
                "geo, in which trainers step by themselves (config.geo_sgd_mode = True)"
            )
