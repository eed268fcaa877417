"""The Lease of coordination.k8s.io as one operator reads and writes it; the election says when it may."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fleet_operator.kubernetes.client import ApiError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fleet_operator.engine.clock import Clock
    from fleet_operator.kubernetes.client import ApiClient

__all__ = ["Lease"]


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
