"""The trainers of a collective job, as processes of this machine."""

from collections.abc import Sequence
from pathlib import Path

from tests.support.forked_python import ForkedPython

__all__ = ["ForkedTrainer", "environments"]


class ForkedTrainer(ForkedPython):
    """A trainer's program.

    torch's optimizers import TorchDynamo in their first step, which takes more than all else that it does.
    """

    preloaded = (*ForkedPython.preloaded, "torch._dynamo")


def environments(directory: Path, ports: Sequence[int]) -> list[dict[str, str]]:
    """Return what says to each process which trainer it is, beside what it inherits.

    Parameters
    ----------
    directory : Path
        Where their last words go.
    ports : sequence of int
        One for each trainer.
    """
    shared = {
        "TRAINING_ROLE": "TRAINER",
        "PADDLE_TRAINERS_NUM": str(len(ports)),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(f"127.0.0.1:{port}" for port in ports),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(ports[0]),
        "GLOO_SOCKET_IFNAME": "lo",
        "FLEET_JOB_KEY": "6b" * 32,
        "OMP_NUM_THREADS": "1",
    }
    return [
        shared
        | {
            "PADDLE_TRAINER_ID": str(rank),
            "RANK": str(rank),
            "PADDLE_CURRENT_ENDPOINT": f"127.0.0.1:{port}",
            "FLEET_TERMINATION_LOG": str(directory / f"words-{rank}"),
        }
        for rank, port in enumerate(ports)
    ]
