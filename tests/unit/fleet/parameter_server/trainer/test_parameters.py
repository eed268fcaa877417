"""A trainer's parameters: new values land beside them; marks find what a script has written to them."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.errors import FleetError
from fleet.fluid import DistributeTranspiler, Program
from fleet.fluid.render import trainer_plan
from fleet.parameter_server.trainer.parameters import ROUND_BYTES, Mark, ParameterStore, covers_all, part_of
from fleet.parameter_server.transport.arena import Arena, Extent, bytes_of
from fleet.plan import PlannedBlock


def blocks_of(model: Any) -> tuple[PlannedBlock, ...]:
    program = Program.from_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    transpiler = DistributeTranspiler()
    transpiler.transpile(
        0, program=program, pservers="a:1,b:1", trainers=1, startup_program=program.startup_program
    )
    return trainer_plan(transpiler.get_trainer_program()).blocks


def land(store: ParameterStore, block: PlannedBlock, value: float) -> None:
    store.landing(block.id)[:] = bytes_of(torch.full(block.shape, value))


def views_of(parameter: torch.Tensor) -> list[torch.Tensor]:
    """Return the ways in which a script may have kept a parameter's values in sight."""
    return [parameter.detach(), parameter.data, torch.from_numpy(parameter.detach().numpy())]


@pytest.fixture
def model() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(100, 200)  # a weight of two blocks, and a bias of one


def test_values_that_land_show_only_after_they_are_adopted_and_then_in_every_view(model):
    weight, views = model.weight, views_of(model.weight)
    blocks = blocks_of(model)
    store = ParameterStore(blocks, dict(model.named_parameters()))
    views += views_of(model.weight)
    for round_ in range(1, 4):
        before = model.weight.detach().clone()
        for block in blocks:
            land(store, block, round_ + block.index / 2)
        assert all(torch.equal(view, before) for view in views)
        store.adopt()
        assert model.weight is weight
        assert torch.equal(model.bias, torch.full((200,), float(round_)))
        for view in views:
            assert torch.equal(view[:100], torch.full((100, 100), float(round_)))
            assert torch.equal(view[100:], torch.full((100, 100), round_ + 0.5))


def test_blocks_that_did_not_change_keep_their_values(model):
    blocks = blocks_of(model)
    store = ParameterStore(blocks, dict(model.named_parameters()))
    bias, first, second = blocks
    before = model.weight.detach().clone()
    land(store, second, 3.0)
    store.adopt(unchanged={bias.id, first.id})
    assert torch.equal(model.weight[:100], before[:100])
    assert torch.equal(model.weight[100:], torch.full((100, 100), 3.0))


def test_values_that_lie_elsewhere_are_copied_when_they_are_adopted_and_nothing_is_made_to_land_in(model):
    blocks = blocks_of(model)
    store = ParameterStore(blocks, dict(model.named_parameters()))
    bias, first, second = blocks
    before, place = model.weight.detach().clone(), model.weight.data_ptr()
    lying = bytearray(bytes_of(torch.full(second.shape, 3.0)))
    store.land_elsewhere(second.id, memoryview(lying))
    assert torch.equal(model.weight, before)
    version = model.weight._version
    store.adopt(unchanged={bias.id, first.id})
    lying[:] = bytes(len(lying))
    assert torch.equal(model.weight[:100], before[:100])
    assert torch.equal(model.weight[100:], torch.full((100, 100), 3.0))
    assert model.weight._version > version
    assert model.weight.data_ptr() == place
    assert all(memory._arena._arena is None for memory in store._memories.values())


@pytest.mark.parametrize("contiguous", [True, False])
def test_one_block_may_land_and_its_neighbour_lie_elsewhere(model, contiguous):
    if not contiguous:
        model.weight.data = torch.zeros(200, 200)[:, :100]
    blocks = blocks_of(model)
    store = ParameterStore(blocks, dict(model.named_parameters()))
    bias, first, second = blocks
    for round_ in range(1, 4):
        land(store, first, float(round_))
        store.land_elsewhere(second.id, memoryview(bytes(bytes_of(torch.full(second.shape, round_ + 0.5)))))
        store.adopt(unchanged={bias.id})
        assert torch.equal(model.weight[:100], torch.full((100, 100), float(round_)))
        assert torch.equal(model.weight[100:], torch.full((100, 100), round_ + 0.5))
        for block in blocks:
            land(store, block, -1.0)
        store.adopt()
        assert torch.equal(model.weight, torch.full((200, 100), -1.0))


