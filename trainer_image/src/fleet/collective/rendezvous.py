"""How the trainers of a job find each other: through a key-value store in trainer 0's process.

Nothing here waits in silence: after a few seconds the log names who is missing, and past the deadline an
error does.

What torchrun's agent keeps outlives the processes that it starts anew (``--max-restarts``): so each of their
lives has keys of its own there.

With a key of the job, a gate stands before the store (`gate`). Without one the store listens on a loopback
address only. Where torchrun's agent has the store, it listens as torch has it, and asks nobody who he is.
"""

import logging
import socket
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError

from fleet.collective.gate import door_to, gate_before, is_elsewhere, is_here, listen_at, loopback_of
from fleet.environment.deadlines import Deadlines
from fleet.errors import ConfigurationError, DeadlineExceededError, PeerLostError
from fleet.process.relay import Relay

if TYPE_CHECKING:
    from fleet.role_maker import Role

__all__ = ["Place", "Wait", "as_all_know_it", "gather", "meet", "place_of"]

TRY_SECONDS = 5.0
TELL_SECONDS = 300.0
PAUSE_SECONDS = 0.1
SHOWN: Final = 8
"""How many trainers a message calls by name."""
LOOPBACK = "127.0.0.1"
_EVERYBODY: Final = "everybody has joined"
_MISSING: Final = "who is missing"
_LISTED: Final = "in the order of their endpoints"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """One trainer's rank among `size`, and where trainer 0's store listens.

    `launcher_has_store` is true under torchrun, whose agent runs the store in trainer 0's place;
    `launcher_restarts` is how often it has started its processes anew. `key` is the job's; empty where
    there is none.
    """

    rank: int
    size: int
    host: str
    port: int
    endpoints: tuple[str, ...] = ()
    launcher_has_store: bool = False
    launcher_restarts: str = "0"
    key: bytes = field(default=b"", repr=False)

    @property
    def others(self) -> list[int]:
        """The ranks but this one."""
        return [rank for rank in range(self.size) if rank != self.rank]

    def name(self, rank: int) -> str:
        """Return how messages call a trainer."""
        if rank < len(self.endpoints):
            return f"trainer {rank} ({self.endpoints[rank]})"
        return f"trainer {rank} ({self.host}:{self.port})" if rank == 0 else f"trainer {rank}"

    def names(self, ranks: Sequence[int], number: int | None = None) -> str:
        """Return how messages call several trainers, of which the first eight may be all that is known."""
        shown = ranks[:SHOWN]
        more = (len(ranks) if number is None else number) - len(shown)
        named = ", ".join(self.name(rank) for rank in shown)
        return f"{named} and {more} more" if more else named


def place_of(role: "Role", environ: Mapping[str, str]) -> Place:
    """Find the store: ``MASTER_ADDR`` and ``MASTER_PORT``, else the endpoint of trainer 0."""
    endpoints = tuple(role.worker_endpoints)
    address, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if not address or not port:
        if not endpoints:
            raise ConfigurationError(
                "MASTER_ADDR and MASTER_PORT are not set and the role names no trainer endpoints; "
                "expected either, to know where trainer 0 is"
            )
        address, _, port = endpoints[0].rpartition(":")
    if not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigurationError(f"MASTER_PORT is {port!r}; expected a port number, 1 to 65535")
    return Place(
        rank=role.index,
        size=role.worker_num,
        host=address,
        port=int(port),
        endpoints=endpoints,
        launcher_has_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        launcher_restarts=environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        key=role.job.key,
    )


def meet(place: Place, deadlines: Deadlines) -> Store:
    """Open the store and wait until every trainer is there.

    Raises
    ------
    ConfigurationError
        Trainer 0 cannot listen at its address, or a trainer of another machine has no key to reach it with.
    DeadlineExceededError
        A trainer did not come before the deadline; the message names who.
    PeerLostError
        Trainer 0, which has the store, was there and is gone.
    """
    _check_machine(place)
    wait = Wait(deadlines.starting_seconds)
    store = _open(place, deadlines, wait)
    gather(place, store, wait)
    return store


