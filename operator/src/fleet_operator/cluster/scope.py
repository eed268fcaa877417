"""How far a namespace, or all of them, has been seen: one that cannot be keeps no other from being served."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from fleet_operator.api.names import PLURAL
from fleet_operator.cluster.failing import Failing
from fleet_operator.cluster.watch import is_refusal

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from fleet_operator.cluster.watch import ListWatch


class Scope:
    """What is looked at together: a namespace, or all of them.

    Parameters
    ----------
    namespace : str or None
        Which; None for all of them.
    owned : mapping
        The watches without which no job can be served, by resource: of pods and Services.
    extras : mapping
        Those of what jobs may have beside these, by resource: some kinds may not be served.
    """

    def __init__(
        self,
        namespace: str | None,
        owned: Mapping[str, ListWatch[Any]],
        extras: Mapping[str, ListWatch[Any]],
    ) -> None:
        self.namespace = namespace
        self.owned = owned
        self.extras = extras
        self._jobs_listed, self._jobs_answered = asyncio.Event(), asyncio.Event()
        self._shown = asyncio.Event()
        self._listing, self._noticing = Failing(), Failing()
        self._noticing.tried(went_well=False)  # whoever is to watch its FleetJobs may never begin to

    def watches(self) -> Iterator[ListWatch[Any]]:
        """Return all watches of it."""
        yield from self.owned.values()
        yield from self.extras.values()

    def jobs_were_listed(self, error: Exception | None = None) -> None:
        """Note how a list of its FleetJobs has ended."""
        self._listing.tried(went_well=error is None)
        if error is None:
            self._jobs_listed.set()
        if error is None or is_refusal(error):
            self._jobs_answered.set()

    def jobs_were_watched(self, *, went_well: bool) -> None:
        """Note whether whoever watches its FleetJobs could."""
        self._noticing.tried(went_well=went_well)

    @property
    def shows_what_jobs_own(self) -> bool:
        """Whether what jobs own there has been seen: before, none of its jobs is judged."""
        return self._shown.is_set()

    @property
    def answered(self) -> bool:
        """Whether it is known what there is to see: everything has been listed, or refused."""
        return self._jobs_answered.is_set() and all(watch.answered.is_set() for watch in self.watches())

    async def until_seen(self) -> None:
        """Wait until its jobs can be served: what must be seen has been, and of the rest what there is.

        Where all was refused at first, because the namespace was gone for example, that says nothing of the
        rest: it is asked for again.
        """
        await self.until_answered()
        comes_late = not all(watch.synced.is_set() for watch in self.owned.values())
        await self._jobs_listed.wait()
        for watch in self.owned.values():
            await watch.synced.wait()
        if comes_late:
            refused = [watch for watch in self.extras.values() if not watch.synced.is_set()]
            for watch in refused:
                watch.heard.clear()
            for watch in refused:
                await watch.heard.wait()
        self._shown.set()

    async def until_answered(self) -> None:
        """Wait until it is known what there is to see."""
        await self._jobs_answered.wait()
        for watch in self.watches():
            await watch.answered.wait()

    def missing(self) -> Iterator[str]:
        """Return what is still waited for, in words."""
        yield from (watch.path for watch in self.owned.values() if not watch.synced.is_set())
        yield from (watch.path for watch in self.extras.values() if not watch.answered.is_set())
        if not self._jobs_listed.is_set():
            where = "" if self.namespace is None else f" of {self.namespace}"
            yield f"{PLURAL}{where} (is the CRD installed?)"

    def failing(self) -> Iterator[tuple[str, float]]:
        """Return for how many seconds each kind of object could not be followed; 0 while it is."""
        yield PLURAL, max(self._listing.seconds, self._noticing.seconds)
        for resource, watch in (*self.owned.items(), *self.extras.items()):
            yield resource, watch.failing.seconds
