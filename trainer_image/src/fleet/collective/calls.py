"""The calls that all trainers make: each is compared with the others' before anything of it travels.

What all have alike is told by two numbers over connections of its own. Only where trainers differ do they
look in trainer 0's store. There trainer 0 reads what each has, and puts down the little by which all can
decide: so what all together read grows with their number, and not with its square.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from fleet.collective.rendezvous import Place
from fleet.errors import ConfigurationError

__all__ = ["Calls"]


class Calls:
    """One trainer's.

    Parameters
    ----------
    place : Place
    store : Store
    patience : timedelta
        How long trainer 0, which runs the store, waits for those that have still to read.
    """

    def __init__(self, place: Place, store: Store, patience: timedelta) -> None:
        self._place = place
        self._store = store
        self._patience = patience
        self._made = 0
        self.channel: dist.ProcessGroup | None = None
        """Connections for these calls alone; none while the trainers are still connecting."""

    def meet(self, what: str) -> None:
        """Wait until every trainer makes this call, and make sure that it is the same one.

        Raises
        ------
        ConfigurationError
            Another trainer has called something else.
        """
        self._made += 1
        if self._is_everybodys(what):
            return
        for rank, theirs in self._chosen(f"call {self._made}", what, _two_unlike).items():
            if theirs != what:
                raise ConfigurationError(
                    f"{self._place.name(rank)} has come to {theirs} where this trainer, {self._place.rank}, "
                    f"has come to {what}; expected the same calls, in the same order, on every trainer"
                )

    def texts(
        self,
        key: str,
        ours: str,
        choose: Callable[[Mapping[int, str]], Iterable[int]] | None = None,
    ) -> dict[int, str]:
        """Return this trainer's text; where any differs, also those of some others.

        Parameters
        ----------
        key, ours : str
        choose : callable, optional
            Given everybody's texts, says whose. Otherwise trainer 0's and the first that differs from it: so
            whoever differs from anybody finds one that differs from its own.
        """
        if self._is_everybodys(ours):
            return {self._place.rank: ours}
        return self._chosen(key, ours, choose or _two_unlike)

    def first_texts(
        self, key: str, ours: str, choose: Callable[[Mapping[int, str]], Iterable[int]]
    ) -> dict[int, str]:
        """Return this trainer's text and those of some others, before any is connected with another.

        Parameters
        ----------
        key, ours : str
        choose : callable
            Given everybody's texts, says whose decide. Trainer 0 alone calls it.
        """
        return self._chosen(key, ours, choose)

    def come_past(self, point: str) -> None:
        """Say that this trainer is past a point; trainer 0, which runs the store, waits for the others."""
        self._store.set(f"{point}/{self._place.rank}", "")
        if self._place.rank != 0 or self._place.launcher_has_store:
            return
        with contextlib.suppress(dist.DistError):  # one that ended here is past it as well
            self._store.wait([f"{point}/{rank}" for rank in range(self._place.size)], self._patience)

    def _is_everybodys(self, text: str) -> bool:
        """Whether all trainers have the same text; each calls this."""
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])
        bounds = torch.tensor([digest, -digest])
        dist.all_reduce(bounds, dist.ReduceOp.MAX, group=self.channel, async_op=True).wait()
        return bounds.tolist() == [digest, -digest]

    def _chosen(
        self, key: str, ours: str, choose: Callable[[Mapping[int, str]], Iterable[int]]
    ) -> dict[int, str]:
        """Publish this trainer's text; return it and those that trainer 0 has chosen out of everybody's."""
        self._store.set(f"{key}/{self._place.rank}", ours)
        if self._place.rank == 0:
            texts = self._store.multi_get([f"{key}/{rank}" for rank in range(self._place.size)])
            everybodys = {rank: text.decode() for rank, text in enumerate(texts)}
            self._store.set(key, json.dumps({rank: everybodys[rank] for rank in sorted(choose(everybodys))}))
        chosen = json.loads(self._store.get(key))
        self.come_past(f"{key}/read")  # what was read may be a reason to end, for trainer 0 and its store too
        return {int(rank): text for rank, text in chosen.items()} | {self._place.rank: ours}


def _two_unlike(texts: Mapping[int, str]) -> set[int]:
    """Return trainer 0 and the first whose text is not trainer 0's, if there is one."""
    return {0, next((rank for rank, text in texts.items() if text != texts[0]), 0)}
