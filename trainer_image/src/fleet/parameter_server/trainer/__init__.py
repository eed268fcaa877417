"""A trainer in a parameter-server job: its session with the servers, gradients, parameters and optimizer."""
