"""Reading: what a process needs of a checkpoint, however it was cut, or an error that names the file."""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fleet.checkpoint.fields import PARSE_ERRORS
from fleet.checkpoint.files import open_file, sha256_of
from fleet.checkpoint.manifest import MANIFEST_NAME, BlockRecord, FileRecord, Manifest
from fleet.checkpoint.piece import Piece, cut_state
from fleet.checkpoint.values import decode
from fleet.errors import CheckpointError
from fleet.plan import describe_difference

__all__ = ["TRAINERS_STATE", "Checkpoint", "check_each"]

TRAINERS_STATE: Final = "state of the optimizer"
"""The fact that it is in the trainer's part, as in GEO; it is in the shards otherwise."""


class Checkpoint:
    """A checkpoint in a directory.

    Parameters
    ----------
    directory : Path
        With a manifest. The files are opened, and checked, when something in them is asked for.
    name : str
        The manifest's, where it is not the usual one.

    Raises
    ------
    CheckpointError
        The directory is no checkpoint.
    """

    def __init__(self, directory: Path, name: str = MANIFEST_NAME) -> None:
        self.directory = directory
        self.manifest = Manifest.read(directory, name)
        self._whole: set[str] = set()
        self._trainer_part: bytes | None = None
        self._statuses: dict[int, bytes] = {}
        self._records: dict[str, list[tuple[BlockRecord, FileRecord]]] = {}
        for file in self.manifest.files:
            for block in file.blocks:
                self._records.setdefault(block.param, []).append((block, file))
        for records in self._records.values():
            records.sort(key=lambda record: record[0].begin)

    def check(self, facts: Mapping[str, str], *, trainers_step: bool = False) -> None:
        """Check that it is of the same model and optimizer.

        Parameters
        ----------
        facts : mapping of str to str
            Those of this process.
        trainers_step : bool
            Whether trainers have optimizers of their own, which take the state that they have saved.

        Raises
        ------
        CheckpointError
            It is not; the message says how they differ.
        """
        theirs = dict(self.manifest.facts)
        if trainers_step:
            theirs.pop(TRAINERS_STATE, None)
        difference = describe_difference(facts, theirs)
        if difference:
            raise CheckpointError(
                f"{self.directory} is a checkpoint of another training: {difference} (here: this process; "
                "there: the checkpoint); load it into the model and the optimizer that it was made of, or "
                "begin with the values alone: fleet.save_inference_model, then load_state_dict"
            )

    def piece(self, param: str, begin: int, end: int, shape: tuple[int, ...]) -> Piece:
        """Return some elements of a parameter, with their state.

        Raises
        ------
        CheckpointError
            A file is missing, truncated, changed or another checkpoint's; or no file has these elements.
        """
        found = [
            (block, self._read(block, file))
            for block, file in self._records.get(param, ())
            if _has_some(block, begin, end)
        ]
        covered = begin
        for block, _ in found:
            if block.begin <= covered:
                covered = max(covered, block.end)
        if covered < end or not found:
            raise CheckpointError(
                f"{self.directory} has the elements of {param} up to {covered}, expected {begin} to {end}; "
                "its manifest names no file with the rest"
            )
        if len(found) == 1 and (found[0][0].begin, found[0][0].end) == (begin, end):
            piece = found[0][1]
            return Piece(param, begin, end, piece.value.view(shape), piece.state)
        try:
            return self._put_together(param, begin, end, shape, found)
        except PARSE_ERRORS as error:
            raise CheckpointError(
                f"{self.directory} has elements of {param} in {len(found)} parts that do not fit together: "
                f"{error}; load another checkpoint"
            ) from error

    @property
    def has_state(self) -> bool:
        """Whether the shards hold state of optimizers."""
        return any(block.state for records in self._records.values() for block, _ in records)

    def files_with(self, spans: Iterable[tuple[str, int, int]]) -> list[FileRecord]:
        """Return the files with some elements of parameters, and those of trainers' parts that lie here.

        Parameters
        ----------
        spans : iterable of (name of parameter, begin, end)
        """
        found = {
            file.name: file
            for param, begin, end in spans
            for block, file in self._records.get(param, ())
            if _has_some(block, begin, end)
        }
        return [*found.values(), *filter(self._is_part_here, self.manifest.files)]

    def check_here(self) -> None:
        """Check that every file that lay beside the manifest is there, and of the right size.

        Raises
        ------
        CheckpointError
            Some are not; the message names each.
        """
        here = self.manifest.here
        check_each(((self, file) for file in self.manifest.files if file.name in here), Checkpoint.check_size)

    def verify(
        self, known: MutableMapping[tuple[int, ...], str], spans: Iterable[tuple[str, int, int]]
    ) -> None:
        """Check the digests of files with some elements of parameters, and of trainers' parts that lie here.

        Parameters
        ----------
        known : mapping
            The digests of files that were read before; those that are as old as then are not read again.
        spans : iterable of (name of parameter, begin, end)

        Raises
        ------
        CheckpointError
            A file is not the one that was written.
        """
        wanted = {file.name: file for file in self.manifest.files if not file.blocks}
        wanted = {name: file for name, file in wanted.items() if name in self.manifest.here}
        wanted |= {file.name: file for file in self.files_with(spans)}
        for file in wanted.values():
            self.check_size(file)
            found = (self.directory / file.name).stat()
            place = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
            if known.get(place) != file.sha256:
                self.checked(file)
                known[place] = file.sha256

    def status_of(self, trainer: int) -> bytes | None:
        """Return what a trainer other than 0 has said of itself; None where it has not, or it is not here.

        It is kept, as `trainer_part` is.

        Raises
        ------
        CheckpointError
            It is not what was written.
        """
        for file in self.manifest.files if trainer not in self._statuses else ():
            if file.trainer == trainer and file.name in self.manifest.here:
                self._statuses[trainer] = self._content(file)
        return self._statuses.get(trainer)

    def keep_parts(self) -> None:
        """Read what trainers have said of themselves: the files may be gone when one of them asks for it.

        Raises
        ------
        CheckpointError
            Some of it is not what was written.
        """
        self.trainer_part()
        for file in self.manifest.files:
            if file.trainer > 0:
                self.status_of(file.trainer)

    def trainer_part(self) -> bytes | None:
        """Return the trainer's own part; None where there is none, or another server has it.

        It is kept: the file may be gone when a trainer that was restarted asks for it again.
        """
        for file in self.manifest.files if self._trainer_part is None else ():
            if file.name == self.manifest.trainer_part and os.path.lexists(self.directory / file.name):
                self._trainer_part = self._content(file)
        return self._trainer_part

    def _is_part_here(self, file: FileRecord) -> bool:
        """Whether a file is a trainer's part, and not one that only another server has."""
        is_part = file.trainer >= 0 or file.name == self.manifest.trainer_part
        return is_part and (file.name in self.manifest.here or os.path.lexists(self.directory / file.name))

    def _content(self, file: FileRecord) -> bytes:
        path = self.checked(file)
        try:
            return path.read_bytes()
        except OSError as error:
            raise _unreadable(path, error) from error

    def _put_together(
        self,
        param: str,
        begin: int,
        end: int,
        shape: tuple[int, ...],
        found: list[tuple[BlockRecord, Piece]],
    ) -> Piece:
        """Cut what is wanted from each piece that has some of it, and join the parts."""
        values: list[Tensor] = []
        states = []
        for block, piece in found:
            _check_cuttable(self.directory, block, piece)
            first, last = max(begin, block.begin) - block.begin, min(end, block.end) - block.begin
            values.append(piece.value.reshape(-1)[first:last])
            states.append(cut_state(piece.state, block.shape, first, last, (last - first,)))
        if any(part.keys() != states[0].keys() for part in states):
            raise CheckpointError(
                f"{self.directory} has other optimizer state for some elements of {param} than for others, "
                "so they cannot be put together; load it with the number of servers and the slicing that it "
                "was saved with"
            )
        state = dict(states[0])  # what is no tensor of elements is the first one's
        for name, entry in found[0][1].state.items():
            if isinstance(entry, Tensor) and tuple(entry.shape) == found[0][0].shape:
                state[name] = torch.cat([part[name] for part in states]).view(shape)
        return Piece(param, begin, end, torch.cat(values).view(shape), state)

    def _read(self, block: BlockRecord, file: FileRecord) -> Piece:
        path = self.checked(file)
        try:
            with safe_open(path, framework="pt") as opened:
                within = f"{block.tensor}."  # how the names of what its state has begin
                tensors = {
                    name: opened.get_tensor(name)
                    for name in opened.keys()  # noqa: SIM118 - no mapping
                    if name == block.tensor or name.startswith(within)
                }
            value = tensors[block.tensor]
            state = {name: decode(entry, tensors) for name, entry in block.state.items()}
        except (SafetensorError, OSError, *PARSE_ERRORS) as error:
            raise CheckpointError(
                f"{path} does not hold what its manifest says of {block.param}: {error}; load another "
                "checkpoint"
            ) from error
        found = str(value.dtype).removeprefix("torch."), tuple(value.shape)
        if found != (block.dtype, block.shape):
            raise CheckpointError(
                f"{path} has {block.param} as {found[0]}{list(found[1])}; expected "
                f"{block.dtype}{list(block.shape)}, as its manifest says"
            )
        return Piece(block.param, block.begin, block.end, value, state)

    def checked(self, file: FileRecord) -> Path:
        """Return the path of a file that is the one the manifest means; CheckpointError if it is not."""
        path = self.directory / file.name
        if file.name in self._whole:
            return path
        self.check_size(file)
        try:
            digest = sha256_of(path)
        except OSError as error:
            raise _unreadable(path, error) from error
        if digest != file.sha256:
            raise CheckpointError(
                f"{path} has the SHA-256 {digest}, expected {file.sha256}: {self._whose(path)}; load another "
                "checkpoint, or copy the file again from where it was written"
            )
        self._whole.add(file.name)
        return path

    def check_size(self, file: FileRecord) -> None:
        """Check that a file is there, and of the right size; CheckpointError if not."""
        path = self.directory / file.name
        try:
            with open_file(path) as opened:
                size = os.fstat(opened.fileno()).st_size
        except OSError as error:
            raise _unreadable(path, error) from error
        if size != file.bytes:
            raise CheckpointError(
                f"{path} has {size} bytes, expected {file.bytes}: it is "
                f"{'truncated' if size < file.bytes else 'another file'}; load another checkpoint, or "
                "copy the file again from where it was written"
            )

    def _whose(self, path: Path) -> str:
        """Say what may have happened to a file whose digest is wrong."""
        try:
            with safe_open(path, framework="pt") as opened:
                save = (opened.metadata() or {}).get("save", self.manifest.save)  # a trainer's part has none
        except (SafetensorError, OSError):
            return "it was changed, or is no safetensors file"
        if save != self.manifest.save:
            return f"it belongs to the save {save!r}, and the manifest to {self.manifest.save!r}"
        return "it was changed after it had been written"


