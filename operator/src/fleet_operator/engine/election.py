"""Leader election with a coordination.k8s.io Lease: only the operator that holds it is active.

Invariants
----------
- Every attempt has a time-out, and any error counts as a failed renewal.
- The holder relies on the lease for two thirds of its duration since it *sent* the last successful renewal.
  Another operator takes the lease only after it has observed it unchanged for the whole duration.
- Both use their own monotonic clocks and never compare times of day. Regardless of clock differences and
  paused processes, the holder has sent its last write before the other operator starts.
- A release is final: an attempt in progress ends before it or is cancelled. The renewal of a cancelled
  attempt either came before the release, or fails because the lease has another version.

A lease that is missing or has no holder may have been held a moment ago, and then been deleted or replaced.
Its holder creates it again while it relies on it. Any other operator waits for a whole duration, even at the
very first installation, which looks the same. Only a release marks the lease as free.

A request in flight may still take effect after the lease is lost, because no lease can revoke it. Therefore
each request is harmless if it is late: a status write has the version on which it is based, a deletion the
uid of its object, and a creation a unique name. The same holds for the lease itself: if a process is
terminated while it takes the lease, the request may succeed later, and no operator is active until the lease
expires.
"""

from __future__ import annotations

import asyncio
import logging
import random
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from fleet_operator.cluster import ClusterError
from fleet_operator.engine.passes import SystemClock
from fleet_operator.kubernetes.client import ApiError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fleet_operator.engine.passes import Clock
    from fleet_operator.kubernetes.client import ApiClient

logger = logging.getLogger(__name__)

BELIEVED = 2 / 3
"""The fraction of a lease's duration, after a renewal, for which the holder acts as the leader."""

TRIES = 5
"""The number of attempts per lease duration: of the holder to renew it, of the others to acquire it."""


class NotLeadingError(ClusterError):
    """Another operator may be the leader, so this operator must not write."""

    transient = True


class Election:
    """One operator's part in the leader election.

    Parameters
    ----------
    client : ApiClient
        The API server, without a rate limit: a renewal must never wait for other writes.
    namespace, name : str
        The Lease.
    identity : str
        Our identity. A restarted process with the same identity reacquires its lease immediately, so two
        running processes must never share an identity.
    duration : timedelta
        How long the lease is valid after a renewal.
    clock : Clock, optional
        This machine's clock if absent.
    owner : callable, optional
        Returns the owner reference of a lease that we create, or None. Kubernetes deletes the lease once its
        owner is deleted, as by an uninstallation: the lease itself cannot be part of a chart.
    """

    def __init__(
        self,
        client: ApiClient,
        *,
        namespace: str,
        name: str,
        identity: str,
        duration: timedelta = timedelta(seconds=15),
        clock: Clock | None = None,
        owner: Callable[[], Mapping[str, Any] | None] = lambda: None,
    ) -> None:
        self._clock = clock or SystemClock()
        self._lease = Lease(
            client,
            namespace=namespace,
            name=name,
            identity=identity,
            seconds=duration.total_seconds(),
            clock=self._clock,
            owner=owner,
        )
        self._until = float("-inf")
        self._may_hold = False  # whether one of our writes has, or may have, acquired the lease
        self._trying = asyncio.Lock()
        self._releases = 0
        self._seen: tuple[str, float] = ("", 0.0)  # another's resourceVersion, and when first seen
        self._gone_since: float | None = None  # since when the lease is missing
        self._holder: str | None = None
        self.asked = False
        """Whether the lease has ever been read."""

    @property
    def name(self) -> str:
        """The name of the Lease."""
        return self._lease.name

    @property
    def leads(self) -> bool:
        """True if this operator holds the lease now."""
        return self._clock.monotonic() < self._until

    def check(self) -> None:
        """Raise NotLeadingError unless this operator holds the lease now."""
        if not self.leads:
            raise NotLeadingError(f"the lease {self._lease.name} is not held any more; nothing is written")

    async def acquire(self) -> None:
        """Wait until this operator holds the lease."""
        while True:
            if await self._try():
                return
            # Jitter keeps standby operators from reading the Lease at the same time.
            await asyncio.sleep(self._pause * random.uniform(0.8, 1.0))  # noqa: S311 no secret

    async def keep(self) -> None:
        """Renew the lease until it is lost or released."""
        releases = self._releases
        while (left := self._until - self._clock.monotonic()) > 0:
            await asyncio.sleep(min(self._pause, left))
            if self._releases == releases:
                await self._try()
            if self._releases != releases:
                return
        logger.error("the lease %s is lost: it could not be renewed in time", self._lease.name)

    async def release(self) -> None:
        """Release the lease after any attempt in progress has ended; no further attempts are made."""
        self._until = float("-inf")
        self._releases += 1
        try:
            async with asyncio.timeout(self._pause), self._trying:
                if self._may_hold:
                    await self._lease.empty()
        except (ApiError, TimeoutError) as error:
            why = str(error) or type(error).__name__
            logger.warning("the lease %s could not be released: %s", self._lease.name, why)
        finally:
            self._lease.held, self._may_hold = None, False

    @property
    def _pause(self) -> float:
        return self._lease.seconds / TRIES

    async def _try(self) -> bool:
        """Try to acquire or renew the lease; return whether this operator now holds it."""
        releases = self._releases
        async with self._trying:
            if releases != self._releases:
                return False
            sent, known = self._clock.monotonic(), False
            try:
                async with asyncio.timeout(self._pause):
                    taken = await (self._take() if self._lease.held is None else self._renew())
                known = True
            except Exception as error:  # noqa: BLE001 any error means that the lease was not renewed
                logger.warning("the lease %s: %s", self._lease.name, str(error) or type(error).__name__)
                return False
            finally:
                if not known:
                    # It may have been written nevertheless: read it before the next attempt.
                    self._lease.held = None
            self.asked, self._may_hold = True, taken
            holds = taken and releases == self._releases
            self._until = sent + self._lease.seconds * BELIEVED if holds else float("-inf")
            return holds

    async def _renew(self) -> bool:
        await self._lease.renew()
        return True

    async def _take(self) -> bool:
        """Acquire the lease if it was released, has expired, or names this operator as its holder."""
        lease = self._lease
        found = await lease.read()
        if found is None:
            return await self._make()
        self._gone_since = None
        spec, version = found.get("spec") or {}, found["metadata"]["resourceVersion"]
        now = self._clock.monotonic()
        if version != self._seen[0]:
            self._seen = (version, now)
        holder = spec.get("holderIdentity")
        # The holder's duration counts, which may be another than ours while a new release is rolled out.
        valid = now - self._seen[1] < spec.get("leaseDurationSeconds", lease.seconds)
        ours = holder in ("", lease.identity) or (holder is None and self.leads)
        if valid and not ours:
            holder = holder or "an operator without a name"
            if holder != self._holder:
                logger.info("standing by: %s holds the lease %s", holder, lease.name)
            self._holder = holder
            return False
        self._may_hold = True
        await lease.take(found)
        self._holder = None
        logger.info("leading: acquired the lease %s as %s", lease.name, lease.identity)
        return True

    async def _make(self) -> bool:
        """Create the lease, unless the holder of a deleted lease may still consider itself the leader."""
        lease, now = self._lease, self._clock.monotonic()
        if self._gone_since is None:
            self._gone_since = now
        if not self.leads and now - self._gone_since < lease.seconds:
            if now == self._gone_since:
                logger.info(
                    "standing by: there is no lease %s; it will be created in %g s unless its holder does so "
                    "first",
                    lease.name,
                    lease.seconds,
                )
            return False
        self._may_hold = True
        await lease.make()
        self._gone_since = None
        logger.info("leading: created the lease %s as %s", lease.name, lease.identity)
        return True


