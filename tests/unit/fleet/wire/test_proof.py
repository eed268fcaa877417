"""Proofs of the job's key: what holds, what does not, and for how long."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.wire.proof import CLOCK_SECONDS, NONCE_BYTES, Proof, ReplayWindow, make_proof, read_proof

KEY, OTHER = b"k" * 32, b"o" * 32
NOW = 1_700_000_000.0
METHOD = "/fleet.ParameterServer/Join"


def proof(
    key: bytes = KEY, *, server: int = 1, method: str = METHOD, at: float = NOW, nonce: int = 0
) -> Proof:
    return make_proof(key, server, method, seconds=at, nonce=nonce.to_bytes(NONCE_BYTES))


def holds(made: Proof | str, *, at: float = NOW) -> bool:
    text = made if isinstance(made, str) else made.to_text()
    return read_proof(text, KEY, 1, METHOD, seconds=at) is not None


def test_a_proof_holds_where_it_is_meant_for_and_does_not_show_the_key():
    assert holds(proof())
    assert KEY.hex() not in proof().to_text()


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(proof(OTHER), id="of-another-key"),
        pytest.param(proof(server=0), id="for-another-server"),
        pytest.param(proof(method="/fleet.ParameterServer/State"), id="for-another-method"),
        pytest.param(proof()._replace(seconds=int(NOW) + 1), id="of-another-moment"),
        pytest.param(proof()._replace(nonce="ff" * NONCE_BYTES), id="of-another-nonce"),
        pytest.param(proof()._replace(mac=""), id="without-its-mac"),
    ],
)
def test_any_other_proof_does_not(made: Proof):
    assert not holds(made)


@pytest.mark.parametrize("difference", [-CLOCK_SECONDS, CLOCK_SECONDS])
def test_clocks_may_differ_by_so_much_and_no_more(difference: float):
    assert holds(proof(), at=NOW + difference)
    assert not holds(proof(), at=NOW + difference * 1.01)


@given(st.text(max_size=300))
def test_any_text_is_no_proof(text: str):
    assert not holds(text)


@given(st.data())
def test_nor_is_one_in_which_anything_is_changed(data: st.DataObject):
    text = proof().to_text()
    place = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.characters().filter(lambda each: each != text[place]))
    assert not holds(text[:place] + other + text[place + 1 :])


def test_a_proof_that_was_overheard_serves_nobody_for_as_long_as_it_holds():
    window = ReplayWindow(times=2)
    admitted = [window.admits(proof(), NOW + seconds) for seconds in (0, 1, 2, CLOCK_SECONDS)]
    assert admitted == [True, True, False, False]
    assert window.admits(proof(nonce=1), NOW + 3)


@given(st.floats(-CLOCK_SECONDS, CLOCK_SECONDS), st.lists(st.floats(0, 200), max_size=8))
def test_whenever_other_calls_come_none_is_forgotten_while_it_holds(made: float, pauses: list[float]):
    window, now = ReplayWindow(times=1), NOW
    first = proof(at=NOW + made)
    assert window.admits(first, now)
    for number, pause in enumerate(pauses, 1):
        now += pause
        window.admits(proof(nonce=number), now)
        if holds(first, at=now):
            assert not window.admits(first, now)


def test_what_holds_no_more_is_forgotten():
    window = ReplayWindow(times=1)
    for number in range(1000):
        window.admits(proof(nonce=number), NOW + number * CLOCK_SECONDS)
    assert len(window._came) + len(window._came_before) <= 6
