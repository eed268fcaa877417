"""A trainer's parameters, the memory that receives their new values, and detection of unexpected writes.

A write from a socket does not increment a version counter, and autograd and the user's code still need the
old values while new values arrive. So values land in other memory, or stay in memory that a server shares,
and `adopt` copies them to the parameter. The address of the parameter's memory never changes, so every other
view of it, such as an entry of a ``state_dict()`` or a numpy array, sees complete values. Swapping two
buffers would avoid the copy, but such a view would then show the values of the previous step.

Writes through ``tensor.data`` and by torch's gradient scaler do not increment a version counter either. So
marks compare bytes: all bytes in the first rounds, which reveal a script's mistakes, and in every round of a
small model. In a larger model, each later round compares a part of each tensor, and the part moves from round
to round. All trainers compare the same parts, so that none is slower than the others.
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
"""The smallest number of bytes that a round of checks compares, for parameters and gradients separately."""
_LEAST_PART: Final = 0.02
"""The smallest fraction of a model that a round compares: `ROUND_BYTES` of 25 million parameters.

Copying and comparing it takes 1 ms, less than 2 % of the shortest steps of ``benchmarks.dense_sync``.
"""

_WHOLE_ROUNDS: Final = 3
"""The number of initial rounds that compare all bytes: a script's mistakes show in its first steps."""
_UNIT_BYTES: Final = 1024
"""The unit of the sizes of parts, in bytes; a multiple of every element's size."""
_ROUNDINGS: Final = 8
"""The accepted rounding error, in units in the last place, after adding and subtracting one value."""
_SMALL: Final = 2.0**-7
"""The smallest magnitude for the unit in the last place: an intermediate sum may exceed all values."""
_AT_ONCE_BYTES: Final = 1 << 18
"""The number of bytes compared in one operation, so that temporary results stay in the cache."""


def version_of(tensor: Tensor) -> int:
    """Return a tensor's version counter, which in-place changes increment."""
    return tensor._version  # noqa: SLF001 - torch documents it under this name, and has no other


def part_of(tensors: Iterable[Tensor]) -> float:
    """Return the fraction of each tensor that is compared after the first rounds of checks."""
    total = sum(each.nbytes for each in tensors)
    return min(1.0, max(_LEAST_PART, ROUND_BYTES / total)) if total else 1.0


def covers_all(round_: int) -> bool:
    """Return whether a round of checks compares all bytes, for models of any size."""
    return round_ < _WHOLE_ROUNDS


