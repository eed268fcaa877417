"""Writing: each file under a temporary name until it is whole and on the disk, the manifest last."""

import contextlib
import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from safetensors import SafetensorError
from safetensors.torch import save, save_file
from torch import Tensor

from fleet.checkpoint.manifest import MANIFEST_NAME, REPLACED_NAME, BlockRecord, FileRecord, Manifest
from fleet.checkpoint.piece import Piece
from fleet.checkpoint.values import encode
from fleet.errors import CheckpointError, FleetError

__all__ = ["commit", "tidy", "write_claim", "write_model", "write_shard", "write_trainer_part"]

TEMPORARY: Final = ".tmp"
_SAVED: Final = r"(shard-\d+-of-\d+|trainer)-[0-9a-f]+\.safetensors"
_OURS: Final = re.compile(rf"{_SAVED}|({_SAVED}|manifest(\.replaced)?\.json)(\.[0-9a-f]{{8}})?\.tmp")
"""Names of files of a checkpoint, and of what was to become one."""


def write_shard(directory: Path, save_name: str, shard: str, pieces: Iterable[Piece]) -> FileRecord:
    """Write pieces to a file of their own.

    Parameters
    ----------
    directory : Path
        Made where it is missing.
    save_name : str
        The random name of the save.
    shard : str
        Which part this is: ``0-of-2``.
    pieces : iterable of Piece
        Nobody may change them meanwhile.

    Returns
    -------
    FileRecord
        For the manifest.

    Raises
    ------
    FleetError
        The disk refuses; the message names the file.
    """
    tensors: dict[str, Tensor] = {}
    blocks = []
    for piece in pieces:
        name = f"{piece.param}[{piece.begin}:{piece.end}]"
        tensors[name] = piece.value
        state = {
            entry: encode(value, tensors, f"{name}.{entry}") for entry, value in sorted(piece.state.items())
        }
        dtype = str(piece.value.dtype).removeprefix("torch.")
        shape = tuple(piece.value.shape)
        blocks.append(BlockRecord(piece.param, piece.begin, piece.end, shape, dtype, name, state))
    path = directory / f"shard-{shard}-{save_name}.safetensors"
    with _naming(path):
        _make(directory)
        temporary = path.with_name(path.name + TEMPORARY)
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, temporary, {"format": "pt", "save": save_name})
        digest = _publish(temporary, path)
        return FileRecord(path.name, path.stat().st_size, digest, tuple(blocks))


def write_trainer_part(directory: Path, save_name: str, data: bytes) -> FileRecord:
    """Write a trainer's own part, which is a safetensors file already; otherwise as `write_shard`."""
    path = directory / f"trainer-{save_name}.safetensors"
    with _naming(path):
        digest = _write(path, data)
        return FileRecord(path.name, len(data), digest)


def write_model(directory: Path, state: Mapping[str, Tensor], facts: Mapping[str, object]) -> Path:
    """Write a state dict that `safetensors.torch.load_file` reads.

    Parameters
    ----------
    directory : Path
        Gets a file ``model.safetensors``.
    state : mapping of name to Tensor
    facts : mapping of str
        What else to say about it, as JSON in the file's own description.

    Returns
    -------
    Path
        The file.
    """
    described = {"format": "pt", **{name: json.dumps(fact) for name, fact in facts.items()}}
    path = directory / "model.safetensors"
    with _naming(path):
        # A file holds no shared memory, and tied weights share theirs.
        apart = {name: tensor.clone().contiguous() for name, tensor in state.items()}
        _write(path, save(apart, described))
    return path


def write_claim(path: Path, text: str) -> None:
    """Write who may write checkpoints in a folder; otherwise as `write_shard`."""
    with _naming(path):
        _write(path, text.encode())


def commit(directory: Path, manifest: str) -> None:
    """Write the manifest. What it replaces stays whole, under another name, until `tidy`.

    Parameters
    ----------
    directory : Path
    manifest : str
        As `Manifest.to_json` gives it.

    Raises
    ------
    FleetError
        The disk refuses; the message names the file.
    """
    path = directory / MANIFEST_NAME
    save = Manifest.parse(manifest, str(path)).save
    with _naming(path):
        try:
            before = path.read_bytes()
            replaced = Manifest.from_bytes(before, str(path)).save != save
        except (FileNotFoundError, CheckpointError):
            replaced = False  # there is none, or one that nobody can load
        if replaced:
            _write(directory / REPLACED_NAME, before)
        _write(path, manifest.encode())


def tidy(directory: Path) -> None:
    """Remove what the manifest does not name: of the save before, or of one that never was finished.

    Raises
    ------
    FleetError
        The disk refuses; the message names the directory and the file.
    """
    named = {file.name for file in Manifest.read(directory).files}
    try:
        (directory / REPLACED_NAME).unlink(missing_ok=True)
        for other in list(directory.iterdir()):
            if _OURS.fullmatch(other.name) and other.name not in named:
                other.unlink(missing_ok=True)
    except OSError as error:
        raise FleetError(
            f"{directory} holds a whole checkpoint, and what an earlier save has left in it could not be "
            f"removed: {error}; expected a directory whose files this process may remove: do so by hand, or "
            "save elsewhere"
        ) from error


def _write(path: Path, data: bytes) -> str:
    _make(path.parent)
    # Several servers write one manifest at once, and in containers all of them are process 1.
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}{TEMPORARY}")
    temporary.write_bytes(data)
    return _publish(temporary, path)


def _publish(temporary: Path, path: Path) -> str:
    """Bring a file to the disk, give it its name, and return its digest."""
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    temporary.replace(path)
    _bring_to_disk(path.parent)
    return digest


def _make(directory: Path) -> None:
    """Make a directory where it is missing, so that its name is on the disk before what is in it."""
    missing = [each for each in (directory, *directory.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
        _bring_to_disk(each.parent)


def _bring_to_disk(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        for left in path.parent.glob(f"{path.name}*{TEMPORARY}"):
            with contextlib.suppress(OSError):
                left.unlink()
        raise FleetError(
            f"{path} could not be written: {error}; expected a directory that this process may write to, "
            "with room for the whole checkpoint"
        ) from error
