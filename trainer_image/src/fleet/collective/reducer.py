"""Applies torch's reducer to an optimizer's parameters, independently of how the script calls its model.

It is the reducer of `torch.nn.parallel.DistributedDataParallel`, over a module that holds the parameters and
computes nothing. DistributedDataParallel prepares its reducer around the model's forward pass; here this
happens when the first gradient of a backward pass arrives. ADR 0054 has the alternatives.
"""

import contextlib
import inspect
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fleet.collective.devices import is_capturing
from fleet.collective.group import Group
from fleet.errors import ConfigurationError

__all__ = ["BUCKET_BYTES", "FLAGS", "FLAG_BITS", "Buckets", "CommHook", "Compression", "Flags", "Reducer"]

BUCKET_BYTES: Final = 25 << 20
FLAGS: Final = -1
"""The position that stands for the flags among the positions of parameters."""
FLAG_BITS: Final = 32
_DELAY: Final = 4
"""The number of exchanges after which a GPU's flags are read, so that reading does not wait for the GPU."""
_MOST_IN_FLOAT32: Final = 1024
"""The maximum number of trainers at which a float32 sum is exact enough to show one trainer's part."""
_BATCHED: Final = "batched_grad_copy"
"""The argument of newer versions of torch that makes one kernel copy all gradients of a bucket."""

_DTYPE_AND_DEVICE: Final = attrgetter("dtype", "device")

CommHook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]
"""Maps a state and a bucket to the bucket's average; see `DistributedDataParallel.register_comm_hook`."""

Compression = Callable[[dist.ProcessGroup | None], CommHook]
"""Returns a hook for the given connections, which averages a bucket of gradients and counts its bytes."""


class Flags:
    """A leaf tensor whose gradient carries control data and is averaged like the parameters' gradients.

    A reducer returns only averages, so every element is 0 or 1. There is one element for each parameter,
    which is 1 if this trainer has a gradient of the parameter, and one for each bit of a number. All trainers
    have the same number if the average of every bit is 0 or 1. All trainers read the same averages, so all
    reach the same conclusion.

    Parameters
    ----------
    num_parameters : int
    size : int
        The number of trainers.
    device : torch.device
    separate : bool
        Use a separate dtype, because hooks compress the other gradients.
    delay : int, optional
        The number of further exchanges before the number's bits are read; by default it depends on the
        device.
    """

    def __init__(
        self,
        num_parameters: int,
        size: int,
        device: torch.device,
        *,
        separate: bool = False,
        delay: int | None = None,
    ) -> None:
        dtype = torch.float64 if separate or size > _MOST_IN_FLOAT32 else torch.float32
        self.leaf = torch.zeros(num_parameters + FLAG_BITS, dtype=dtype, device=device, requires_grad=True)
        self._num_parameters = num_parameters
        self._size = size
        self._delay = delay if delay is not None else _DELAY * (device.type == "cuda")
        self._given = self.leaf.detach()
        self._bits: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()

    def gradient(self, absent: Sequence[int], number: int) -> torch.Tensor:
        """Return this trainer's flags, which encode the parameters without a gradient and a 32-bit number."""
        self.leaf.grad = None
        if not is_capturing(self.leaf.device):  # a captured graph would send the same number in each replay
            bits = [number >> bit & 1 for bit in range(FLAG_BITS)]
            given = torch.ones(len(self.leaf), dtype=self.leaf.dtype)
            given[self._num_parameters :] = torch.tensor(bits)
            if absent:
                given[list(absent)] = 0
            self._given = given.to(self.leaf.device)
        return self._given.clone()

    def unused(self, positions: Sequence[int]) -> set[int]:
        """Return the given parameters for which no trainer has a gradient."""
        if not positions:
            return set()
        averages = self._averages()[positions].tolist()
        return {position for position, average in zip(positions, averages, strict=True) if average == 0}

    def are_equal(self) -> bool:
        """Return False if the flags received so far show that trainers sent different numbers."""
        if is_capturing(self.leaf.device):
            return True
        self._bits.append(self._copied())
        if len(self._bits) <= self._delay:
            return True
        bits, event = self._bits.popleft()
        if event is not None:
            event.synchronize()
        # A single trainer with another bit moves the average by 1/size. Half of that leaves room for the
        # rounding of the sum.
        return all(min(each, abs(1 - each)) < 0.5 / self._size for each in bits.tolist())

    def _averages(self) -> torch.Tensor:
        return cast("torch.Tensor", self.leaf.grad)  # the reducer has replaced the flags in place

    def _copied(self) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        bits = self._averages()[self._num_parameters :]
        if not bits.is_cuda:
            return bits.clone(), None
        copy = torch.empty(FLAG_BITS, dtype=bits.dtype, pin_memory=True)
        copy.copy_(bits, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(bits.device))
        return copy, event


