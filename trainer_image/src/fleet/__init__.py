"""Parameter-server and collective training for PyTorch, with the semantics of PaddlePaddle Fleet.

Importing this package is cheap: a public name is imported from its module when it is first used, and only
the modules that need torch import it.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fleet.process import lifecycle as lifecycle  # its import makes report() serve itself in a plain script
from fleet.process.progress import report

if TYPE_CHECKING:
    from fleet.averaging import LocalSGD, PowerSGD
    from fleet.checkpoint import TrainStatus
    from fleet.errors import (
        CheckpointError,
        ConfigurationError,
        DeadlineExceededError,
        FleetError,
        PeerLostError,
        ProtocolError,
        RoleError,
        StateLostError,
        TranspileError,
    )
    from fleet.executor.executor import Executor
    from fleet.executor.parallel import ParallelExecutor
    from fleet.executor.place import CPUPlace, CUDAPlace
    from fleet.loop import epochs, prefetch, steps
    from fleet.program import (
        Block,
        ClipGradByGlobalNorm,
        ClipGradByNorm,
        ClipGradByValue,
        Operator,
        Program,
        Variable,
        default_main_program,
        default_startup_program,
    )
    from fleet.strategy import (
        DistributedStrategy,
        StrategyFactory,
        create_async_strategy,
        create_geo_strategy,
        create_half_async_strategy,
        create_sync_strategy,
    )
    from fleet.transpiler import (
        DistributedMode,
        DistributeTranspiler,
        DistributeTranspilerConfig,
        HashName,
        PSDispatcher,
        RoundRobin,
    )

__version__ = "0.1.0"

if "torch" in sys.modules:  # a script that is about to build its optimizer, maybe long before fleet.init()
    from fleet.without_dynamo import defer_dynamo

    defer_dynamo()

_MODULE_OF = {
    **dict.fromkeys(("LocalSGD", "PowerSGD"), "fleet.averaging"),
    "TrainStatus": "fleet.checkpoint",
    **dict.fromkeys(
        (
            "CheckpointError",
            "ConfigurationError",
            "DeadlineExceededError",
            "FleetError",
            "PeerLostError",
            "ProtocolError",
            "RoleError",
            "StateLostError",
            "TranspileError",
        ),
        "fleet.errors",
    ),
    "Executor": "fleet.executor.executor",
    "ParallelExecutor": "fleet.executor.parallel",
    **dict.fromkeys(("epochs", "prefetch", "steps"), "fleet.loop"),
    **dict.fromkeys(("CPUPlace", "CUDAPlace"), "fleet.executor.place"),
    **dict.fromkeys(
        (
            "Block",
            "ClipGradByGlobalNorm",
            "ClipGradByNorm",
            "ClipGradByValue",
            "Operator",
            "Program",
            "Variable",
            "default_main_program",
            "default_startup_program",
        ),
        "fleet.program",
    ),
    **dict.fromkeys(
        (
            "DistributedStrategy",
            "StrategyFactory",
            "create_async_strategy",
            "create_geo_strategy",
            "create_half_async_strategy",
            "create_sync_strategy",
        ),
        "fleet.strategy",
    ),
    **dict.fromkeys(
        (
            "DistributedMode",
            "DistributeTranspiler",
            "DistributeTranspilerConfig",
            "HashName",
            "PSDispatcher",
            "RoundRobin",
        ),
        "fleet.transpiler",
    ),
}

__all__ = [
    "Block",
    "CPUPlace",
    "CUDAPlace",
    "CheckpointError",
    "ClipGradByGlobalNorm",
    "ClipGradByNorm",
    "ClipGradByValue",
    "ConfigurationError",
    "DeadlineExceededError",
    "DistributeTranspiler",
    "DistributeTranspilerConfig",
    "DistributedMode",
    "DistributedStrategy",
    "Executor",
    "FleetError",
    "HashName",
    "LocalSGD",
    "Operator",
    "PSDispatcher",
    "ParallelExecutor",
    "PeerLostError",
    "PowerSGD",
    "Program",
    "ProtocolError",
    "RoleError",
    "RoundRobin",
    "StateLostError",
    "StrategyFactory",
    "TrainStatus",
    "TranspileError",
    "Variable",
    "create_async_strategy",
    "create_geo_strategy",
    "create_half_async_strategy",
    "create_sync_strategy",
    "default_main_program",
    "default_startup_program",
    "epochs",
    "prefetch",
    "report",
    "steps",
]


_PACKAGES = ("nn", "tables")
"""What scripts say as ``fleet.nn.DistributedEmbedding``; each is imported when it is used."""

_RUN_BY_AN_EXECUTOR = "run the program itself with fleet.Executor, in one process for each device"
_LEFT_TO_PYTORCH = "PyTorch runs the model, and has settings of its own"
_NOT_HERE = {
    "CompiledProgram": f"{_RUN_BY_AN_EXECUTOR} (python -m fleet.launch)",
    "BuildStrategy": _LEFT_TO_PYTORCH,
    "ExecutionStrategy": _LEFT_TO_PYTORCH,
    "DGCMomentumOptimizer": "no gradient travels in parts; see strategy.wire_dtype and strategy.power_sgd",
}
"""The original's names that scripts may use and that are not here, and what to do instead."""


def __getattr__(name: str) -> Any:
    if name in _NOT_HERE:
        raise AttributeError(f"fleet has no {name}: {_NOT_HERE[name]}")
    if name in _PACKAGES:
        return import_module(f"fleet.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