def check_each(
    files: Iterable[tuple[Checkpoint, FileRecord]], check: Callable[[Checkpoint, FileRecord], object]
) -> None:
    """Check files, each with the checkpoint that has it.

    Raises
    ------
    CheckpointError
        `check` has raised it of some; the message names each of them.
    """
    damage = []
    for checkpoint, file in files:
        try:
            check(checkpoint, file)
        except CheckpointError as error:
            damage.append(error)
    if damage:
        raise CheckpointError("; ".join(map(str, damage))) from damage[0]


def _has_some(block: BlockRecord, begin: int, end: int) -> bool:
    return (block.begin < end and block.end > begin) or block.begin == block.end == begin == end


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read ({error.strerror}), and is needed here: expected every file of the "
        "checkpoint in a directory that all processes see; where each server has a directory of its own, "
        "load with the number of servers and the slicing that it was saved with"
    )


def _check_cuttable(directory: Path, block: BlockRecord, piece: Piece) -> None:
    for name, entry in piece.state.items():
        if isinstance(entry, Tensor) and tuple(entry.shape) == block.shape:
            continue
        for shape in map(tuple, _shapes_in(entry)):
            if math.prod(shape) > 1:
                raise CheckpointError(
                    f"{directory}: the optimizer's {name} of {block.param} has the shape "
                    f"{list(shape)} and belongs to {list(block.shape)} elements as a whole, so it "
                    "cannot be cut anew; load it with the number of servers and the slicing that it was "
                    "saved with"
                )


def _shapes_in(entry: object) -> Iterator[Sequence[int]]:
    """Return the shapes of the tensors and arrays that an entry of an optimizer's state is or has."""
    if isinstance(entry, Tensor | np.ndarray):
        yield entry.shape
    elif isinstance(entry, list | tuple | dict):
        for item in entry.values() if isinstance(entry, dict) else entry:
            yield from _shapes_in(item)
