"""A trainer's parameters, and the memory beside them in which new values land.

A write from a socket moves no version counter, and autograd and the user's code still need the old values
while new ones arrive. So they land beside, or stay in memory which a server shares, and `adopt` copies them
to where the parameter lies. That place never changes: whoever has another view of it, an entry of a
``state_dict()`` or a numpy array, sees whole values, the old ones before `adopt` and the new ones after.
Two memories that change places would save the copy, but such a view would show the values of a step before.
"""

import threading
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter

from fleet.errors import ConfigurationError, FleetError
from fleet.parameter_server.trainer.marks import Mark, covers_all, part_of, version_of
from fleet.parameter_server.transport.arena import Arena, Extent, bytes_of, copy_bytes, dtype_of
from fleet.plan.blocks import PlannedBlock

__all__ = ["ParameterStore", "check_dtype"]


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
    """Where the blocks of a job land on a trainer, and how they become the module's parameters.

    Parameters
    ----------
    blocks : sequence of PlannedBlock
        All blocks of the job.
    parameters : mapping of name to Parameter
        The module's own.
    guarded : bool
        Whether nobody but this store may change them: a script that does is told so.

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
        self.parameters: Mapping[str, Parameter] = {block.param: parameters[block.param] for block in blocks}
        self._dtypes = {block.param: dtype_of(block.dtype) for block in blocks}
        self.check_dtypes()
        self._guarded = guarded
        self._lock = threading.Lock()
        self._landing: Arena[str] | None = None
        self.place(blocks)

    def place(self, blocks: Sequence[PlannedBlock]) -> None:
        """Let these blocks land from now on, which are of the same parameters; called before any has."""
        part = part_of(self.parameters.values())
        by_name: dict[str, list[PlannedBlock]] = {}
        for block in blocks:
            by_name.setdefault(block.param, []).append(block)
        self._memories = {
            name: _ParameterMemory(
                name,
                self.parameters[name],
                run,
                partial(self._make_landing, name),
                part if self._guarded else None,
            )
            for name, run in by_name.items()
        }
        self._memory_of = {block.id: memory for memory in self._memories.values() for block in memory.blocks}

    def check_dtypes(self) -> None:
        """Check that no parameter has been converted; see `check_dtype`."""
        for name, dtype in self._dtypes.items():
            check_dtype(name, self.parameters[name], dtype)

    def landing(self, block: int) -> memoryview:
        """Return where the bytes of a block's next value belong."""
        return self._memory_of[block].landing(block)

    def lies(self, block: int, value: memoryview) -> None:
        """Take note that a block's next value lies elsewhere, where it stays as it is until it is adopted."""
        self._memory_of[block].elsewhere[block] = value

    def landed(self, name: str) -> Tensor:
        """Return the value of a parameter that has landed and is not adopted; memory of the host."""
        return self._memories[name].landed

    def adopt(self, unchanged: Collection[int] = (), names: Iterable[str] | None = None) -> None:
        """Make the values that have landed the parameters.

        Parameters
        ----------
        unchanged : collection of int
            Blocks that did not land, as no trainer had a gradient for them: they keep their values.
        names : iterable of str, optional
            Of which parameters; of all otherwise. Some are adopted while the script runs, and not in a step
            that has just called `check_kept`: they are checked now.

        Raises
        ------
        FleetError
            As of `check_kept`; or the script has converted one, so that the value does not fit.
        """
        for name in self._memories if names is None else names:
            check_dtype(name, self.parameters[name], self._dtypes[name])
            self._memories[name].adopt(unchanged, checked=names is None)

    def check_kept(self) -> None:
        """Check that parameters which have gradients hold what was adopted last, as far as marks of it tell.

        Numbers that differ by rounding do: a script that adds something to its weights and subtracts it
        again, as sharpness-aware training does, loses nothing by the values that follow.

        Raises
        ------
        FleetError
            The script has written to one, which the next values would overwrite; or has converted it.
        """
        for name, memory in self._memories.items():
            if memory.parameter.grad is not None:
                check_dtype(name, memory.parameter, self._dtypes[name])
                memory.check_kept()

    def keep(self) -> None:
        """Take the present values for those that were adopted last: they are the servers' too."""
        for memory in self._memories.values():
            memory.keep()

    def forget(self) -> None:
        """Let the next values overwrite whatever there is."""
        for memory in self._memories.values():
            memory.forget()

    def value_bytes(self, block: int) -> memoryview:
        """Return the bytes of a block's present value; memory of the host, a copy where it must be."""
        return self._memory_of[block].value_bytes(block)

    def checksums(self) -> dict[int, int]:
        """Return the CRC-32 of every block's present value."""
        return {block: zlib.crc32(memory.value_bytes(block)) for block, memory in self._memory_of.items()}

    def _make_landing(self, name: str) -> Tensor:
        """Return where a parameter's value lands, in memory that is made when something first lands."""
        with self._lock:
            if self._landing is None:
                pinned = any(parameter.is_cuda for parameter in self.parameters.values())
                extents = {
                    each: Extent(parameter.dtype, tuple(parameter.shape))
                    for each, parameter in self.parameters.items()
                }
                self._landing = Arena(extents, pinned=pinned)
        return self._landing[name]


