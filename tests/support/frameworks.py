"""Programs that use other frameworks, which are installed in a separate environment."""

from __future__ import annotations

from pathlib import Path

from tests.support.forked_python import PRELOADED, ForkedPython

__all__ = ["FRAMEWORKS", "ForkedFrameworks"]

FRAMEWORKS = Path(__file__).parents[2] / ".venv-frameworks" / "bin" / "python"


class ForkedFrameworks(ForkedPython):
    """A program that runs in the environment with the other frameworks."""

    preloaded = (*PRELOADED, "torch._dynamo", "accelerate", "lightning.pytorch", "mlflow", "wandb")
    python = str(FRAMEWORKS)
