"""The measured systems, each used as its own documentation shows.

A system is a pair of functions: `trainer` returns the step to time and a function that ends training, and
`serve` runs a parameter server until every trainer has ended.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import rpc
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

from benchmarks import (
    alone_systems,
    ctr_systems,
    fluid_systems,
    grpc_stream,
    price_systems,
    sparse_systems,
)
from benchmarks.workload import LEARNING_RATE, Config, End, Step, batch, build_layers
from fleet.averaging import LocalSGD

__all__ = ["ENCRYPTED", "SYSTEMS", "System", "rpc_part"]

RPC_SECONDS = 600
STRATEGIES: dict[str, dict[str, Any]] = {
    "fleet": {"transport": "tcp"},
    "tls": {"transport": "tcp"},
    "cross": {"transport": "tcp", "cross_step": True},
    "bf16": {"transport": "tcp", "wire_dtype": "bfloat16"},
    "async": {"transport": "tcp"},
    "shared": {"transport": "shared_memory"},
    "both": {"transport": "shared_memory", "cross_step": True},
}
"""The strategies of fleet's parameter-server systems; those in `ENCRYPTED` also have certificates."""
COLLECTIVE: dict[str, dict[str, Any]] = {
    "allreduce": {},
    "allreducehalf": {"wire_dtype": "bfloat16"},
    "localsgd": {"local_sgd": LocalSGD(k_steps=8)},
}
"""The strategies of fleet's collective systems."""
ENCRYPTED = frozenset({"tls"})


@dataclass(frozen=True)
class System:
    """A system to measure: its trainer function and its server function."""

    trainer: Callable[[Config], tuple[Step, End]]
    serve: Callable[[Config], None] | None = None


def _loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: Config,
    *,
    to_none: bool = True,
    advance: Callable[[], object] | None = None,
) -> Step:
    """Return the usual training step, which ends with ``optimizer.step()`` or a replacement."""
    inputs, labels = batch(config.index, config.widths)
    advance = advance or optimizer.step

    def step(size: int) -> None:
        optimizer.zero_grad(set_to_none=to_none)
        nn.functional.cross_entropy(model(inputs[:size]), labels[:size]).backward()
        advance()

    return step


def compute_trainer(config: Config) -> tuple[Step, End]:
    """Train without communication, as an upper bound on the speed of all systems."""
    model = nn.Sequential(*build_layers(config.widths))
    return _loop(model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), config), lambda: None


def imports_trainer(config: Config) -> tuple[Step, End]:
    """Import what fleet's processes import, and do nothing else."""
    del config
    _import_fleet()
    return lambda _: None, lambda: None


def alone_trainer(config: Config) -> tuple[Step, End]:
    """Train without communication but with fleet's imports, as a memory reference."""
    _import_fleet()
    from fleet.without_dynamo import step_directly

    model = nn.Sequential(*build_layers(config.widths))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    return _loop(model, optimizer, config, advance=lambda: step_directly(optimizer)), lambda: None


def _import_fleet() -> None:
    import fleet.parameter_server

    assert fleet.parameter_server.fleet is not None


def ddp_trainer(
    config: Config, hook: Callable[..., Any] | None = None, *, to_none: bool = False
) -> tuple[Step, End]:
    """Train with DistributedDataParallel over gloo, optionally with a communication hook.

    Gradients are zeroed in place, or set to None.
    """
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{config.endpoints[0]}",
        rank=config.index,
        world_size=config.num_trainers,
    )
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(*build_layers(config.widths)), gradient_as_bucket_view=True
    )
    if hook is not None:
        model.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    return _loop(model, optimizer, config, to_none=to_none), dist.destroy_process_group


def _fleet_init(config: Config) -> tuple[Any, nn.Module, torch.optim.Optimizer]:
    from fleet import DistributedStrategy, create_async_strategy, role_maker
    from fleet.parameter_server import fleet

    kind = role_maker.Role.SERVER if config.role == "server" else role_maker.Role.WORKER
    fleet.init(role_maker.UserDefinedRoleMaker(config.index, kind, config.num_trainers, config.endpoints))
    model = nn.Sequential(*build_layers(config.widths))
    create = create_async_strategy if config.system == "async" else DistributedStrategy
    strategy = create(**STRATEGIES[config.system])
    optimizer = fleet.distributed_optimizer(
        torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), strategy, model
    )
    return fleet, model, optimizer


def fleet_trainer(config: Config) -> tuple[Step, End]:
    """Train with fleet.parameter_server and the strategy that the system's name selects."""
    fleet, model, optimizer = _fleet_init(config)
    fleet.init_worker()
    return _loop(model, optimizer, config), fleet.stop_worker


def fleet_serve(config: Config) -> None:
    """Serve with fleet.parameter_server until every trainer has finished."""
    fleet, _, _ = _fleet_init(config)
    fleet.init_server()
    fleet.run_server()


def collective_trainer(config: Config) -> tuple[Step, End]:
    """Train with fleet.collective and the strategy that the system's name selects."""
    from fleet import DistributedStrategy, role_maker
    from fleet.collective import fleet

    host, _, port = config.endpoints[0].rpartition(":")
    places = [f"{host}:{int(port) + rank}" for rank in range(config.num_trainers)]
    fleet.init(role_maker.UserDefinedCollectiveRoleMaker(config.index, places))
    model = nn.Sequential(*build_layers(config.widths))
    optimizer = fleet.distributed_optimizer(
        torch.optim.SGD(model.parameters(), lr=LEARNING_RATE),
        DistributedStrategy(**COLLECTIVE[config.system]),
        model,
    )
    fleet.init_worker()
    return _loop(model, optimizer, config), fleet.stop_worker


