"""The process of a replica: its start and end, its reported progress, its resources and its clock."""
