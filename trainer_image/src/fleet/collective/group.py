"""The process group of a collective job: its start, its end, and errors that name the trainer to blame.

Gradients have one set of connections, and the calls that all trainers make (barriers, small sums, the end)
another: a trainer that calls something while others exchange gradients must not have its numbers added to
theirs, and gloo would end the process where the two differ in size. For the same reason the gradients of each
optimizer have connections of their own: which of two optimizers' gradients leave first may differ.
"""

import contextlib
import logging
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from datetime import timedelta
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from fleet.collective.adoption import place_beside
from fleet.collective.calls import Calls
from fleet.collective.devices import Facts, backend_of, difference, gpu_number, samples, why_not_nccl
from fleet.collective.faults import is_of_script, own_fault, reason_of
from fleet.collective.marks import Marks
from fleet.collective.rendezvous import Place, as_all_know_it, meet
from fleet.collective.standing import Way
from fleet.collective.watchdog import Watch
from fleet.environment.deadlines import Deadlines
from fleet.environment.interface import choose_interface
from fleet.errors import ConfigurationError, DeadlineExceededError, FleetError, PeerLostError

__all__ = ["Group"]

_log = logging.getLogger(__name__)
TELL_SECONDS = 5.0
_OPERATIONS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


class Group:
    """All trainers of a job, connected.

    Callers need not know what carries their tensors; see `fleet.collective.devices`.
    """

    def __init__(self, place: Place, deadlines: Deadlines, store: Store, watch: Watch) -> None:
        self.place = place
        self._deadlines = deadlines
        self._watch = watch
        self._calls = Calls(place, store, timedelta(seconds=deadlines.silent_seconds))
        self._everybodys: dict[int, Facts] = {}  # of those by which all decide alike
        self._marks: dict[torch.device, Marks] = {}
        self._connected: set[tuple[torch.device, dist.ProcessGroup | None]] = set()
        self._shared: dist.ProcessGroup | None = None  # that of torch.distributed
        self._adopted = False
        self._channels = 0
        self._uses = 0

    @classmethod
    def connect(cls, place: Place, deadlines: Deadlines, environ: MutableMapping[str, str]) -> "Group":
        """Meet the other trainers and connect to them.

        A process group that the script has made stays as it is, and is left to the script at the end.

        Raises
        ------
        ConfigurationError
            The address or device cannot be used, the script has made a process group of other processes, or
            another trainer has another version of PyTorch or NCCL.
        DeadlineExceededError
            A trainer did not come; the message names who.
        """
        adopts = dist.is_initialized()
        if adopts:
            place = place_beside(place)
        facts = _facts(environ)
        store = meet(place, deadlines)
        place = as_all_know_it(place, store)
        choose_interface(place.host, place.port, environ)
        watch = Watch(store.clone(), place, deadlines, _end_this_thread)
        watch.start()
        group = cls(place, deadlines, store, watch)
        group._compare(facts)
        before = _sockets()
        with group._naming("connecting to the other trainers"), _telling_the_interface(environ):
            timeout = timedelta(seconds=deadlines.stalled_seconds)
            backend = backend_of(group._everybodys)
            if adopts:
                group._adopted = True
                group._shared = cast("dist.ProcessGroup", dist.new_group(backend=backend, timeout=timeout))
            else:
                dist.init_process_group(
                    backend,
                    store=PrefixStore("group", store),
                    rank=place.rank,
                    world_size=place.size,
                    timeout=timeout,
                )
            group._calls.channel = cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=timeout))
        group._check(torch.device("cpu"), "the start of the job")
        group.barrier("the start of the job")
        _keep_from_children(_sockets() - before)
        return group

    def close(self) -> None:
        """Leave, when all trainers have come here: trainer 0's store must outlive the others' calls."""
        self.barrier("stop_worker()")
        self._watch.close()
        if not self._adopted:
            dist.destroy_process_group()
        self._calls.come_past("left")

    def barrier(self, what: str) -> None:
        """Wait until every trainer has come to this barrier.

        Raises
        ------
        ConfigurationError
            Another trainer has called something else.
        """
        with self._naming(what, Way.CALL):
            self._calls.meet(what)

    def reduce_(self, values: torch.Tensor, operation: str, what: str) -> None:
        """Replace `values`, on the CPU, by their ``sum``, ``min`` or ``max`` over all trainers.

        Raises
        ------
        ConfigurationError
            Another trainer has called something else; `what` says all that must be the same.
        """
        with self._naming(what, Way.CALL):
            self._calls.meet(what)
            dist.all_reduce(values, _OPERATIONS[operation], group=self._calls.channel, async_op=True).wait()

    def channel(self) -> dist.ProcessGroup | None:
        """Return connections that nobody else uses; every trainer calls this."""
        self._channels += 1
        if self._channels == 1:
            return self._shared
        before = _sockets()
        with self._naming("connecting to the other trainers once more"):
            channel = dist.new_group(
                backend=backend_of(self._everybodys),
                timeout=timedelta(seconds=self._deadlines.stalled_seconds),
            )
        _keep_from_children(_sockets() - before)
        return cast("dist.ProcessGroup", channel)

    def use(self, parameters: Iterable[torch.Tensor], channel: dist.ProcessGroup | None = None) -> None:
        """Make sure that tensors like these can travel; every trainer calls this before they do.

        Raises
        ------
        ConfigurationError
            Another trainer's are of another dtype, or on devices of another kind.
        FleetError
            The devices cannot be connected; the message says why.
        """
        kinds = {(parameter.dtype, parameter.device) for parameter in parameters}
        used = sorted({device for _, device in kinds}, key=str)
        ours = " and ".join(sorted({f"{dtype} on {device.type}" for dtype, device in kinds}))
        self._uses += 1
        for rank, theirs in self.agree(f"devices ({self._uses})", ours).items():
            if theirs != ours:
                raise ConfigurationError(
                    f"{self.place.name(rank)} has its parameters as {theirs} where this trainer, "
                    f"{self.place.rank}, has them as {ours}; move and convert the model alike in every "
                    "trainer, before the first backward()"
                )
        for device in used:
            if device.type == "cuda" and (device, channel) not in self._connected:
                self._connect(device, channel)

    def broadcast_(self, values: torch.Tensor, what: str) -> None:
        """Replace `values`, of any dtype, by trainer 0's; all have agreed on their shape and dtype."""
        travelling = values.contiguous()  # what travels is memory, not elements
        with self.waiting(what, device=values.device):
            flat = travelling.reshape(-1).view(torch.uint8)
            work = dist.broadcast(flat, src=0, group=self._shared, async_op=True)
            if work is not None:
                work.wait()
        if travelling is not values:
            values.copy_(travelling)

    @contextlib.contextmanager
    def waiting(self, what: str, way: Way = Way.OTHER, device: torch.device | None = None) -> Iterator[None]:
        """Have errors of the block, which waits for the others, name what it is for and who is to blame.

        Operations of a GPU are waited for by the GPU only: the block ends at once, and the watch goes on to
        look.
        """
        marks = self._marks.get(device) if device is not None else None
        captured = marks is not None and torch.cuda.is_current_stream_capturing()  # waited for in replays
        mark = marks.next() if marks is not None and not captured else None
        with self._naming(what, way, until=mark.reached if mark is not None else None):
            yield
            if mark is not None:
                mark.put()

    def agree(self, key: str, value: str) -> dict[int, str]:
        """Compare a value with every trainer's; return it, and where any differs some others' by rank.

        Whoever has another value than anybody finds one of another there.

        Raises
        ------
        ConfigurationError
            Another trainer has called something else.
        """
        what = f"the exchange of {key}"
        with self._naming(what, Way.CALL):
            self._calls.meet(what)
            return self._calls.texts(key, value)

    def everybodys(self, key: str, value: str) -> dict[int, str]:
        """Return every trainer's value, by rank; only this trainer's where all have the same.

        Raises
        ------
        ConfigurationError
            Another trainer has called something else.
        """
        what = f"the exchange of {key}"
        with self._naming(what, Way.CALL):
            self._calls.meet(what)
            return self._calls.texts(key, value, choose=set)

    def _compare(self, facts: Facts) -> None:
        """Learn what every trainer has, before any connects; raise where they could not train together."""
        with self._naming("comparing versions and devices"):
            texts = self._calls.first_texts("facts", facts.to_text(), lambda all_: samples(_parsed(all_)))
        self._everybodys = _parsed(texts)
        found = difference(self._everybodys, self.place.rank)
        if found is not None:
            rank, how = found
            raise ConfigurationError(
                f"{self.place.name(rank)} {how}; expected the same on every trainer: give all one image"
            )

    def _connect(self, device: torch.device, channel: dist.ProcessGroup | None = None) -> None:
        """Connect the trainers' GPUs, which the first operation on them does."""
        carrier = "NCCL"
        if reason := why_not_nccl(self._everybodys):
            carrier = "gloo"
            _log.warning("CUDA tensors travel through the host's memory, which is slow: %s", reason)
        elif len({facts.model for facts in self._everybodys.values()}) > 1:
            models = ", ".join(f"trainer {rank}: {facts.model}" for rank, facts in self._everybodys.items())
            _log.warning("the trainers' GPUs differ, and all wait for the slowest (%s)", models)
        before = _sockets()
        self._check(device, f"connecting the trainers' GPUs by {carrier}", channel)
        self._connected.add((device, channel))
        self._marks.setdefault(device, Marks(device))
        _keep_from_children(_sockets() - before)

    def _check(self, device: torch.device, what: str, channel: dist.ProcessGroup | None = None) -> None:
        """Add up a number of each trainer, and wait for the sum."""
        with self._naming(what):
            total = torch.ones(1, device=device)
            dist.all_reduce(total, group=channel or self._shared, async_op=True).wait()
            total.item()  # the wait above is the GPU's only

    @contextlib.contextmanager
    def _naming(
        self, what: str, way: Way = Way.OTHER, until: Callable[[], bool] | None = None
    ) -> Iterator[None]:
        """Turn the errors of torch.distributed inside the block into one that names the trainer to blame."""
        try:
            with self._watch.waiting(what, way, until):
                yield
        except (dist.DistError, RuntimeError) as error:
            reason = reason_of(error)
            if help_ := own_fault(error):
                raise FleetError(f"this trainer's device failed in {what}: {reason}; {help_}") from error
            if is_of_script(error):
                raise
            if silent := self._watch.silent_now():
                message = f"{self.place.names(silent)} vanished while {what} waited: {reason}"
                raise PeerLostError(message) from error
            raise DeadlineExceededError(
                f"{what} failed though every trainer is alive: {reason}; "
                f"a trainer may have taken longer than {self._deadlines.stalled_seconds:.0f} s, "
                "or have lost its connections"
            ) from error


