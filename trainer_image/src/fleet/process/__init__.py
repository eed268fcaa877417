"""The process of a replica: its start and end, the progress that it reports, its resources and its clock."""
