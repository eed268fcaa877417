"""Headers survive the wire or are refused, and a connection takes only the frames that its state allows."""

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.errors import LocalProtocolError, ProtocolError, RemoteProtocolError
from fleet.wire import (
    HEADER_BYTES,
    NO_BLOCK,
    RESUMED,
    TRANSITIONS,
    Conversation,
    Header,
    Identity,
    Kind,
    Side,
    State,
    job_hash,
    pack_header,
    read_header,
)
from fleet.wire.protocol import VERSION
from fleet.wire.rows import payload_bounds

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
HEADERS = st.builds(Header, st.sampled_from(Kind), U64, U32, U32, U64, U32, U64, U64, st.booleans())
SOME = Header(Kind.GRAD, job=2**63, attempt=3, trainer=1, step=10**12, block=7, taken=5, payload_bytes=2**40)


@given(HEADERS)
def test_a_header_survives_the_wire(header):
    wire = pack_header(header)
    assert len(wire) == HEADER_BYTES
    assert read_header(wire) == header


@given(HEADERS)
def test_a_header_cut_anywhere_is_incomplete(header):
    wire = pack_header(header)
    assert all(read_header(wire[:n]) is None for n in range(len(wire)))


@given(HEADERS, st.binary(max_size=80))
def test_what_follows_a_header_does_not_change_it(header, rest):
    assert read_header(memoryview(pack_header(header) + rest)) == header


@given(st.binary(min_size=1).filter(lambda received: not b"FLET".startswith(received[:4])))
def test_garbage_is_refused_from_its_first_wrong_byte(received):
    with pytest.raises(RemoteProtocolError, match="not a fleet frame"):
        read_header(received)


def test_a_visitor_from_the_web_is_shown_as_it_came():
    with pytest.raises(RemoteProtocolError, match=r"b'GET '.*expected b'FLET'"):
        read_header(b"GET / HTTP/1.1\r\n")


@pytest.mark.parametrize(
    ("offset", "value", "words"),
    [
        pytest.param(4, VERSION - 1, f"version {VERSION - 1} .* version {VERSION}", id="an-older-version"),
        pytest.param(4, VERSION + 1, f"version {VERSION + 1} .* version {VERSION}", id="a-newer-version"),
        pytest.param(5, 0, "kind is 0", id="no-kind"),
        pytest.param(5, 200, "kind is 200", id="an-unknown-kind"),
        pytest.param(6, 2, "shared is 2", id="neither-shared-nor-not"),
    ],
)
def test_a_broken_header_is_refused_by_what_is_broken(offset, value, words):
    wire = bytearray(pack_header(SOME))
    wire[offset] = value
    with pytest.raises(RemoteProtocolError, match=words):
        read_header(wire)


@pytest.mark.parametrize("field", ["job", "attempt", "trainer", "step", "block", "payload_bytes"])
@pytest.mark.parametrize("value", [-1, 2**64])
def test_a_field_that_does_not_fit_is_our_own_mistake(field, value):
    with pytest.raises(LocalProtocolError, match=str(value)):
        pack_header(SOME._replace(**{field: value}))


def test_the_layout_is_the_documented_one():
    expected = struct.pack("<4sBBHIIIQQQQ", b"FLET", 4, 4, 0, 3, 1, 7, 2**63, 10**12, 5, 2**40)
    assert pack_header(SOME) == expected


def test_a_frame_about_no_block_says_so():
    assert Header(Kind.PULL, 0, 0, 0).block == NO_BLOCK


def test_jobs_differ_by_name_and_by_uid():
    hashes = {
        job_hash("a", "b"),
        job_hash("a", "c"),
        job_hash("ab", ""),
        job_hash("", "ab"),
        job_hash("a", ""),
    }
    assert len(hashes) == 5


