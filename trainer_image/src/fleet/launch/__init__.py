"""Starts the processes of a job on one machine, watches them, and reports their end by its exit status.

``python -m fleet.launch`` starts the workers of a collective job (`collective`), ``python -m
fleet.launch_ps`` parameter servers and workers (`fleet.launch_ps`). They differ only in the environments that
they compute; the same `supervisor` runs both.
"""
