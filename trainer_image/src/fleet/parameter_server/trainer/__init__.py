"""A trainer of a job with servers: its session with them, its gradients, parameters and optimizer."""
