"""The job `digits`, which many tests use: two parameter servers and two trainers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.support.jobs import manifest

if TYPE_CHECKING:
    from tests.support.kube import Manifest, Namespace

SERVERS = ("digits-pserver-0", "digits-pserver-1")
TRAINERS = ("digits-trainer-0", "digits-trainer-1")


def annotated(document: Manifest | None = None, /, **annotations: str) -> Manifest:
    """Return `document`, by default the job `digits`, with annotations that control its simulated pods."""
    document = document or manifest()
    document["spec"]["template"]["metadata"] = {
        "annotations": {f"fleet.test/{name}": value for name, value in annotations.items()}
    }
    return document


async def run(namespace: Namespace, document: Manifest | None = None, /, **spec: Any) -> dict[str, Manifest]:
    """Create `document`, by default the job `digits`; return its pods once all of them are running."""
    await namespace.create_job(document or manifest(**spec))
    pods = await namespace.until_running("digits", *SERVERS, *TRAINERS)
    await namespace.until_state("digits", "Running")
    return pods
