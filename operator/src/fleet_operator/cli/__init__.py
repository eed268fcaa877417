"""``fleetjob``: run a job on this machine, look at what the operator would make of it, or be the operator."""

from fleet_operator.cli.app import app, main

__all__ = ["app", "main"]
