"""Start the processes of a job on one machine, watch them, and end truthfully.

``python -m fleet.launch_ps`` starts parameter servers and workers, ``python -m fleet.launch`` the workers of
a collective job. Both only differ in the environments that they compute (``ps.py``, ``collective.py``); one
supervisor runs them: ``decision.py`` decides, without touching a process or a clock, ``supervisor.py`` acts.
"""
