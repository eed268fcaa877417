"""Atomic file writes: each file is written under a temporary name, flushed, and then renamed.

Every file gets the mode of any new file of this process (its umask).
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
    "disk_errors",
    "open_file",
    "sha256_of",
    "write_bytes",
    "write_parts",
    "write_tensors",
]

TEMPORARY: Final = ".tmp"
"""The suffix of a file that is being written."""
_KINDS: Final = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a FIFO"}


def open_file(path: str | Path, *, flags: int = 0, dir_fd: int | None = None) -> BufferedReader:
    """Open a regular file for reading.

    Parameters
    ----------
    path : str or Path
    flags : int
        Additional flags of ``open(2)``.
    dir_fd : int, optional
        The open directory that a relative `path` starts from.

    Raises
    ------
    OSError
        The file cannot be opened; FileNotFoundError if the path is a directory, FIFO, socket or device.
    DiskFullError
        The process has no free descriptor. The file itself may be intact.
    """
    try:
        # O_NONBLOCK: opening a FIFO would otherwise block until a process opens it for writing.
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
    """Write a file and return its SHA-256 digest."""
    _make_directory(path.parent)
    # A random name: several servers write the same manifest concurrently, and in containers all have process
    # id 1.
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}{TEMPORARY}")
    try:
        temporary.write_bytes(data)
        _publish(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    return hashlib.sha256(data).hexdigest()


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: Mapping[str, str]) -> tuple[int, str]:
    """Write a safetensors file, freeing each tensor once it is written.

    Parameters
    ----------
    path : Path
    tensors : dict
        The dict is emptied.
    metadata : mapping of str to str

    Returns
    -------
    bytes : int
    sha256 : str
    """
    _make_directory(path.parent)
    shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    header, offsets, size = _header(shapes, metadata)
    temporary = path.with_name(path.name + TEMPORARY)
    digest = hashlib.sha256(header)
    with temporary.open("wb", buffering=0) as file:
        _write_all(file.fileno(), memoryview(header))
        for name in offsets:
            tensor = tensors.pop(name).detach().cpu().contiguous()
            content = _bytes_of(tensor)
            _write_all(file.fileno(), content)
            digest.update(content)
    _publish(temporary, path)
    return size, digest.hexdigest()


def write_parts(
    path: Path,
    whole: Mapping[str, Tensor],
    none: Mapping[str, Tensor],
    num_rows: int,
    parts: Iterable[Mapping[str, Tensor]],
    metadata: Mapping[str, str],
) -> int:
    """Write a safetensors file whose columns arrive in parts; only one part is in memory at a time.

    Parameters
    ----------
    path : Path
    whole : mapping of name to Tensor
        Tensors that are written as they are.
    none : mapping of name to Tensor
        The columns, without rows, which define names, dtypes and shapes.
    num_rows : int
        The total number of rows in the parts.
    parts : iterable of mapping of name to Tensor
        Consecutive rows of every column.
    metadata : mapping of str to str

    Returns
    -------
    bytes : int
        The size of the file.

    Raises
    ------
    RuntimeError
        The parts have more or fewer rows.
    """
    _make_directory(path.parent)
    shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in whole.items()}
    shapes |= {name: (tensor.dtype, (num_rows, *tensor.shape[1:])) for name, tensor in none.items()}
    header, offsets, size = _header(shapes, metadata)
    temporary = path.with_name(path.name + TEMPORARY)
    with temporary.open("wb", buffering=0) as file:
        _write_all(file.fileno(), memoryview(header))
        for name, tensor in whole.items():
            _write_at(file, offsets[name], tensor)
        done = 0
        for part in parts:
            for name, tensor in part.items():
                row_bytes = prod(tensor.shape[1:]) * tensor.itemsize
                _write_at(file, offsets[name] + done * row_bytes, tensor)
            done += len(next(iter(part.values())))
        if done != num_rows:
            raise RuntimeError(f"{path.name} received {done} rows, expected {num_rows}")
    _publish(temporary, path)
    return size


def sha256_of(path: Path) -> str:
    """Return the SHA-256 digest of a file."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Convert disk errors to errors that name the file; after an error, remove temporary files.

    Raises
    ------
    DiskFullError
        The disk or the process has no room for the file.
    FleetError
        Any other disk error.
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


def _header(
    shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int], int]:
    """Return the header of a safetensors file, the offset of each tensor in file order, and the file size."""
    names = sorted(shapes, key=lambda name: (-shapes[name][0].itemsize, name))  # keeps every tensor aligned
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offsets, end = {}, 0
    for name in names:
        dtype, shape = shapes[name]
        offsets[name], end = end, end + prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": _dtype_name(dtype),
            "shape": list(shape),
            "data_offsets": [offsets[name], end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return head, {name: len(head) + offset for name, offset in offsets.items()}, len(head) + end


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    """Return the safetensors name of a dtype."""
    # The library exposes no table of names, so read the header of an empty tensor.
    data = save({"x": torch.empty(0, dtype=dtype)})
    name: str = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["x"]["dtype"]
    return name


def _write_at(file: IO[bytes], offset: int, tensor: Tensor) -> None:
    # The file is unbuffered, so this moves the offset of the descriptor that `_write_all` writes to.
    file.seek(offset)
    _write_all(file.fileno(), _bytes_of(tensor.detach().contiguous()))


def _write_all(descriptor: int, content: memoryview) -> None:
    while content:
        # Linux writes at most 2 GiB in one call.
        content = content[os.write(descriptor, content) :]


def _bytes_of(tensor: Tensor) -> memoryview:
    # torch refuses to view some empty tensors as bytes.
    return tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")


def _publish(temporary: Path, path: Path) -> None:
    """Flush a file to disk and rename it to its final name."""
    # The content must be durable before the new name: otherwise, after a crash of the machine, the name could
    # refer to an empty file. The rename itself is durable once the directory is.
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)
    _fsync_directory(path.parent)


def _make_directory(directory: Path) -> None:
    """Create a directory and its parents; flush each to disk before anything is written into it."""
    missing = [each for each in (directory, *directory.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
        _fsync_directory(each.parent)


def _fsync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
