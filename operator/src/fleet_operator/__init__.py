"""A kopf operator that runs FleetJobs: parameter-server and collective training of PyTorch models."""

__version__ = "0.1.0"
