"""A parameter server: its trainers, their barriers, and its shard with the shard's checkpoints."""
