"""Collective training: every trainer holds the whole model, and gradients are averaged among them.

``from fleet.collective import fleet`` gives the singleton of this process. Gradients are exchanged while
``backward()`` still runs; when it returns, they are the average over all trainers, so that clipping, loss
scaling, schedulers and the optimizer work as in one process.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from fleet.installation import refuse_another

refuse_another()

if TYPE_CHECKING:
    from fleet.facade.collective import Fleet, fleet

__all__ = ["Fleet", "fleet"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        # `fleet` is loaded on first access, because its module imports modules of this package.
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module("fleet.facade.collective"), name)
