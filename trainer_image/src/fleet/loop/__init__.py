"""Training loops that begin where the training is, and not always at the first batch of the first epoch.

A trainer that is started again, or that joins late, makes the steps that are left of the plan, on the batches
that one which was never stopped would make them on. What that takes is in four modules: which batches are
left (`batches`), how often schedulers have been stepped (`schedulers`), which steps are which loop's, and
what a checkpoint keeps of that (`place`), and the loops (`loop`). Beside them, `prefetch` reads batches one
ahead, so that their rows of tables are fetched meanwhile.
"""

from fleet.loop.loop import LoopCalls, epochs, steps
from fleet.loop.place import Loops, Place
from fleet.loop.prefetch import prefetch

__all__ = ["LoopCalls", "Loops", "Place", "epochs", "prefetch", "steps"]