class Lease:
    """The Lease object in the cluster.

    Parameters
    ----------
    client : ApiClient
        The API server.
    namespace, name : str
        The namespace and name of the object.
    identity : str
        Our identity.
    seconds : float
        How long it is valid after a write.
    clock : Clock
        The clock for its times, which are for people and never compared.
    owner : callable
        Returns the owner reference of the object that is created, or None.
    """

    def __init__(
        self,
        client: ApiClient,
        *,
        namespace: str,
        name: str,
        identity: str,
        seconds: float,
        clock: Clock,
        owner: Callable[[], Mapping[str, Any] | None],
    ) -> None:
        self._client = client
        self._collection = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._path = f"{self._collection}/{name}"
        self.name = name
        self.identity = identity
        self.seconds = seconds
        self._clock = clock
        self._owner = owner
        self.held: dict[str, Any] | None = None
        """The object as we last wrote it; None unless it is known to name this operator as the holder."""

    async def read(self) -> dict[str, Any] | None:
        """Return the current object, or None if it does not exist."""
        try:
            return await self._client.get(self._path)
        except ApiError as error:
            if error.status != 404:
                raise
            return None

    async def make(self) -> None:
        """Create the lease with this operator as the holder."""
        manifest = self._manifest({})
        # Only here: to change an object's owners later, some clusters require the permission to delete it.
        if (owner := self._owner()) is not None:
            manifest["metadata"]["ownerReferences"] = [dict(owner)]
        self.held = await self._client.create(self._collection, manifest)

    async def take(self, found: dict[str, Any]) -> None:
        """Take over the lease; raise an error if another operator changes it at the same time."""
        found["spec"] = self._manifest(found.get("spec") or {})["spec"]
        self.held = await self._client.replace(self._path, found)

    async def renew(self) -> None:
        """Renew the lease; raise an error if another operator has changed it."""
        lease = self.held or {}
        lease["spec"] |= {"renewTime": self._now()}
        self.held = await self._client.replace(self._path, lease)

    async def empty(self) -> None:
        """Clear the holder of the lease if this operator is the holder."""
        while True:
            lease = self.held or await self.read()
            if lease is None or (lease.get("spec") or {}).get("holderIdentity") != self.identity:
                return
            # The API server refuses a duration of 0. Nobody waits for this second, as there is no holder.
            lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
            try:
                await self._client.replace(self._path, lease)
            except ApiError as error:
                if error.status == 409:  # a cancelled attempt has taken effect meanwhile
                    self.held = None
                    continue
                if error.status != 404:
                    raise
            return

    def _manifest(self, before: Mapping[str, Any]) -> dict[str, Any]:
        """Return the Lease with this operator as its holder; count a transition if the holder changes."""
        transitions, holder = before.get("leaseTransitions") or 0, before.get("holderIdentity")
        now = self._now()
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self.name},
            "spec": {
                "holderIdentity": self.identity,
                "leaseDurationSeconds": max(1, round(self.seconds)),
                "acquireTime": now,
                "renewTime": now,
                "leaseTransitions": transitions + (bool(before) and holder != self.identity),
            },
        }

    def _now(self) -> str:
        return self._clock.now().strftime("%Y-%m-%dT%H:%M:%S.%fZ")