class Buckets:
    """torch's reducer for the given leaf tensors, whose gradients become views of its buckets.

    Parameters
    ----------
    leaves : sequence of Tensor
        On devices of one type. In the first pass all are sent in one bucket, later in the order of that pass.
    channel : ProcessGroup or None
        None for the default process group of torch.distributed.
    bucket_bytes : int
    hook : CommHook, optional
        Computes a bucket's average; by default an all-reduce does.
    """

    def __init__(
        self,
        leaves: Sequence[torch.Tensor],
        channel: dist.ProcessGroup | None,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        hook: CommHook | None = None,
    ) -> None:
        # No initial broadcast: `Trainer.distribute` shares trainer 0's values, and a reducer that is built
        # again must not replace values in the middle of training.
        options: dict[str, Any] = {"init_sync": False, "gradient_as_bucket_view": True}
        if (
            bucket_bytes != BUCKET_BYTES
        ):  # by torch's own default the first bucket is smaller, and is sent early
            options["bucket_cap_mb"] = bucket_bytes / (1 << 20)
        if _BATCHED in inspect.signature(DistributedDataParallel).parameters:
            options[_BATCHED] = leaves[0].is_cuda
        self._parallel = DistributedDataParallel(_Holder(leaves), process_group=channel, **options)
        if hook is not None:
            self._parallel.register_comm_hook(None, hook)
        self._leaves = list(leaves)
        self._forms = self._current_forms()
        self._views: list[torch.Tensor] = []
        """The reducer's own gradients; kept, because recreating their Python objects would be slower."""
        self._averages: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self.num_bytes = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
        """The number of bytes that a pass averages."""
        self.ordered = False
        """True once the buckets follow the order in which gradients arrive."""

    def fits(self) -> bool:
        """Return whether all leaves still have the dtypes, devices and layouts that the buckets expect."""
        return self._current_forms() == self._forms

    # A gradient hook runs without grad mode, in which DistributedDataParallel does not prepare its reducer.
    @torch.enable_grad()
    def begin(self) -> None:
        """Begin a pass, in which gradients are averaged as they arrive."""
        self._parallel()

    @torch.enable_grad()
    def follow_order(self) -> None:
        """Arrange the buckets in the order of trainer 0's first pass; every trainer must call this."""
        self.ordered = True
        self._averages = []
        # A forward pass rebuilds the buckets. In no_sync() it does not also wait for a backward pass.
        with self._parallel.no_sync():
            self._parallel()

    def averages(self) -> list[torch.Tensor]:
        """Return the averages by leaf, as views of the reducer's buckets.

        They are separate tensor objects because a model that moves changes its gradients in place.
        """
        if not self._averages or list(map(torch.Tensor.data_ptr, self._averages)) != self._addresses:
            self._views = [cast("torch.Tensor", leaf.grad) for leaf in self._leaves]
            self._averages = [view.detach() for view in self._views]
            self._addresses = list(map(torch.Tensor.data_ptr, self._averages))
        return self._averages

    def _current_forms(self) -> list[Any]:
        return [*map(_DTYPE_AND_DEVICE, self._leaves), *map(torch.Tensor.stride, self._leaves)]


