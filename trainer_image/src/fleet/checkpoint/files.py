"""Files that appear whole: written under a temporary name, brought to the disk, and then given their own.

All of them get the mode that the process gives to any new file (its umask), whoever writes them.
"""

import contextlib
import errno
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import IO, Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor

from fleet.errors import disk_error, no_room

__all__ = [
    "TEMPORARY",
    "naming",
    "open_file",
    "publish",
    "sha256_of",
    "write_bytes",
    "write_parts",
    "write_tensors",
]

TEMPORARY: Final = ".tmp"
_KINDS: Final = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a FIFO"}


def open_file(path: str | Path, *, flags: int = 0, dir_fd: int | None = None) -> BufferedReader:
    """Open a regular file for reading.

    Parameters
    ----------
    path : str or Path
    flags : int
        For ``open(2)``, beside the usual ones.
    dir_fd : int, optional
        The open directory that a relative `path` is in.

    Raises
    ------
    OSError
        It cannot be opened. A FileNotFoundError where something else is in its place: a FIFO, for whose
        writer nobody waits, or a directory.
    DiskFullError
        This process has no descriptor left, which says nothing about the file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | flags, dir_fd=dir_fd)
    except OSError as error:
        if no_room(error):
            raise disk_error(error, f"{path} could not be opened: {error}") from error
        if error.errno == errno.ENXIO:
            raise FileNotFoundError(errno.ENOENT, "it is a socket or a device, not a file") from error
        raise
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, f"it is {_KINDS.get(kind, 'a device')}, not a file")
    return os.fdopen(descriptor, "rb")


def write_bytes(path: Path, data: bytes | bytearray) -> str:
    """Write a file in one go, and return its SHA-256."""
    _make(path.parent)
    # Several servers write one manifest at once, and in containers all of them are process 1.
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}{TEMPORARY}")
    try:
        temporary.write_bytes(data)
        publish(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    return hashlib.sha256(data).hexdigest()


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: Mapping[str, str]) -> tuple[int, str]:
    """Write a safetensors file, tensor by tensor; each is let go when it is written.

    Parameters
    ----------
    path : Path
    tensors : dict
        Is empty afterwards.
    metadata : mapping of str to str

    Returns
    -------
    bytes : int
    sha256 : str
    """
    _make(path.parent)
    shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    header, begins, end = _header(shapes, metadata)
    temporary = path.with_name(path.name + TEMPORARY)
    digest = hashlib.sha256(header)
    with temporary.open("wb", buffering=0) as file:
        _write_all(file.fileno(), memoryview(header))
        for name in begins:
            tensor = tensors.pop(name).detach().cpu().contiguous()
            content = _bytes_of(tensor)
            _write_all(file.fileno(), content)
            digest.update(content)
    publish(temporary, path)
    return end, digest.hexdigest()


def write_parts(
    path: Path,
    whole: Mapping[str, Tensor],
    none: Mapping[str, Tensor],
    num_rows: int,
    parts: Iterable[Mapping[str, Tensor]],
    metadata: Mapping[str, str],
) -> int:
    """Write a safetensors file of tensors that come in parts, one held at a time; return its bytes.

    Parameters
    ----------
    path : Path
    whole : mapping of name to Tensor
        What does not come in parts.
    none : mapping of name to Tensor
        What does, without any rows.
    num_rows : int
        Of all parts.
    parts : iterable of mapping of name to Tensor
        The rows that follow each other in the file.
    metadata : mapping of str to str

    Raises
    ------
    RuntimeError
        There are more or fewer rows.
    """
    _make(path.parent)
    shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in whole.items()}
    shapes |= {name: (tensor.dtype, (num_rows, *tensor.shape[1:])) for name, tensor in none.items()}
    header, begins, end = _header(shapes, metadata)
    temporary = path.with_name(path.name + TEMPORARY)
    with temporary.open("wb", buffering=0) as file:
        _write_all(file.fileno(), memoryview(header))
        for name, tensor in whole.items():
            _write_at(file, begins[name], tensor)
        done = 0
        for part in parts:
            for name, tensor in part.items():
                _write_at(file, begins[name] + done * _row_bytes(tensor), tensor)
            done += len(next(iter(part.values())))
        if done != num_rows:
            raise RuntimeError(f"{path.name} has got {done} rows, expected {num_rows}")
    publish(temporary, path)
    return end


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, which is read for it."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _header(
    shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int], int]:
    """Return how a file begins, at which of its bytes each tensor does, in their order, and its size."""
    names = sorted(shapes, key=lambda name: (-shapes[name][0].itemsize, name))  # each is aligned
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    begins, end = {}, 0
    for name in names:
        dtype, shape = shapes[name]
        begins[name], end = end, end + prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": _dtype_name(dtype),
            "shape": list(shape),
            "data_offsets": [begins[name], end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return head, {name: len(head) + begin for name, begin in begins.items()}, len(head) + end


def _row_bytes(tensor: Tensor) -> int:
    return prod(tensor.shape[1:]) * tensor.itemsize


def _write_at(file: IO[bytes], begin: int, tensor: Tensor) -> None:
    file.seek(begin)
    _write_all(file.fileno(), _bytes_of(tensor.detach().contiguous()))


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor; torch cannot view each one without elements as bytes."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")


def publish(temporary: Path, path: Path) -> None:
    """Bring a file to the disk, and give it its name."""
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)
    _bring_to_disk(path.parent)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn what a disk refuses into a sentence that names the file, and leave no part of it.

    Raises
    ------
    DiskFullError
        There is no room for it.
    FleetError
        Anything else.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        for left in path.parent.glob(f"{path.name}*{TEMPORARY}"):
            with contextlib.suppress(OSError):
                left.unlink()
        raise disk_error(
            error,
            f"{path} could not be written: {error}; expected a directory that this process may write to, "
            "with room for the whole checkpoint",
        ) from error


def _write_all(descriptor: int, content: memoryview) -> None:
    while content:
        content = content[os.write(descriptor, content) :]


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    """Return what safetensors calls a type, as it says itself."""
    data = save({"x": torch.empty(0, dtype=dtype)})
    name: str = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["x"]["dtype"]
    return name


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
