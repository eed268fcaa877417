"""A replica's process: its start and end, its reported progress, its resources and its clock."""
