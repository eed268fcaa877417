"""A trainer in a job with parameter servers: its session, gradients, parameters and optimizer."""
