"""The process of a replica: its start and end, reported progress, resources, and clock."""
