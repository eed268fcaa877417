"""The process groups of a collective job: connecting, disconnecting, and collective calls.

Gradients use one set of connections, and the calls that all trainers make (barriers, small sums, the end) use
another. On shared connections, a call by one trainer during the others' exchange of gradients would add its
numbers to theirs, and gloo ends the process if the two differ in size. For the same reason the gradients of
each optimizer have separate connections: trainers may send the gradients of two optimizers in a different
order.

Every call is compared with the other trainers' before any of its data is sent. Two numbers, over the
connections for calls, show whether all calls are equal. Only if they are not, the trainers exchange texts
through trainer 0's store. Trainer 0 reads all texts and publishes the few that all trainers need, so traffic
grows linearly with the number of trainers, not quadratically.
"""

import contextlib
import hashlib
import json
import logging
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from datetime import timedelta
from pathlib import Path
from typing import Final, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from fleet.collective.devices import Facts, Marks, backend_of, difference, local_facts, samples, why_not_nccl
from fleet.collective.heartbeats import WaitKind
from fleet.collective.rendezvous import open_shared_store, shared_world
from fleet.collective.watchdog import Watchdog
from fleet.collective.world import World, with_separate_port
from fleet.environment.deadlines import Deadlines
from fleet.environment.network import choose_interface
from fleet.errors import ConfigurationError, FleetError

__all__ = ["Group", "TextExchange", "compare_facts"]

LOG_AFTER_SECONDS = 5.0
_OPERATIONS: Final = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
_log = logging.getLogger(__name__)

Chooser = Callable[[Mapping[int, str]], Iterable[int]]
"""A function that selects the ranks whose texts every trainer needs, given the texts of all trainers."""


class TextExchange:
    """Exchanges strings through trainer 0's store.

    Parameters
    ----------
    world : World
    store : Store
    patience_seconds : float
        How long trainer 0, which hosts the store, waits for the others to read.
    """

    def __init__(self, world: World, store: Store, patience_seconds: float) -> None:
        self._world = world
        self._store = store
        self._patience = timedelta(seconds=patience_seconds)

    def choose(self, key: str, ours: str, choose: Chooser) -> dict[int, str]:
        """Publish this trainer's string; return it and the strings that trainer 0 selects, by rank."""
        self._store.set(f"{key}/{self._world.rank}", ours)
        if self._world.rank == 0:
            found = self._store.multi_get([f"{key}/{rank}" for rank in range(self._world.size)])
            texts = {rank: text.decode() for rank, text in enumerate(found)}
            self._store.set(key, json.dumps({rank: texts[rank] for rank in sorted(choose(texts))}))
        chosen = json.loads(self._store.get(key))
        # The texts may be a reason to end. The store ends with trainer 0, so all others must read them first.
        self.leave(f"{key}/read")
        return {int(rank): text for rank, text in chosen.items()} | {self._world.rank: ours}

    def leave(self, point: str) -> None:
        """Announce that this trainer has passed `point`; trainer 0 then waits until all trainers have."""
        self._store.set(f"{point}/{self._world.rank}", "")
        if self._world.rank == 0 and not self._world.launcher_has_store:
            with contextlib.suppress(dist.DistError):  # a trainer that has ended has passed the point as well
                self._store.wait([f"{point}/{rank}" for rank in range(self._world.size)], self._patience)


