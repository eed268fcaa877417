"""Parameter-server and collective training for PyTorch, with the semantics of PaddlePaddle Fleet."""

from fleet import lifecycle as lifecycle  # its import makes report() serve itself in a plain script
from fleet.progress import report

__all__ = ["report"]