def _check_machine(place: Place) -> None:
    """Raise without a key of the job where a trainer is on another machine: it could never come here.

    Trainer 0's host and the last trainer's are looked at: lists go by machine, so that one of the two is
    another machine than this one where there are several. A name that is not known yet says nothing.
    """
    if place.key or place.launcher_has_store or place.size == 1 or loopback_of(place.host) is not None:
        return
    last = [endpoint.rpartition(":")[0].strip("[]") for endpoint in place.endpoints[-1:]]
    for host in (place.host, *last):
        if is_elsewhere(host):
            raise ConfigurationError(
                f"this trainer was given no key of the job, and {host} is another machine, which it "
                "does not speak with then; set FLEET_JOB_KEY to the same on all trainers: what one call of "
                "openssl rand -hex 32 prints"
            )


def gather(place: Place, store: Store, wait: "Wait") -> None:
    """Wait until every trainer has said in the store that it is there.

    Trainer 0 looks for everybody, and tells the others: so all together ask for as many keys as there are
    trainers, and not for its square.

    Parameters
    ----------
    place : Place
    store : Store
    wait : Wait

    Raises
    ------
    DeadlineExceededError
        A trainer did not come; the message names who.
    PeerLostError
        Trainer 0, which has the store, was there and is gone.
    """
    store.set(f"joined/{place.rank}", place.name(place.rank))
    for who in _awaited(place, store):
        if wait.is_over(who):
            raise DeadlineExceededError(
                f"{who} did not come within {wait.seconds:.0f} s; expected {place.size} "
                f"trainers to meet at {place.host}:{place.port}: see the logs of who is missing, or raise "
                "runPolicy.pendingDeadlineSeconds (FLEET_START_DEADLINE_SECONDS; without, FLAGS_rpc_deadline)"
            )


def as_all_know_it(place: Place, store: Store) -> Place:
    """Return a place without endpoints where a launcher's ranks are not in their order; once all have met."""
    if not (place.launcher_has_store and place.endpoints) or store.get(_EVERYBODY).decode() == _LISTED:
        return place
    return replace(place, endpoints=())


def _are_as_listed(place: Place, store: Store) -> bool:
    """Whether all trainers call themselves as trainer 0 does: who knows of another order has no endpoints."""
    if not (place.launcher_has_store and place.endpoints):
        return False
    names = store.multi_get([f"joined/{rank}" for rank in range(place.size)])
    return all(name.decode() == place.name(rank) for rank, name in enumerate(names))


class Wait:
    """One wait for others to start, told in the log ever more rarely, but at least once in five minutes."""

    def __init__(self, limit_seconds: float) -> None:
        self._limit = limit_seconds
        self._started = time.monotonic()
        self._next = TRY_SECONDS / 2

    @property
    def seconds(self) -> float:
        """For how long it has lasted."""
        return time.monotonic() - self._started

    @property
    def left(self) -> float:
        """Seconds until it is over; not below 0."""
        return max(0.0, self._limit - self.seconds)

    def is_over(self, who: str) -> bool:
        """Whether it has lasted long enough; if not, say for whom it is, if it is time to."""
        waited = self.seconds
        if waited > self._limit:
            return True
        if waited >= self._next:
            _log.warning("waiting for %s since %.0f s", who, waited)
            self._next = waited + min(waited, TELL_SECONDS)
        return False


def _awaited(place: Place, store: Store) -> Iterator[str]:
    """Wait until everybody has joined; once in a while, yield the names of those that are missing."""
    missing = list(range(place.size))
    while missing and not _are_there(
        store, [f"joined/{rank}" for rank in missing] if place.rank == 0 else [_EVERYBODY]
    ):
        try:
            if place.rank == 0:
                missing = [rank for rank in missing if not store.check([f"joined/{rank}"])]
                store.set(_MISSING, place.names(missing))
            who = store.get(_MISSING).decode() if store.check([_MISSING]) else place.name(0)
        except (DistError, RuntimeError) as error:
            raise PeerLostError(
                f"{place.name(0)} was there and is gone, before all trainers had come: {_first_line(error)}; "
                "see its log"
            ) from error
        yield who or place.name(0)  # all are there, and trainer 0 has still to say so
    if place.rank == 0:
        store.set(_EVERYBODY, _LISTED if _are_as_listed(place, store) else "")


