"""All parsers of untrusted bytes in one table; as a program, this module fuzzes them with atheris.

Atheris keeps the inputs that reach new lines of code, and mutates them further.

    python -m tests.support.any_bytes FOLDER [OPTION…]

FOLDER contains the initial inputs; each OPTION is passed to libFuzzer.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

PACKAGES: Final = [
    "fleet.wire",
    "fleet.checkpoint.manifest",
    "fleet.checkpoint.trainer_part",
    "fleet.checkpoint.values",
]
"""The packages to instrument: all that parse untrusted bytes."""
NO_JSON: Final = (json.JSONDecodeError, UnicodeDecodeError, RecursionError)
"""The errors that `read_signed` itself may raise."""


def readers() -> dict[str, tuple[Callable[[bytes], Any], bytes]]:
    """Return the parsers of untrusted bytes by name, each with a valid message."""
    import torch

    from fleet.checkpoint import FileRecord, Manifest, TrainerPart, TrainStatus
    from fleet.checkpoint.manifest import BlockRecord, _digest
    from fleet.errors import FleetError
    from fleet.wire import Header, Hello, Kind, pack_header, read_header
    from fleet.wire import messages as wire
    from fleet.wire.proof import make_proof, read_proof

    def read_signed(data: bytes) -> None:
        """Read a manifest whose digest has been corrected, so that fuzzing gets past the digest check."""
        fields = json.loads(data)
        if isinstance(fields, dict):
            fields.pop("sha256", None)
            fields["sha256"] = _digest(fields)
        Manifest.parse(json.dumps(fields), "manifest.json")

    key = b"k" * 32
    block = BlockRecord("w", 0, 6, (2, 3), "float32", "w[0:6]", {"exp_avg": 1.5})
    manifest = Manifest("abcd1234", 7, {"mode": "sync"}, (FileRecord("a", 3, "0" * 64, (block,)),))
    compact = json.dumps(json.loads(manifest.to_json()), separators=(",", ":"))
    part = TrainerPart(TrainStatus(1, 2, {"best": [0.5, None], "seed": torch.ones(2)}))
    return {
        "header": (lambda data: read_header(memoryview(data)), pack_header(Header(Kind.GRAD, 1, 2, 3, 4))),
        "hello": (wire.read_hello, wire.pack_hello(Hello("abc", 4, "session", 7, True))),
        "hyper": (wire.read_hyper, wire.pack_hyper([{"lr": 0.1, "betas": (0.9, 0.999), "foreach": None}])),
        "numbers": (wire.read_numbers, wire.pack_numbers([1, 2, 3])),
        "error": (wire.read_error, wire.pack_error(FleetError("it broke"))),
        "proof": (
            lambda data: read_proof(data.decode("latin-1"), key, 0, "m", seconds=0.0),
            make_proof(key, 0, "m", seconds=0.0, nonce=bytes(16)).to_text().encode(),
        ),
        "manifest": (lambda data: Manifest.from_bytes(data, "manifest.json"), manifest.to_json().encode()),
        "signed-manifest": (read_signed, compact.encode()),
        "trainers-part": (lambda data: TrainerPart.from_bytes(data, "a part"), part.to_bytes()),
    }


def main(arguments: list[str]) -> None:
    """Fuzz all parsers; the first byte of each input selects the parser."""
    import atheris

    with atheris.instrument_imports(include=PACKAGES):
        all_of_them = [read for read, _ in readers().values()]
    from fleet.errors import FleetError

    def read(data: bytes) -> None:
        if data:
            with contextlib.suppress(FleetError, *NO_JSON):
                all_of_them[data[0] % len(all_of_them)](data[1:])

    atheris.Setup([sys.argv[0], *arguments], read)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1:])
