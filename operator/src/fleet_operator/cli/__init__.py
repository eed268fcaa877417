"""The ``fleetjob`` command: runs a job on this machine, manages jobs on a cluster, or runs the operator."""

from fleet_operator.cli.app import app, main

__all__ = ["app", "main"]
