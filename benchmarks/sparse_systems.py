"""The systems of embedding benchmarks, which look up 26 ids per sample in a million rows.

A step looks up the distinct rows of a batch, computes on them, and sends a gradient for each. The layers of a
workload, if any, are local to each trainer in every system; systems differ only in the transfer of rows.
Trainers wait for each other only in fleet's sync mode; in the other systems, a gradient is applied on
arrival.
"""

import threading
from collections.abc import Callable
from concurrent import futures
from itertools import count
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import rpc

from benchmarks.workload import LEARNING_RATE, Config, End, Step, build_layers

__all__ = [
    "DIMENSION",
    "ROWS",
    "SLOTS",
    "fleet_serve",
    "fleet_trainer",
    "grpc_serve",
    "grpc_trainer",
    "id_batches",
    "local_trainer",
    "rpc_serve",
    "rpc_trainer",
]

ROWS: Final = 1_000_000
DIMENSION: Final = 10
SLOTS: Final = 26
_BATCHES: Final = 16
_SAMPLES: Final = 1000
_SKEW: Final = 1.05
_MESSAGES: Final = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


def id_batches(index: int) -> list[Tensor]:
    """Return a trainer's batches, each with Zipf-distributed ids of shape int64[1000, 26]."""
    shares = np.cumsum(np.arange(1, ROWS + 1) ** -_SKEW)
    names = np.random.default_rng(0).permutation(ROWS)
    random = np.random.default_rng(100 + index)
    draws = (random.random((_SAMPLES, SLOTS)) for _ in range(_BATCHES))
    return [torch.from_numpy(names[np.searchsorted(shares, draw * shares[-1])]) for draw in draws]


class _Computing:
    """A trainer's computation on the rows of a batch: the sum of the rows, or layers that are trained too."""

    def __init__(self, config: Config) -> None:
        self.layers = nn.Sequential(*build_layers(config.widths)) if config.widths else None
        self._optimizer = (
            torch.optim.SGD(self.layers.parameters(), lr=LEARNING_RATE) if self.layers is not None else None
        )

    def __call__(self, embedded: Tensor) -> None:
        """Run the backward pass for rows of shape float32[n, 26, 10], and update the layers."""
        if self.layers is None or self._optimizer is None:
            embedded.sum().backward()
            return
        self._optimizer.zero_grad()
        logits = self.layers(embedded.flatten(1)).squeeze(1)
        nn.functional.binary_cross_entropy_with_logits(logits, torch.zeros_like(logits)).backward()
        self._optimizer.step()


def _loop(
    config: Config, look_up: Callable[[Tensor], Tensor], push: Callable[[Tensor, Tensor], object]
) -> Step:
    """Return a step that looks up the distinct rows of a batch and pushes their gradients."""
    batches, numbers, computing = id_batches(config.index), count(), _Computing(config)

    def step(size: int) -> None:
        ids = batches[next(numbers) % _BATCHES][:size]
        distinct, positions = np.unique(ids.numpy(), return_inverse=True)
        asked = torch.from_numpy(distinct)
        rows = look_up(asked).requires_grad_()
        computing(nn.functional.embedding(torch.from_numpy(positions.reshape(ids.shape)), rows))
        assert rows.grad is not None
        push(asked, rows.grad)

    return step


class _Table:
    """A dense array of rows to which gradients are applied as they arrive."""

    def __init__(self) -> None:
        self._rows = torch.zeros(ROWS, DIMENSION)
        self._lock = threading.Lock()

    def look_up(self, ids: Tensor) -> Tensor:
        """Return the rows of the given ids."""
        return self._rows.index_select(0, ids)

    def push(self, ids: Tensor, gradient: Tensor) -> None:
        """Update rows with their gradients."""
        with self._lock:
            self._rows.index_add_(0, ids, gradient, alpha=-LEARNING_RATE)


def local_trainer(config: Config) -> tuple[Step, End]:
    """Train a table in the trainer's own process, as an upper bound on the speed of all systems."""
    table = _Table()
    return _loop(config, table.look_up, table.push), lambda: None


def _fleet_init(config: Config) -> tuple[Any, Any, Any]:
    import fleet as names
    from fleet import role_maker
    from fleet.parameter_server import fleet

    kind = role_maker.Role.SERVER if config.role == "server" else role_maker.Role.WORKER
    fleet.init(role_maker.UserDefinedRoleMaker(config.index, kind, config.num_trainers, config.endpoints))
    table = names.nn.DistributedEmbedding(ROWS, DIMENSION, name="rows", first_values=0.0)
    create = names.create_async_strategy if config.system == "rowsasync" else names.DistributedStrategy
    optimizer = fleet.distributed_optimizer(
        torch.optim.SGD(table.parameters(), lr=LEARNING_RATE), create(transport="tcp"), table
    )
    return fleet, table, optimizer


