"""The calls that all trainers make: each is compared with the others' before anything of it travels.

What all have alike is told by two numbers over connections of its own. Only where trainers differ do they
read in trainer 0's store what each has.
"""

import contextlib
import hashlib
import json
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
        key = f"call {self._made}"
        self._store.set(f"{key}/{self._place.rank}", what)
        for rank, theirs in self._read(key).items():
            if theirs != what:
                raise ConfigurationError(
                    f"{self._place.name(rank)} has come to {theirs} where this trainer, {self._place.rank}, "
                    f"has come to {what}; expected the same calls, in the same order, on every trainer"
                )

    def texts(self, key: str, ours: str) -> dict[int, str]:
        """Return every trainer's text; only what differs is read."""
        if self._is_everybodys(ours):
            return dict.fromkeys(range(self._place.size), ours)
        self._store.set(f"{key}/{self._place.rank}", ours)
        return self._read(key)

    def first_texts(self, key: str, ours: str) -> dict[int, str]:
        """Return every trainer's text before any is connected with another.

        Trainer 0 reads for all: each key is asked for once, and not by everybody.
        """
        self._store.set(f"{key}/{self._place.rank}", ours)
        if self._place.rank == 0:
            texts = self._store.multi_get([f"{key}/{rank}" for rank in range(self._place.size)])
            self._store.set(key, json.dumps([text.decode() for text in texts]))
        everybodys = json.loads(self._store.get(key))
        self.come_past(f"{key}/read")
        return dict(enumerate(everybodys))

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

    def _read(self, key: str) -> dict[int, str]:
        """Return what every trainer has published, and let trainer 0 go on once all have."""
        texts = self._store.multi_get([f"{key}/{rank}" for rank in range(self._place.size)])
        self.come_past(f"{key}/read")  # what was read may be a reason to end, for trainer 0 and its store too
        return {rank: text.decode() for rank, text in enumerate(texts)}
