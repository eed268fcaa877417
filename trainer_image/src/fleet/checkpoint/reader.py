"""A reader of checkpoints that returns any range of a parameter, however the parameter was sliced.

A process reads only the files that it needs, and verifies size and digest of each before it uses the content.
Every error names the file.
"""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fleet.checkpoint.files import open_file, sha256_of
from fleet.checkpoint.manifest import MANIFEST_NAME, BlockRecord, FileRecord, Manifest
from fleet.checkpoint.values import PARSE_ERRORS, decode
from fleet.errors import CheckpointError
from fleet.plan import describe_difference

__all__ = ["TRAINERS_STATE", "Checkpoint", "Piece", "check_files", "cut_state", "join_pieces"]

TRAINERS_STATE: Final = "state of the optimizer"
"""The name of a fact that is present if trainer 0's part, not the shards, has the optimizer state."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A contiguous run of elements of one parameter in row-major order, with their optimizer state."""

    param: str
    begin: int
    """The index of the first element in the flattened parameter."""
    end: int
    """The index of the last element, plus one."""
    value: Tensor
    """The elements, in the parameter's shape with the first dimension reduced."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """The optimizer's entries for these elements: tensors, or plain values such as a step count."""


def cut_state(
    state: Mapping[str, Any], whole: tuple[int, ...], begin: int, end: int, shape: tuple[int, ...]
) -> dict[str, Any]:
    """Slice an optimizer's state to a range of a parameter's elements.

    Parameters
    ----------
    state : mapping
        The entries for a tensor of the shape `whole`. An entry of the same shape is sliced; any other entry,
        such as a step count, belongs to the tensor as a whole and is kept.
    whole, shape : tuple of int
        The shapes of the tensor and of the result.
    begin, end : int
        The elements, in row-major order.
    """
    cut = {}
    for name, entry in state.items():
        elementwise = isinstance(entry, Tensor) and tuple(entry.shape) == whole
        cut[name] = entry.detach().reshape(-1)[begin:end].view(shape) if elementwise else entry
    return cut


def join_pieces(pieces: Sequence[Piece]) -> Sequence[Piece]:
    """Join consecutive pieces of one parameter; the inverse of slicing.

    Parameters
    ----------
    pieces : sequence of Piece
        At least one, in order.

    Returns
    -------
    sequence of Piece
        One piece; or the given pieces, if an entry that is not sliced differs between them.
    """
    first = pieces[0]
    if len(pieces) == 1 or any(piece.state.keys() != first.state.keys() for piece in pieces):
        return pieces
    state: dict[str, Any] = {}
    for name, entry in first.state.items():
        entries = [piece.state[name] for piece in pieces]
        if all(_is_elementwise(piece, name) for piece in pieces):
            state[name] = torch.cat(entries)
        elif all(_is_equal(each, entry) for each in entries):
            state[name] = entry
        else:
            return pieces
    value = torch.cat([piece.value for piece in pieces])
    return [Piece(first.param, first.begin, pieces[-1].end, value, state)]


