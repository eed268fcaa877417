"""Rendezvous of a job's trainers through a key-value store in trainer 0's process.

torch's store does not authenticate its clients. If the job has a key, the store therefore listens on trainer
0's loopback address, and a gate listens at `World.port` instead. It forwards a connection once both ends have
proven the key, by a MAC over a random number from each end. Every other trainer opens a tunnel: a port on its
own loopback address, whose connections prove the key to the gate. Gate and tunnel forward bytes unchanged, so
client and store are torch's own. Without a key, the store listens only on a loopback address.

Under torchrun the agent's store is used as it is, without authentication.

Every wait is reported: in the log after a few seconds, and by an error after the deadline.
"""

import hmac
import logging
import secrets
import socket
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Final

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError

from fleet.collective.devices import reason_of
from fleet.collective.world import World, is_elsewhere, is_here, listen_at, loopback_of
from fleet.environment.deadlines import Deadlines
from fleet.errors import ConfigurationError, DeadlineExceededError, PeerLostError
from fleet.process.connections import HalfOpen, Relay
from fleet.wire import Side
from fleet.wire.proof import CHALLENGE_BYTES, MAC_BYTES, greeting_mac

__all__ = ["JoinWait", "join", "open_gate", "open_shared_store", "open_tunnel", "shared_world"]

ATTEMPT_SECONDS = 5.0
LOG_SECONDS = 300.0
PAUSE_SECONDS = 0.1
DIAL_SECONDS: Final = 5.0
LOOPBACK: Final = "127.0.0.1"
_ALL_JOINED: Final = "all trainers have joined"
_MISSING: Final = "who is missing"
_LISTED: Final = "in the order of their endpoints"

_log = logging.getLogger(__name__)


class JoinWait:
    """A wait for other trainers to start, which is logged at increasing intervals.

    Parameters
    ----------
    limit_seconds : float
    """

    def __init__(self, limit_seconds: float) -> None:
        self._limit = limit_seconds
        self._started = time.monotonic()
        # Less than one attempt, so that the first one that fails is logged.
        self._next = ATTEMPT_SECONDS / 2

    @property
    def seconds(self) -> float:
        """The seconds waited so far."""
        return time.monotonic() - self._started

    @property
    def left(self) -> float:
        """The seconds that remain until the time limit; 0 after it."""
        return max(0.0, self._limit - self.seconds)

    def is_over(self, who: str) -> bool:
        """Return whether the time limit has passed; until then, log the missing trainers at intervals."""
        waited = self.seconds
        if waited > self._limit:
            return True
        if waited >= self._next:
            _log.warning("still waiting for %s after %.0f s", who, waited)
            self._next = waited + min(waited, LOG_SECONDS)
        return False


def open_shared_store(world: World, deadlines: Deadlines) -> Store:
    """Open the store, and wait until every trainer has joined.

    Raises
    ------
    ConfigurationError
        Trainer 0 cannot listen at its address, or a trainer on another machine lacks the key that it needs.
    DeadlineExceededError
        A trainer did not join before the deadline; the message names it.
    PeerLostError
        Trainer 0, which hosts the store, had joined and is lost.
    """
    _check_machine(world)
    wait = JoinWait(deadlines.starting_seconds)
    seconds = timedelta(seconds=deadlines.deadline_seconds)
    if world.rank == 0 and not world.launcher_has_store:
        try:
            store = _open_store(world, seconds)
        except (DistError, RuntimeError, OSError) as error:
            raise ConfigurationError(
                f"trainer 0 cannot listen at {world.host}:{world.port}: {reason_of(error)}; "
                "expected an address of this machine and a free port"
            ) from error
    else:
        store = _connect(world, wait)
        store.set_timeout(seconds)
    join(world, store, wait)
    return store


def join(world: World, store: Store, wait: JoinWait) -> None:
    """Register this trainer in the store, and wait until all trainers have registered.

    Trainer 0 waits for all others, and publishes the missing ones, so the number of reads grows linearly with
    the number of trainers, not quadratically.

    Raises
    ------
    DeadlineExceededError
        A trainer did not join; the message names it.
    PeerLostError
        Trainer 0, which hosts the store, had joined and is lost.
    """
    store.set(f"joined/{world.rank}", world.name(world.rank))
    for who in _missing(world, store):
        if wait.is_over(who):
            raise DeadlineExceededError(
                f"{who} did not join within {wait.seconds:.0f} s; expected {world.size} trainers to connect "
                f"to {world.host}:{world.port}: see the logs of the missing ones, or raise "
                "runPolicy.pendingDeadlineSeconds (FLEET_START_DEADLINE_SECONDS; if unset, "
                "FLAGS_rpc_deadline)"
            )


