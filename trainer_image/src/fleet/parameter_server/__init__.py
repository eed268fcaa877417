"""Training with parameter servers: scripts run ``from fleet.parameter_server import fleet``.

A trainer sends each gradient as soon as it is computed. The servers update the blocks that they own with the
user's torch.optim class; ``optimizer.step()`` then copies the new values into the parameters. Control calls
use gRPC; tensors travel in raw frames over TCP (see `fleet.wire`).
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING

from fleet.installation import refuse_another

# gRPC's fork support makes the parent wait for threads that the heartbeat keeps busy, so a forking DataLoader
# would hang. Children never call gRPC, so the support is disabled here, before gRPC reads the variable.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

refuse_another()

if TYPE_CHECKING:
    from fleet.facade.parameter_server import Fleet, fleet

__all__ = ["Fleet", "fleet"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        # The job's `fleet` depends on this package, so it is imported lazily to avoid an import cycle.
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module("fleet.facade.parameter_server"), name)
