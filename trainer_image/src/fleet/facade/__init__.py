"""The `fleet` of a job: the calls of a training script, for each kind of job.

``from fleet.parameter_server import fleet`` and ``from fleet.collective import fleet`` have the same calls.
`calls` has what they share; `parameter_server` and `collective` add how each kind of job trains.
"""

from fleet.facade.calls import FleetCalls

__all__ = ["FleetCalls"]