IDENTITY = Identity(job=11, trainer=1, attempt=2)
BLOCKS = {3: 400, 5: 8}
TABLES = {2: 12}
MOST_GRADIENT_BYTES = payload_bounds(12, with_ids=True, with_rows=True)[1]
MOST_LOOK_UP_BYTES = payload_bounds(12, with_ids=True, with_rows=False)[1]
OF_A_BLOCK = {Kind.GRAD, Kind.PARAM, Kind.UNCHANGED}
OF_A_TABLE = {Kind.LOOK_UP: 16, Kind.ROWS: 24, Kind.ROW_GRADIENT: 41, Kind.STEPPED: 28}
PATHS = {
    Side.TRAINER: {
        State.START: (),
        State.OPEN: (Kind.HELLO,),
        State.IN_STEP: (Kind.HELLO, Kind.HYPER),
        State.COMPLETED: (Kind.HELLO, Kind.COMPLETE),
        State.CLOSED: (Kind.ERROR,),
    },
    Side.SERVER: {
        State.START: (),
        State.OPEN: (Kind.HELLO,),
        State.COMPLETED: (Kind.HELLO, Kind.COMPLETE),
        State.CLOSED: (Kind.ERROR,),
    },
}


def frame(kind: Kind, **changes: Any) -> Header:
    """Return a header of this kind that fits the connection."""
    block = 3 if kind in OF_A_BLOCK else 2 if kind in OF_A_TABLE else NO_BLOCK
    payload = {
        Kind.GRAD: 400,
        Kind.PARAM: 400,
        Kind.HELLO: 20,
        Kind.HYPER: 30,
        Kind.STEP_END: 4,
        Kind.ERROR: 9,
        **OF_A_TABLE,
    }
    header = Header(kind, 11, 2, 1, block=block, payload_bytes=payload.get(kind, 0))
    return header._replace(**changes)


def conversation(side: Side, state: State, *, remote: bool = True) -> Conversation:
    """Return a direction that has come to this state."""
    made = Conversation(side, IDENTITY, BLOCKS, remote=remote, row_bytes=TABLES)
    for kind in PATHS[side][state]:
        made.advance(frame(kind))
    assert made.state is state
    return made


CASES = [
    pytest.param(side, state, kind, id=f"{side.name}-{state.name}-{kind.name}")
    for side in Side
    for state in TRANSITIONS[side]
    for kind in Kind
]


@pytest.mark.parametrize(("side", "state", "kind"), CASES)
def test_each_frame_in_each_state_does_what_the_table_says(side, state, kind):
    following = TRANSITIONS[side][state].get(kind)
    made = conversation(side, state)
    if following is not None:
        made.advance(frame(kind))
        assert made.state is following
        return
    with pytest.raises(
        RemoteProtocolError, match=rf"sent {kind.name} in the state '{state.value}', expected"
    ):
        made.advance(frame(kind))
    assert made.state is state


def test_the_table_ends_only_in_its_final_states():
    final = {
        side: {state for state, kinds in table.items() if not kinds} for side, table in TRANSITIONS.items()
    }
    assert final == {Side.TRAINER: {State.CLOSED}, Side.SERVER: {State.COMPLETED, State.CLOSED}}
    for side, table in TRANSITIONS.items():
        assert all(conversation(side, state).over is (state in final[side]) for state in table)


RESUMPTIONS = [
    pytest.param(side, state, kind, id=f"{side.name}-{state.name}-{kind.name}")
    for side in Side
    for state in State
    if state in RESUMED[side]
    for kind in Kind
]


@pytest.mark.parametrize(("side", "state", "kind"), RESUMPTIONS)
def test_after_another_greeting_a_direction_goes_on_where_it_stood(side, state, kind):
    made = conversation(side, State.OPEN)
    made.resume(state, 0)
    following = TRANSITIONS[side][state].get(kind)
    if following is None:
        with pytest.raises(RemoteProtocolError, match=f"sent {kind.name} in the state '{state.value}'"):
            made.advance(frame(kind))
    else:
        made.advance(frame(kind))
        assert made.state is following


