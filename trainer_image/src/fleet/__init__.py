"""Parameter-server and collective training for PyTorch, with the semantics of PaddlePaddle Fleet.

Importing this package is cheap: a public name is imported from its module when it is first used, and only
the modules that need torch import it.
"""

import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from fleet.errors import meant
from fleet.installation import problem_with
from fleet.process import lifecycle as lifecycle  # installs the hook that reports a user's mistake

if TYPE_CHECKING:
    from fleet.typed import *  # noqa: F403

__version__ = "0.1.0"

if "torch" in sys.modules:  # before the script builds its optimizer, which may be long before fleet.init()
    from fleet.without_dynamo import defer_dynamo

    defer_dynamo()

_NAMES_IN = {
    "averaging": ("LocalSGD", "PowerSGD"),
    "checkpoint": ("TrainStatus",),
    "errors": (
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
    "fluid.executor": ("Executor",),
    "fluid.ir": ("Block", "Operator", "Variable"),
    "fluid.parallel_executor": ("ParallelExecutor",),
    "fluid.place": ("CPUPlace", "CUDAPlace"),
    "fluid.program": ("Program", "default_main_program", "default_startup_program"),
    "fluid.transpiler": ("DistributeTranspiler",),
    "loop": ("epochs", "prefetch", "steps"),
    "plan.clipping": ("ClipGradByGlobalNorm", "ClipGradByNorm", "ClipGradByValue"),
    "plan.config": ("DistributeTranspilerConfig", "DistributedMode"),
    "plan.dispatch": ("HashName", "PSDispatcher", "RoundRobin"),
    "process.lifecycle": ("report",),
    "strategy": (
        "DistributedStrategy",
        "StrategyFactory",
        "create_async_strategy",
        "create_geo_strategy",
        "create_half_async_strategy",
        "create_sync_strategy",
    ),
}
"""The public names, by module. For type checkers, ``make docs`` writes `fleet.typed` from them."""

_PACKAGES = ("nn", "tables")
"""The modules that scripts use as attributes, as in ``fleet.nn.DistributedEmbedding``."""

NAMES = {name: f"fleet.{module}" for module, names in _NAMES_IN.items() for name in names}
__all__ = sorted(NAMES)
NAMES |= dict.fromkeys(_PACKAGES, "fleet")
"""The module of each public name. Scripts find the names in this package and on their `fleet` object."""

_RUN_BY_AN_EXECUTOR = "run the program itself with fleet.Executor, in one process for each device"
_LEFT_TO_PYTORCH = "PyTorch runs the model, and has its own settings"
_NOT_HERE = {
    "CompiledProgram": f"{_RUN_BY_AN_EXECUTOR} (python -m fleet.launch)",
    "BuildStrategy": _LEFT_TO_PYTORCH,
    "ExecutionStrategy": _LEFT_TO_PYTORCH,
    "DGCMomentumOptimizer": "gradients are always sent whole; see strategy.wire_dtype and strategy.power_sgd",
}
"""Names of Paddle that this package does not have, and what to use instead."""


if (_problem := problem_with(sys.modules[__name__], Path(__file__).parent)) is not None:
    warnings.warn(_problem, RuntimeWarning, stacklevel=2)


def unknown_name(name: str, problem: str) -> AttributeError:
    """Return the AttributeError for an unknown name; for a Paddle name, it says what to use instead."""
    if name in _NOT_HERE:
        problem = f"fleet has no {name}: {_NOT_HERE[name]}"
    return AttributeError(problem, name=name, obj=None)  # of an obj, Python would add a guess of its own


if not TYPE_CHECKING:  # hidden from type checkers, which should report a name that is not in fleet.typed

    def __getattr__(name: str) -> object:
        if name in _PACKAGES:
            return import_module(f"fleet.{name}")
        if name in NAMES:
            value = globals()[name] = getattr(import_module(NAMES[name]), name)
            return value
        close = meant(name, NAMES, cutoff=0.8)  # else main_program would mean default_main_program
        raise unknown_name(
            name,
            f"module 'fleet' has no attribute {name!r}{close}; init(), distributed_optimizer() and the other "
            "calls of a job are methods of the object that a script imports with 'from "
            "fleet.parameter_server import fleet' or, for collective training, 'from fleet.collective "
            "import fleet'",
        )


def __dir__() -> list[str]:
    return sorted({*globals(), *NAMES})
