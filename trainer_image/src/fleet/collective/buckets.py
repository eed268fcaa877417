"""Where the gradients of some parameters travel; made anew when a model has moved."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from fleet.collective.group import Group
from fleet.collective.notes import Notes
from fleet.collective.reducer import BUCKET_BYTES, CommHook, Reducer
from fleet.errors import ConfigurationError

__all__ = ["Buckets", "Compression"]

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
            self._made, self._anew = True, False
        self.reducer.begin()

    def averages(self) -> list[torch.Tensor]:
        """Return the averages of a pass, by parameter; see `Reducer.averages`."""
        return self.reducer.averages()[1:]

    def order_anew(self) -> None:
        """Have the next pass say in which order gradients come; every trainer calls this after the same one.

        Buckets that a graph was captured with stay, as its replays go on in them; so do those of which
        what was left out is remembered.
        """
        self._anew = not self._kept

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
        frozen = [each for each in self._parameters if not each.requires_grad]
        for each in frozen:  # it may be trained again, and torch takes in what needs a gradient now
            each.requires_grad_(True)
        try:
            self.reducer = Reducer(leaves, self._channel, bucket_bytes=self._bucket_bytes, hook=hook)
        finally:
            for each in frozen:
                each.requires_grad_(False)
