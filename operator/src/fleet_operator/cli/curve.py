"""The loss curve of a run, as a picture beside its logs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def draw_loss_curves(curves: Mapping[str, Mapping[int, float]], title: str, path: Path) -> bool:
    """Draw each replica's loss over its steps.

    Parameters
    ----------
    curves : mapping
        Loss by step, by the name of the replica; empty curves are left out.
    title : str
        The title of the picture.
    path : Path
        The PNG file to write.

    Returns
    -------
    bool
        False if there is nothing to draw, and no file then.

    Raises
    ------
    ImportError
        matplotlib is not installed.
    """
    if not (drawn := {name: curve for name, curve in curves.items() if curve}):
        return False
    # Here and not above: it takes a second, and is an extra that the operator's image leaves out.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")  # no pyplot: no display is ever looked for
    axes = figure.subplots()
    for name, curve in drawn.items():
        axes.plot(list(curve), list(curve.values()), label=name, linewidth=1.2)
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path, format="png")
    return True
