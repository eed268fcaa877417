"""Norms over several servers: each part counts once, and one call completes each norm."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fleet.errors import FleetError, RemoteProtocolError
from fleet.fluid import DistributeTranspiler, Program
from fleet.fluid.render import server_plan
from fleet.parameter_server.modes import Answer, Missing, NormPart, Sync
from fleet.parameter_server.modes.agreement import (
    KnownNorm,
    NormBook,
    PendingNorm,
    clip_coefficient,
    sum_of_squares,
    total_of,
)
from fleet.parameter_server.shard import Shard
from fleet.plan import (
    ClipGradByGlobalNorm,
    ClipGradByNorm,
    DistributeTranspilerConfig,
    NormPlan,
    PSDispatcher,
)
from tests.support.modes import wait_for_buffer

HYPER = ({"lr": 1.0},)
ALL = NormPlan("", 1.0, (0, 2), (0, 1, 2))


def silent(part, servers):
    raise AssertionError("nobody else has a part")


def unheard(part, servers):
    """Tell a part to servers that this test has no use for."""


@given(st.permutations([("own", 0), ("own", 2), ("other", 1), ("other", 2)]), st.booleans())
def test_in_any_order_the_last_part_makes_the_norm_known_once(order, twice):
    told: list[tuple[NormPart, tuple[int, ...]]] = []
    book = NormBook([ALL], 0, lambda part, servers: told.append((part, tuple(servers))))
    own, others = {0: 1.0, 2: 4.0}, {1: {1: 9.0, 5: 2.0}, 2: {3: 16.0}}
    found = []
    for kind, number in order:
        if kind == "own":
            found.append(book.add(7, number, own[number]))
        else:
            part = NormPart(7, "", number, others[number])
            found.append(book.add_part(part, 7))
            if twice and found[-1] is None:
                found.append(book.add_part(part, 7))
    *early, last = found
    assert early == [None] * len(early)
    assert last == KnownNorm(7, ALL, 1.0 / (32.0**0.5 + 1e-6))
    assert told == [(NormPart(7, "", 0, own), (1, 2))]
    assert book.pending() is None


def test_a_norm_of_one_server_is_told_to_nobody():
    book = NormBook([NormPlan("w", 1.0, (4,), (2,))], 2, silent)
    assert book.blocks == {4}
    known = book.add(0, 4, 0.25)
    assert known is not None
    assert known.coefficient == 1.0


def test_who_is_awaited_is_known_once_this_server_has_told_its_part():
    book = NormBook([ALL], 1, unheard)
    book.add_part(NormPart(3, "", 2, {9: 1.0}), 3)
    book.add(3, 0, 1.0)
    assert book.pending() is None
    book.add(3, 2, 1.0)
    assert book.pending() == PendingNorm(3, ALL, (0,))


def test_what_is_told_again_after_the_norm_was_known_is_dropped():
    book = NormBook([NormPlan("", 1.0, (0,), (0, 1))], 0, unheard)
    for step in range(3):
        part = NormPart(step, "", 1, {1: 1.0})
        book.add(step, 0, 1.0)
        assert book.add_part(part, step) is not None
        assert book.add_part(part, step) is None  # before the step was counted as made
        assert book.add_part(part, step + 1) is None
    assert len(book._parts) == 1


class SecondHalfElsewhere(PSDispatcher):
    def dispatch(self, varlist):
        return [self.eps[block.name == "w.block1"] for block in varlist]


class Server:
    """Server 0 of two, which holds ``b`` (block 0) and the first half of ``w`` (block 1), all zero."""

    def __init__(self, trainers: int, clip: ClipGradByNorm | ClipGradByGlobalNorm) -> None:
        model = torch.nn.ParameterDict({"b": torch.zeros(1), "w": torch.zeros(2, 10000)})
        program = Program.from_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, clip)
        transpiler = DistributeTranspiler(DistributeTranspilerConfig(split_method=SecondHalfElsewhere))
        transpiler.transpile(
            0,
            program=program,
            pservers="a:1,b:1",
            trainers=trainers,
            startup_program=program.startup_program,
        )
        assert program.source is not None
        self.told: list[NormPart] = []
        self.shard = Shard(
            server_plan(transpiler.get_pserver_program("a:1")),
            program.source.parameters,
            send_norm_part=lambda part, _: self.told.append(part),
        )
        self.mode = mode = Sync().make_server(self.shard, trainers)
        for trainer in range(trainers):
            mode.begin(trainer, 0, HYPER)

    def send(self, trainer: int, block: int, value: float, step: int = 0) -> list[Answer]:
        landing = wait_for_buffer(self.shard, trainer, block, self.mode.turn)
        np.frombuffer(landing, dtype=np.float32)[:] = value
        return [*self.mode.gradient(trainer, block, step), *self.mode.advance(block)]

    def value(self, block: int) -> float:
        return float(np.frombuffer(self.shard.store.view(block), dtype=np.float32)[0])


def their_part(square: float, step: int = 0, key: str = "") -> NormPart:
    return NormPart(step, key, 1, {2: square})


def test_nothing_is_stepped_before_the_norm_is_known_and_then_all_of_it():
    server = Server(2, ClipGradByGlobalNorm(5.0))
    for trainer in range(2):
        assert server.send(trainer, 0, 3.0) == []
    for trainer in range(2):
        assert server.send(trainer, 1, 0.0) == []
    assert server.told == [NormPart(0, "", 0, {0: 9.0, 1: 0.0})]
    assert (server.value(0), server.mode.step) == (0.0, 0)
    assert server.mode.missing() == Missing(0, (), "the norm of all gradients", (1,))
    answers = server.mode.norm(their_part(91.0))  # the norm is 10: halved
    assert answers == [Answer(0, 1, (0, 1)), Answer(1, 1, (0, 1))]
    assert server.value(0) == pytest.approx(-1.5, rel=1e-6)
    assert (server.mode.step, server.mode.missing()) == (1, None)


def test_a_step_that_fails_once_its_norm_is_known_fails_for_everybody(monkeypatch):
    server = Server(1, ClipGradByGlobalNorm(5.0))

    def broken(*_: object) -> None:
        raise ArithmeticError("no root")

    monkeypatch.setattr(server.shard.store, "_rule", broken)
    server.send(0, 0, 3.0)
    server.send(0, 1, 0.0)
    reason = "could not be stepped: ArithmeticError: no root"
    with pytest.raises(FleetError, match=reason):
        server.mode.norm(their_part(91.0))
    with pytest.raises(FleetError, match=reason):
        server.mode.missing()


def test_the_last_part_may_be_this_servers_own():
    server = Server(1, ClipGradByGlobalNorm(5.0))
    assert server.mode.norm(their_part(91.0)) == []
    assert server.send(0, 0, 3.0) == []
    assert server.send(0, 1, 0.0) == [Answer(0, 1, (0,)), Answer(1, 1, (0,))]
    assert server.value(0) == pytest.approx(-1.5, rel=1e-6)


def test_the_norm_of_one_parameter_holds_up_no_other():
    server = Server(1, ClipGradByNorm(1.0))
    assert server.send(0, 1, 1.0) == []
    assert server.send(0, 0, 2.0) == [Answer(0, 1, (0,))]
    assert server.value(0) == pytest.approx(-1.0, rel=1e-5)
    assert server.mode.norm(their_part(0.0, key="w")) == [Answer(1, 1, (0,))]
    assert server.value(1) == pytest.approx(-0.01, rel=1e-5)  # 10000 ones have the norm 100


def test_what_is_absent_everywhere_has_no_part_and_is_not_stepped():
    server = Server(2, ClipGradByGlobalNorm(1.0))
    for trainer in range(2):
        server.send(trainer, 0, 1.0)
        server.mode.end(trainer, 0, [1])
    assert server.told == [NormPart(0, "", 0, {0: 1.0, 1: 0.0})]
    assert server.mode.norm(their_part(0.0)) == [Answer(0, 1, (0, 1)), Answer(1, 1, (0, 1), changed=False)]


def test_a_trainer_that_comes_back_while_a_norm_is_awaited_changes_nothing():
    """Its gradient is in the part that was told: what it sends again is taken, and not used."""
    server = Server(2, ClipGradByGlobalNorm(1000.0))
    for trainer in range(2):
        server.send(trainer, 0, 4.0)
        server.send(trainer, 1, 0.0)
    server.mode.admit(0)
    server.mode.begin(0, 0, HYPER)
    assert server.send(0, 0, 99.0) == []
    with pytest.raises(RemoteProtocolError, match="for step 0, expected the next step"):
        server.send(0, 0, 99.0)
    with pytest.raises(RemoteProtocolError, match=r"without a gradient of w\.block0"):
        server.mode.end(0, 0, [])
    pulled = server.mode.pull(0, 0)[1].value
    # Block 1 has not come again: the trainer awaits no answer about it yet.
    assert server.mode.norm(their_part(0.0)) == [Answer(0, 1, (0, 1)), Answer(1, 1, (1,))]
    assert server.value(0) == -4.0
    # What it has been answered about that block does not change under its hands.
    assert pulled is not None
    assert pulled.obj is not server.shard.store.view(1).obj
    assert server.send(0, 1, 99.0) == [Answer(1, 1, (0,))]
    assert server.value(1) == 0.0
    assert server.mode.end(0, 0, []) == []


def test_a_trainer_that_comes_back_may_say_that_there_is_no_gradient():
    server = Server(1, ClipGradByGlobalNorm(1000.0))
    server.send(0, 0, 4.0)
    server.send(0, 1, 0.0)
    server.mode.admit(0)
    assert server.mode.end(0, 0, [0, 1]) == []
    assert server.mode.norm(their_part(0.0)) == [Answer(0, 1, (0,)), Answer(1, 1, (0,))]
    assert server.value(0) == -4.0


def test_a_trainer_that_completes_changes_no_block_that_awaits_its_norm():
    server = Server(2, ClipGradByGlobalNorm(1000.0))
    for trainer in range(2):
        server.send(trainer, 0, 4.0)
    server.send(0, 1, 6.0)
    assert server.mode.complete(1) == []
    assert len(server.told) == 1
    assert server.mode.norm(their_part(0.0)) == [Answer(0, 1, (0,)), Answer(1, 1, (0,))]
    assert (server.value(0), server.value(1)) == (-4.0, -6.0)


@pytest.mark.parametrize("part", [their_part(1.0, key="v"), NormPart(0, "", 0, {}), NormPart(0, "", 5, {})])
def test_a_part_of_no_norm_of_this_server_is_refused(part):
    with pytest.raises(RemoteProtocolError, match="that norm does not cover blocks of both servers"):
        Server(1, ClipGradByGlobalNorm(1.0)).mode.norm(part)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
@pytest.mark.parametrize("cut", [1, 40, 99])
def test_a_norm_of_parts_is_the_norm_of_the_whole(dtype, scale, cut):
    whole = (torch.randn(100, generator=torch.Generator().manual_seed(0)) * scale).to(dtype)
    found = total_of({1: sum_of_squares(whole[cut:]), 0: sum_of_squares(whole[:cut])})
    assert found**0.5 == pytest.approx(whole.double().norm().item(), rel=1e-12)


@pytest.mark.parametrize("max_norm", [0.1, 1.0, 10.0, 1e4])
@pytest.mark.parametrize("value", [0.0, 1e-4, 3.0, float("inf"), float("nan")])
def test_the_coefficient_is_torch_s(max_norm, value):
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    parameter.grad = torch.tensor([value, -2 * value], dtype=torch.float64)
    before = parameter.grad.clone()
    torch.nn.utils.clip_grad_norm_(parameter, max_norm)
    ours = before * clip_coefficient(sum_of_squares(before), max_norm)
    torch.testing.assert_close(ours, parameter.grad, rtol=1e-12, atol=0.0, equal_nan=True)


def test_a_large_gradient_does_not_overflow():
    assert sum_of_squares(torch.full((4,), 1e38)) == pytest.approx(4e76)
    assert clip_coefficient(math.inf, 1.0) == 0.0


@given(st.dictionaries(st.integers(0, 50), st.floats(0, 1e30), min_size=1), st.randoms())
def test_the_order_of_the_parts_changes_no_bit(sums, random):
    shuffled = list(sums.items())
    random.shuffle(shuffled)
    assert total_of(dict(shuffled)) == total_of(sums)