class RpcServer:
    """The parameter server of PyTorch's tutorial on batch RPC processing."""

    def __init__(self, config: Config) -> None:
        self.model = rpc_part(config, config.index)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)
        self.num_trainers = config.num_trainers
        self.num_arrived = 0
        self.lock = threading.Lock()
        self.updated: torch.futures.Future[nn.Module] = torch.futures.Future()
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def add(self, gradients: list[torch.Tensor]) -> torch.futures.Future[nn.Module]:
        """Add a trainer's gradients; the last trainer's gradients of a step trigger the update."""
        with self.lock:
            self.num_arrived += 1
            for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
                assert parameter.grad is not None
                parameter.grad += gradient
            updated = self.updated
            if self.num_arrived == self.num_trainers:
                for parameter in self.model.parameters():
                    assert parameter.grad is not None
                    parameter.grad /= self.num_trainers
                self.num_arrived = 0
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=False)
                updated.set_result(self.model)
                self.updated = torch.futures.Future()
        return updated


_rpc_server: list[RpcServer] = []


def rpc_part(config: Config, index: int) -> nn.Sequential:
    """Return the layers of the server at `index`; consecutive layers are divided evenly among servers."""
    layers = build_layers(config.widths)
    num_linears = len(config.widths) - 1
    first, end = (2 * -(-num_linears * each // config.num_servers) for each in (index, index + 1))
    return nn.Sequential(*layers[first:end])


def rpc_model() -> nn.Module:
    """Return this server's part of the model to the caller."""
    return _rpc_server[0].model


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def rpc_update(gradients: list[torch.Tensor]) -> torch.futures.Future[nn.Module]:
    """Add a trainer's gradients; return the updated part once all gradients of the step have arrived."""
    return _rpc_server[0].add(gradients)


def _rpc_init(config: Config) -> None:
    rank = config.index + (config.num_servers if config.role == "trainer" else 0)
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://{config.endpoints[0]}", num_worker_threads=8, rpc_timeout=RPC_SECONDS
    )
    rpc.init_rpc(
        f"{config.role}{config.index}",
        rank=rank,
        world_size=config.num_servers + config.num_trainers,
        rpc_backend_options=options,
    )


def rpc_trainer(config: Config) -> tuple[Step, End]:
    """Train over torch.distributed.rpc: send gradients to every server and fetch updated layers."""
    inputs, labels = batch(config.index, config.widths)
    _rpc_init(config)
    servers = [f"server{index}" for index in range(config.num_servers)]
    parts: list[nn.Module] = [rpc.rpc_sync(server, rpc_model) for server in servers]

    def step(size: int) -> None:
        outputs = inputs[:size]
        for part in parts:
            outputs = part(outputs)
        nn.functional.cross_entropy(outputs, labels[:size]).backward()
        futures = [
            rpc.rpc_async(server, rpc_update, args=([parameter.grad for parameter in part.parameters()],))
            for server, part in zip(servers, parts, strict=True)
        ]
        parts[:] = [future.wait() for future in futures]

    return step, rpc.shutdown


def rpc_serve(config: Config) -> None:
    """Serve a part of the model over RPC until every process calls shutdown."""
    _rpc_server.append(RpcServer(config))
    _rpc_init(config)
    rpc.shutdown()


SYSTEMS = {
    "compute": System(compute_trainer),
    "imports": System(imports_trainer),
    "alone": System(alone_trainer),
    "ddp": System(ddp_trainer),
    "ddpnone": System(partial(ddp_trainer, to_none=True)),
    "ddphalf": System(partial(ddp_trainer, hook=bf16_compress_hook)),
    "rpc": System(rpc_trainer, rpc_serve),
    "grpc": System(grpc_stream.trainer, grpc_stream.serve),
    **dict.fromkeys(STRATEGIES, System(fleet_trainer, fleet_serve)),
    **dict.fromkeys(COLLECTIVE, System(collective_trainer)),
    **{
        f"{model}{way}": System(alone_systems.trainer)
        for model in alone_systems.MODELS
        for way in alone_systems.WAYS
    },
    "rowslocal": System(sparse_systems.local_trainer),
    "rowsrpc": System(sparse_systems.rpc_trainer, sparse_systems.rpc_serve),
    "rowsgrpc": System(sparse_systems.grpc_trainer, sparse_systems.grpc_serve),
    **dict.fromkeys(("rows", "rowsasync"), System(sparse_systems.fleet_trainer, sparse_systems.fleet_serve)),
    **{
        f"{system}_{workload}": System(trainer, serve)
        for workload in ("table", "dense")
        for system, trainer, serve in (
            ("priceplain", price_systems.plain_trainer, None),
            ("pricerpc", price_systems.rpc_trainer, price_systems.rpc_serve),
            ("pricesync", price_systems.fleet_trainer, price_systems.fleet_serve),
            ("priceasync", price_systems.fleet_trainer, price_systems.fleet_serve),
        )
    },
    **dict.fromkeys(("fluidlayers", "fluidmodule"), System(fluid_systems.trainer, fluid_systems.serve)),
    "ctrtorch": System(ctr_systems.torch_trainer),
    **dict.fromkeys(("ctr", "ctrasync"), System(ctr_systems.fleet_trainer, ctr_systems.fleet_serve)),
}
