"""Training loops that begin where the training is, and not always at the first batch of the first epoch.

A trainer that is started again, or that joins late, makes the steps that are left of the plan, on the batches
that one which was never stopped would make them on. What that takes is in three modules: which batches are
left (`batches`), how often schedulers have been stepped (`schedulers`), and the loops (`loop`).
"""

from fleet.loop.loop import LoopCalls, epochs, steps

__all__ = ["LoopCalls", "epochs", "steps"]