def _parsed(texts: Mapping[int, str]) -> dict[int, Facts]:
    return {rank: Facts.from_text(text) for rank, text in texts.items()}


def _facts(environ: Mapping[str, str]) -> Facts:
    """Return what this trainer has, and make its GPU, if it has one, the current device."""
    version = torch.__version__.partition("+")[0]  # what follows names the build
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return Facts(version)
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    number = gpu_number(environ, torch.cuda.device_count())
    if number is None:
        return Facts(version, nccl)
    if number:  # the first is current already, and choosing it would make a context that may stay unused
        torch.cuda.set_device(number)
    properties = torch.cuda.get_device_properties(number)
    return Facts(version, nccl, str(properties.uuid), properties.name)


@contextlib.contextmanager
def _telling_the_interface(environ: Mapping[str, str]) -> Iterator[None]:
    """Say by which interface this trainer connects, if that takes long: nobody may reach it there."""
    interface = environ.get("GLOO_SOCKET_IFNAME", "")
    by = f"the interface {interface!r}" if interface else "the interface of this host's name"
    text = (
        "connecting to the other trainers takes more than %.0f s; the others must reach this trainer by %s: "
        "if they do not, let GLOO_SOCKET_IFNAME name another, and NCCL_SOCKET_IFNAME for GPUs"
    )
    timer = threading.Timer(TELL_SECONDS, _log.warning, (text, TELL_SECONDS, by))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _end_this_thread(error: FleetError) -> None:
    """Raise in the watch's thread: the replica ends with this error though its main thread waits."""
    raise error


def _sockets() -> set[tuple[int, int]]:
    """Return descriptor and inode of every socket of this process; nothing where /proc is missing."""
    found: set[tuple[int, int]] = set()
    if sys.platform != "linux":
        return found
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            status = os.fstat(int(entry.name))
            if stat.S_ISSOCK(status.st_mode):
                found.add((int(entry.name), status.st_ino))
    return found


_private_sockets: set[tuple[int, int]] = set()
_registered = threading.Event()


def _keep_from_children(sockets: set[tuple[int, int]]) -> None:
    """Keep forked children from holding our connections: a copy would hide from the peers that we died."""
    _private_sockets.update(sockets)
    if not _registered.is_set():
        _registered.set()
        os.register_at_fork(after_in_child=_let_go)


def _let_go() -> None:
    """Put /dev/null in the sockets' place: a number that is closed twice could be somebody else's by then."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor, inode in _private_sockets:
        with contextlib.suppress(OSError):
            status = os.fstat(descriptor)
            if stat.S_ISSOCK(status.st_mode) and status.st_ino == inode:
                os.dup2(null, descriptor, inheritable=False)
    os.close(null)
    _private_sockets.clear()