def fleet_trainer(config: Config) -> tuple[Step, End]:
    """Train a table on fleet's servers in sync or async mode."""
    fleet, table, optimizer = _fleet_init(config)
    fleet.init_worker()
    batches, numbers, computing = id_batches(config.index), count(), _Computing(config)

    def step(size: int) -> None:
        computing(table(batches[next(numbers) % _BATCHES][:size]))
        optimizer.step()

    return step, fleet.stop_worker


def fleet_serve(config: Config) -> None:
    """Serve with fleet.parameter_server until every trainer has finished."""
    fleet, _, _ = _fleet_init(config)
    fleet.run_server()


_rpc_table: list[_Table] = []


def _rpc_look_up(ids: Tensor) -> Tensor:
    return _rpc_table[0].look_up(ids)


def _rpc_push(ids: Tensor, gradient: Tensor) -> None:
    _rpc_table[0].push(ids, gradient)


def _rpc_init(config: Config) -> None:
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://{config.endpoints[0]}", num_worker_threads=8, rpc_timeout=600
    )
    rank = config.index + (config.num_servers if config.role == "trainer" else 0)
    rpc.init_rpc(
        f"{config.role}{config.index}",
        rank=rank,
        world_size=config.num_servers + config.num_trainers,
        rpc_backend_options=options,
    )


def rpc_trainer(config: Config) -> tuple[Step, End]:
    """Train a table that is accessed over torch.distributed.rpc."""
    _rpc_init(config)

    def look_up(ids: Tensor) -> Tensor:
        rows: Tensor = rpc.rpc_sync("server0", _rpc_look_up, args=(ids,))
        return rows

    def push(ids: Tensor, gradient: Tensor) -> None:
        rpc.rpc_sync("server0", _rpc_push, args=(ids, gradient))

    return _loop(config, look_up, push), rpc.shutdown


def rpc_serve(config: Config) -> None:
    """Serve the table over RPC until every process calls shutdown."""
    _rpc_table.append(_Table())
    _rpc_init(config)
    rpc.shutdown()


def grpc_trainer(config: Config) -> tuple[Step, End]:
    """Train a table that is accessed by unary grpcio calls with raw bytes."""
    import grpc

    channel = grpc.insecure_channel(config.endpoints[0], options=_MESSAGES)
    grpc.channel_ready_future(channel).result(60)
    ask: Any = channel.unary_unary("/rows/look_up")
    give: Any = channel.unary_unary("/rows/push")
    end: Any = channel.unary_unary("/rows/end")

    def look_up(ids: Tensor) -> Tensor:
        found = bytearray(ask(ids.numpy().tobytes()))
        return torch.frombuffer(found, dtype=torch.float32).view(-1, DIMENSION)

    def push(ids: Tensor, gradient: Tensor) -> None:
        give(ids.numpy().tobytes() + gradient.numpy().tobytes())

    return _loop(config, look_up, push), lambda: end(b"")


def grpc_serve(config: Config) -> None:
    """Serve the table over grpcio until every trainer has finished."""
    import grpc

    table, left = _Table(), threading.Semaphore(0)

    def look_up(request: bytes, _: object) -> bytes:
        ids = torch.frombuffer(bytearray(request), dtype=torch.int64)
        return bytes(table.look_up(ids).numpy().tobytes())

    def push(request: bytes, _: object) -> bytes:
        number, content = len(request) // (8 + 4 * DIMENSION), bytearray(request)
        ids = torch.frombuffer(content, dtype=torch.int64, count=number)
        gradient = torch.frombuffer(content, dtype=torch.float32, offset=8 * number)
        table.push(ids, gradient.view(number, DIMENSION))
        return b""

    def end(_: bytes, __: object) -> bytes:
        left.release()
        return b""

    server = grpc.server(futures.ThreadPoolExecutor(8), options=_MESSAGES)
    calls = {"look_up": look_up, "push": push, "end": end}
    handlers: dict[str, Any] = {
        name: grpc.unary_unary_rpc_method_handler(call) for name, call in calls.items()
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("rows", handlers),))
    server.add_insecure_port(config.endpoints[0])
    server.start()
    for _ in range(config.num_trainers):
        left.acquire()
    server.stop(1.0).wait()
