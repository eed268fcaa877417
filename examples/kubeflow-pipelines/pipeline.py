"""A pipeline with one training step; ``python pipeline.py FILE`` compiles it for Kubeflow Pipelines."""

import sys
from pathlib import Path

from component import train_fleetjob
from kfp import compiler, dsl

IMAGE = "fleetjob-client:0.1.0"  # Python, and the wheel of fleet-operator: see README.md
MANIFEST = Path(__file__).parent.parent / "digits" / "fleetjob.yaml"

train = dsl.component(base_image=IMAGE)(train_fleetjob)


@dsl.pipeline(name="digits")
def pipeline(name: str, namespace: str = "") -> None:
    """Train digits as a FleetJob."""
    step = train(manifest=MANIFEST.read_text(), name=name, namespace=namespace)
    step.set_retry(2)
    step.set_caching_options(enable_caching=False)  # the same manifest may train on other data


if __name__ == "__main__":
    compiler.Compiler().compile(pipeline, sys.argv[1])
