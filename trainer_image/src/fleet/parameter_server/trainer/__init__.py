"""A trainer of a job with parameter servers: its session, gradients, parameters and optimizer."""
