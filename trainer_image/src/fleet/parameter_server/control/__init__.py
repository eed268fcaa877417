"""The control protocol: its gRPC service and client, heartbeats, reductions, and streams of state."""
