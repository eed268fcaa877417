"""A parameter server: who has joined, where they meet, the shard and its checkpoints."""
