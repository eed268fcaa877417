import subprocess
import sys
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.errors import TranspileError
from fleet.fluid import DistributeTranspiler
from fleet.plan import DistributeTranspilerConfig, HashName, PSDispatcher, RoundRobin
from tests.support.programs import captured

PSERVERS = "10.0.0.1:6174,10.0.0.2:6174,10.0.0.3:6174"


@dataclass
class Block:
    name: str


names = st.lists(st.text(max_size=20).map(Block), max_size=30)
endpoints = st.lists(st.text(min_size=1), min_size=1, max_size=7, unique=True)


@pytest.mark.parametrize("dispatcher", [RoundRobin, HashName])
@given(names, endpoints)
def test_each_block_gets_one_known_server(dispatcher, blocks, servers):
    found = dispatcher(servers).dispatch(blocks)
    assert len(found) == len(blocks)
    assert set(found) <= set(servers)


@given(st.lists(names, max_size=4), endpoints)
def test_round_robin_is_balanced_whatever_comes_at_once(batches, servers):
    dispatcher = RoundRobin(servers)
    found = [server for blocks in batches for server in dispatcher.dispatch(blocks)]
    counts = [found.count(server) for server in servers]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("dispatcher", [RoundRobin, HashName])
@given(names, endpoints)
def test_reset_begins_anew(dispatcher, blocks, servers):
    one = dispatcher(servers)
    first = one.dispatch(blocks)
    one.reset()
    assert one.dispatch(blocks) == first
    assert dispatcher(servers).dispatch(blocks) == first


def test_round_robin_goes_on_where_it_stopped():
    dispatcher = RoundRobin(["a", "b", "c"])
    assert dispatcher.dispatch([Block("x"), Block("y")]) == ["a", "b"]
    assert dispatcher.dispatch([Block("z"), Block("w")]) == ["c", "a"]
    assert dispatcher.eps == ["a", "b", "c"]


def test_hash_name_spreads_the_blocks_of_a_model():
    blocks = [Block(f"layers.{layer}.weight.block{index}") for layer in range(50) for index in range(4)]
    found = HashName(["a", "b", "c", "d"]).dispatch(blocks)
    assert all(25 <= found.count(server) <= 75 for server in "abcd")


@pytest.mark.programs
def test_hash_name_is_the_same_in_every_process():
    program = (
        "from fleet.plan.dispatch import HashName; from types import SimpleNamespace as N;"
        "print(HashName('abcdefg').dispatch([N(name=f'w{i}') for i in range(20)]))"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    }
    assert runs == {f"{HashName('abcdefg').dispatch([Block(f'w{i}') for i in range(20)])}\n"}


@pytest.mark.parametrize("split_method", [RoundRobin, HashName])
def test_parameter_and_gradient_share_a_server(split_method):
    transpiler = DistributeTranspiler(DistributeTranspilerConfig(split_method=split_method))
    transpiler.transpile(
        0, program=captured({f"w{i}": (400, 100) for i in range(7)}), pservers=PSERVERS, trainers=2
    )
    ops = transpiler.get_trainer_program().global_block().ops
    sent = {op.attr("op_role_var")[0]: op.attr("epmap") for op in ops if op.type == "send"}
    received = {op.attr("op_role_var")[0]: op.attr("epmap") for op in ops if op.type == "recv"}
    assert sent == received
    held = [
        op.input("Param")[0]
        for endpoint in PSERVERS.split(",")
        for block in transpiler.get_pserver_program(endpoint).blocks[1:]
        for op in block.ops[-1:]
    ]
    assert sorted(held) == sorted(name for op in ops if op.type == "recv" for name in op.output("Out"))


class Elsewhere(PSDispatcher):
    def dispatch(self, varlist):
        return ["10.9.9.9:1" for _ in varlist]


class Lazy(PSDispatcher):
    def dispatch(self, varlist):
        return []


@pytest.mark.parametrize(
    ("split_method", "message"),
    [(Elsewhere, "Elsewhere.dispatch .* '10.9.9.9:1'"), (Lazy, "Lazy.dispatch gave 0 endpoints")],
)
def test_a_dispatcher_that_answers_wrongly_is_an_error(split_method, message):
    transpiler = DistributeTranspiler(DistributeTranspilerConfig(split_method=split_method))
    with pytest.raises(TranspileError, match=message):
        transpiler.transpile(0, program=captured(), pservers=PSERVERS)
