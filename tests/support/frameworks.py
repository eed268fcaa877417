"""Programs that use other frameworks, whose packages are in an environment of their own."""

from __future__ import annotations

from pathlib import Path

from tests.support.forked_python import PRELOADED, ForkedPython

__all__ = ["FRAMEWORKS", "ForkedFrameworks"]

FRAMEWORKS = Path(__file__).parents[2] / ".venv-frameworks" / "bin" / "python"


class ForkedFrameworks(ForkedPython):
    """A program of that environment."""

    preloaded = (*PRELOADED, "torch._dynamo", "accelerate", "lightning.pytorch", "mlflow", "wandb")
    python = str(FRAMEWORKS)