class Checkpoint:
    """A saved checkpoint, opened for reading.

    Parameters
    ----------
    directory : Path
        Contains the manifest. Other files are opened and verified when their content is needed.
    name : str
        The file name of the manifest.

    Raises
    ------
    CheckpointError
        The manifest is missing or damaged.
    """

    def __init__(self, directory: Path, name: str = MANIFEST_NAME) -> None:
        self.directory = directory
        self.manifest = Manifest.read(directory, name)
        self._verified: set[str] = set()
        self._parts: dict[int, bytes] = {}
        self._records: dict[str, list[tuple[BlockRecord, FileRecord]]] = {}
        for file in self.manifest.files:
            for block in file.blocks:
                self._records.setdefault(block.param, []).append((block, file))
        for records in self._records.values():
            records.sort(key=lambda record: record[0].begin)

    @property
    def key(self) -> tuple[Path, str]:
        """The directory and the random name of this save, which together identify the save."""
        return self.directory, self.manifest.save

    @property
    def has_state(self) -> bool:
        """True if the shards contain optimizer state for parameters."""
        return any(block.state for records in self._records.values() for block, _ in records)

    def check(self, facts: Mapping[str, str], *, trainers_step: bool = False) -> None:
        """Check that the checkpoint matches this process's model and optimizer.

        Parameters
        ----------
        facts : mapping of str to str
            The facts of this process; see `Manifest.facts`.
        trainers_step : bool
            Whether trainers have their own optimizers, and can therefore load the state in trainer 0's part.

        Raises
        ------
        CheckpointError
            The facts differ; the message says how.
        """
        theirs = dict(self.manifest.facts)
        if trainers_step:
            theirs.pop(TRAINERS_STATE, None)
        difference = describe_difference(facts, theirs)
        if difference:
            raise CheckpointError(
                f"{self.directory} is a checkpoint of another model or optimizer: {difference} (here: this "
                "process; there: the checkpoint); load it into the model and the optimizer from which it "
                "was saved, or load only the values: fleet.save_inference_model, then load_state_dict"
            )

    def piece(self, param: str, begin: int, end: int, shape: tuple[int, ...]) -> Piece:
        """Read a range of a parameter's elements, with their optimizer state.

        Parameters
        ----------
        param : str
        begin, end : int
            The elements, in row-major order.
        shape : tuple of int
            The shape of the result.

        Raises
        ------
        CheckpointError
            A file is missing, truncated, changed or from another checkpoint; or no file has the elements.
        """
        found = [
            (block, self._read(block, file))
            for block, file in self._records.get(param, ())
            if _overlaps(block, begin, end)
        ]
        # The records are sorted by their first element.
        covered = begin
        for block, _ in found:
            if block.begin <= covered:
                covered = max(covered, block.end)
        if covered < end or not found:
            raise CheckpointError(
                f"{self.directory} has elements of {param} only up to {covered}, expected {begin} to {end}; "
                "its manifest names no file with the rest"
            )
        if len(found) == 1 and (found[0][0].begin, found[0][0].end) == (begin, end):
            piece = found[0][1]
            return Piece(param, begin, end, piece.value.view(shape), piece.state)
        try:
            return self._assemble(param, begin, end, shape, found)
        except PARSE_ERRORS as error:
            raise CheckpointError(
                f"{self.directory} has elements of {param} in {len(found)} parts that do not fit together: "
                f"{error}; load another checkpoint"
            ) from error

    def part_of(self, trainer: int) -> bytes | None:
        """Return a trainer's part, or None if this directory does not contain it.

        The result is kept, because the file may be gone when a restarted trainer requests the part.

        Raises
        ------
        CheckpointError
            The file is damaged.
        """
        for file in self.manifest.files if trainer not in self._parts else ():
            # The manifest names trainer 0's part, as format 1 does not record the trainer of a file.
            is_wanted = file.trainer == trainer if trainer else file.name == self.manifest.trainer_part
            if is_wanted and os.path.lexists(self.directory / file.name):
                self._parts[trainer] = self._content(file)
        return self._parts.get(trainer)

    def keep_parts(self) -> None:
        """Read all trainers' parts into memory, because another save may delete the files.

        Raises
        ------
        CheckpointError
            A file is damaged.
        """
        for trainer in {0, *(file.trainer for file in self.manifest.files if file.trainer > 0)}:
            self.part_of(trainer)

    def files_with(self, spans: Iterable[tuple[str, int, int]]) -> list[FileRecord]:
        """Return the files with the given ranges of parameters, and the trainer parts in this directory.

        Parameters
        ----------
        spans : iterable of (name of parameter, begin, end)
        """
        found = {
            file.name: file
            for param, begin, end in spans
            for block, file in self._records.get(param, ())
            if _overlaps(block, begin, end)
        }
        return [*found.values(), *filter(self._is_part_here, self.manifest.files)]

    def check_here(self) -> None:
        """Check that the files listed in this directory's manifest exist and have the recorded sizes.

        Raises
        ------
        CheckpointError
            The message names every missing or truncated file.
        """
        here = self.manifest.here
        check_files(
            ((self, file) for file in self.manifest.files if file.name in here), Checkpoint.check_size
        )

    def verify(
        self, known: MutableMapping[tuple[int, ...], str], spans: Iterable[tuple[str, int, int]]
    ) -> None:
        """Verify the digests of this directory's table rows and of the files that `files_with` returns.

        Parameters
        ----------
        known : mapping
            Digests from earlier calls, by inode, size and times. Unchanged files are not read again.
        spans : iterable of (name of parameter, begin, end)

        Raises
        ------
        CheckpointError
            A file is missing or damaged.
        """
        wanted = {file.name: file for file in self.manifest.files if not file.blocks}
        wanted = {name: file for name, file in wanted.items() if name in self.manifest.here}
        wanted |= {file.name: file for file in self.files_with(spans)}
        for file in wanted.values():
            self.check_size(file)
            found = (self.directory / file.name).stat()
            # The ctime changes even if a program writes to the file and then restores its mtime.
            identity = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
            if known.get(identity) != file.sha256:
                self.verify_file(file)
                known[identity] = file.sha256

    def check_size(self, file: FileRecord) -> None:
        """Check that a file exists and has the recorded size; raise CheckpointError otherwise."""
        path = self.directory / file.name
        try:
            with open_file(path) as opened:
                size = os.fstat(opened.fileno()).st_size
        except OSError as error:
            raise _unreadable(path, error) from error
        if size != file.bytes:
            raise CheckpointError(
                f"{path} has {size} bytes, expected {file.bytes}: it is "
                f"{'truncated' if size < file.bytes else 'another file'}; load another checkpoint, or copy "
                "the file again from its original"
            )

    def verify_file(self, file: FileRecord) -> Path:
        """Verify a file's digest, at most once, and return its path; raise CheckpointError on a mismatch."""
        path = self.directory / file.name
        if file.name in self._verified:
            return path
        self.check_size(file)
        try:
            digest = sha256_of(path)
        except OSError as error:
            raise _unreadable(path, error) from error
        if digest != file.sha256:
            raise CheckpointError(
                f"{path} has the SHA-256 {digest}, expected {file.sha256}: {self._explain(path)}; load "
                "another checkpoint, or copy the file again from its original"
            )
        self._verified.add(file.name)
        return path

    def _explain(self, path: Path) -> str:
        """Return the likely reason for a digest mismatch."""
        try:
            with safe_open(path, framework="pt") as opened:
                save = (opened.metadata() or {}).get("save", self.manifest.save)  # a trainer's part has none
        except (SafetensorError, OSError):
            return "it was changed, or is not a safetensors file"
        if save != self.manifest.save:
            return f"it belongs to the save {save!r}, and the manifest to {self.manifest.save!r}"
        return "it was changed after it had been written"

    def _is_part_here(self, file: FileRecord) -> bool:
        is_part = file.trainer >= 0 or file.name == self.manifest.trainer_part
        return is_part and (file.name in self.manifest.here or os.path.lexists(self.directory / file.name))

    def _content(self, file: FileRecord) -> bytes:
        path = self.verify_file(file)
        try:
            return path.read_bytes()
        except OSError as error:
            raise _unreadable(path, error) from error

    def _read(self, block: BlockRecord, file: FileRecord) -> Piece:
        path = self.verify_file(file)
        try:
            with safe_open(path, framework="pt") as opened:
                prefix = f"{block.tensor}."
                tensors = {
                    name: opened.get_tensor(name)
                    for name in opened.keys()  # noqa: SIM118 - not a mapping
                    if name == block.tensor or name.startswith(prefix)
                }
            value = tensors[block.tensor]
            state = {name: decode(entry, tensors) for name, entry in block.state.items()}
        except (SafetensorError, OSError, *PARSE_ERRORS) as error:
            raise CheckpointError(
                f"{path} does not match its manifest in {block.param}: {error}; load another checkpoint"
            ) from error
        found = str(value.dtype).removeprefix("torch."), tuple(value.shape)
        if found != (block.dtype, block.shape):
            raise CheckpointError(
                f"{path} has {block.param} as {found[0]}{list(found[1])}; expected "
                f"{block.dtype}{list(block.shape)}, as in its manifest"
            )
        return Piece(block.param, block.begin, block.end, value, state)

    def _assemble(
        self,
        param: str,
        begin: int,
        end: int,
        shape: tuple[int, ...],
        found: list[tuple[BlockRecord, Piece]],
    ) -> Piece:
        """Slice the requested range from the pieces and join the slices."""
        values: list[Tensor] = []
        states = []
        for block, piece in found:
            _check_cuttable(self.directory, block, piece)
            first, last = max(begin, block.begin) - block.begin, min(end, block.end) - block.begin
            values.append(piece.value.reshape(-1)[first:last])
            states.append(cut_state(piece.state, block.shape, first, last, (last - first,)))
        if any(part.keys() != states[0].keys() for part in states):
            raise CheckpointError(
                f"{self.directory} has different optimizer state for some elements of {param} than for "
                "others, so they cannot be joined; load it with the number of servers and the slicing with "
                "which it was saved"
            )
        state = dict(states[0])  # entries that belong to a piece as a whole come from the first piece
        for name, entry in found[0][1].state.items():
            if isinstance(entry, Tensor) and tuple(entry.shape) == found[0][0].shape:
                state[name] = torch.cat([part[name] for part in states]).view(shape)
        return Piece(param, begin, end, torch.cat(values).view(shape), state)


