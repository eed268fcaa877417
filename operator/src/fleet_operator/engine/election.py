"""Which of several operators works: whoever holds a Lease of coordination.k8s.io.

Invariants
----------
Every try has a time-out, and any error counts as not renewed. The holder believes in itself for two thirds of
the lease's duration since it *sent* its last successful renewal; another takes the lease only after it has
seen it unchanged for the whole duration. Both measure with clocks that only grow, each its own, and nobody
compares times of day: whatever the clocks of two machines say, and however long a process was paused, the
holder has sent its last write before the other begins. A release is the last word: a try that was under way
ends before it, or was broken off; a renewal then either came before it or finds another version of the lease.

A lease that is not there, or says nothing of a holder, may have been held a moment ago: somebody deleted or
replaced it. Its holder makes it anew while it believes in itself; anybody else keeps away for a whole lease,
at the very first installation as well, which looks the same. Only a release says that nobody holds it.

A request that is under way then may still be carried out afterwards: no lease can take it back. That is why
each bears what makes it harmless: a status the version it was decided on, a deletion the uid it means, and a
creation the name that only one object can have. The same holds for the lease itself: one that was about to be
taken when its taker was told to end may be taken late, and then nobody works until it has run out.
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
    from collections.abc import Mapping

    from fleet_operator.engine.passes import Clock
    from fleet_operator.kubernetes.client import ApiClient

logger = logging.getLogger(__name__)

BELIEVED = 2 / 3
"""For which part of its duration the holder trusts a lease that it has renewed."""

TRIES = 5
"""How often within its duration a lease is renewed, or looked at by those who wait for it."""


class NotLeadingError(ClusterError):
    """Another operator may be at work: nothing may be written."""

    transient = True


class Election:
    """One operator's part in the election.

    Parameters
    ----------
    client : ApiClient
        The API server, without limits: a renewal must never wait behind other writes.
    namespace, name : str
        The Lease.
    identity : str
        Who we are. A process that is started again under its old identity takes its lease up again at once,
        so no two that run at the same time may share one.
    duration : timedelta
        How long the lease is valid after a renewal.
    clock : Clock, optional
        This machine's clock if absent.
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
    ) -> None:
        self._clock = clock or SystemClock()
        self._lease = Lease(
            client,
            namespace=namespace,
            name=name,
            identity=identity,
            seconds=duration.total_seconds(),
            clock=self._clock,
        )
        self._until = float("-inf")
        self._may_hold = False  # whether a write of ours has taken it, or was broken off and may have
        self._trying = asyncio.Lock()
        self._releases = 0
        self._seen: tuple[str, float] = ("", 0.0)  # another's lease: its resourceVersion, and since when
        self._gone_since: float | None = None  # since when we have found no lease
        self._holder: str | None = None
        self.asked = False
        """Whether the API server has ever said who holds the lease."""

    @property
    def name(self) -> str:
        """The name of the Lease."""
        return self._lease.name

    @property
    def leads(self) -> bool:
        """Whether we hold the lease at this very moment."""
        return self._clock.monotonic() < self._until

    def check(self) -> None:
        """Raise NotLeadingError unless we hold the lease at this very moment."""
        if not self.leads:
            raise NotLeadingError(f"the lease {self._lease.name} is not held any more; nothing is written")

    async def acquire(self) -> None:
        """Wait until we hold the lease."""
        while True:
            if await self._try():
                return
            await asyncio.sleep(self._pause * random.uniform(0.8, 1.0))  # noqa: S311 no secret

    async def keep(self) -> None:
        """Renew the lease for as long as that goes well; return when it is lost, or was released."""
        releases = self._releases
        while (left := self._until - self._clock.monotonic()) > 0:
            await asyncio.sleep(min(self._pause, left))
            if self._releases == releases:
                await self._try()
            if self._releases != releases:
                return
        logger.error("the lease %s is lost: it could not be renewed in time", self._lease.name)

    async def release(self) -> None:
        """Let another take the lease at once. A try that is under way ends first, and none follows."""
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
        """Take or renew the lease; return whether that went well, and nobody has released it meanwhile."""
        releases = self._releases
        async with self._trying:
            if releases != self._releases:
                return False
            sent, known = self._clock.monotonic(), False
            try:
                async with asyncio.timeout(self._pause):
                    taken = await (self._take() if self._lease.held is None else self._renew())
                known = True
            except Exception as error:  # noqa: BLE001 whatever it is, the lease was not renewed
                logger.warning("the lease %s: %s", self._lease.name, str(error) or type(error).__name__)
                return False
            finally:
                if not known:
                    self._lease.held = (
                        None  # it may have been written all the same: read it before the next try
                    )
            self.asked, self._may_hold = True, taken
            holds = taken and releases == self._releases
            self._until = sent + self._lease.seconds * BELIEVED if holds else float("-inf")
            return holds

    async def _renew(self) -> bool:
        await self._lease.renew()
        return True

    async def _take(self) -> bool:
        """Take the lease if it was released, or nobody has renewed it for as long as it is valid."""
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
        valid = now - self._seen[1] < spec.get("leaseDurationSeconds", lease.seconds)
        ours = holder in ("", lease.identity) or (holder is None and self.leads)
        if valid and not ours:
            holder = holder or "nobody, as it says,"
            if holder != self._holder:
                logger.info("standing by: %s holds the lease %s", holder, lease.name)
            self._holder = holder
            return False
        self._may_hold = True
        await lease.take(found)
        self._holder = None
        logger.info("leading: took the lease %s as %s", lease.name, lease.identity)
        return True

    async def _make(self) -> bool:
        """Make the lease, unless somebody else may hold the one that was there before."""
        lease, now = self._lease, self._clock.monotonic()
        if self._gone_since is None:
            self._gone_since = now
        if not self.leads and now - self._gone_since < lease.seconds:
            if now == self._gone_since:
                logger.info(
                    "standing by: there is no lease %s; it is made in %g s unless somebody who holds it does",
                    lease.name,
                    lease.seconds,
                )
            return False
        self._may_hold = True
        await lease.make()
        self._gone_since = None
        logger.info("leading: made the lease %s as %s", lease.name, lease.identity)
        return True