@pytest.mark.parametrize(
    ("side", "state"),
    [(side, state) for side in Side for state in State if state not in RESUMED[side]],
)
def test_no_greeting_leads_to_a_state_in_which_nothing_is_left_to_say(side, state):
    with pytest.raises(LocalProtocolError, match=f"cannot continue in the state '{state.value}'"):
        conversation(side, State.OPEN).resume(state, 0)


@pytest.mark.parametrize("state", [State.START, State.IN_STEP])
def test_a_direction_goes_on_only_right_after_its_greeting(state):
    with pytest.raises(LocalProtocolError, match="expected a greeting"):
        conversation(Side.TRAINER, state).resume(State.OPEN, 0)


def test_a_direction_knows_its_state_and_the_step_that_began_last():
    made = conversation(Side.TRAINER, State.OPEN)
    for kind, step, expected in [
        (Kind.HYPER, 7, State.IN_STEP),
        (Kind.GRAD, 7, State.IN_STEP),
        (Kind.CONFIRM, 0, State.IN_STEP),
        (Kind.STEP_END, 7, State.OPEN),
        (Kind.PULL, 0, State.OPEN),
        (Kind.COMPLETE, 0, State.COMPLETED),
    ]:
        made.advance(frame(kind, step=step))
        assert (made.state, made.step) == (expected, 7)


def test_a_step_that_is_sent_again_is_the_same_step():
    made = conversation(Side.TRAINER, State.OPEN)
    made.resume(State.IN_STEP, 7)
    with pytest.raises(RemoteProtocolError, match="to step 8, expected the step that has begun, 7"):
        made.advance(frame(Kind.GRAD, step=8))
    made.advance(frame(Kind.GRAD, step=7))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({"job": 12}, r"job 0+c.* this connection, job 0+b", id="another-job"),
        pytest.param({"trainer": 0}, "trainer 0.*trainer 1", id="another-trainer"),
        pytest.param({"attempt": 1}, "attempt 1.*attempt 2", id="an-older-attempt"),
        pytest.param({"block": 4}, "block 4, expected one of the 2 blocks", id="another-servers-block"),
        pytest.param({"block": NO_BLOCK}, f"block {NO_BLOCK}", id="no-block"),
        pytest.param({"payload_bytes": 399}, "of block 3 carries 399 bytes, expected 400", id="too-short"),
        pytest.param({"payload_bytes": 401}, "carries 401 bytes, expected 400", id="trailing-bytes"),
        pytest.param(
            {"block": 5}, "of block 5 carries 400 bytes, expected 8", id="the-size-of-another-block"
        ),
        pytest.param({"step": 1}, "to step 1, expected the step that has begun, 0", id="another-step"),
    ],
)
@pytest.mark.parametrize("remote", [True, False])
def test_a_gradient_that_is_not_what_it_claims_is_refused(changes, words, remote):
    made = conversation(Side.TRAINER, State.IN_STEP, remote=remote)
    with pytest.raises(ProtocolError, match=words) as caught:
        made.advance(frame(Kind.GRAD, **changes))
    assert caught.type is (RemoteProtocolError if remote else LocalProtocolError)
    made.advance(frame(Kind.GRAD))


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        pytest.param(Kind.HYPER, {"payload_bytes": 2**21}, "at most 1048576", id="a-huge-text"),
        pytest.param(Kind.HYPER, {"block": 3}, "names block 3, expected none", id="a-text-about-a-block"),
        pytest.param(
            Kind.PULL, {"payload_bytes": 1}, "carries 1 bytes, expected 0", id="a-pull-with-a-payload"
        ),
    ],
)
def test_small_frames_have_bounds_too(kind, changes, words):
    with pytest.raises(RemoteProtocolError, match=words):
        conversation(Side.TRAINER, State.OPEN).advance(frame(kind, **changes))