def shared_world(world: World, store: Store) -> World:
    """Return the world, without its endpoints if a launcher has assigned the ranks in another order.

    This is known once all trainers have joined the launcher's store.
    """
    if not (world.launcher_has_store and world.endpoints) or store.get(_ALL_JOINED).decode() == _LISTED:
        return world
    return replace(world, endpoints=())


def _missing(world: World, store: Store) -> Iterator[str]:
    """Yield the names of the missing trainers at intervals until all trainers have joined."""
    missing = list(range(world.size))
    while missing and not _has_keys(
        store, [f"joined/{rank}" for rank in missing] if world.rank == 0 else [_ALL_JOINED]
    ):
        try:
            if world.rank == 0:
                missing = [rank for rank in missing if not store.check([f"joined/{rank}"])]
                store.set(_MISSING, world.names(missing))
            who = store.get(_MISSING).decode() if store.check([_MISSING]) else world.name(0)
        except (DistError, RuntimeError) as error:
            raise PeerLostError(
                f"{world.name(0)} had joined, but is lost before all trainers had joined: "
                f"{reason_of(error)}; see its log"
            ) from error
        yield who or world.name(0)  # trainer 0 has not published yet that all have joined
    if world.rank == 0:
        store.set(_ALL_JOINED, _LISTED if _are_as_listed(world, store) else "")


def _has_keys(store: Store, keys: list[str]) -> bool:
    """Wait a few seconds for keys; return whether all of them exist."""
    try:
        store.wait(keys, timedelta(seconds=ATTEMPT_SECONDS))
    except DistError:
        return False
    return True


def _are_as_listed(world: World, store: Store) -> bool:
    """Return whether every trainer has the name and endpoint that trainer 0 expects."""
    if not (world.launcher_has_store and world.endpoints):
        return False
    names = store.multi_get([f"joined/{rank}" for rank in range(world.size)])
    return all(name.decode() == world.name(rank) for rank, name in enumerate(names))


def _check_machine(world: World) -> None:
    """Raise an error if trainers on several machines need the job's key to connect, but there is none.

    Checks the hosts of trainer 0 and of the last trainer: endpoints are listed by machine, so if there are
    several machines, one of the two hosts is on another machine than this trainer. A host that does not
    resolve yet is ignored.
    """
    if world.key or world.launcher_has_store or world.size == 1 or loopback_of(world.host) is not None:
        return
    last = [endpoint.rpartition(":")[0].strip("[]") for endpoint in world.endpoints[-1:]]
    for host in (world.host, *last):
        if is_elsewhere(host):
            raise ConfigurationError(
                f"this trainer has no key of the job, and {host} is another machine, with which it may "
                "communicate only with a key; set FLEET_JOB_KEY to the same value on all trainers, such as "
                "the output of one call of openssl rand -hex 32"
            )


def _open_store(world: World, seconds: timedelta) -> Store:
    """Open the store in this process, accessible only to trainers that have the job's key."""
    if not world.key:
        host = loopback_of(world.host)
        if host is None:
            host = LOOPBACK
            _log.warning(
                "this process has no key of the job (FLEET_JOB_KEY), so the store listens only on %s, not "
                "on %s: without a key, any process that reaches it could change or end the training",
                host,
                world.host,
            )
        return _store_at(listen_at(host, world.port), host, seconds)
    outward = listen_at(world.host, world.port)
    inward = socket.create_server((LOOPBACK, 0))
    gate = open_gate(inward.getsockname()[1], outward, world.key)
    store = _store_at(inward, LOOPBACK, seconds)
    # torch's store has no method that closes it, so the gate ends with the object.
    weakref.finalize(store, gate.close)
    return store


def _store_at(listener: socket.socket, host: str, seconds: timedelta) -> Store:
    """Open a store that takes over a socket's descriptor and listens only on that socket."""
    # torch would wait for workers without saying who is missing, so `join` waits instead.
    return TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=seconds,
        master_listen_fd=listener.detach(),
    )


