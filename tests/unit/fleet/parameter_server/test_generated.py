"""The committed protobuf modules are what the .proto file generates today."""

from pathlib import Path

import pytest

from tools.proto import PROTO, SOURCE, generate

pytestmark = pytest.mark.programs


def test_the_committed_modules_are_up_to_date(tmp_path):
    generate(tmp_path)
    generated = sorted((tmp_path / PROTO).parent.iterdir())
    assert len(generated) == 4
    for made in generated:
        committed = SOURCE / Path(PROTO).parent / made.name
        assert committed.read_text() == made.read_text(), f"{made.name} is stale: `make proto`"


def test_the_committed_modules_ask_for_no_version():
    for made in (SOURCE / Path(PROTO).parent).glob("*.py"):
        assert not {"runtime_version", "GRPC_GENERATED_VERSION"} & set(made.read_text().split()), made.name