def test_a_list_of_absent_blocks_is_no_longer_than_the_blocks():
    made = conversation(Side.TRAINER, State.IN_STEP)
    with pytest.raises(RemoteProtocolError, match="carries 12 bytes, expected at most 8"):
        made.advance(frame(Kind.STEP_END, payload_bytes=12))


def test_steps_go_forward():
    made = conversation(Side.TRAINER, State.OPEN)
    made.advance(frame(Kind.HYPER, step=7))
    made.advance(frame(Kind.GRAD, step=7))
    made.advance(frame(Kind.STEP_END, step=7))
    with pytest.raises(RemoteProtocolError, match="step 6 begins after step 7"):
        made.advance(frame(Kind.HYPER, step=6))
    made.advance(frame(Kind.HYPER, step=8))


@pytest.mark.parametrize(("side", "kind"), [(Side.TRAINER, Kind.GRAD), (Side.SERVER, Kind.PARAM)])
def test_a_tensor_in_shared_memory_carries_nothing(side, kind):
    state = State.IN_STEP if side is Side.TRAINER else State.OPEN
    made = conversation(side, state)
    with pytest.raises(RemoteProtocolError, match=r"is in shared memory.*this connection shares no memory"):
        made.advance(frame(kind, shared=True, payload_bytes=0))
    made.shares = True
    made.advance(frame(kind, shared=True, payload_bytes=0))
    with pytest.raises(RemoteProtocolError, match="carries 400 bytes, expected 0"):
        made.advance(frame(kind, shared=True))
    with pytest.raises(RemoteProtocolError, match="carries 0 bytes, expected 400"):
        made.advance(frame(kind, payload_bytes=0))


def test_what_is_no_tensor_follows_its_header():
    made = conversation(Side.TRAINER, State.OPEN)
    made.shares = True
    with pytest.raises(RemoteProtocolError, match=r"HYPER frame is in shared memory.*it is not a tensor"):
        made.advance(frame(Kind.HYPER, shared=True, payload_bytes=0))


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        pytest.param(
            Kind.LOOK_UP, {"block": 3}, "names table 3, expected one of the 1 tables", id="no-table"
        ),
        pytest.param(
            Kind.LOOK_UP, {"payload_bytes": 12}, "carries 12 bytes, expected 0 or 16 to", id="half-an-id"
        ),
        pytest.param(Kind.ROW_GRADIENT, {"payload_bytes": 24}, "expected 0 or 28 to", id="half-a-row"),
        pytest.param(
            Kind.ROW_GRADIENT, {"step": 1}, "expected the step that has begun, 0", id="another-step"
        ),
        pytest.param(
            Kind.ROW_GRADIENT,
            {"payload_bytes": MOST_GRADIENT_BYTES + 1},
            f"0 or 28 to {MOST_GRADIENT_BYTES}",
            id="more-than-a-frame-may-carry",
        ),
        pytest.param(
            Kind.LOOK_UP,
            {"payload_bytes": MOST_LOOK_UP_BYTES + 1},
            f"0 or 16 to {MOST_LOOK_UP_BYTES}",
            id="more-rows-than-the-answers-frame-may-carry",
        ),
        pytest.param(Kind.LOOK_UP, {"shared": True}, "connection shares no memory", id="in-shared-memory"),
    ],
)
def test_a_frame_of_a_table_carries_whole_ids_and_rows_within_a_bound(kind, changes, words):
    made = conversation(Side.TRAINER, State.IN_STEP)
    with pytest.raises(RemoteProtocolError, match=words):
        made.advance(frame(kind, **changes))
    made.advance(frame(kind, payload_bytes=0))


def test_a_word_about_a_tables_step_carries_whole_rows_or_nothing():
    conversation(Side.SERVER, State.OPEN).advance(frame(Kind.STEPPED, payload_bytes=0))
    with pytest.raises(RemoteProtocolError, match="carries 4 bytes, expected 0 or 28 to"):
        conversation(Side.SERVER, State.OPEN).advance(frame(Kind.STEPPED, payload_bytes=4))
