"""Launchers, which start a job's processes on one machine, monitor them and return an exit status.

``python -m fleet.launch`` starts the workers of a collective job (`collective`), and ``python -m
fleet.launch_ps`` starts parameter servers and workers (`fleet.launch_ps`). They differ only in the
environments that they compute; the same `supervisor` runs the processes of both.
"""
