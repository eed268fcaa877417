"""A trainer that has something else than the others is named to all, soon after the last of them is there."""

import time

import pytest

SECONDS = 10
OTHER_VERSION = """
if os.environ["RANK"] == "1":
    torch.__version__ = "1.13.0+cpu"
pathlib.Path(f"there-{os.environ['RANK']}").touch()
fleet.init()
"""
# A device that every build of torch has: nothing is computed there, but what is there says so.
OTHER_DEVICE = """
fleet.init()
rank = fleet.worker_index()
model = build(seed=0).to("meta" if rank == 1 else "cpu")
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
pathlib.Path(f"there-{rank}").touch()
fleet.distributed_optimizer(sgd, model=model)
"""


@pytest.mark.serial
@pytest.mark.parametrize(
    ("script", "words"),
    [
        pytest.param(
            OTHER_VERSION,
            (
                ("trainer 1 (", "has PyTorch 1.13.0 where this trainer, 0, has"),
                ("trainer 0 (", "has 1.13.0; expected the same on every trainer"),
            ),
            id="another-version-of-torch",
        ),
        pytest.param(
            OTHER_DEVICE,
            (
                ("trainer 1 (", "has its parameters as torch.float32 on meta where this trainer, 0, has"),
                ("trainer 0 (", "has its parameters as torch.float32 on cpu where this trainer, 1, has"),
            ),
            id="another-device",
        ),
    ],
)
def test_it_is_named_to_all_within_ten_seconds(trainers, tmp_path, script, words):
    both = trainers(script)
    errors = [process.communicate(timeout=60)[1] for process in both]
    ended = time.time()
    there = max((tmp_path / f"there-{rank}").stat().st_mtime for rank in (0, 1))
    assert ended - there < SECONDS
    for process, said, error in zip(both, words, errors, strict=True):
        assert process.returncode == 2, error
        assert all(each in error for each in said), error
        assert "Traceback" not in error
