"""Gradient compression with communication hooks of torch's reducer."""

from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from fleet.collective.group import Group
from fleet.process import progress

if TYPE_CHECKING:
    from fleet.averaging import PowerSGD
    from fleet.collective.reducer import CommHook

__all__ = ["factorizing", "rounding"]

_EXACT: Final = torch.float64
"""The dtype of tensors that are not compressed: the flags, and the gradients of a float64 model."""

_ROUNDED: Final = {
    "bfloat16": default_hooks.bf16_compress_hook,
    "float16": default_hooks.fp16_compress_hook,
}
_ROUNDED_BYTES: Final = 2
_EPSILON: Final = 1e-8
"""The number added to a column's norm before division; the norm is zero if no trainer uses the matrix."""


def rounding(wire_dtype: str, channel: dist.ProcessGroup | None) -> "CommHook":
    """Return a hook that averages gradient buckets in a 16-bit dtype and counts the averaged bytes.

    Parameters
    ----------
    wire_dtype : str
        ``bfloat16`` or ``float16``.
    channel : ProcessGroup or None
        None for the default process group of torch.distributed.
    """
    average = _ROUNDED[wire_dtype]

    def hook(_: Any, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations
        buffer = bucket.buffer()
        if buffer.dtype is _EXACT:
            return _average_exactly(channel, bucket)
        progress.count("bytes_reduced", buffer.numel() * _ROUNDED_BYTES)
        return average(channel, bucket)  # type: ignore[arg-type]

    return hook


def factorizing(power_sgd: "PowerSGD", group: Group, channel: dist.ProcessGroup | None) -> "CommHook":
    """Return a hook that averages gradient matrices as low-rank products and counts the averaged bytes.

    If the average of a bucket holds NaN or infinity, the bucket's compression state is reset for the next
    pass.

    Parameters
    ----------
    power_sgd : PowerSGD
    group : Group
        The trainers' group, which reports the trainers that delay an average.
    channel : ProcessGroup or None
        None for the default process group of torch.distributed.
    """
    state = powerSGD_hook.PowerSGDState(
        channel,
        matrix_approximation_rank=power_sgd.matrix_rank,
        start_powerSGD_iter=power_sgd.start_step,
        orthogonalization_epsilon=_EPSILON,
    )

    def hook(_: Any, bucket):  # type: ignore[no-untyped-def]
        buffer = bucket.buffer()
        if buffer.dtype is _EXACT:
            state.maybe_increase_iter(bucket)  # type: ignore[no-untyped-call]  # if it is the last bucket
            return _average_exactly(channel, bucket)
        whole = state.iter < state.start_powerSGD_iter
        before = state.total_numel_after_compression
        future = powerSGD_hook.powerSGD_hook(state, _without_scalars(bucket))
        numel = buffer.numel() if whole else state.total_numel_after_compression - before
        progress.count("bytes_reduced", numel * buffer.element_size())
        if not whole:
            future = future.then(partial(_forget_unless_finite, state, bucket.index()))
        if not buffer.is_cuda:
            # gloo's threads send a bucket's parts in any order, so the parts of two concurrent buckets could
            # be mixed up.
            with group.waiting("an average by PowerSGD"):
                future.wait()
        return future

    return hook


def _without_scalars(bucket: Any) -> Any:
    """Return the bucket with scalar gradients viewed as one-dimensional tensors, as torch's hook requires."""
    given = [each.view(each.shape or (1,)) for each in bucket.gradients() if each.numel()]
    return SimpleNamespace(
        buffer=bucket.buffer, index=bucket.index, is_last=bucket.is_last, gradients=lambda: given
    )


def _forget_unless_finite(
    state: powerSGD_hook.PowerSGDState, index: int, future: torch.futures.Future[torch.Tensor]
) -> torch.Tensor:
    """Return a bucket's average; if it contains NaN or infinity, reset torch's state for the bucket.

    All trainers read the same average, so all delete the state after the same pass and draw the same new
    factors. Reading the average causes no further wait, because torch has just waited for the device.
    """
    average = future.value()
    extremes = torch.stack(torch.aminmax(average))  # both are NaN if any number is
    if not bool(torch.isfinite(extremes).all()):
        for memory in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
            memory.pop(index, None)
    return average


def _average_exactly(channel: dist.ProcessGroup | None, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    buffer = bucket.buffer()
    progress.count("bytes_reduced", buffer.numel() * buffer.element_size())
    return default_hooks.allreduce_hook(channel, bucket)  # type: ignore[arg-type]