def _connect(world: World, wait: JoinWait) -> Store:
    """Connect to the store of trainer 0, or of torchrun's agent, as soon as it is listening."""
    host, port, tunnel = world.host, world.port, None
    if world.key and not world.launcher_has_store:
        # This wait ends earlier than the wait of torch's client, which would log a stack trace.
        tunnel = open_tunnel(host, port, world.key, min(0.8 * ATTEMPT_SECONDS, wait.left))
        host, port = LOOPBACK, tunnel.port
    elif not world.launcher_has_store and loopback_of(host) is None and is_here(host):
        host = LOOPBACK
    while True:
        try:
            seconds = timedelta(seconds=ATTEMPT_SECONDS)
            store: Store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=seconds)
        except (DistError, RuntimeError) as error:
            _check_machine(world)  # the host may resolve to an address by now
            if wait.is_over(world.name(0)):
                reason = reason_of(error)
                if tunnel is not None:
                    tunnel.close()
                    reason = tunnel.refusal or reason
                raise DeadlineExceededError(
                    f"{world.name(0)} did not listen at {world.host}:{world.port} within {wait.seconds:.0f} "
                    f"s: {reason}. See its log, or raise runPolicy.pendingDeadlineSeconds "
                    "(FLEET_START_DEADLINE_SECONDS; if unset, FLAGS_rpc_deadline)"
                ) from error
            time.sleep(
                PAUSE_SECONDS
            )  # a tunnel accepts immediately, even if nothing listens at its other end
        else:
            if tunnel is not None:
                weakref.finalize(store, tunnel.close)
            if world.launcher_has_store:
                store = PrefixStore(f"fleet/{world.launcher_restarts}", store)
            return store


def open_gate(port: int, listener: socket.socket, key: bytes, half_open: HalfOpen | None = None) -> Relay:
    """Open a relay to the store on this machine for clients that prove that they have the job's key.

    Parameters
    ----------
    port : int
        The store's port, on the loopback address.
    listener : socket.socket
        Where the other trainers connect.
    key : bytes
        The key of the job.
    half_open : HalfOpen, optional
        Limits the connections that have not proven the key.
    """
    unproven = half_open or HalfOpen()

    def forward(connected: socket.socket) -> socket.socket:
        with unproven.bounded(connected):
            _verify(connected, key)
        return socket.create_connection((LOOPBACK, port), DIAL_SECONDS)

    return Relay(listener, forward, log_refusals=True)


def open_tunnel(host: str, port: int, key: bytes, patience_seconds: float = 0.0) -> Relay:
    """Open a relay from a local port to the gate on another machine; the two authenticate with the job's key.

    Parameters
    ----------
    host, port : str, int
        Where the gate listens, or will listen.
    key : bytes
        The key of the job.
    patience_seconds : float
        How long to dial a gate that does not listen yet. The client waits meanwhile: torch's client would log
        a stack trace for each connection that is closed.
    """

    def forward(_: socket.socket) -> socket.socket:
        dialled = _dial(host, port, patience_seconds)
        try:
            _prove(dialled, key)
        except OSError:
            dialled.close()
            raise
        return dialled

    return Relay(socket.create_server((LOOPBACK, 0)), forward)


def _dial(host: str, port: int, patience_seconds: float) -> socket.socket:
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            return socket.create_connection((host, port), DIAL_SECONDS)
        except (
            ConnectionRefusedError,
            socket.gaierror,
        ):  # the gate does not listen yet, or its host has no address yet
            if time.monotonic() >= deadline:
                raise
            time.sleep(PAUSE_SECONDS)


def _verify(connected: socket.socket, key: bytes) -> None:
    """Authenticate a client and this process to each other with the key; raise ConnectionError on failure."""
    challenge = secrets.token_bytes(CHALLENGE_BYTES)
    connected.sendall(challenge)
    answer, mac = _receive(connected, CHALLENGE_BYTES), _receive(connected, MAC_BYTES)
    # The client proves the key first, so a stranger gets no MAC from the gate. Each MAC names its side, so
    # that neither end can be sent its own proof.
    if not hmac.compare_digest(mac, greeting_mac(key, Side.TRAINER, challenge, answer, of="store")):
        raise ConnectionError(
            "it does not have the key of this job; give all trainers the same FLEET_JOB_KEY"
        )
    connected.sendall(greeting_mac(key, Side.SERVER, challenge, answer, of="store"))


def _prove(dialled: socket.socket, key: bytes) -> None:
    """Authenticate this process and the gate to each other with the key; raise ConnectionError on failure."""
    challenge, answer = _receive(dialled, CHALLENGE_BYTES), secrets.token_bytes(CHALLENGE_BYTES)
    dialled.sendall(answer + greeting_mac(key, Side.TRAINER, challenge, answer, of="store"))
    expected = greeting_mac(key, Side.SERVER, challenge, answer, of="store")
    if not hmac.compare_digest(_receive(dialled, MAC_BYTES), expected):
        raise ConnectionError(
            "the process that listens there does not have the key of this job (FLEET_JOB_KEY)"
        )


def _receive(connected: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        part = connected.recv(count - len(received))
        if not part:
            raise ConnectionError(
                "the other end closed the connection before the key of the job was proven; give all trainers "
                "the same FLEET_JOB_KEY"
            )
        received += part
    return received
