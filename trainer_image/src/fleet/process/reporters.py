"""The reporters that this package includes: TensorBoard, Weights & Biases, and MLflow.

Each reporter uses the package of its tool, which must be installed, and the tool's own environment variables.
`fleet.process.reporting` describes what a reporter does.
"""

from collections.abc import Mapping
from pathlib import Path
from time import time
from typing import Any, ClassVar

from fleet.process.reporting import Reported

__all__ = ["MLflow", "TensorBoard", "WandB"]

_FLUSH_SECONDS = 5
"""The interval in seconds at which TensorBoard's writer flushes events to disk."""


class TensorBoard:
    """Writes event files to ``JOB/REPLICA`` in the folder ``FLEET_TENSORBOARD_DIR`` (default ``runs``).

    Parameters
    ----------
    reported : Reported
    """

    package: ClassVar = "tensorboard"

    def __init__(self, reported: Reported) -> None:
        self._folder = (
            Path(reported.environ.get("FLEET_TENSORBOARD_DIR") or "runs") / reported.job / reported.replica
        )
        self._restarted = reported.restarts > 0
        self._writer: Any = None

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write values; after a restart, the first call discards previously written values from `step` on."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter  # imported late, because it is slow

            purge = step if self._restarted else None
            self._writer = SummaryWriter(str(self._folder), purge_step=purge, flush_secs=_FLUSH_SECONDS)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write the remaining events."""
        if self._writer is not None:
            self._writer.close()


class WandB:
    """Logs to a Weights & Biases run in the job's group; ``WANDB_MODE=offline`` needs no account.

    Parameters
    ----------
    reported : Reported
    """

    package: ClassVar = "wandb"

    def __init__(self, reported: Reported) -> None:
        import wandb  # imported late, because it is slow and optional

        self._run = wandb.init(
            group=reported.job,
            name=reported.replica,
            job_type=reported.replica.partition("-")[0],
            config={"job": reported.job, "replica": reported.replica, "restarts": reported.restarts},
            settings=wandb.Settings(silent=True),
        )
        self._run.define_metric("*", step_metric="step")  # wandb's own step must never decrease

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Send the values together with the step."""
        self._run.log({"step": step, **values})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class MLflow:
    """Logs to an MLflow run in the experiment ``MLFLOW_EXPERIMENT_NAME``, by default named after the job.

    Parameters
    ----------
    reported : Reported
    """

    package: ClassVar = "mlflow"

    def __init__(self, reported: Reported) -> None:
        from mlflow.entities import Metric  # imported late, because it is slow and optional
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        try:
            self._client = MlflowClient()
        except Exception:  # noqa: BLE001 - a file store raises it if another replica has just made its files
            self._client = MlflowClient()
        name = reported.environ.get("MLFLOW_EXPERIMENT_NAME") or reported.job
        try:
            experiment = self._client.create_experiment(name)
        # Another replica may have created the experiment first.
        except MlflowException:
            if (existing := self._client.get_experiment_by_name(name)) is None:
                raise
            experiment = existing.experiment_id
        tags = {"fleet.job": reported.job, "fleet.restarts": str(reported.restarts)}
        run = self._client.create_run(experiment, run_name=reported.replica, tags=tags)
        self._id = run.info.run_id

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Send all values in one request."""
        now = int(time() * 1000)
        metrics = [self._metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._id)
