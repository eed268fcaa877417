"""The systems of small-step benchmarks: a linear layer alone, or on 200 rows of a table.

There is so little computation and data that the requests determine the cost of a step. Servers use plain SGD.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed import rpc

from benchmarks.workload import LEARNING_RATE, Config, End, Step

__all__ = ["fleet_serve", "fleet_trainer", "plain_trainer", "rpc_serve", "rpc_trainer"]

DIMENSION: Final = 16
LOOK_UPS: Final = 200
_IDS: Final = 100_000
"""The number of ids that occur; the table on the servers accepts any others."""
_BATCHES: Final = 16


def id_batches(index: int) -> list[Tensor]:
    """Return a trainer's batches of 200 ids each, most of them distinct."""
    generator = torch.Generator().manual_seed(index)
    return [torch.randint(0, _IDS, (LOOK_UPS,), generator=generator) for _ in range(_BATCHES)]


class _Dense(nn.Module):
    """A linear layer with 16 inputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(DIMENSION, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        loss: Tensor = self.linear(inputs).sum()
        return loss


class _WithTable(_Dense):
    """A linear layer whose inputs are the rows of a table."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(self.embedding(ids))


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: Config, advance: Callable[[], object]
) -> Step:
    inputs: list[Tensor] = [torch.ones(LOOK_UPS, DIMENSION)]
    if isinstance(model, _WithTable):
        inputs = id_batches(config.index)
    made = 0

    def step(_: int) -> None:
        nonlocal made
        optimizer.zero_grad()
        model(inputs[made % len(inputs)]).backward()
        advance()
        made += 1

    return step


def plain_trainer(config: Config) -> tuple[Step, End]:
    """Train in one process without fleet; the table is an `nn.Embedding` with sparse gradients."""
    model = _Dense() if config.system.endswith("dense") else _WithTable(_embedding())
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    return _step(model, optimizer, config, optimizer.step), lambda: None


def _embedding() -> nn.Module:
    return nn.Embedding(_IDS, DIMENSION, sparse=True)


def _fleet_init(config: Config) -> tuple[Any, nn.Module, torch.optim.Optimizer]:
    import fleet as names
    from fleet import role_maker
    from fleet.parameter_server import fleet

    kind = role_maker.Role.SERVER if config.role == "server" else role_maker.Role.WORKER
    fleet.init(role_maker.UserDefinedRoleMaker(config.index, kind, config.num_trainers, config.endpoints))
    system, _, workload = config.system.partition("_")
    model = (
        _Dense()
        if workload == "dense"
        else _WithTable(names.nn.DistributedEmbedding(None, DIMENSION, name="rows", first_values=0.0))
    )
    create = names.create_async_strategy if system == "priceasync" else names.DistributedStrategy
    optimizer = fleet.distributed_optimizer(
        torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), create(transport="tcp"), model
    )
    return fleet, model, optimizer


def fleet_trainer(config: Config) -> tuple[Step, End]:
    """Train with fleet.parameter_server in sync or async mode."""
    fleet, model, optimizer = _fleet_init(config)
    fleet.init_worker()
    return _step(model, optimizer, config, optimizer.step), fleet.stop_worker


def fleet_serve(config: Config) -> None:
    """Serve with fleet.parameter_server until every trainer has finished."""
    fleet, _, _ = _fleet_init(config)
    fleet.run_server()


class _Shard:
    """The rows on one server and, on the first server, the linear layer; accessed over RPC."""

    def __init__(self) -> None:
        self.rows: Tensor = torch.zeros(_IDS, DIMENSION)
        self.layer: list[Tensor] = [each.detach().clone() for each in _Dense().parameters()]


_shard: list[_Shard] = []


def _rpc_look_up(ids: Tensor) -> Tensor:
    return _shard[0].rows.index_select(0, ids)


def _rpc_push(ids: Tensor, gradient: Tensor) -> None:
    _shard[0].rows.index_add_(0, ids, gradient, alpha=-LEARNING_RATE)


def _rpc_step(gradients: list[Tensor]) -> list[Tensor]:
    for value, gradient in zip(_shard[0].layer, gradients, strict=True):
        value.add_(gradient, alpha=-LEARNING_RATE)
    return _shard[0].layer


def _rpc_init(config: Config) -> None:
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://{config.endpoints[0]}", num_worker_threads=4, rpc_timeout=600
    )
    rank = config.index + (config.num_servers if config.role == "trainer" else 0)
    rpc.init_rpc(
        f"{config.role}{config.index}",
        rank=rank,
        world_size=config.num_servers + config.num_trainers,
        rpc_backend_options=options,
    )


class _RpcRows(nn.Module):
    """A client that looks up and updates rows on all servers concurrently."""

    def __init__(self, num_servers: int) -> None:
        super().__init__()
        self._num_servers = num_servers
        self._rows: list[tuple[int, Tensor, Tensor]] = []

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of the given ids as float32[200, 16]."""
        asked, positions = torch.unique(ids, return_inverse=True)
        servers = asked % self._num_servers
        parts = [(server, asked[servers == server]) for server in range(self._num_servers)]
        futures = [rpc.rpc_async(f"server{server}", _rpc_look_up, args=(part,)) for server, part in parts]
        self._rows = [
            (server, part, future.wait().requires_grad_())
            for (server, part), future in zip(parts, futures, strict=True)
        ]
        found = torch.empty(len(asked), DIMENSION)
        for server, _, rows in self._rows:
            found[servers == server] = rows
        return found[positions]

    def push(self) -> list[Any]:
        """Send the rows' gradients to the servers; return the futures to wait for."""
        return [
            rpc.rpc_async(f"server{server}", _rpc_push, args=(part, rows.grad))
            for server, part, rows in self._rows
            if rows.grad is not None
        ]


def rpc_trainer(config: Config) -> tuple[Step, End]:
    """Train over torch.distributed.rpc, with servers that apply gradients on arrival."""
    _rpc_init(config)
    table = None if config.system.endswith("dense") else _RpcRows(config.num_servers)
    model = _Dense() if table is None else _WithTable(table)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def advance() -> None:
        waited = table.push() if table is not None else []
        parameters = list(model.parameters())
        layer = rpc.rpc_async("server0", _rpc_step, args=([each.grad for each in parameters],))
        with torch.no_grad():
            for parameter, value in zip(parameters, layer.wait(), strict=True):
                parameter.copy_(value)
        for each in waited:
            each.wait()

    return _step(model, optimizer, config, advance), rpc.shutdown


def rpc_serve(config: Config) -> None:
    """Serve a part of the model over RPC until every process calls shutdown."""
    _shard.append(_Shard())
    _rpc_init(config)
    rpc.shutdown()
