"""``fleetjob``: run a job on this machine or a cluster, look after it, or be the operator."""

from fleet_operator.cli.app import app, main

__all__ = ["app", "main"]
