"""A kopf operator that runs FleetJobs: parameter-server and collective training of PyTorch models."""