class Group:
    """The connected trainers of a job, independent of the backend that carries their tensors.

    Parameters
    ----------
    world : World
    deadlines : Deadlines
    texts : TextExchange
    watchdog : Watchdog
        Reports the trainers for which this one is waiting.
    facts : mapping of int to Facts
        The facts of a few trainers, from which all trainers make the same decisions.
    tensors : ProcessGroup or None
        Carries tensors; None for the default group of torch.distributed.
    calls : ProcessGroup or None
        Compares calls, and carries their numbers.
    owns_default : bool
        False if the script made the process group of torch.distributed, and therefore destroys it.
    """

    def __init__(
        self,
        world: World,
        deadlines: Deadlines,
        texts: TextExchange,
        watchdog: Watchdog,
        facts: Mapping[int, Facts],
        *,
        tensors: dist.ProcessGroup | None = None,
        calls: dist.ProcessGroup | None = None,
        owns_default: bool = True,
    ) -> None:
        self.world = world
        self._deadlines = deadlines
        self._texts = texts
        self._watchdog = watchdog
        self._facts = facts
        self._tensors = tensors
        self._calls = calls
        self._owns_default = owns_default
        self._num_calls = 0
        self._num_channels = 0
        self._num_uses = 0
        self._marks: dict[torch.device, Marks] = {}
        self._connected: set[tuple[torch.device, dist.ProcessGroup | None]] = set()

    @classmethod
    def connect(cls, world: World, deadlines: Deadlines, environ: MutableMapping[str, str]) -> "Group":
        """Rendezvous with the other trainers and connect to them.

        A process group that the script has made still belongs to the script, so `close` does not destroy it.

        Raises
        ------
        ConfigurationError
            The address or device cannot be used, the script has made a process group of other processes, or
            another trainer has a different version of PyTorch or NCCL.
        DeadlineExceededError
            A trainer did not join; the message names it.
        """
        owns_default = not dist.is_initialized()
        if not owns_default:
            world = with_separate_port(world)
        ours = local_facts(environ)
        store = open_shared_store(world, deadlines)
        world = shared_world(world, store)
        choose_interface(world.host, world.port, environ)
        watchdog = Watchdog(store.clone(), world, deadlines, _end_this_thread)
        watchdog.start()
        texts = TextExchange(world, store, deadlines.silent_seconds)
        with watchdog.waiting("comparing versions and devices"):
            facts = compare_facts(world, texts, ours)
        timeout, backend = timedelta(seconds=deadlines.stalled_seconds), backend_of(facts)
        before, tensors = _sockets(), None
        with watchdog.waiting("connecting to the other trainers"), _logging_the_interface(environ):
            if owns_default:
                dist.init_process_group(
                    backend,
                    store=PrefixStore("group", store),
                    rank=world.rank,
                    world_size=world.size,
                    timeout=timeout,
                )
            else:
                tensors = cast("dist.ProcessGroup", dist.new_group(backend=backend, timeout=timeout))
            calls = cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=timeout))
        group = cls(
            world,
            deadlines,
            texts,
            watchdog,
            facts,
            tensors=tensors,
            calls=calls,
            owns_default=owns_default,
        )
        # A first operation on each kind of connection, because some sockets may be opened only then.
        group._check(torch.device("cpu"), "the start of the job", tensors)
        group.barrier("the start of the job")
        _keep_from_children(_sockets() - before)
        return group

    def close(self) -> None:
        """Wait until every trainer has called this, because all need trainer 0's store; then disconnect."""
        self.barrier("stop_worker()")
        # Before the connections close: from here on, no trainer waits for another, so a missing heartbeat
        # means nothing.
        self._watchdog.close()
        if self._owns_default:
            dist.destroy_process_group()
        self._texts.leave("left")

    def barrier(self, what: str) -> None:
        """Wait until every trainer has reached this barrier.

        Raises
        ------
        ConfigurationError
            Another trainer is making a different call.
        """
        with self._watchdog.waiting(what, WaitKind.CALL):
            self._compare_calls(what)

    def reduce_(self, values: torch.Tensor, operation: str, what: str) -> None:
        """Replace `values` on the CPU with their ``sum``, ``min`` or ``max`` over all trainers.

        Raises
        ------
        ConfigurationError
            Another trainer is making a different call; `what` includes everything that must be the same.
        """
        with self._watchdog.waiting(what, WaitKind.CALL):
            self._compare_calls(what)
            dist.all_reduce(values, _OPERATIONS[operation], group=self._calls, async_op=True).wait()

    def agree(self, key: str, value: str) -> dict[int, str]:
        """Compare a value across trainers; return this trainer's value and, if any differ, up to two others.

        The others are trainer 0's value and the first value that differs from trainer 0's. Each trainer
        therefore receives a value that differs from its own, if there is one.

        Raises
        ------
        ConfigurationError
            Another trainer is making a different call.
        """
        return self._compare_texts(key, value, _two_unlike)

    def gather(self, key: str, value: str) -> dict[int, str]:
        """Return every trainer's value by rank, or only this trainer's if all values are equal.

        Raises
        ------
        ConfigurationError
            Another trainer is making a different call.
        """
        return self._compare_texts(key, value, set)

    def channel(self) -> dist.ProcessGroup | None:
        """Return a process group for one caller's exclusive use; every trainer must call this."""
        self._num_channels += 1
        if self._num_channels == 1:
            return self._tensors
        before = _sockets()
        with self._watchdog.waiting("connecting to the other trainers once more"):
            timeout = timedelta(seconds=self._deadlines.stalled_seconds)
            channel = dist.new_group(backend=backend_of(self._facts), timeout=timeout)
        _keep_from_children(_sockets() - before)
        return cast("dist.ProcessGroup", channel)

    def use(self, parameters: Iterable[torch.Tensor], channel: dist.ProcessGroup | None = None) -> None:
        """Compare dtypes and devices, and connect GPUs, before an exchange; every trainer must call this.

        Raises
        ------
        ConfigurationError
            Another trainer's tensors have a different dtype, or are on devices of a different type.
        FleetError
            The devices cannot be connected; the message says why.
        """
        kinds = {(parameter.dtype, parameter.device) for parameter in parameters}
        used = sorted({device for _, device in kinds}, key=str)
        ours = " and ".join(sorted({f"{dtype} on {device.type}" for dtype, device in kinds}))
        self._num_uses += 1
        for rank, theirs in self.agree(f"devices ({self._num_uses})", ours).items():
            if theirs != ours:
                raise ConfigurationError(
                    f"{self.world.name(rank)} has its parameters as {theirs} where this trainer, "
                    f"{self.world.rank}, has them as {ours}; move and convert the model in the same way "
                    "on every trainer, before the first backward()"
                )
        for device in used:
            if device.type == "cuda" and (device, channel) not in self._connected:
                self._connect(device, channel)

    def broadcast_(self, values: torch.Tensor, what: str) -> None:
        """Replace `values` with trainer 0's; their shape and dtype must be the same on all trainers."""
        travelling = values.contiguous()  # bytes are sent in the order of memory, not of elements
        with self.waiting(what, device=values.device):
            # As bytes, because gloo refuses some dtypes, such as int16 and float8.
            flat = travelling.reshape(-1).view(torch.uint8)
            work = dist.broadcast(flat, src=0, group=self._tensors, async_op=True)
            if work is not None:
                work.wait()
        if travelling is not values:
            values.copy_(travelling)

    @contextlib.contextmanager
    def waiting(
        self, what: str, kind: WaitKind = WaitKind.OTHER, device: torch.device | None = None
    ) -> Iterator[None]:
        """Monitor a `with` block that exchanges tensors on a device; see `Watchdog.waiting`.

        On a GPU the block ends immediately, and the watchdog monitors the device's wait.
        """
        marks = self._marks.get(device) if device is not None else None
        if (
            marks is None or torch.cuda.is_current_stream_capturing()
        ):  # operations of a captured graph run, and wait, only in its replays
            with self._watchdog.waiting(what, kind):
                yield
            return
        mark = marks.next()
        with self._watchdog.waiting(what, kind, until=mark.reached):
            yield
            mark.put()

    def _compare_calls(self, what: str) -> None:
        """Wait until every trainer makes the call; raise an error if the calls differ."""
        self._num_calls += 1
        if self._is_equal(what):
            return
        for rank, theirs in self._texts.choose(f"call {self._num_calls}", what, _two_unlike).items():
            if theirs != what:
                raise ConfigurationError(
                    f"{self.world.name(rank)} has reached {theirs} where this trainer, {self.world.rank}, "
                    f"has reached {what}; expected the same calls, in the same order, on every trainer"
                )

    def _compare_texts(self, key: str, ours: str, choose: Chooser) -> dict[int, str]:
        what = f"the exchange of {key}"
        with self._watchdog.waiting(what, WaitKind.CALL):
            self._compare_calls(what)
            if self._is_equal(ours):
                return {self.world.rank: ours}
            return self._texts.choose(key, ours, choose)

    def _is_equal(self, text: str) -> bool:
        """Return True if all trainers have the same string; every trainer must call this."""
        # Seven bytes, so that the number and its negative fit into an int64. One maximum over both then gives
        # the largest and the smallest number.
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])
        bounds = torch.tensor([digest, -digest])
        dist.all_reduce(bounds, dist.ReduceOp.MAX, group=self._calls, async_op=True).wait()
        return bounds.tolist() == [digest, -digest]

    def _connect(self, device: torch.device, channel: dist.ProcessGroup | None = None) -> None:
        """Connect the trainers' GPUs by running a first operation on them."""
        carrier = "NCCL"
        if reason := why_not_nccl(self._facts):
            carrier = "gloo"
            _log.warning("CUDA tensors are sent through host memory, which is slow: %s", reason)
        elif len({facts.model for facts in self._facts.values()}) > 1:
            models = ", ".join(f"trainer {rank}: {facts.model}" for rank, facts in self._facts.items())
            _log.warning("the trainers' GPUs differ, so all wait for the slowest (%s)", models)
        before = _sockets()
        self._check(device, f"connecting the trainers' GPUs by {carrier}", channel or self._tensors)
        self._connected.add((device, channel))
        self._marks.setdefault(device, Marks(device))
        _keep_from_children(_sockets() - before)

    def _check(self, device: torch.device, what: str, channel: dist.ProcessGroup | None) -> None:
        """Sum a number over all trainers to check the connection, and wait for the result."""
        with self._watchdog.waiting(what):
            total = torch.ones(1, device=device)
            dist.all_reduce(total, group=channel, async_op=True).wait()
            total.item()  # on a GPU the wait above is the stream's, not this thread's