class Lease:
    """One Lease, which any of several operators may hold.

    Parameters
    ----------
    client : ApiClient
        The API server.
    namespace, name : str
        Where it is.
    identity : str
        Who we are.
    seconds : float
        How long it is valid after we have written it.
    clock : Clock
        For the times in it, which people read and nobody compares.
    """

    def __init__(
        self, client: ApiClient, *, namespace: str, name: str, identity: str, seconds: float, clock: Clock
    ) -> None:
        self._client = client
        self._collection = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._path = f"{self._collection}/{name}"
        self.name = name
        self.identity = identity
        self.seconds = seconds
        self._clock = clock
        self.held: dict[str, Any] | None = None
        """As we last wrote it; None while it is not ours, or nobody knows whether it is."""

    async def read(self) -> dict[str, Any] | None:
        """Return the object as it is, or None if there is none."""
        try:
            return await self._client.get(self._path)
        except ApiError as error:
            if error.status != 404:
                raise
            return None

    async def make(self) -> None:
        """Make it as ours where there is none."""
        self.held = await self._client.create(self._collection, self._manifest({}))

    async def take(self, found: dict[str, Any]) -> None:
        """Make it ours; a conflict is an error, because somebody else has written it since it was found."""
        found["spec"] = self._manifest(found.get("spec") or {})["spec"]
        self.held = await self._client.replace(self._path, found)

    async def renew(self) -> None:
        """Write it anew; a conflict is an error, because nobody but its holder may touch it."""
        lease = self.held or {}
        lease["spec"] |= {"renewTime": self._now()}
        self.held = await self._client.replace(self._path, lease)

    async def empty(self) -> None:
        """Say that nobody holds it, if it is ours, whichever of our tries was the last to write it."""
        while True:
            lease = self.held or await self.read()
            if lease is None or (lease.get("spec") or {}).get("holderIdentity") != self.identity:
                return
            lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
            try:
                await self._client.replace(self._path, lease)
            except ApiError as error:
                if error.status == 409:  # a try that was broken off has been carried out meanwhile
                    self.held = None
                    continue
                if error.status != 404:
                    raise
            return

    def _manifest(self, before: Mapping[str, Any]) -> dict[str, Any]:
        """Return the lease as ours. Its transitions count how often it went from one holder to another."""
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
