"""A trainer's parameters, the memory in which new values land, and marks that find writes to either.

A write from a socket moves no version counter, and autograd and the user's code still need the old values
while new ones arrive. So values land in other memory, or stay in memory that a server shares, and `adopt`
copies them into the parameter. The parameter's own memory never changes: every other view of it, an entry of
a ``state_dict()`` or a numpy array, sees whole values. Swapping two memories would save the copy, but such a
view would then show the values of the step before.

``tensor.data`` and the kernels of torch's gradient scaler write without moving a version counter. So marks
compare bytes: all of them in the first rounds, where mistakes of a script show, and in every round of a small
model. In a larger one each later round compares a part of each tensor, which moves from round to round. All
trainers compare the same parts, so that none is slower than the others.
"""

import math
import mmap
import threading
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor
from torch.nn import Parameter

from fleet.errors import ConfigurationError, FleetError
from fleet.parameter_server.transport.arena import Arena, Extent, bytes_of, copy_bytes, dtype_of
from fleet.plan.blocks import PlannedBlock

__all__ = [
    "ROUND_BYTES",
    "LazyArena",
    "Mark",
    "ParameterStore",
    "check_dtype",
    "covers_all",
    "part_of",
    "version_of",
]

ROUND_BYTES: Final = 2 << 20
"""The least bytes of a model that a round compares, of parameters and of gradients each."""
_LEAST_PART: Final = 0.02
"""The least part of a larger model that a round compares: with 25 million parameters `ROUND_BYTES`.

Copying and comparing these takes 1 ms, less than 2 % of the shortest steps of ``benchmarks.dense_sync``.
"""

_WHOLE_ROUNDS: Final = 3
_UNIT_BYTES: Final = 1024
"""Parts are multiples of this, so that they cut no number."""
_ROUNDINGS: Final = 8
"""The units in the last place by which a number may differ after a sum was added and subtracted again."""
_SMALL: Final = 2.0**-7
"""The units are at least those of this number: the sum may be larger than all numbers of a tensor."""
_AT_ONCE_BYTES: Final = 1 << 18
"""The bytes compared at once, so that temporary results stay in the cache."""


def version_of(tensor: Tensor) -> int:
    """Return the counter that moves with each in-place change of a tensor."""
    return tensor._version  # noqa: SLF001 - torch documents it under this name, and has no other


def part_of(tensors: Iterable[Tensor]) -> float:
    """Return the part of each of these tensors that a later round compares; 1.0 for all of it."""
    total = sum(each.nbytes for each in tensors)
    return min(1.0, max(_LEAST_PART, ROUND_BYTES / total)) if total else 1.0


def covers_all(round_: int) -> bool:
    """Return whether a round compares all bytes, however many there are."""
    return round_ < _WHOLE_ROUNDS


