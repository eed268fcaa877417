"""A component of Kubeflow Pipelines that trains a FleetJob: a plain function, which needs no kfp to run."""

from typing import NamedTuple


def train_fleetjob(
    manifest: str, name: str, namespace: str = "", timeout_seconds: int = 86400, keep: bool = False
) -> NamedTuple("Outputs", [("completion_time", str), ("restarts", int), ("step", int)]):  # type: ignore[valid-type]
    """Submit a FleetJob, show its logs, and wait for its end; a failed job fails the component.

    Parameters
    ----------
    manifest : str
        The FleetJob, as YAML.
    name : str
        The name of the job, which replaces that in the manifest. A retry of the step finds the job by it.
    namespace : str
        The namespace. Default: that of the component's pod.
    timeout_seconds : int
        How long the job may take.
    keep : bool
        Whether a job that has succeeded stays on the cluster.
    """
    # Kubeflow runs this function alone, so it imports what it needs.
    import asyncio
    from collections import namedtuple

    import yaml

    from fleet_operator.api import FleetJob
    from fleet_operator.client import AsyncFleetJobClient

    document = yaml.safe_load(manifest)
    document["metadata"] = {**document.get("metadata", {}), "name": name}

    async def train() -> FleetJob:
        async with AsyncFleetJobClient(namespace=namespace or None) as client:
            await client.submit(document)

            async def show_logs() -> None:
                async for line in client.logs(name, follow=True):
                    print(f"[{line.replica}] {line.text}", flush=True)

            logs = asyncio.create_task(show_logs())
            try:
                job = await client.wait(name, timeout_seconds=timeout_seconds)
            finally:
                await asyncio.wait({logs}, timeout=30)
                logs.cancel()
                await asyncio.gather(logs, return_exceptions=True)
            if not keep:
                await client.delete(name)
            return job

    status = asyncio.run(train()).status
    step = status.progress.step if status.progress and status.progress.step is not None else -1
    outputs = namedtuple("outputs", ["completion_time", "restarts", "step"])
    return outputs(str(status.completion_time), status.restarts, step)
