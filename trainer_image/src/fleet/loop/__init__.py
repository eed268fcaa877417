"""Training loops that resume at the right batch of the right epoch.

A trainer that is restarted, or that joins late, runs the remaining steps on the batches that an uninterrupted
trainer would use. `loop` holds the loops, their schedulers and their positions in checkpoints; `batches` the
remaining batches of an epoch and the prefetching of their table rows.
"""

from fleet.loop.batches import prefetch
from fleet.loop.loop import LoopCalls, Loops, Place, epochs, steps

__all__ = ["LoopCalls", "Loops", "Place", "epochs", "prefetch", "steps"]
