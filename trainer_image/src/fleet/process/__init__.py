"""What concerns one process: how it begins and ends, what it tells of its progress, its memory, its clock."""