def test_autograd_notices_that_the_values_changed(model):
    store = ParameterStore(blocks_of(model), dict(model.named_parameters()))
    x = torch.ones(1, 100, requires_grad=True)
    loss = model(x).sum()
    store.adopt()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: torch.nn.Parameter(torch.randn(100, 200).t()), id="not-contiguous"),
        pytest.param(lambda: torch.nn.Parameter(torch.randn(300, 100)[50:250]), id="part-of-something"),
        pytest.param(lambda: torch.nn.Parameter(torch.randn(200, 100).share_memory_()), id="shared"),
    ],
)
def test_parameters_on_whose_place_others_rely_stay_there(make):
    model: Any = torch.nn.Module()
    model.weight = make()
    place, strides = model.weight.data_ptr(), model.weight.stride()
    blocks = blocks_of(model)
    store = ParameterStore(blocks, dict(model.named_parameters()))
    for block in blocks:
        land(store, block, 1.0 + block.index)
    store.adopt()
    assert (model.weight.data_ptr(), model.weight.stride()) == (place, strides)
    assert torch.equal(model.weight[:100], torch.full((100, 100), 1.0))
    assert torch.equal(model.weight[100:], torch.full((100, 100), 2.0))


@pytest.mark.parametrize("rounds", [1, 7])
@pytest.mark.parametrize(
    "write",
    [
        pytest.param(lambda model: model.weight.data.clamp_(-0.01, 0.01), id="clamped"),
        pytest.param(
            lambda model: model.load_state_dict(torch.nn.Linear(100, 200).state_dict()), id="loaded"
        ),
        pytest.param(lambda model: setattr(model.weight, "data", torch.zeros(200, 100)), id="replaced"),
    ],
)
def test_a_parameter_that_the_script_has_written_to_is_named(model, write, rounds):
    blocks = blocks_of(model)
    store = ParameterStore(blocks, dict(model.named_parameters()), guarded=True)
    model(torch.ones(1, 100)).sum().backward()
    for round_ in range(rounds):
        for block in blocks:
            land(store, block, 1.0 + round_)
        store.adopt()
        store.check_kept()
    write(model)
    with pytest.raises(
        FleetError, match=r"parameter (weight|bias) was written to .*fleet\.push_parameters\(\)"
    ):
        store.check_kept()
    with pytest.raises(FleetError, match="was written to"):
        store.adopt(names=["bias", "weight"])
    store.keep()
    store.adopt()
    store.check_kept()


@pytest.mark.parametrize("rounds", [1, 4, 10])
@pytest.mark.parametrize(
    "weight",
    [
        pytest.param(lambda: torch.randn(200, 100), id="plain"),
        pytest.param(lambda: torch.randn(100, 200).t(), id="not-contiguous"),
    ],
)
def test_one_number_of_a_small_model_that_is_written_past_autograd_is_noticed_in_every_round(weight, rounds):
    model: Any = torch.nn.Module()
    model.weight = torch.nn.Parameter(weight())
    blocks = blocks_of(model)
    store = ParameterStore(blocks, dict(model.named_parameters()), guarded=True)
    model.weight.grad = torch.zeros(200, 100)
    for round_ in range(rounds):
        for block in blocks:
            land(store, block, 1.0 + round_)
        store.adopt()
        store.check_kept()
    model.weight.data[3, 2] = 5.0 + rounds
    with pytest.raises(FleetError, match="parameter weight was written to"):
        store.check_kept()


@pytest.mark.parametrize("rounds", [1, 4])
def test_weights_that_come_back_but_for_rounding_in_one_place_and_to_the_bit_in_another_are_no_error(rounds):
    model: Any = torch.nn.Linear(100, 200)
    blocks = blocks_of(model)
    store = ParameterStore(blocks, dict(model.named_parameters()), guarded=True)
    for _ in range(rounds):
        model.zero_grad()
        model(torch.ones(1, 100)).sum().backward()
        for block, value in zip(blocks, (0.1, 0.0, 0.1), strict=True):
            land(store, block, value)
        store.adopt()
        add_and_subtract(model)
        assert bool((model.weight != 0.1).any())
        store.check_kept()
    model.weight.data[150, 3] = 0.2
    with pytest.raises(FleetError, match="parameter weight was written to"):
        store.check_kept()