class Mark:
    """A copy of the bytes that some memory held, or of the part whose turn it was.

    Parameters
    ----------
    length : int
        The size of the memory in bytes. The copy's memory is allocated at once: among the gradients that
        come and go, it would fragment the heap.
    part : float
        The part of the memory that a later round compares.
    copies : bool
        Whether the first rounds copy all bytes of memory that later rounds compare in parts. Otherwise they
        keep its CRC-32, which takes no memory, and cannot distinguish rounding from writing.
    """

    def __init__(self, length: int, part: float = 1.0, *, copies: bool = True) -> None:
        self._part = part
        self._copies = copies
        self._begin = 0
        self._length = length
        self._stretch = bytearray(self._stretch_of(length))
        self._whole: mmap.mmap | None = None
        """All of larger memory in a first round; unlike the heap it returns to the kernel afterwards."""
        self._crc: int | None = None

    def take(self, content: memoryview, round_: int) -> None:
        """Mark these bytes, or the part whose turn it is in a round; rounds count from 0."""
        length, self._crc = len(content), None
        if length != self._length:  # the script has replaced the memory
            self._length, self._stretch = length, bytearray(self._stretch_of(length))
        stretch = len(self._stretch)
        if stretch < length and covers_all(round_):
            if not self._copies:
                self._crc = zlib.crc32(content)
                return
            if self._whole is None or len(self._whole) != length:
                self._whole = mmap.mmap(-1, length)
            memoryview(self._whole)[:] = content
            return
        self._whole = None
        self._begin = 0
        if stretch < length:
            self._begin = min(round_ % math.ceil(length / stretch) * stretch, length - stretch)
            content = content[self._begin : self._begin + stretch]
        memoryview(self._stretch)[:] = content

    def matches(self, content: memoryview) -> bool:
        """Return whether the memory is unchanged."""
        if self._crc is not None:
            return zlib.crc32(content) == self._crc
        if self._whole is None:
            # A bytearray compares bytes; two views would be compared number by number.
            return self._stretch == content[self._begin : self._begin + len(self._stretch)]
        held = memoryview(self._whole)
        return len(held) == len(content) and all(
            bytearray(held[begin : begin + _AT_ONCE_BYTES]) == content[begin : begin + _AT_ONCE_BYTES]
            for begin in range(0, len(held), _AT_ONCE_BYTES)
        )

    def matches_but_for_rounding(self, content: memoryview, dtype: torch.dtype) -> bool:
        """Return whether changed memory differs only as after adding a sum and subtracting it again.

        All that the mark covers is judged; False where it has no copy of that.
        """
        held, present = memoryview(self._stretch), content[self._begin : self._begin + len(self._stretch)]
        if self._whole is not None:
            held, present = memoryview(self._whole), content
        if self._crc is not None or len(present) != len(held) or not dtype.is_floating_point:
            return False
        off, largest = 0.0, _SMALL
        for begin in range(0, len(present), _AT_ONCE_BYTES):
            before, now = (
                torch.frombuffer(each[begin : begin + _AT_ONCE_BYTES], dtype=dtype).double()
                for each in (held, present)
            )
            differ = (now != before) & ~(now.isnan() & before.isnan())
            by = (now[differ] - before[differ]).abs()
            if not bool(by.isfinite().all()):
                return False
            off = max(off, float(by.max())) if by.numel() else off
            largest = max(largest, float(before.nan_to_num(0.0, 0.0, 0.0).abs().max()))
        return off <= _ROUNDINGS * torch.finfo(dtype).eps * largest

    def _stretch_of(self, length: int) -> int:
        """Return how many of so many bytes a later round compares."""
        if self._part >= 1.0:
            return length
        return min(length, math.ceil(length * self._part / _UNIT_BYTES) * _UNIT_BYTES)


class LazyArena:
    """Host memory of the shape of each parameter, allocated at first use; pinned for parameters on a GPU.

    Parameters
    ----------
    parameters : mapping of name to Parameter
    """

    def __init__(self, parameters: Mapping[str, Parameter]) -> None:
        self._parameters = parameters
        self._lock = threading.Lock()
        self._arena: Arena[str] | None = None

    def __getitem__(self, name: str) -> Tensor:
        with self._lock:  # values land in several threads
            if self._arena is None:
                self._arena = Arena(
                    {name: Extent(each.dtype, tuple(each.shape)) for name, each in self._parameters.items()},
                    pinned=any(each.is_cuda for each in self._parameters.values()),
                )
        return self._arena[name]


def check_dtype(name: str, parameter: Tensor, expected: torch.dtype) -> None:
    """Check that a parameter, or its gradient, still has the dtype that servers hold it as.

    Raises
    ------
    ConfigurationError
        The script has converted the model; the message names the parameter and both dtypes.
    """
    if parameter.dtype is not expected:
        raise ConfigurationError(
            f"{name} is {parameter.dtype}, and was {expected} when fleet.distributed_optimizer() was called, "
            "as which the parameter servers hold and step it; convert the model (model.to(dtype), double(), "
            "bfloat16(), half()) before that call, in every role alike"
        )


