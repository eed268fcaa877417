"""How bytes move between trainer and server: sockets, resumable streams, shared memory, flat buffers."""
