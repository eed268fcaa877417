"""Launchers, which start the processes of a job on one machine, monitor them, and return their status.

``python -m fleet.launch`` starts the workers of a collective job (`collective`), and ``python -m
fleet.launch_ps`` starts parameter servers and workers (`fleet.launch_ps`). They differ only in the
environments that they compute; the same `supervisor` runs the processes of both.
"""
