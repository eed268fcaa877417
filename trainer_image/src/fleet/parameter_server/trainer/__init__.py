"""A trainer of a job with servers: its session with the servers, gradients, parameters and optimizer."""