@torch.no_grad()
def add_and_subtract(model: Any) -> None:
    """Move weights away and back, as sharpness-aware training does: they come back but for rounding."""
    for parameter in model.parameters():
        ascent = 0.003 * torch.randn(parameter.shape)
        parameter.add_(ascent)
        parameter.sub_(ascent)


def exchange_for_a_while(model: Any) -> None:
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(kept)


@pytest.mark.parametrize("value", [1.0, float("nan")])
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(exchange_for_a_while, id="exchanged-and-put-back"),
        pytest.param(lambda model: setattr(model.weight, "data", model.weight.data.clone()), id="moved"),
        pytest.param(
            lambda model: setattr(model.weight, "data", model.weight.data.t().contiguous().t()),
            id="laid-out-anew",
        ),
        pytest.param(add_and_subtract, id="added-and-subtracted"),
    ],
)
def test_what_no_value_of_the_servers_would_undo_is_no_error(model, change, value):
    blocks = blocks_of(model)
    store = ParameterStore(blocks, dict(model.named_parameters()), guarded=True)
    for _ in range(6):
        for block in blocks:
            land(store, block, value)
        store.adopt()
        model.zero_grad()
        model(torch.ones(1, 100)).sum().backward()
        change(model)
        store.check_kept()


@pytest.mark.parametrize("rounds", [1, 7])
def test_what_is_written_where_nobody_steps_stays(model, rounds):
    bias, *weight = blocks = blocks_of(model)
    store = ParameterStore(blocks, dict(model.named_parameters()), guarded=True)
    for _ in range(rounds):
        for block in blocks:
            land(store, block, 1.0)
        store.adopt()
    model.weight.data.zero_()
    store.check_kept()  # without a gradient
    land(store, bias, 2.0)
    store.adopt(unchanged={block.id for block in weight})
    assert not model.weight.any()
    land(store, weight[0], 3.0)
    with pytest.raises(FleetError, match="parameter weight was written to"):
        store.adopt(names=["weight"])


@pytest.mark.parametrize("rounds", [1, 7])
def test_a_large_parameter_that_is_laid_out_otherwise_is_compared_where_its_version_has_moved(
    rounds, monkeypatch
):
    monkeypatch.setattr("fleet.parameter_server.trainer.parameters.ROUND_BYTES", 4096)
    model: Any = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.randn(100, 200).t())
    blocks = blocks_of(model)
    store = ParameterStore(blocks, dict(model.named_parameters()), guarded=True)
    for _ in range(rounds):
        for block in blocks:
            land(store, block, 1.0)
        store.adopt()
    model.weight.grad = torch.zeros(200, 100)
    with torch.no_grad():
        kept = model.weight.clone()
        model.weight.zero_()
        model.weight.copy_(kept)
        store.check_kept()
        model.weight.clamp_(0.0, 0.5)
    with pytest.raises(FleetError, match="parameter weight was written to"):
        store.check_kept()


def test_equal_values_have_equal_checksums(model):
    blocks = blocks_of(model)
    store = ParameterStore(blocks, dict(model.named_parameters()))
    torch.manual_seed(0)
    other = torch.nn.Linear(100, 200)
    same = ParameterStore(blocks_of(other), dict(other.named_parameters()))
    assert store.checksums() == same.checksums()
    with torch.no_grad():
        other.weight[150, 3] += 1
    differing = [block for block, crc in same.checksums().items() if crc != store.checksums()[block]]
    assert [blocks[block].name for block in differing] == ["weight.block1"]


def test_an_arena_holds_each_dtype_flat_and_aligned():
    arena = Arena(
        {
            "a": Extent(torch.float32, (3,)),
            "b": Extent(torch.bfloat16, (5, 2)),
            "c": Extent(torch.float32, ()),
        }
    )
    assert set(arena.flat) == {torch.float32, torch.bfloat16}
    assert arena["c"].shape == ()
    assert (arena["c"].data_ptr() - arena["a"].data_ptr()) % 64 == 0
    bytes_of(arena["b"])[:2] = b"\x80\x3f"
    assert arena["b"][0, 0].item() == 1.0
    assert len(bytes_of(arena["c"])) == 4


def marked(content: memoryview, round_: int, part: float = 1.0, *, copies: bool = True) -> Mark:
    mark = Mark(len(content), part, copies=copies)
    mark.take(content, round_)
    return mark


