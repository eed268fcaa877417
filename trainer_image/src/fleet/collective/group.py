"""The process group of a collective job: its start, its end, and errors that name the trainer to blame.

Gradients have one set of connections, and the calls that all trainers make (barriers, small sums, the end)
another: a trainer that calls something while others exchange gradients must not have its numbers added to
theirs, and gloo would end the process where the two differ in size.
"""

import contextlib
import hashlib
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from fleet.collective.deadlines import Deadlines
from fleet.collective.rendezvous import Place, meet
from fleet.collective.standing import Way
from fleet.collective.watch import Watch
from fleet.errors import ConfigurationError, DeadlineExceededError, FleetError, PeerLostError

__all__ = ["Group"]

_OPERATIONS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


class Group:
    """All trainers of a job, connected.

    CPU tensors travel by gloo and CUDA tensors by NCCL; callers need not know which.
    """

    def __init__(self, place: Place, deadlines: Deadlines, store: Store, watch: Watch) -> None:
        self.place = place
        self._deadlines = deadlines
        self._store = store
        self._watch = watch
        self._calls = 0
        self._calling: dist.ProcessGroup | None = None  # none while the trainers are still connecting

    @classmethod
    def connect(cls, place: Place, deadlines: Deadlines, environ: Mapping[str, str]) -> "Group":
        """Meet the other trainers and connect to them.

        Raises
        ------
        ConfigurationError
            The address or device cannot be used, or the script has made a process group of its own.
        DeadlineExceededError
            A trainer did not come; the message names who.
        """
        if dist.is_initialized():
            raise ConfigurationError(
                "torch.distributed is initialized already; expected fleet.init to be the one that does: "
                "remove init_process_group, or do without fleet.init"
            )
        backend = _backend(environ)
        store = meet(place, deadlines)
        watch = Watch(store.clone(), place, deadlines, _end_this_thread)
        watch.start()
        group = cls(place, deadlines, store, watch)
        before = _sockets()
        with group._naming("connecting to the other trainers"):
            dist.init_process_group(
                backend,
                store=PrefixStore("group", store),
                rank=place.rank,
                world_size=place.size,
                timeout=deadlines.stalled,
            )
            calling = dist.new_group(backend="gloo", timeout=deadlines.stalled)
            group._calling = cast("dist.ProcessGroup", calling)
        group.wait([dist.all_reduce(torch.zeros(1), async_op=True)], "the start of the job")
        group.barrier("the start of the job")
        _keep_from_children(_sockets() - before)
        return group

    def close(self) -> None:
        """Leave, when all trainers have come here: trainer 0's store must outlive the others' calls."""
        self.barrier("stop_worker()")
        self._watch.close()
        dist.destroy_process_group()
        self._pass("left")

    def barrier(self, what: str) -> None:
        """Wait until every trainer has come to this barrier.

        Raises
        ------
        ConfigurationError
            Another trainer has called something else.
        """
        with self._naming(what, Way.CALL):
            self._meet(what)

    def reduce_(self, values: torch.Tensor, operation: str, what: str) -> None:
        """Replace `values`, on the CPU, by their ``sum``, ``min`` or ``max`` over all trainers.

        Raises
        ------
        ConfigurationError
            Another trainer has called something else; `what` says all that must be the same.
        """
        with self._naming(what, Way.CALL):
            self._meet(what)
            dist.all_reduce(values, _OPERATIONS[operation], group=self._calling, async_op=True).wait()

    def broadcast_(self, values: torch.Tensor, what: str) -> None:
        """Replace `values` by trainer 0's; all trainers have agreed on their shape and dtype."""
        travelling = values.contiguous()  # what travels is memory, not elements
        self.wait([dist.broadcast(travelling, src=0, async_op=True)], what, device=values.device)
        if travelling is not values:
            values.copy_(travelling)

    def wait(
        self,
        works: Iterable[dist.Work | None],
        what: str,
        way: Way = Way.OTHER,
        device: torch.device | None = None,
    ) -> None:
        """Wait for started operations; an error names what they were for and who is to blame.

        Those of a GPU are waited for by the GPU only: this returns at once, and the watch goes on to look.
        """
        on_gpu = device is not None and device.type == "cuda"
        event = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        with self._naming(what, way, until=event.query if event is not None else None):
            for work in works:
                if work is not None:
                    work.wait()
            if event is not None:
                event.record(torch.cuda.current_stream(device))

    def agree(self, key: str, value: str) -> dict[int, str]:
        """Publish a value and return every trainer's.

        Raises
        ------
        ConfigurationError
            Another trainer has called something else.
        """
        what = f"the exchange of {key}"
        with self._naming(what, Way.CALL):
            self._store.set(f"{key}/{self.place.rank}", value)
            self._meet(what)
            return self._read(key)

    def _meet(self, what: str) -> None:
        """Wait until every trainer makes this call, and make sure that it is the same one."""
        self._calls += 1
        digest = int.from_bytes(hashlib.sha256(what.encode()).digest()[:7])
        bounds = torch.tensor([digest, -digest])
        dist.all_reduce(bounds, dist.ReduceOp.MAX, group=self._calling, async_op=True).wait()
        if bounds.tolist() == [digest, -digest]:
            return
        key = f"call {self._calls}"
        self._store.set(f"{key}/{self.place.rank}", what)
        for rank, theirs in self._read(key).items():
            if theirs != what:
                raise ConfigurationError(
                    f"{self.place.name(rank)} has come to {theirs} where this trainer, {self.place.rank}, "
                    f"has come to {what}; expected the same calls, in the same order, on every trainer"
                )

    def _read(self, key: str) -> dict[int, str]:
        """Return what every trainer has published, and let trainer 0 go on once all have."""
        texts = self._store.multi_get([f"{key}/{rank}" for rank in range(self.place.size)])
        self._pass(f"{key}/read")  # what was read may be a reason to end, for trainer 0 and its store too
        return {rank: text.decode() for rank, text in enumerate(texts)}

    @contextlib.contextmanager
    def _naming(
        self, what: str, way: Way = Way.OTHER, until: Callable[[], bool] | None = None
    ) -> Iterator[None]:
        """Turn the errors of torch.distributed inside the block into one that names the trainer to blame."""
        try:
            with self._watch.waiting(what, way, until):
                yield
        except (dist.DistError, RuntimeError) as error:
            reason = str(error).strip().partition("\n")[0]
            if silent := self._watch.silent_now():
                message = f"{self.place.names(silent)} vanished while {what} waited: {reason}"
                raise PeerLostError(message) from error
            raise DeadlineExceededError(
                f"{what} failed though every trainer is alive: {reason}; "
                f"a trainer may have taken longer than {self._deadlines.stalled.total_seconds():.0f} s, "
                "or have lost its connections"
            ) from error

    def _pass(self, point: str) -> None:
        """Say that this trainer is past a point; trainer 0, which runs the store, waits for the others."""
        self._store.set(f"{point}/{self.place.rank}", "")
        if self.place.rank != 0 or self.place.launcher_has_store:
            return
        with contextlib.suppress(dist.DistError):  # one that ended here is past it as well
            keys = [f"{point}/{rank}" for rank in range(self.place.size)]
            self._store.wait(keys, timedelta(seconds=self._deadlines.silent_seconds))


def _backend(environ: Mapping[str, str]) -> str:
    """Choose the backends, and this process's GPU where there are any."""
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return "gloo"
    text = environ.get("FLAGS_selected_gpus") or environ.get("LOCAL_RANK") or "0"
    count = torch.cuda.device_count()
    if not text.isascii() or not text.isdigit() or int(text) >= count:
        raise ConfigurationError(
            f"the GPU of this process (FLAGS_selected_gpus, else LOCAL_RANK) is {text!r}; "
            f"expected a number from 0 to {count - 1}, for {count} visible GPUs"
        )
    torch.cuda.set_device(int(text))
    return "cpu:gloo,cuda:nccl"


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
