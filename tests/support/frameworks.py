"""Programs that use other frameworks, whose packages are in an environment of their own."""

from __future__ import annotations

from pathlib import Path

from tests.support.collective import ForkedTrainer

__all__ = ["FRAMEWORKS", "ForkedFrameworks"]

FRAMEWORKS = Path(__file__).parents[2] / ".venv-frameworks" / "bin" / "python"


class ForkedFrameworks(ForkedTrainer):
    """A program of that environment."""

    preloaded = (*ForkedTrainer.preloaded, "accelerate", "lightning.pytorch", "mlflow", "wandb")
    python = str(FRAMEWORKS)