class ParameterStore:
    """The module's parameters, and the memory in which their next values land.

    Parameters
    ----------
    blocks : sequence of PlannedBlock
        All blocks that servers hold.
    parameters : mapping of name to Parameter
        The module's own.
    guarded : bool
        Whether writes of the script are errors.

    Raises
    ------
    ConfigurationError
        A parameter has another dtype than its blocks.
    """

    def __init__(
        self,
        blocks: Sequence[PlannedBlock],
        parameters: Mapping[str, Parameter],
        *,
        guarded: bool = False,
    ) -> None:
        by_name: dict[str, list[PlannedBlock]] = {}
        for block in blocks:
            by_name.setdefault(block.param, []).append(block)
        self.parameters: Mapping[str, Parameter] = {name: parameters[name] for name in by_name}
        landing, part = LazyArena(self.parameters), part_of(self.parameters.values()) if guarded else None
        self._memories = {
            name: _ParameterMemory(name, self.parameters[name], run, landing, part)
            for name, run in by_name.items()
        }
        self._memory_of = {block.id: memory for memory in self._memories.values() for block in memory.blocks}
        self.check_dtypes()

    def check_dtypes(self) -> None:
        """Check that no parameter has been converted; see `check_dtype`."""
        for name, memory in self._memories.items():
            check_dtype(name, memory.parameter, memory.dtype)

    def landing(self, block: int) -> memoryview:
        """Return where a block's next value is written."""
        memory = self._memory_of[block]
        return memory.landings.get(block) or memory.landing(block)  # each frame asks

    def land_elsewhere(self, block: int, value: memoryview) -> None:
        """Note that a block's next value is in other memory, which stays unchanged until it is adopted."""
        self._memory_of[block].elsewhere[block] = value

    def landed(self, name: str) -> Tensor:
        """Return the value of a parameter that has landed and is not adopted; in host memory."""
        return self._memories[name].landed

    def adopt(self, unchanged: Collection[int] = (), names: Iterable[str] | None = None) -> None:
        """Copy the values that have landed into the parameters.

        Parameters
        ----------
        unchanged : collection of int
            Blocks that keep their values, because no trainer had a gradient for them.
        names : iterable of str, optional
            The parameters; all of them by default. Some are adopted while the script runs, outside of the
            step that calls `check_kept`: these are checked here.

        Raises
        ------
        FleetError
            As of `check_kept`; or the script has converted a parameter, so that the value does not fit.
        """
        for name in self._memories if names is None else names:
            self._memories[name].adopt(unchanged, check=names is not None)

    def check_kept(self) -> None:
        """Check that parameters with gradients hold the values adopted last, as far as marks can show.

        Differences by rounding pass: a script that adds something to its weights and subtracts it again, as
        sharpness-aware training does, loses nothing by the values that follow.

        Raises
        ------
        FleetError
            The script has written to a parameter, which the next values would overwrite; or has converted it.
        """
        for memory in self._memories.values():
            if memory.parameter.grad is not None:
                if memory.parameter.dtype is not memory.dtype:
                    check_dtype(memory.name, memory.parameter, memory.dtype)
                memory.check_kept()

    def keep(self) -> None:
        """Mark the present values as those adopted last: the servers have them too."""
        for memory in self._memories.values():
            memory.keep()

    def forget(self) -> None:
        """Let the next values overwrite whatever there is."""
        for memory in self._memories.values():
            memory.is_kept = False

    def value_bytes(self, block: int) -> memoryview:
        """Return the bytes of a block's present value in host memory; a copy where it must be."""
        return self._memory_of[block].value_bytes(block)

    def checksums(self) -> dict[int, int]:
        """Return the CRC-32 of every block's present value."""
        return {block: zlib.crc32(memory.value_bytes(block)) for block, memory in self._memory_of.items()}