def _are_there(store: Store, keys: list[str]) -> bool:
    """Wait a little for keys."""
    try:
        store.wait(keys, timedelta(seconds=TRY_SECONDS))
    except DistError:
        return False
    return True


def _open(place: Place, deadlines: Deadlines, wait: Wait) -> Store:
    seconds = timedelta(seconds=deadlines.deadline_seconds)
    if place.rank == 0 and not place.launcher_has_store:
        try:
            return _open_here(place, seconds)
        except (DistError, RuntimeError, OSError) as error:
            raise ConfigurationError(
                f"trainer 0 cannot listen at {place.host}:{place.port}: {_first_line(error)}; "
                "expected an address of this machine and a free port"
            ) from error
    store = _reach(place, wait)
    store.set_timeout(seconds)
    return store


def _open_here(place: Place, seconds: timedelta) -> Store:
    """Open the store in this process, where nobody else reaches it without the key of the job."""
    if not place.key:
        host = loopback_of(place.host)
        if host is None:
            host = LOOPBACK
            _log.warning(
                "this process was given no key of the job (FLEET_JOB_KEY), so the store listens on %s only "
                "and not on %s: without one, whoever reaches it could change or end the training",
                host,
                place.host,
            )
        return _store(listen_at(host, place.port), host, seconds)
    outward = listen_at(place.host, place.port)
    inward = socket.create_server((LOOPBACK, 0))
    gate = gate_before(inward.getsockname()[1], outward, place.key)
    store = _store(inward, LOOPBACK, seconds)
    weakref.finalize(store, gate.close)
    return store


def _store(listener: socket.socket, host: str, seconds: timedelta) -> Store:
    """Open a store that listens there and nowhere else; it takes the descriptor for its own."""
    return TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=seconds,
        master_listen_fd=listener.detach(),
    )


def _reach(place: Place, wait: Wait) -> Store:
    """Connect with the store of trainer 0, or of torchrun's agent, once it listens."""
    host, port, door = _way(place, wait)
    while True:
        try:
            seconds = timedelta(seconds=TRY_SECONDS)
            store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=seconds)
        except (DistError, RuntimeError) as error:
            _check_machine(place)  # its name may be known by now
            if wait.is_over(place.name(0)):
                reason = _first_line(error)
                if door is not None:
                    door.close()
                    reason = door.refusal or reason
                raise DeadlineExceededError(
                    f"{place.name(0)} did not listen at {place.host}:{place.port} within "
                    f"{wait.seconds:.0f} s: {reason}. See its log, or raise "
                    "runPolicy.pendingDeadlineSeconds (FLEET_START_DEADLINE_SECONDS; without, "
                    "FLAGS_rpc_deadline)"
                ) from error
            time.sleep(PAUSE_SECONDS)  # a door opens at once, whatever is behind it
        else:
            if door is not None:
                weakref.finalize(store, door.close)
            of_this_life = f"fleet/{place.launcher_restarts}"
            return PrefixStore(of_this_life, store) if place.launcher_has_store else store


def _way(place: Place, wait: Wait) -> tuple[str, int, Relay | None]:
    """Return where the store is reached from here: at a door to it where its gate wants the key."""
    if place.launcher_has_store:
        return place.host, place.port, None
    if place.key:
        # Given up before torch's client gives up, which would log a stack.
        door = door_to(place.host, place.port, place.key, min(0.8 * TRY_SECONDS, wait.left))
        return LOOPBACK, door.port, door
    here = loopback_of(place.host) is None and is_here(place.host)
    return LOOPBACK if here else place.host, place.port, None


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
