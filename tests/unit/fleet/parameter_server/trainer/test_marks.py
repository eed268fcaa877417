"""Marks of memory: which changes are noticed, and when."""

from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.parameter_server.trainer.marks import Mark, covers_all


@settings(deadline=None)
@given(st.integers(1, 6000), st.data())
def test_a_changed_byte_is_noticed_at_once_in_the_first_rounds_and_later_within_one_turn(length, data):
    content = bytearray(length)
    changed = data.draw(st.integers(0, length - 1))
    first = data.draw(st.integers(0, 20))
    noticed = []
    for round_ in range(first, first + -(-length // 1024)):
        mark = Mark.of(memoryview(content), round_)
        assert mark.matches(memoryview(content))
        content[changed] ^= 1
        noticed.append(not mark.matches(memoryview(content)))
    assert any(noticed)
    assert noticed[0] or not covers_all(first)


def test_nothing_has_a_mark_too():
    assert Mark.of(memoryview(b""), 0).matches(memoryview(b""))
    assert Mark.of(memoryview(b""), 9).matches(memoryview(b""))
