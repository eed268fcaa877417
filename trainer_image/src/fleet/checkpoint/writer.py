"""Writing: what a save is about to write is named first, then come the files, and the manifest last."""

import contextlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from safetensors.torch import save as serialize
from torch import Tensor

from fleet.checkpoint.files import TEMPORARY, naming, open_file, write_bytes, write_tensors
from fleet.checkpoint.manifest import (
    BEGUN_SUFFIX,
    MANIFEST_NAME,
    REPLACED_NAME,
    BlockRecord,
    FileRecord,
    Manifest,
)
from fleet.checkpoint.piece import Piece
from fleet.checkpoint.values import encode
from fleet.errors import CheckpointError

__all__ = ["announce", "commit", "write_claim", "write_model", "write_shard", "write_trainer_part"]

_LEFT_SECONDS: Final = 60.0
"""A claim that has not got its name for so long is of a process that was killed."""


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
        Nobody may change them meanwhile. Each is let go when it is written, if nobody else holds it.

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
    del pieces
    path = directory / f"shard-{shard}-{save_name}.safetensors"
    with naming(path):
        announce(path, save_name)
        size, digest = write_tensors(path, tensors, {"format": "pt", "save": save_name})
        return FileRecord(path.name, size, digest, tuple(blocks))


def write_trainer_part(
    directory: Path, save_name: str, data: bytes | bytearray, trainer: int = 0
) -> FileRecord:
    """Write a trainer's own part, which is a safetensors file already; otherwise as `write_shard`."""
    path = directory / f"trainer-{f'{trainer}-' if trainer else ''}{save_name}.safetensors"
    with naming(path):
        announce(path, save_name)
        digest = write_bytes(path, data)
        return FileRecord(path.name, len(data), digest, trainer=trainer)


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
    with naming(path):
        # A file holds no shared memory, and tied weights share theirs.
        apart = {name: tensor.clone().contiguous() for name, tensor in state.items()}
        write_bytes(path, serialize(apart, described))
    return path


def write_claim(path: Path, text: str) -> None:
    """Write who may write checkpoints in a folder, and remove what processes killed amid it have left.

    Otherwise as `write_shard`.
    """
    with naming(path):
        write_bytes(path, text.encode())
    with contextlib.suppress(OSError):  # it takes a few bytes, and a later claim tries again
        now = path.stat().st_mtime  # by the clock of the disk, which may be another host's
        for left in path.parent.glob(f"{path.name}.*{TEMPORARY}"):
            if left.stat().st_mtime < now - _LEFT_SECONDS:
                left.unlink()


def commit(directory: Path, manifest: str) -> None:
    """Write the manifest. What it replaces stays whole, under another name, until `tidy`.

    Which of the files lie beside it is written into it: all of them where servers share a directory.

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
    whole = Manifest.parse(manifest, str(path))
    with naming(path):
        here = tuple(file.name for file in whole.files if _is_there(directory / file.name, file.bytes))
        before, replaced = _save_in(path), _save_in(directory / REPLACED_NAME)
        # One that was replaced before, and is here still, is what all servers have for sure.
        if before not in {"", whole.save} and replaced in {"", whole.save}:
            write_bytes(directory / REPLACED_NAME, path.read_bytes())
        write_bytes(path, replace(whole, here=here).to_json().encode())


def announce(path: Path, save_name: str) -> None:
    """Name a file in a manifest of its own, so that what a save that is cut short leaves is known as ours."""
    begun = Manifest(save_name, 0, {}, (FileRecord(path.name, 0, ""),)).to_json()
    write_bytes(path.with_name(path.name + BEGUN_SUFFIX), begun.encode())


def _save_in(manifest: Path) -> str:
    """Return the name of the save that a manifest is of; empty where there is none, or none to be loaded."""
    try:
        with open_file(manifest) as file:
            return Manifest.from_bytes(file.read(), str(manifest)).save
    except (FileNotFoundError, CheckpointError):
        return ""


def _is_there(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size