class _Holder(torch.nn.Module):
    """A module whose parameters may be any leaf tensors that an optimizer accepts."""

    def __init__(self, leaves: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._parameters.update({str(number): leaf for number, leaf in enumerate(leaves)})  # type: ignore[misc]

    def forward(self) -> None:
        """Do nothing; the reducer requires a forward method."""


class Reducer:
    """Averages the gradients of an optimizer's parameters, and the flags, over dedicated connections.

    Parameters
    ----------
    group : Group
    parameters : sequence of Tensor
    bucket_bytes : int
        The size of a bucket.
    compression : Compression, optional
        By default an all-reduce averages a bucket.
    stateful : bool
        True if the compression adds the error of a bucket's previous average to the same bucket (error
        feedback).
    """

    buckets: Buckets
    """The buckets, created together with `flags` in the first pass, because the model may move before it."""
    flags: Flags

    def __init__(
        self,
        group: Group,
        parameters: Sequence[torch.Tensor],
        *,
        bucket_bytes: int = BUCKET_BYTES,
        compression: Compression | None = None,
        stateful: bool = False,
    ) -> None:
        self._group = group
        self._parameters = parameters
        self._bucket_bytes = bucket_bytes
        self._compression = compression
        self._channel: dist.ProcessGroup | None = None
        self._fixed = stateful
        """True if the order of the buckets must not change."""
        self._is_laid_out = self._is_outdated = False
        self._once_unused: set[int] = set()
        self._order: list[int] | None = None

    def connect(self) -> None:
        """Open the connections; every trainer must call this."""
        self._channel = self._group.channel()
        self._group.use(self._parameters, self._channel)

    def begin(self) -> None:
        """Begin an exchange at the first gradient of a pass.

        Raises
        ------
        ConfigurationError
            The parameters are on devices of two kinds.
        """
        if self._parameters[0].is_cuda and torch.cuda.is_current_stream_capturing():
            self._fixed, self._is_outdated = True, False  # the graph's replays use these buckets
        if not self._is_laid_out or self._is_outdated or not self.buckets.fits():
            self.release()
            self._group.use(self._parameters, self._channel)
            self._lay_out()
            self._is_laid_out, self._is_outdated, self._order = True, False, None
        self.buckets.begin()

    def averages(self) -> list[torch.Tensor]:
        """Return the averages of a pass, by parameter; see `Buckets.averages`."""
        return self.buckets.averages()[1:]

    @property
    def order(self) -> list[int] | None:
        """The positions of the parameters, and `FLAGS`, in the order in which the buckets contain them.

        None if the next pass determines the order; that pass sends all of them in one bucket.
        """
        return None if self._is_outdated else self._order

    @property
    def once_unused(self) -> list[int]:
        """The parameters that no trainer used in at least one pass."""
        return sorted(self._once_unused)

    @property
    def num_bytes(self) -> int:
        """The number of bytes averaged in each pass; 0 if the compression hook counts them."""
        return self.buckets.num_bytes if self._compression is None else 0

    def end(self, order: Iterable[int], unused: Collection[int]) -> None:
        """End an exchange, given the order in which its gradients arrived; every trainer must call this.

        The first exchange determines the order of the buckets. It is determined again after an exchange in
        which no trainer used a parameter that was always used before, because this parameter's bucket would
        delay all later buckets until the end of each pass. Buckets of a captured graph, and those of a
        stateful compression, keep their order.
        """
        if not self.buckets.ordered:
            self._order = list(order)
            with self._group.waiting("the order of the gradients", device=self._parameters[0].device):
                self.buckets.follow_order()
        elif not self._once_unused.issuperset(unused):
            self._is_outdated = not self._fixed
        self._once_unused.update(unused)

    def resume(self, order: Sequence[int], once_unused: Iterable[int]) -> None:
        """Arrange the buckets in the order stored in a checkpoint; every trainer must call this.

        The exact value of a sum over three or more trainers depends on its position in a bucket.
        """
        if self._fixed:
            return
        self._once_unused.update(once_unused)
        gradients = [parameter.grad for parameter in self._parameters]
        self.release()
        what, device = "the order of the gradients", self._parameters[0].device
        with _trainable(self._parameters), self._group.waiting(what, device=device):
            self.begin()
            leaves = {FLAGS: self.flags.leaf, **dict(enumerate(self._parameters))}
            for position in order:  # exchange zeros in that order
                torch.autograd.backward([leaves[position]], [torch.zeros_like(leaves[position])])
        self.end(order, ())
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient

    def release(self) -> None:
        """Delete the buckets and remove their hooks from the parameters."""
        if self._is_laid_out:
            self._is_laid_out = False
            del self.buckets, self.flags

    def _lay_out(self) -> None:
        kinds = sorted({parameter.device.type for parameter in self._parameters})
        if len(kinds) > 1:
            raise ConfigurationError(
                f"the optimizer's parameters are on {' and on '.join(kinds)}; expected all on devices of one "
                "kind: use a separate optimizer for each kind, each with its own fleet.distributed_optimizer"
            )
        hook = self._compression(self._channel) if self._compression is not None else None
        number, device = len(self._parameters), self._parameters[0].device
        self.flags = Flags(number, self._group.world.size, device, separate=hook is not None)
        leaves = [self.flags.leaf, *self._parameters]
        with _trainable(self._parameters):
            self.buckets = Buckets(leaves, self._channel, bucket_bytes=self._bucket_bytes, hook=hook)


@contextlib.contextmanager
def _trainable(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Unfreeze parameters in the `with` block; the reducer ignores any that are frozen when it is built."""
    frozen = [each for each in parameters if not each.requires_grad]
    for each in frozen:
        each.requires_grad_(True)
    try:
        yield
    finally:
        for each in frozen:
            each.requires_grad_(False)
