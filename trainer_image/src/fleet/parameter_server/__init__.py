"""Training with parameter servers. ``from fleet.parameter_server import fleet`` is what a script imports.

A trainer sends each gradient the moment it exists; the servers step the blocks they own with the user's own
torch.optim class; the new values become the parameters inside ``optimizer.step()``. Control goes by gRPC,
tensors by raw frames over TCP (see `fleet.wire`).
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING

# gRPC's own handling of fork() waits in the parent for threads that our heartbeat keeps busy: a forking
# DataLoader would hang. Children never call gRPC, so it is switched off, before gRPC reads the variable.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

if TYPE_CHECKING:
    from fleet.facade.parameter_server import Fleet, fleet

__all__ = ["Fleet", "fleet"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        # The job's `fleet` stands above this package, which its modules import: it is loaded when asked for.
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module("fleet.facade.parameter_server"), name)
