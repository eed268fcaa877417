"""torch's own reducer, for whichever parameters.

It is that of `torch.nn.parallel.DistributedDataParallel`, over a module that has the parameters and computes
nothing. What that class does around a model's forward pass is done when the first gradient of a backward
pass is there: so it is the same how a script calls its model, or whether it does.
"""

import inspect
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

__all__ = ["BUCKET_BYTES", "CommHook", "Reducer"]

BUCKET_BYTES: Final = 25 << 20
_BATCHED: Final = "batched_grad_copy"
"""An argument of newer versions: one kernel copies all gradients of a bucket."""

_DTYPE_AND_DEVICE: Final = attrgetter("dtype", "device")

CommHook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]
"""From a state and a bucket to its average, as `DistributedDataParallel.register_comm_hook` takes it."""


class Reducer:
    """Averages gradients into buckets, of which they become views.

    Parameters
    ----------
    leaves : sequence of Tensor
        In the first pass all travel at once, and afterwards in the order of that one. All on devices of one
        type.
    channel : ProcessGroup or None
        That of torch.distributed where it is None.
    bucket_bytes : int
    hook : CommHook, optional
        Makes a bucket's average; an all-reduce does otherwise.
    """

    def __init__(
        self,
        leaves: Sequence[torch.Tensor],
        channel: dist.ProcessGroup | None,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        hook: CommHook | None = None,
    ) -> None:
        options: dict[str, Any] = {"init_sync": False, "gradient_as_bucket_view": True}
        if bucket_bytes != BUCKET_BYTES:  # else the first bucket is smaller, and leaves early
            options["bucket_cap_mb"] = bucket_bytes / (1 << 20)
        if _BATCHED in inspect.signature(DistributedDataParallel).parameters:
            options[_BATCHED] = leaves[0].is_cuda
        self._parallel = DistributedDataParallel(_Holder(leaves), process_group=channel, **options)
        if hook is not None:
            self._parallel.register_comm_hook(None, hook)
        self._leaves = list(leaves)
        self._forms = self._now()
        self._views: list[torch.Tensor] = []
        """The gradients as the reducer has them: kept, as making Python's objects anew takes longer."""
        self._averages: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self.num_bytes = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
        """What a pass averages."""
        self.ordered = False
        """Whether the buckets follow the order in which gradients come."""

    def fits(self) -> bool:
        """Whether every leaf has the dtype, device and layout that it had; a model may have moved."""
        return self._now() == self._forms

    @torch.enable_grad()
    def begin(self) -> None:
        """Have the gradients that come from now on averaged, once each, until all are there."""
        self._parallel()

    @torch.enable_grad()
    def end(self) -> None:
        """After the first pass, lay out the buckets in its order, which is trainer 0's; all call this."""
        self.ordered = True
        self._averages = []
        with self._parallel.no_sync():
            self._parallel()

    def averages(self) -> list[torch.Tensor]:
        """Return what a pass has come to, by leaf: other tensors of the same memory than the reducer's own.

        A model that moves moves its gradients, too.
        """
        if not self._averages or list(map(torch.Tensor.data_ptr, self._averages)) != self._addresses:
            self._views = [cast("torch.Tensor", leaf.grad) for leaf in self._leaves]
            self._averages = [view.detach() for view in self._views]
            self._addresses = list(map(torch.Tensor.data_ptr, self._averages))
        return self._averages

    def _now(self) -> list[Any]:
        return [*map(_DTYPE_AND_DEVICE, self._leaves), *map(torch.Tensor.stride, self._leaves)]


class _Holder(torch.nn.Module):
    """Has leaves that may be no `torch.nn.Parameter`, as an optimizer takes them."""

    def __init__(self, leaves: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._parameters.update({str(number): leaf for number, leaf in enumerate(leaves)})  # type: ignore[misc]

    def forward(self) -> None:
        """Compute nothing."""