@settings(deadline=None)
@given(st.integers(1, 6000), st.booleans(), st.data())
def test_a_changed_byte_of_much_memory_is_noticed_at_once_in_the_first_rounds_and_later_within_one_turn(
    length, copies, data
):
    content = bytearray(length)
    changed = data.draw(st.integers(0, length - 1))
    first = data.draw(st.integers(0, 20))
    mark = Mark(length, 0.001, copies=copies)  # which is 1 KiB a round
    noticed = []
    for round_ in range(first, first + -(-length // 1024)):
        mark.take(memoryview(content), round_)
        assert mark.matches(memoryview(content))
        content[changed] ^= 1
        noticed.append(not mark.matches(memoryview(content)))
    assert any(noticed)
    assert noticed[0] or not covers_all(first)


@settings(deadline=None)
@given(st.integers(1, 6000), st.data())
def test_a_changed_byte_of_little_memory_is_noticed_in_every_round(length, data):
    content = bytearray(length)
    changed = data.draw(st.integers(0, length - 1))
    mark = marked(memoryview(content), data.draw(st.integers(0, 20)))
    content[changed] ^= 1
    assert not mark.matches(memoryview(content))


def test_nothing_has_a_mark_too():
    for round_ in (0, 9):
        for part in (0.5, 1.0):
            assert marked(memoryview(b""), round_, part).matches(memoryview(b""))


def test_what_a_round_covers_of_a_large_model_is_what_it_may_cost():
    small = [torch.empty(ROUND_BYTES // 8), torch.empty(ROUND_BYTES // 8)]
    assert part_of(small) == 1.0
    assert part_of([]) == 1.0
    large = [*small, torch.empty(3 * ROUND_BYTES // 4, dtype=torch.int8).view(torch.float32)]
    assert part_of([torch.empty(1 << 40, device="meta")]) == 0.02
    part = part_of(large)
    covered = 0
    for each in large:
        content = bytes_of(each.zero_())
        mark = marked(content, 4, part)
        for begin in range(0, len(content), 1024):
            content[begin] = 1
            covered += 1024 * (not mark.matches(content))
            content[begin] = 0
    assert ROUND_BYTES <= covered <= ROUND_BYTES + 1024 * len(large)


def moved(count: int, by: float, size: float = 1.0) -> tuple[torch.Tensor, Any]:
    """Return numbers of a size, and how they come back from where something is added and subtracted."""
    numbers = size * torch.randn(count, generator=torch.Generator().manual_seed(3))
    ascent = by * torch.randn(count, generator=torch.Generator().manual_seed(4))
    return numbers, lambda: numbers.add_(ascent).sub_(ascent)


@pytest.mark.parametrize(
    ("by", "size"),
    [
        pytest.param(0.05, 0.1, id="less-than-the-numbers"),
        pytest.param(0.05, 1e-5, id="more-than-the-numbers"),
    ],
)
@pytest.mark.parametrize("round_", [0, 9])
def test_what_comes_back_but_for_rounding_beyond_the_first_kibibyte_has_not_changed(by, size, round_):
    numbers, move = moved(200_000, by, size)
    first = numbers[:256].clone()
    mark = marked(bytes_of(numbers), round_)
    move()
    numbers[:256] = first  # to the bit, as zeros come back
    assert not mark.matches(bytes_of(numbers))
    assert mark.matches_but_for_rounding(bytes_of(numbers), numbers.dtype)


@pytest.mark.parametrize("written", [5.0, float("nan"), float("inf")])
@pytest.mark.parametrize("at", [0, 300, 199_999])
@pytest.mark.parametrize("part", [0.01, 1.0])
def test_one_written_number_is_told_from_rounding_wherever_it_is(written, at, part):
    numbers, move = moved(200_000, 0.05, 0.1)
    mark = marked(bytes_of(numbers), 0, part)
    move()
    numbers[at] = written
    assert not mark.matches_but_for_rounding(bytes_of(numbers), numbers.dtype)


def test_numbers_that_are_none_come_back_too():
    numbers, move = moved(1000, 0.05, 0.1)
    numbers[:3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    mark = marked(bytes_of(numbers), 0)
    move()
    assert not mark.matches(bytes_of(numbers))
    assert mark.matches_but_for_rounding(bytes_of(numbers), numbers.dtype)


def test_a_checksum_tells_no_rounding_from_writing():
    numbers, move = moved(1000, 0.05, 0.1)
    mark = marked(bytes_of(numbers), 0, 0.1, copies=False)
    move()
    assert not mark.matches_but_for_rounding(bytes_of(numbers), numbers.dtype)
