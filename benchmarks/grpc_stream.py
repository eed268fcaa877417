"""A hand-written parameter server on grpcio's bidirectional streams, as a typical alternative.

It is tuned as far as grpcio allows: raw bytes without a serializer, one stream per trainer and server, pieces
of 2 MB so that sending, summing and receiving overlap, gradients that are sent during the backward pass, and
channels that are optimized for throughput.
"""

import itertools
import queue
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures

import grpc
import torch
from torch import Tensor, nn

from benchmarks.workload import LEARNING_RATE, Config, batch, build_layers

__all__ = ["serve", "trainer"]

PIECE_ELEMENTS = 1 << 19
METHOD = "/benchmarks.ParameterServer/Train"
HEADER = struct.Struct("<I")
OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.optimization_target", "throughput"),
    ("grpc.http2.max_frame_size", (1 << 24) - 1),
    ("grpc.http2.lookahead_bytes", 1 << 24),
    ("grpc.http2.write_buffer_size", 1 << 24),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.use_local_subchannel_pool", 1),
]


def _pieces(parameters: Iterable[Tensor]) -> list[tuple[Tensor, ...]]:
    """Return the pieces of each parameter as views of its memory."""
    return [parameter.detach().view(-1).split(PIECE_ELEMENTS) for parameter in parameters]


def _numbers(pieces: Sequence[Sequence[Tensor]]) -> list[range]:
    """Return the piece numbers of each parameter, which are the same on servers and trainers."""
    ends = list(itertools.accumulate(len(each) for each in pieces))
    return [range(end - len(each), end) for end, each in zip(ends, pieces, strict=True)]


class _Server:
    """A server that sums pieces as they arrive; after the last trainer's piece, it updates and replies."""

    def __init__(self, config: Config) -> None:
        model = nn.Sequential(*build_layers(config.widths))
        pieces = _pieces(model.parameters())
        self._values = [piece for of_one in pieces for piece in of_one]
        self._sums = [torch.zeros_like(value) for value in self._values]
        self._counts = [0] * len(self._values)
        self._num_trainers = config.num_trainers
        self._lock = threading.Lock()
        self._locks = [threading.Lock() for _ in self._values]
        self._answers: list[queue.SimpleQueue[int | None]] = []

    def train(self, requests: Iterator[bytes], _: grpc.ServicerContext) -> Iterator[bytes]:
        """Exchange gradients and values with one trainer until the stream ends."""
        answers: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        with self._lock:
            self._answers.append(answers)
        threading.Thread(target=self._receive, args=(requests, answers), daemon=True).start()
        while (number := answers.get()) is not None:
            yield HEADER.pack(number) + self._values[number].numpy().tobytes()

    def _receive(self, requests: Iterator[bytes], answers: "queue.SimpleQueue[int | None]") -> None:
        try:
            for request in requests:
                (number,) = HEADER.unpack_from(request)
                self._add(number, torch.frombuffer(request, dtype=torch.float32, offset=HEADER.size))
        except grpc.RpcError:
            pass  # the trainer has ended
        answers.put(None)

    def _add(self, number: int, gradient: Tensor) -> None:
        with self._locks[number]:
            total = self._sums[number]
            if self._counts[number] == 0:
                total.copy_(gradient)
            else:
                total.add_(gradient)
            self._counts[number] += 1
            if self._counts[number] < self._num_trainers:
                return
            self._counts[number] = 0
            self._values[number].add_(total, alpha=-LEARNING_RATE / self._num_trainers)
        for answers in list(self._answers):
            answers.put(number)


def serve(config: Config) -> None:
    """Serve until the process is terminated."""
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(
        _Server(config).train
    )
    service, _, method = METHOD[1:].partition("/")
    server = grpc.server(futures.ThreadPoolExecutor(2 * config.num_trainers), options=OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    server.add_insecure_port(config.endpoints[config.index])
    server.start()
    server.wait_for_termination()


class _Trainer:
    """A trainer with a stream to each server, which sends gradients during the backward pass."""

    def __init__(self, config: Config) -> None:
        self._model = nn.Sequential(*build_layers(config.widths))
        self._parameters = list(self._model.parameters())
        pieces = _pieces(self._parameters)
        self._numbers = _numbers(pieces)
        self._values = [piece for of_one in pieces for piece in of_one]
        self._num_servers = config.num_servers
        self._inputs, self._labels = batch(config.index, config.widths)
        self._landed: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._requests: list[queue.SimpleQueue[bytes | None]] = []
        self._channels = []
        for endpoint in config.endpoints:
            channel = grpc.insecure_channel(endpoint, options=OPTIONS)
            requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
            method: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(METHOD)
            call = method(iter(requests.get, None), wait_for_ready=True)
            threading.Thread(target=self._receive, args=(call,), daemon=True).start()
            self._channels.append(channel)
            self._requests.append(requests)
        for parameter, numbers in zip(self._parameters, self._numbers, strict=True):
            hook = self._sender(numbers)
            parameter.register_post_accumulate_grad_hook(hook)

    def step(self, size: int) -> None:
        """Run a step on a batch of the given size."""
        for parameter in self._parameters:
            parameter.grad = None
        nn.functional.cross_entropy(self._model(self._inputs[:size]), self._labels[:size]).backward()
        for _ in self._values:
            answer = self._landed.get()
            (number,) = HEADER.unpack_from(answer)
            self._values[number].copy_(torch.frombuffer(answer, dtype=torch.float32, offset=HEADER.size))

    def close(self) -> None:
        """Close the streams to all servers."""
        for requests in self._requests:
            requests.put(None)
        for channel in self._channels:
            channel.close()

    def _sender(self, numbers: range) -> Callable[[Tensor], None]:
        def send(parameter: Tensor) -> None:
            assert parameter.grad is not None
            pieces = parameter.grad.view(-1).split(PIECE_ELEMENTS)
            for number, piece in zip(numbers, pieces, strict=True):
                request = HEADER.pack(number) + piece.numpy().tobytes()
                self._requests[number % self._num_servers].put(request)

        return send

    def _receive(self, call: Iterator[bytes]) -> None:
        try:
            for answer in call:
                self._landed.put(answer)
        except grpc.RpcError:
            pass  # the stream was closed


def trainer(config: Config) -> tuple[Callable[[int], None], Callable[[], None]]:
    """Train with the servers at the configured endpoints."""
    made = _Trainer(config)
    return made.step, made.close
