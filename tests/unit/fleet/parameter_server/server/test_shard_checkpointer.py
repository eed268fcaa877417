"""A trainer's part of a checkpoint comes whole or not at all, and goes to whoever was told of it."""

import pytest

from fleet.errors import ConfigurationError, FleetError
from fleet.parameter_server.control.proto import control_pb2
from fleet.parameter_server.control.state_stream import PIECE_BYTES
from fleet.parameter_server.server.parts import TrainerParts


def piece(save: str, offset: int, data: bytes) -> control_pb2.PartRequest:
    return control_pb2.PartRequest(trainer=control_pb2.Trainer(), save=save, offset=offset, data=data)


def fetch(parts: TrainerParts, trainer: int, offset: int) -> bytes:
    return parts.piece(control_pb2.FoundPartRequest(trainer=control_pb2.Trainer(id=trainer), offset=offset))


@pytest.fixture
def parts() -> TrainerParts:
    return TrainerParts(lambda _: None)


def test_a_part_is_put_together_and_let_go_of(parts):
    parts.receive(piece("a", 0, b"half "))
    parts.receive(piece("a", 5, b"and half"))
    assert parts.take("a", 13) == b"half and half"
    with pytest.raises(FleetError, match="has 13 bytes, and 0 have come"):
        parts.take("a", 13)
    assert parts.take("b", 0) == b""


def test_a_save_that_begins_anew_has_nothing_of_the_one_before(parts):
    parts.receive(piece("a", 0, b"of a"))
    parts.receive(piece("b", 0, b"b"))
    with pytest.raises(
        FleetError, match="part of the save 'a' has 4 bytes, and 1 have come of 'b': save again"
    ):
        parts.take("a", 4)


@pytest.mark.parametrize("after", [piece("a", 3, b"x"), piece("a", 5, b"x"), piece("b", 4, b"x")])
def test_a_piece_that_does_not_follow_is_refused(parts, after):
    parts.receive(piece("a", 0, b"four"))
    with pytest.raises(ConfigurationError, match="expected one of 'a' at 4: save again"):
        parts.receive(after)


def test_each_trainer_gets_what_it_was_told_of_last(parts):
    large = bytes(range(251)) * (PIECE_BYTES // 251 + 7)
    assert parts.offer(0, large) == len(large)
    assert parts.offer(1, None) == 0
    found = b""
    while data := fetch(parts, 0, len(found)):
        assert len(data) <= PIECE_BYTES
        found += data
    assert found == large
    assert fetch(parts, 1, 0) == fetch(parts, 2, 0) == b""


def test_who_has_not_joined_neither_sends_nor_fetches():
    def refuse(trainer: control_pb2.Trainer) -> None:
        raise ConfigurationError(f"trainer {trainer.id} has not joined")

    parts = TrainerParts(refuse)
    for call in (lambda: parts.receive(piece("a", 0, b"x")), lambda: fetch(parts, 0, 0)):
        with pytest.raises(ConfigurationError, match="has not joined"):
            call()