class _ParameterMemory:
    """One parameter, with the buffers in which its next values land.

    Of what it holds then a `part` is compared in each round, as of `Mark`; None: the script may write to it.
    """

    def __init__(
        self,
        name: str,
        parameter: Parameter,
        blocks: Sequence[PlannedBlock],
        make_landing: Callable[[], Tensor],
        part: float | None,
    ) -> None:
        self.blocks = blocks
        self.parameter = parameter
        self.elsewhere: dict[int, memoryview] = {}
        """By block the values that have not landed here, and are not adopted."""
        self._name = name
        size = parameter.element_size()
        self._ranges = {block.id: slice(block.begin * size, block.end * size) for block in blocks}
        self._make_landing = make_landing
        self._landing: Tensor | None = None
        self._adopted = 0
        """How many times values were adopted."""
        self._mark = Mark(parameter.nbytes, part) if part is not None else None
        """Of the values adopted last."""
        self._small = part == 1.0 and parameter.device.type == "cpu"
        """Whether a copy in each round is cheap."""
        self._is_kept = False
        """Whether the mark is to be checked."""
        self._lay: tuple[int, memoryview] | None = None
        """Where they lie, if the parameter's memory holds its bytes as they travel."""
        self._version = 0
        """The parameter's, when they were adopted."""

    @property
    def landed(self) -> Tensor:
        if self._landing is None:
            self._landing = self._make_landing()
        return self._landing

    def landing(self, block: int) -> memoryview:
        return bytes_of(self.landed)[self._ranges[block]]

    def value_bytes(self, block: int) -> memoryview:
        return self._bytes()[self._ranges[block]]

    @property
    def _plain(self) -> bool:
        """Whether the parameter's memory holds its bytes as they travel."""
        return self.parameter.device.type == "cpu" and self.parameter.is_contiguous()

    @torch.no_grad()
    def adopt(self, unchanged: Collection[int], *, checked: bool) -> None:
        changed = [block.id for block in self.blocks if block.id not in unchanged]
        if not changed:
            return
        if not checked:
            self.check_kept()
        elsewhere, self.elsewhere = self.elsewhere, {}
        parameter = self.parameter
        if self._plain:
            whole = bytes_of(parameter)
            for block in changed:
                copy_bytes(
                    elsewhere[block] if block in elsewhere else self.landing(block),
                    whole[self._ranges[block]],
                )
            torch.autograd.graph.increment_version(parameter)
            self._take(whole, parameter.data_ptr())
            return
        for block, found in elsewhere.items():
            copy_bytes(found, self.landing(block))
        flat, value = self.landed.view(-1), parameter.detach().reshape(-1)
        for kept in self.blocks:
            if kept.id in unchanged:
                flat[kept.begin : kept.end].copy_(value[kept.begin : kept.end])
        parameter.copy_(self.landed)
        self._take(bytes_of(self.landed))

    def keep(self) -> None:
        self._take(self._bytes(), self.parameter.data_ptr() if self._plain else None)

    def forget(self) -> None:
        self._is_kept = False

    def check_kept(self) -> None:
        """Check the mark.

        Of a large model past the first rounds only what takes no copy, or has another version.
        """
        if self._mark is None or not self._is_kept:
            return
        if self._lay is not None and self._lay[0] == self.parameter.data_ptr():
            content = self._lay[1]
        elif (
            version_of(self.parameter) != self._version
            or self._plain
            or self._small
            or covers_all(self._adopted - 1)
        ):
            content = self._bytes()
        else:
            return
        if self._mark.matches(content) or self._mark.matches_but_for_rounding(content, self.parameter.dtype):
            return
        raise FleetError(
            f"the parameter {self._name} was written to after its values had come from the parameter "
            "servers, whose next values would overwrite that. Call fleet.push_parameters() after writing, "
            "before the next step; or write before fleet.init_worker(), in every role alike, or after "
            "fleet.stop_worker(). What an evaluation exchanges for a while is put back before the next step"
        )

    def _bytes(self) -> memoryview:
        """Return the present value's bytes; a copy where they lie otherwise, or on a device."""
        parameter = self.parameter.detach()
        return bytes_of(parameter if self._plain else parameter.cpu().contiguous())

    def _take(self, content: memoryview, address: int | None = None) -> None:
        """Mark the present value, if the script may not write to it."""
        if self._mark is None:
            return
        self._lay = (address, content) if address is not None else None
        self._mark.take(content, self._adopted)
        self._is_kept, self._version = True, version_of(self.parameter)
        self._adopted += 1
