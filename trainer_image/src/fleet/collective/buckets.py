"""Where the gradients of some parameters travel; made anew when a model has moved."""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Final

import torch
import torch.distributed as dist

from fleet.collective.group import Group
from fleet.collective.notes import Notes
from fleet.collective.reducer import BUCKET_BYTES, CommHook, Reducer
from fleet.errors import ConfigurationError

__all__ = ["NOTES", "Buckets", "Compression"]

NOTES: Final = -1
"""The place of the notes in an order of parameters' positions."""

Compression = Callable[[dist.ProcessGroup | None], CommHook]
"""Given the connections, returns what averages a bucket of gradients."""


class Buckets:
    """torch's reducer for some parameters, over connections of their own, and the notes beside them.

    Parameters
    ----------
    group : Group
    parameters : sequence of Tensor
    bucket_bytes : int
        How much travels at once.
    compression : callable, optional
        Given the connections, returns what averages a bucket, and counts its bytes; an all-reduce does
        otherwise.
    remembers : bool
        Whether it adds to a bucket what it has left out of that one before.
    """

    reducer: Reducer
    """Once a pass has begun; so are `notes`."""
    notes: Notes

    def __init__(
        self,
        group: Group,
        parameters: Sequence[torch.Tensor],
        *,
        bucket_bytes: int = BUCKET_BYTES,
        compression: Compression | None = None,
        remembers: bool = False,
    ) -> None:
        self._group = group
        self._parameters = parameters
        self._bucket_bytes = bucket_bytes
        self._compression = compression
        self._channel: dist.ProcessGroup | None = None
        self._kept = remembers
        self._made = self._anew = False
        self._once_unused: set[int] = set()
        self._order: list[int] | None = None

    def connect(self) -> None:
        """Make the connections; every trainer calls this."""
        self._channel = self._group.channel()
        self._group.use(self._parameters, self._channel)

    def begin(self) -> None:
        """Begin an exchange, with the first gradient of a pass.

        Raises
        ------
        ConfigurationError
            The parameters are on devices of two kinds.
        """
        if self._parameters[0].is_cuda and torch.cuda.is_current_stream_capturing():
            self._kept, self._anew = True, False
        if not self._made or self._anew or not self.reducer.fits():
            self.let_go()
            self._group.use(self._parameters, self._channel)
            self._lay_out()
            self._made, self._anew, self._order = True, False, None
        self.reducer.begin()

    def averages(self) -> list[torch.Tensor]:
        """Return the averages of a pass, by parameter; see `Reducer.averages`."""
        return self.reducer.averages()[1:]

    @property
    def order(self) -> list[int] | None:
        """The positions of parameters, and `NOTES`, in the order in which buckets have them.

        None if the next pass decides, in which all travel in one bucket.
        """
        return None if self._anew else self._order

    @property
    def once_unused(self) -> list[int]:
        """The parameters that nobody has used in some pass."""
        return sorted(self._once_unused)

    def end(self, order: Iterable[int], unused: Collection[int]) -> None:
        """End an exchange, whose gradients came in this order; every trainer calls this.

        The first one decides the order in the buckets, and so does the one after one in which nobody used a
        parameter that was always used before: its bucket would hold up all behind it until the end of each
        pass. Buckets that a graph was captured with stay, as its replays go on in them; so do those of
        which what was left out is remembered.
        """
        if not self.reducer.ordered:  # which gives the gradients other places
            self._order = list(order)
            with self._group.waiting("the order of the gradients", device=self._parameters[0].device):
                self.reducer.end()
        elif not self._once_unused.issuperset(unused):
            self._anew = not self._kept
        self._once_unused.update(unused)

    def resume(self, order: Sequence[int], once_unused: Iterable[int]) -> None:
        """Have the buckets in an order that was theirs before; every trainer calls this.

        Sums of three and more depend on where in a bucket they are made.
        """
        if self._kept:
            return
        self._once_unused.update(once_unused)
        gradients = [parameter.grad for parameter in self._parameters]
        self.let_go()
        what, device = "the order of the gradients", self._parameters[0].device
        with _trainable(self._parameters), self._group.waiting(what, device=device):
            self.begin()
            leaves = {NOTES: self.notes.leaf, **dict(enumerate(self._parameters))}
            for position in order:
                torch.autograd.backward([leaves[position]], [torch.zeros_like(leaves[position])])
        self.end(order, ())
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient

    def let_go(self) -> None:
        """Let go of the reducer, which has hooks on the parameters."""
        if self._made:
            self._made = False
            del self.reducer, self.notes

    @property
    def num_bytes(self) -> int:
        """What a pass averages, as far as nobody else counts it."""
        return self.reducer.num_bytes if self._compression is None else 0

    def _lay_out(self) -> None:
        kinds = sorted({parameter.device.type for parameter in self._parameters})
        if len(kinds) > 1:
            raise ConfigurationError(
                f"the optimizer's parameters are on {' and on '.join(kinds)}; expected all on devices of one "
                "kind: give each kind an optimizer of its own, and each its fleet.distributed_optimizer"
            )
        hook = self._compression(self._channel) if self._compression is not None else None
        self.notes = Notes(
            len(self._parameters),
            self._group.place.size,
            self._parameters[0].device,
            exactly=hook is not None,
        )
        leaves = [self.notes.leaf, *self._parameters]
        with _trainable(self._parameters):
            self.reducer = Reducer(leaves, self._channel, bucket_bytes=self._bucket_bytes, hook=hook)


@contextlib.contextmanager
def _trainable(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Have frozen parameters take gradients: torch takes in what does now, and they may be trained again."""
    frozen = [each for each in parameters if not each.requires_grad]
    for each in frozen:
        each.requires_grad_(True)
    try:
        yield
    finally:
        for each in frozen:
            each.requires_grad_(False)
