"""Saves under a number, and ends at once: as a script does that forgot `fleet.stop_worker()`.

Arguments: the folder of the checkpoints.
"""

import sys

import torch

from fleet import role_maker
from fleet.checkpoint import TrainStatus
from fleet.parameter_server import fleet

fleet.init(role_maker.PaddleCloudRoleMaker())
torch.manual_seed(0)
model = torch.nn.Linear(1000, 2000)
optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters()))
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
else:
    fleet.init_worker()
    model(torch.ones(1, 1000)).sum().backward()
    optimizer.step()
    fleet.save_check_point(sys.argv[1], TrainStatus(epoch_no=3))
    print("saved, it seems; the end", flush=True)
