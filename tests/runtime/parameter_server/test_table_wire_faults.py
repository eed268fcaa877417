"""A server with tables refuses frames of tables that break the protocol, by name, and goes on."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import fleet
from fleet.errors import FleetError
from fleet.wire import Kind
from fleet.wire.messages import pack_hyper
from fleet.wire.rows import pack_ids, pack_row_gradient
from tests.runtime.parameter_server.test_wire_faults import ATTEMPTS, Peer, peer_of
from tests.support.parameter_server import PATIENT, Loopback, loopback

ROWS, DIM = 50, 4
HUGE = 1 << 40


def model() -> Any:
    return torch.nn.Sequential(fleet.nn.DistributedEmbedding(ROWS, DIM, name="clicks"))


@pytest.fixture(scope="module")
def job() -> Iterator[Loopback]:
    """Give a server that outlives every test of this module."""
    with loopback(trainers=1, model=model, settings=PATIENT) as running:
        yield running


@pytest.fixture(autouse=True)
def _the_server_stays_up(job: Loopback) -> Iterator[None]:
    yield
    trainer, table, _ = job.make_trainer(attempt=next(ATTEMPTS))
    trainer.start()
    table(torch.tensor([3])).sum().backward()
    trainer.step()
    trainer.close()
    assert job.servers[0].failure is None


def step_of(peer: Peer) -> int:
    return peer.job.servers[0].server.stats().step


def ids(*numbers: int) -> bytes:
    return bytes(pack_ids(np.array(numbers)))


def gradient(*numbers: int, num_rows: int | None = None) -> bytes:
    rows = np.zeros((len(numbers) if num_rows is None else num_rows, DIM), dtype=np.float32)
    return bytes(pack_row_gradient(np.array(numbers), rows))


@pytest.mark.parametrize(
    ("kind", "payload", "changes", "words"),
    [
        pytest.param(Kind.LOOK_UP, ids(5, 2), {}, "2 follows 5 at position 1", id="ids-in-another-order"),
        pytest.param(Kind.LOOK_UP, ids(5, 5), {}, "5 follows 5 at position 1", id="an-id-twice"),
        pytest.param(Kind.LOOK_UP, ids(50), {}, "id 50 at position 0, expected 0 to 49", id="out-of-range"),
        pytest.param(Kind.LOOK_UP, ids(-1), {}, "id -1 at position 0", id="a-negative-id"),
        pytest.param(Kind.LOOK_UP, ids(1), {"block": 9}, "names table 9", id="another-table"),
        pytest.param(Kind.LOOK_UP, ids(1)[:5], {}, "carries 5 bytes, expected 0 or 16 to", id="half-an-id"),
        pytest.param(Kind.LOOK_UP, b"", {"payload_bytes": HUGE}, f"carries {HUGE} bytes", id="a-huge-frame"),
        pytest.param(Kind.LOOK_UP, ids(1), {"step": 10**6}, "at step 1000000", id="a-step-far-ahead"),
        pytest.param(Kind.LOOK_UP, ids(1, 300)[:-1], {}, "ids of a table has 17 bytes", id="half-a-gap"),
        pytest.param(Kind.ROW_GRADIENT, gradient(1), {}, "in the state 'open'", id="out-of-a-step"),
        pytest.param(Kind.ROWS, bytes(4 * DIM), {}, "in the state 'open'", id="a-servers-kind"),
    ],
)
def test_a_frame_that_breaks_the_protocol_is_refused_by_name(job, kind, payload, changes, words):
    with peer_of(job) as peer:
        peer.greet()
        peer.send(kind, payload, **{"block": 0, "step": step_of(peer), **changes})
        assert words in str(peer.expect_error())


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        pytest.param(gradient(1, num_rows=2), "ids of a table has 48 bytes", id="a-row-without-an-id"),
        pytest.param(gradient(60), "ids 60 to 60 of table clicks, expected 0 to 49", id="out-of-range"),
        pytest.param(gradient(2, 1), "1 follows 2", id="in-another-order"),
    ],
)
def test_a_gradient_that_breaks_the_protocol_is_refused_by_name(job, payload, words):
    with peer_of(job) as peer:
        peer.greet()
        step = step_of(peer)
        peer.send(Kind.HYPER, pack_hyper([{"lr": 0.1}]), step=step)
        peer.send(Kind.ROW_GRADIENT, payload, block=0, step=step)
        assert words in str(peer.expect_error())


def test_a_step_that_ends_without_a_tables_gradient_is_refused(job):
    with peer_of(job) as peer:
        peer.greet()
        step = step_of(peer)
        peer.send(Kind.HYPER, pack_hyper([{"lr": 0.1}]), step=step)
        peer.send(Kind.STEP_END, step=step)
        error = peer.expect_error()
        assert isinstance(error, FleetError)
        assert "without a gradient of table clicks" in str(error)


def test_a_look_up_is_answered_by_rows_in_the_order_of_their_ids(job):
    with peer_of(job) as peer:
        peer.greet()
        step = step_of(peer)
        peer.send(Kind.LOOK_UP, ids(1, 4, 9), block=0, step=step)
        header, payload = peer.receive()
        assert (header.kind, header.block, header.step, len(payload)) == (Kind.ROWS, 0, step, 3 * 4 * DIM)
