"""Fields that a strategy of the original has and ours has not, and what to use instead."""

from collections.abc import Mapping
from typing import Final

__all__ = ["ORIGINALS"]

_LOCAL = "set strategy.local_sgd = fleet.LocalSGD(k_steps=8); collective training only"
_FIXED = (
    "its k would follow the loss, which an optimizer is not told; "
    "set strategy.local_sgd = fleet.LocalSGD(k_steps=8, begin_step=30)"
)
_RECOMPUTED = "use torch.utils.checkpoint in the model"
_AUTOCAST = "run the forward pass under torch.autocast"
_EXECUTED = "PyTorch runs the model, and has settings of its own"
ORIGINALS: Final[Mapping[str, str]] = {
    "use_local_sgd": _LOCAL,
    "local_sgd_config": _LOCAL,
    "localsgd": _LOCAL,
    "localsgd_configs": _LOCAL,
    "adaptive_localsgd": _FIXED,
    "adaptive_localsgd_configs": _FIXED,
    "use_dgc": "no gradient travels in parts; wire_dtype='bfloat16' halves it, power_sgd makes it narrow",
    "use_amp": _AUTOCAST,
    "amp_loss_scaling": _AUTOCAST,
    "forward_recompute": _RECOMPUTED,
    "recompute_checkpoints": _RECOMPUTED,
    "fuse_all_reduce_ops": "gradients travel in buckets anyway",
    "sync_batch_norm": "give torch.nn.SyncBatchNorm.convert_sync_batchnorm the model, on GPUs",
    "exec_strategy": _EXECUTED,
    "build_strategy": _EXECUTED,
}
"""The original's other fields of a strategy, and what to use instead."""
