"""Files that appear whole: written under a temporary name, brought to the disk, and then given their own.

All of them get the mode that the process gives to any new file (its umask), whoever writes them.
"""

import contextlib
import errno
import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor

from fleet.errors import DiskFullError, FleetError

__all__ = ["TEMPORARY", "naming", "publish", "write_bytes", "write_tensors"]

TEMPORARY: Final = ".tmp"
_FULL: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def write_bytes(path: Path, data: bytes) -> str:
    """Write a file in one go, and return its SHA-256."""
    _make(path.parent)
    # Several servers write one manifest at once, and in containers all of them are process 1.
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}{TEMPORARY}")
    temporary.write_bytes(data)
    publish(temporary, path)
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
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # each is aligned
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _dtype_name(tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    temporary = path.with_name(path.name + TEMPORARY)
    digest = hashlib.sha256()
    with temporary.open("wb", buffering=0) as file:
        for part in (len(text).to_bytes(8, "little"), text):
            _write_all(file.fileno(), memoryview(part))
            digest.update(part)
        for name in names:
            tensor = tensors.pop(name).detach().cpu().contiguous()
            content = _bytes_of(tensor)
            _write_all(file.fileno(), content)
            digest.update(content)
    publish(temporary, path)
    return 8 + len(text) + end, digest.hexdigest()


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
        full = isinstance(error, OSError) and error.errno in _FULL
        raise (DiskFullError if full else FleetError)(
            f"{path} could not be written: {error}; expected a directory that this process may write to, "
            "with room for the whole checkpoint"
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