class _ParameterMemory:
    """One parameter, with the memory in which its next value lands.

    Each round compares a `part` of it, as of `Mark`; None where the script may write to it.
    """

    def __init__(
        self,
        name: str,
        parameter: Parameter,
        blocks: Sequence[PlannedBlock],
        landing: LazyArena,
        part: float | None,
    ) -> None:
        self.blocks = blocks
        self.parameter = parameter
        self.elsewhere: dict[int, memoryview] = {}
        """By block the values in other memory that are not adopted."""
        self.is_kept = False
        """Whether the mark is to be checked."""
        self.landings: dict[int, memoryview] = {}
        """By block where its values land, once one has."""
        self.name = name
        self.dtype = dtype_of(blocks[0].dtype)
        size = self.dtype.itemsize
        self._ranges = {block.id: slice(block.begin * size, block.end * size) for block in blocks}
        self._arena = landing
        self._rounds = 0
        """How often values were adopted."""
        self._mark = Mark(parameter.nbytes, part) if part is not None else None
        """Of the values adopted last."""
        self._small = part == 1.0 and parameter.device.type == "cpu"
        """Whether a copy in each round is cheap."""
        self._adopted: tuple[int, memoryview] | None = None
        """The address and the bytes of these values, if the parameter's memory holds them as they travel."""
        self._version = 0
        """The parameter's, when they were adopted."""

    @property
    def landed(self) -> Tensor:
        return self._arena[self.name]

    def landing(self, block: int) -> memoryview:
        if block not in self.landings:
            self.landings[block] = bytes_of(self.landed)[self._ranges[block]]
        return self.landings[block]

    def value_bytes(self, block: int) -> memoryview:
        return self._bytes()[self._ranges[block]]

    @property
    def _plain(self) -> bool:
        """Whether the parameter's memory holds its bytes as they travel."""
        return self.parameter.device.type == "cpu" and self.parameter.is_contiguous()

    @torch.no_grad()
    def adopt(self, unchanged: Collection[int], *, check: bool) -> None:
        if self.parameter.dtype is not self.dtype:
            check_dtype(self.name, self.parameter, self.dtype)
        changed = [block.id for block in self.blocks if block.id not in unchanged]
        if not changed:
            return
        if check:
            self.check_kept()
        elsewhere, self.elsewhere = self.elsewhere, {}
        parameter = self.parameter
        if self._plain:
            whole = bytes_of(parameter)
            for block in changed:
                value = elsewhere.get(block) or self.landings.get(block) or self.landing(block)
                copy_bytes(value, whole[self._ranges[block]])
            torch.autograd.graph.increment_version(parameter)
            self._take(whole, parameter.data_ptr())
            return
        for block, value in elsewhere.items():
            copy_bytes(value, self.landing(block))
        flat, present = self.landed.view(-1), parameter.detach().reshape(-1)
        for kept in self.blocks:
            if kept.id in unchanged:
                flat[kept.begin : kept.end].copy_(present[kept.begin : kept.end])
        parameter.copy_(self.landed)
        self._take(bytes_of(self.landed))

    def keep(self) -> None:
        self._take(self._bytes(), self.parameter.data_ptr() if self._plain else None)

    def check_kept(self) -> None:
        """Check the mark.

        In a large model past the first rounds, only where that takes no copy, or the version has moved.
        """
        if self._mark is None or not self.is_kept:
            return
        if self._adopted is not None and self._adopted[0] == self.parameter.data_ptr():
            content = self._adopted[1]
        elif (
            version_of(self.parameter) != self._version
            or self._plain
            or self._small
            or covers_all(self._rounds - 1)
        ):
            content = self._bytes()
        else:
            return
        if self._mark.matches(content) or self._mark.matches_but_for_rounding(content, self.parameter.dtype):
            return
        raise FleetError(
            f"the parameter {self.name} was written to after its values had come from the parameter "
            "servers, whose next values would overwrite that. Call fleet.push_parameters() after writing, "
            "before the next step; or write before fleet.init_worker(), in every role alike, or after "
            "fleet.stop_worker(). What an evaluation exchanges for a while is put back before the next step"
        )

    def _bytes(self) -> memoryview:
        """Return the present value's bytes; a copy of a value that is not contiguous, or on a device."""
        parameter = self.parameter.detach()
        return bytes_of(parameter if self._plain else parameter.cpu().contiguous())

    def _take(self, content: memoryview, address: int | None = None) -> None:
        """Mark the present value, unless the script may write to it."""
        if self._mark is None:
            return
        self._adopted = (address, content) if address is not None else None
        self._mark.take(content, self._rounds)
        self.is_kept, self._version = True, version_of(self.parameter)
        self._rounds += 1
