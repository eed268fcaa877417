"""The transport of bytes between trainer and server: sockets, resumable streams, shared memory, arenas."""