def compare_facts(world: World, texts: TextExchange, ours: Facts) -> dict[int, Facts]:
    """Compare the trainers' facts before connecting; raise an error if they cannot train together."""

    def parsed(found: Mapping[int, str]) -> dict[int, Facts]:
        return {rank: Facts.from_text(text) for rank, text in found.items()}

    facts = parsed(texts.choose("facts", ours.to_text(), lambda found: samples(parsed(found))))
    if (found := difference(facts, world.rank)) is not None:
        rank, how = found
        raise ConfigurationError(
            f"{world.name(rank)} {how}; expected the same on every trainer: use one image for all"
        )
    return facts


def _two_unlike(texts: Mapping[int, str]) -> set[int]:
    """Return trainer 0 and the first trainer whose string differs from trainer 0's, if any."""
    return {0, next((rank for rank, text in texts.items() if text != texts[0]), 0)}


@contextlib.contextmanager
def _logging_the_interface(environ: Mapping[str, str]) -> Iterator[None]:
    """Log the network interface if connecting takes long; other trainers may be unable to reach it."""
    interface = environ.get("GLOO_SOCKET_IFNAME", "")
    by = f"the interface {interface!r}" if interface else "the interface of this host's name"
    text = (
        "connecting to the other trainers takes more than %.0f s; the others must reach this trainer "
        "through %s: if they cannot, set GLOO_SOCKET_IFNAME to another interface, and NCCL_SOCKET_IFNAME "
        "for GPUs"
    )
    timer = threading.Timer(LOG_AFTER_SECONDS, _log.warning, (text, LOG_AFTER_SECONDS, by))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _end_this_thread(error: FleetError) -> None:
    """Raise an error in the watchdog's thread, to end the process even while its main thread is waiting."""
    raise error


def _sockets() -> set[tuple[int, int]]:
    """Return the descriptor and inode of each socket of this process, or an empty set if not on Linux."""
    found: set[tuple[int, int]] = set()
    if sys.platform != "linux":
        return found
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor was closed meanwhile
            status = os.fstat(int(entry.name))
            if stat.S_ISSOCK(status.st_mode):
                found.add((int(entry.name), status.st_ino))
    return found


_private_sockets: set[tuple[int, int]] = set()
_registered = threading.Event()


def _keep_from_children(sockets: set[tuple[int, int]]) -> None:
    """Close the given sockets in forked children, where a copy would keep the connections open."""
    _private_sockets.update(sockets)
    if not _registered.is_set():
        _registered.set()
        os.register_at_fork(after_in_child=_replace_private_sockets)


def _replace_private_sockets() -> None:
    # torch closes its descriptors when the child ends. A number that was closed here could belong to another
    # file by then, so /dev/null takes each socket's place.
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor, inode in _private_sockets:
        with contextlib.suppress(OSError):
            status = os.fstat(descriptor)
            if stat.S_ISSOCK(status.st_mode) and status.st_ino == inode:
                os.dup2(null, descriptor, inheritable=False)
    os.close(null)
    _private_sockets.clear()
