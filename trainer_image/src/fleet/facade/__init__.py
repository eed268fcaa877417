"""The `fleet` singletons, whose methods training scripts call in each kind of job.

``from fleet.parameter_server import fleet`` and ``from fleet.collective import fleet`` have the same calls.
`calls` holds the common part; `parameter_server` and `collective` add the training of each kind of job.
"""

from fleet.facade.calls import FleetCalls

__all__ = ["FleetCalls"]
