"""A parameter server: its trainers, their barriers, its shard, and checkpoints of the shard."""
