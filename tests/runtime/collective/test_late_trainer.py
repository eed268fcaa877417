"""A trainer that comes when one that is lost would have been given up."""

LATE = """
from fleet.collective import rendezvous

rendezvous.ATTEMPT_SECONDS = 0.1  # after which it looks whether that was long enough
if os.environ["RANK"] == "1":
    time.sleep(3)
fleet.init()
model = build(seed=0)
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
loss_of(model, 0, fleet.worker_index()).backward()
optimizer.step()
fleet.stop_worker()
"""


def test_a_trainer_that_has_still_to_start_is_waited_for_longer_than_one_that_is_lost(trainers):
    patience = {"FLAGS_rpc_deadline": "1000", "FLEET_START_DEADLINE_SECONDS": "60"}
    for process in trainers(LATE, FLEET_HEARTBEAT_SECONDS="0.2", **patience):
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
