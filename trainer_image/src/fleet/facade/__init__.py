"""What the `fleet` of a parameter-server job and that of a collective one have in common: their calls.

``from fleet.parameter_server import fleet`` and ``from fleet.collective import fleet`` answer the same calls.
Those that follow from the role alone stand here, and so does what both do around the others.
"""

from fleet.facade.calls import FleetCalls

__all__ = ["FleetCalls"]
