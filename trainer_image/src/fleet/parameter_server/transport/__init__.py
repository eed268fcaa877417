"""The transport of bytes between trainers and servers: sockets, resumable streams and shared memory."""