class Mark:
    """A copy or checksum of some memory, used to detect later changes to it.

    Parameters
    ----------
    length : int
        The size of the memory in bytes. Memory for the copy is allocated when the mark is created, because a
        later allocation, among short-lived gradients, would fragment the heap.
    part : float
        The fraction of the memory that a later round compares.
    copies : bool
        Whether the first rounds copy all bytes of memory that later rounds compare in parts. If not, they
        keep only the CRC-32, which needs no memory but cannot distinguish rounding from writing.
    """

    def __init__(self, length: int, part: float = 1.0, *, copies: bool = True) -> None:
        self._part = part
        self._copies = copies
        self._begin = 0
        self._length = length
        self._stretch = bytearray(self._stretch_of(length))
        self._whole: mmap.mmap | None = None
        """The full copy of larger memory in the initial rounds; mapped, so that the kernel can reclaim it."""
        self._crc: int | None = None

    def take(self, content: memoryview, round_: int) -> None:
        """Copy the memory, or only the part that this round of checks compares."""
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
            # A bytearray compares bytes with memcmp; two views would be compared element by element.
            return self._stretch == content[self._begin : self._begin + len(self._stretch)]
        held = memoryview(self._whole)
        return len(held) == len(content) and all(
            bytearray(held[begin : begin + _AT_ONCE_BYTES]) == content[begin : begin + _AT_ONCE_BYTES]
            for begin in range(0, len(held), _AT_ONCE_BYTES)
        )

    def matches_but_for_rounding(self, content: memoryview, dtype: torch.dtype) -> bool:
        """Return whether the memory differs only by rounding errors, as after `w += e; w -= e`.

        This compares all bytes that the mark covers; the result is False if the mark has no copy of them.
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
        """Return the number of bytes, out of `length`, that a later round of checks compares."""
        if self._part >= 1.0:
            return length
        return min(length, math.ceil(length * self._part / _UNIT_BYTES) * _UNIT_BYTES)


class LazyArena:
    """Host memory for all parameters, allocated on first use, and pinned for parameters on a GPU.

    Parameters
    ----------
    parameters : mapping of name to Parameter
    """

    def __init__(self, parameters: Mapping[str, Parameter]) -> None:
        self._parameters = parameters
        self._lock = threading.Lock()
        self._arena: Arena[str] | None = None

    def __getitem__(self, name: str) -> Tensor:
        with self._lock:  # several threads receive values
            if self._arena is None:
                self._arena = Arena(
                    {name: Extent(each.dtype, tuple(each.shape)) for name, each in self._parameters.items()},
                    pinned=any(each.is_cuda for each in self._parameters.values()),
                )
        return self._arena[name]


def check_dtype(name: str, parameter: Tensor, expected: torch.dtype) -> None:
    """Raise an error if a parameter or its gradient does not have the dtype used on the servers.

    Raises
    ------
    ConfigurationError
        The script has converted the model; the message names the parameter and both dtypes.
    """
    if parameter.dtype is not expected:
        raise ConfigurationError(
            f"{name} is {parameter.dtype}, but was {expected} when fleet.distributed_optimizer() was called, "
            "and the parameter servers hold and step it as such; convert the model (model.to(dtype), "
            "double(), bfloat16(), half()) before that call, in every role"
        )


class ParameterStore:
    """A module's parameters, with the memory that receives their new values.

    Parameters
    ----------
    blocks : sequence of PlannedBlock
        All blocks that servers hold.
    parameters : mapping of name to Parameter
        The parameters of the module.
    guarded : bool
        Whether the script's writes to parameters are errors.

    Raises
    ------
    ConfigurationError
        A parameter's dtype differs from the dtype of its blocks.
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
        """Raise an error if a parameter was converted to another dtype; see `check_dtype`."""
        for name, memory in self._memories.items():
            check_dtype(name, memory.parameter, memory.dtype)

    def landing(self, block: int) -> memoryview:
        """Return the memory that receives a block's new value."""
        memory = self._memory_of[block]
        return memory.landings.get(block) or memory.landing(block)  # fast path: called for each frame

    def land_elsewhere(self, block: int, value: memoryview) -> None:
        """Use the given memory as a block's new value; it must not change until the value is copied."""
        self._memory_of[block].elsewhere[block] = value

    def landed(self, name: str) -> Tensor:
        """Return a parameter's new value in host memory, before it is copied into the parameter."""
        return self._memories[name].landed

    def adopt(self, unchanged: Collection[int] = (), names: Iterable[str] | None = None) -> None:
        """Copy newly arrived values to the parameters.

        Parameters
        ----------
        unchanged : collection of int
            Blocks that keep their values, because no trainer had a gradient for them.
        names : iterable of str, optional
            The names of the parameters; all by default. Parameters given by name are checked here, because
            they are adopted while the script runs, outside the step that calls `check_kept`.

        Raises
        ------
        FleetError
            See `check_kept`; or the script has converted a parameter, so that its value does not fit.
        """
        for name in self._memories if names is None else names:
            self._memories[name].adopt(unchanged, check=names is not None)

    def check_kept(self) -> None:
        """Raise an error if the script has changed a parameter that has a gradient.

        Rounding differences are accepted: if a script adds something to its weights and then subtracts it, as
        in sharpness-aware training, no change is lost when the next values overwrite the weights.

        Raises
        ------
        FleetError
            The script has written to a parameter, which the next values would overwrite, or has converted it.
        """
        for memory in self._memories.values():
            if memory.parameter.grad is not None:
                if memory.parameter.dtype is not memory.dtype:
                    check_dtype(memory.name, memory.parameter, memory.dtype)
                memory.check_kept()

    def keep(self) -> None:
        """Record the current values as the servers' values."""
        for memory in self._memories.values():
            memory.keep()

    def forget(self) -> None:
        """Allow the next values to replace the parameters without a check for changes."""
        for memory in self._memories.values():
            memory.is_kept = False

    def value_bytes(self, block: int) -> memoryview:
        """Return the bytes of a block's current value in host memory; copies them only if necessary."""
        return self._memory_of[block].value_bytes(block)

    def checksums(self) -> dict[int, int]:
        """Return the CRC-32 of every block's current value."""
        return {block: zlib.crc32(memory.value_bytes(block)) for block, memory in self._memory_of.items()}


