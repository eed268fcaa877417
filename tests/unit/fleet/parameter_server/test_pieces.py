"""How servers cut blocks into pieces, where nothing of the result depends on it, and trainers as they do."""

import pytest
import torch

from fleet.fluid import DistributeTranspiler, Program
from fleet.fluid.render import server_plan, trainer_plan
from fleet.parameter_server.pieces import by_block, in_pieces
from fleet.parameter_server.settings import Settings
from fleet.plan import ClipGradByGlobalNorm, ClipGradByNorm, ClipGradByValue, DistributeTranspilerConfig

ENDPOINTS = ["10.0.0.1:7164", "10.0.0.2:7164"]
SMALL = Settings(piece_bytes=4096)


def plans(
    settings=SMALL,
    endpoints=ENDPOINTS,
    *,
    clip=None,
    config=None,
    optimizer=torch.optim.SGD,
    model=None,
    trainers=2,
):
    """Return a trainer's plan and the servers', in pieces."""
    model = model or torch.nn.Sequential(torch.nn.Linear(64, 1000), torch.nn.Linear(1000, 3))
    program = Program.from_optimizer(optimizer(model.parameters(), lr=0.1), model, clip)
    transpiler = DistributeTranspiler(config or DistributeTranspilerConfig())
    transpiler.transpile(
        0,
        program=program,
        pservers=",".join(endpoints),
        trainers=trainers,
        startup_program=program.startup_program,
    )
    servers = [
        in_pieces(server_plan(transpiler.get_pserver_program(endpoint)), settings) for endpoint in endpoints
    ]
    trainer = trainer_plan(transpiler.get_trainer_program())
    return trainer.placed([server.placement for server in servers]), servers


def is_cut(plan):
    return any(len(pieces) > 1 for pieces in by_block(plan.blocks))


def test_trainers_cut_as_servers_do():
    trainer, servers = plans()
    assert is_cut(trainer)
    for index, server in enumerate(servers):
        assert trainer.blocks_on(index) == server.blocks
    assert len({piece.id for piece in trainer.blocks}) == len(trainer.blocks)
    assert sorted(trainer.send_order) == sorted(piece.id for piece in trainer.blocks)


def test_pieces_are_whole_rows_that_cover_the_parameter():
    trainer, _ = plans()
    for name, shape in {"0.weight": (1000, 64), "0.bias": (1000,), "1.weight": (3, 1000)}.items():
        pieces = trainer.blocks_of(name)
        assert [piece.begin for piece in pieces] == [0, *(piece.end for piece in pieces[:-1])]
        assert pieces[-1].end == torch.Size(shape).numel()
        assert sum(piece.shape[0] for piece in pieces) == shape[0]
        assert all(
            piece.shape[1:] == shape[1:] and piece.numel == piece.end - piece.begin for piece in pieces
        )
    assert max(piece.numel * 4 for piece in trainer.blocks_of("0.weight")) <= 4096


def test_a_piece_ends_where_the_vectors_of_kernels_do():
    trainer, _ = plans(Settings(piece_bytes=1), model=torch.nn.Linear(24, 1000))
    assert is_cut(trainer)
    for pieces in by_block(trainer.blocks):
        assert all(piece.numel % 64 == 0 for piece in pieces[:-1])


@pytest.mark.parametrize(
    ("endpoints", "cut"),
    [
        (["127.0.0.1:7164", "127.0.0.2:7164"], False),
        (["[::1]:7164", "localhost:7164"], False),
        (["127.0.0.1:7164", "10.0.0.2:7164"], True),
        (["job-pserver-0.job.ns.svc:7164", "job-pserver-1.job.ns.svc:7164"], True),
    ],
)
def test_by_itself_a_block_is_cut_where_a_network_lies_between(endpoints, cut):
    wide = torch.nn.Linear(1024, 1024)
    trainer, _ = plans(Settings(), endpoints, model=wide)
    assert is_cut(trainer) is cut


@pytest.mark.parametrize(("trainers", "kib"), [(1, 256), (4, 256), (8, 128), (100, 128)])
def test_pieces_are_smaller_where_many_trainers_fill_a_servers_port(trainers, kib):
    trainer, _ = plans(Settings(), model=torch.nn.Linear(1024, 1024), trainers=trainers)
    assert max(piece.numel * 4 for piece in trainer.blocks) == kib << 10


@pytest.mark.parametrize("clip", [ClipGradByNorm(1.0), ClipGradByGlobalNorm(1.0)])
def test_what_is_clipped_by_a_norm_stays_whole(clip):
    trainer, servers = plans(clip=clip)
    assert not any(map(is_cut, (trainer, *servers)))


def test_the_bounds_of_a_block_are_those_of_its_pieces():
    _, servers = plans(clip=ClipGradByValue(0.5))
    for server in servers:
        assert server.clipping.ranges == dict.fromkeys((piece.id for piece in server.blocks), (-0.5, 0.5))


def test_an_optimizer_that_looks_at_whole_parameters_gets_them():
    model = torch.nn.Linear(64, 1000, bias=False)
    trainer, _ = plans(
        optimizer=torch.optim.Muon, model=model, config=DistributeTranspilerConfig(slice_var_up=False)
    )
    assert not is_cut(trainer)


@pytest.mark.parametrize("geo", [True, False])
def test_modes_that_keep_something_of_a_block_get_whole_ones(geo):
    config = DistributeTranspilerConfig(sync_mode=False, geo_sgd_mode=geo, half_async=not geo)
    trainer, _ = plans(config=config)
    assert not is_cut(trainer)
