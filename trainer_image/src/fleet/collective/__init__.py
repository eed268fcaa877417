"""Collective training: every trainer holds the whole model, and gradients are averaged among them.

``from fleet.collective import fleet`` gives the singleton of this process. Gradients are exchanged while
``backward()`` still runs; when it returns, they are the average over all trainers, so that clipping, loss
scaling, schedulers and the optimizer work as in one process.
"""

from fleet.collective.singleton import Fleet

__all__ = ["Fleet", "fleet"]

fleet = Fleet()