class _ParameterMemory:
    """A parameter, with the memory that receives its new value.

    Each round compares a `part` of the parameter (see `Mark`); None if the script may write to the parameter.
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
        """For each block, a value in other memory that has not been copied to the parameter yet."""
        self.is_kept = False
        """Whether the parameter must still match `_mark`."""
        self.landings: dict[int, memoryview] = {}
        """The memory that receives each block's values; an entry is added on first use."""
        self.name = name
        self.dtype = dtype_of(blocks[0].dtype)
        size = self.dtype.itemsize
        self._ranges = {block.id: slice(block.begin * size, block.end * size) for block in blocks}
        self._arena = landing
        self._rounds = 0
        """The number of times that values have been adopted."""
        self._mark = Mark(parameter.nbytes, part) if part is not None else None
        """The mark of the values adopted last; None if the script may write to the parameter."""
        self._small = part == 1.0 and parameter.device.type == "cpu"
        """Whether copying the value in each round is cheap."""
        self._adopted: tuple[int, memoryview] | None = None
        """The address and bytes of the adopted values, if the parameter's memory has the wire format."""
        self._version = 0
        """The parameter's version when the values were adopted."""

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
        """True if the parameter's memory can be sent as it is."""
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
            address, adopted = parameter.data_ptr(), self._adopted
            whole = adopted[1] if adopted is not None and adopted[0] == address else bytes_of(parameter)
            for block in changed:
                value = elsewhere.get(block) or self.landings.get(block) or self.landing(block)
                copy_bytes(value, whole[self._ranges[block]])
            # torch does not see the copy, but a graph that has saved the old value must detect it like an
            # in-place operation.
            torch.autograd.graph.increment_version(parameter)
            self._take(whole, address)
            return
        for block, value in elsewhere.items():
            copy_bytes(value, self.landing(block))
        flat, present = self.landed.view(-1), parameter.detach().reshape(-1)
        # The parameter is overwritten as a whole, so unchanged blocks first receive their present values.
        for kept in self.blocks:
            if kept.id in unchanged:
                flat[kept.begin : kept.end].copy_(present[kept.begin : kept.end])
        parameter.copy_(self.landed)
        self._take(bytes_of(self.landed))

    def keep(self) -> None:
        self._take(self._bytes(), self.parameter.data_ptr() if self._plain else None)

    def check_kept(self) -> None:
        """Raise an error if the script has changed the parameter.

        In a large model, after the first rounds, this is done only if it needs no copy or the version has
        changed.
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
            f"the parameter {self.name} was written to after its values had arrived from the parameter "
            "servers, and the next values would overwrite the change. Call fleet.push_parameters() after "
            "writing and before the next step; or write before fleet.init_worker(), in every role, or after "
            "fleet.stop_worker(). If an evaluation replaces the values temporarily, restore them before the "
            "next step"
        )

    def _bytes(self) -> memoryview:
        """Return the bytes of the current value, copied if it is on a device or not contiguous."""
        parameter = self.parameter.detach()
        return bytes_of(parameter if self._plain else parameter.cpu().contiguous())

    def _take(self, content: memoryview, address: int | None = None) -> None:
        """Record the current value for later checks, unless the script may write to the parameter."""
        if self._mark is None:
            return
        self._adopted = (address, content) if address is not None else None
        self._mark.take(content, self._rounds)
        self.is_kept, self._version = True, version_of(self.parameter)
        self._rounds += 1
