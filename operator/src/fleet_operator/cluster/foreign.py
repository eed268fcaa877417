"""Objects of others with names that jobs want. No watch tells of what has not our labels: it is looked up."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from fleet_operator.cluster.client import ApiError
from fleet_operator.cluster.resources import KINDS, collection

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fleet_operator.cluster.client import ApiClient
    from fleet_operator.cluster.interface import Key
    from fleet_operator.cluster.jobs import FleetJobs
    from fleet_operator.cluster.owned import OwnedObjects

logger = logging.getLogger(__name__)

FOREIGN_SECONDS = 10.0
"""How often an object of another owner that has one of our names is looked at again."""


class ForeignObjects:
    """Who has a name that a job wants, where that is not the job itself.

    Parameters
    ----------
    client : ApiClient
        The API server.
    jobs : FleetJobs
        The jobs there are: of one that is gone nothing is noted.
    owned : OwnedObjects
        Where an object goes that turns out to be a job's.
    on_change : callable
        Told of each job of which something has been found out.
    """

    def __init__(
        self, client: ApiClient, jobs: FleetJobs, owned: OwnedObjects, on_change: Callable[[Key], None]
    ) -> None:
        self._client = client
        self._jobs = jobs
        self._owned = owned
        self._on_change = on_change
        self._known: dict[Key, dict[str, tuple[str, str]]] = {}  # job: {"Kind/name": (resource, name)}

    def of(self, key: Key) -> tuple[str, ...]:
        """Return the objects that have names of a job's, as ``Kind/name``."""
        return tuple(self._known.get(key, ()))

    def forget(self, key: Key) -> None:
        """Look no more after the names of a job that is gone."""
        self._known.pop(key, None)

    async def meet(self, key: Key, resource: str, name: str) -> None:
        """Find out who has a name that a job wants: we ourselves, unseen as yet, or somebody else."""
        shown = f"{KINDS[resource]}/{name}"
        found: Mapping[str, Any] | None = None
        try:
            found = await self._client.get(f"{collection(resource, key.namespace)}/{name}")
        except ApiError as error:
            if error.status != 404:
                raise
        if self._jobs.get(key) is None:
            return  # it was deleted meanwhile: nobody would forget what is noted of it now
        known = self._known.get(key, {})
        entry = None if found is None else self._owned.reduce(resource, found)
        if entry is not None and entry.job == key:
            # It is watched, so it will be seen to go, whoever owns it.
            self._owned.stores[resource].put(entry)
            known.pop(shown, None)
        elif found is None:
            known.pop(shown, None)
        elif shown in known:
            return
        else:
            self._known.setdefault(key, {})[shown] = (resource, name)
        self._on_change(key)

    async def check_forever(self) -> None:
        """Look at them again and again."""
        while True:
            await asyncio.sleep(FOREIGN_SECONDS)
            for key in list(self._known):
                try:
                    for resource, name in list(self._known.get(key, {}).values()):
                        await self.meet(key, resource, name)
                except ApiError as error:
                    logger.warning("looking at a foreign object: %s", error, extra={"job": str(key)})
