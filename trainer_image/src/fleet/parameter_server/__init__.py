"""Training with parameter servers. ``from fleet.parameter_server import fleet`` is what a script imports.

A trainer sends each gradient the moment it exists; the servers step the blocks they own with the user's own
torch.optim class; the new values become the parameters inside ``optimizer.step()``. Control goes by gRPC,
tensors by raw frames over TCP (see `fleet.wire`).
"""

import os

# gRPC's own handling of fork() waits in the parent for threads that our heartbeat keeps busy: a forking
# DataLoader would hang. Children never call gRPC, so it is switched off, before gRPC reads the variable.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

from fleet.parameter_server.singleton import Fleet

__all__ = ["Fleet", "fleet"]

fleet = Fleet()
