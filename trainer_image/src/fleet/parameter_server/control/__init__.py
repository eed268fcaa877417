"""The control protocol: its gRPC service and client, heartbeats, reductions, and state streams."""
