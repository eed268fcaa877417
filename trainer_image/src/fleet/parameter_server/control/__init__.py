"""The control protocol: its gRPC service and client, heartbeats, and what is combined or streamed over it."""
