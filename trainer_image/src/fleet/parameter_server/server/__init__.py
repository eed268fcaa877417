"""A parameter server: its trainers, their barriers, its shard and the shard's checkpoints."""