def check_files(
    files: Iterable[tuple[Checkpoint, FileRecord]], check: Callable[[Checkpoint, FileRecord], object]
) -> None:
    """Apply a check to each file; if any check fails, raise one error with all messages.

    Raises
    ------
    CheckpointError
        `check` raised it for some files; the message joins all their messages.
    """
    damage = []
    for checkpoint, file in files:
        try:
            check(checkpoint, file)
        except CheckpointError as error:
            damage.append(error)
    if damage:
        raise CheckpointError("; ".join(map(str, damage))) from damage[0]


def _overlaps(block: BlockRecord, begin: int, end: int) -> bool:
    # The second condition is for an empty parameter, which is one block without elements.
    return (block.begin < end and block.end > begin) or block.begin == block.end == begin == end


def _is_elementwise(piece: Piece, name: str) -> bool:
    entry = piece.state[name]
    return isinstance(entry, Tensor) and entry.shape == piece.value.shape


def _is_equal(one: object, other: object) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return bool(one == other)


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read ({error.strerror}), but is needed here: expected every file of the "
        "checkpoint in a directory that all processes see; if each server has its own directory, load with "
        "the number of servers and the slicing with which it was saved"
    )


def _check_cuttable(directory: Path, block: BlockRecord, piece: Piece) -> None:
    for name, entry in piece.state.items():
        if isinstance(entry, Tensor) and tuple(entry.shape) == block.shape:
            continue
        for shape in map(tuple, _shapes_in(entry)):
            if math.prod(shape) > 1:
                raise CheckpointError(
                    f"{directory}: the optimizer's {name} of {block.param} has the shape {list(shape)} and "
                    f"belongs to {list(block.shape)} elements as a whole, so it cannot be sliced "
                    "differently; load it with the number of servers and the slicing with which it was saved"
                )


def _shapes_in(entry: object) -> Iterator[Sequence[int]]:
    """Yield the shapes of all tensors and arrays in an optimizer state entry."""
    if isinstance(entry, Tensor | np.ndarray):
        yield entry.shape
    elif isinstance(entry, list | tuple | dict):
        for item in entry.values() if isinstance(entry, dict) else entry:
            yield from _shapes_in(item)
