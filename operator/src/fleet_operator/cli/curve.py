"""The loss curves of a run, as pictures for its page and its folder."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

DARK: dict[Any, str] = {
    "figure.facecolor": "#121212",
    "axes.facecolor": "#121212",
    "axes.edgecolor": "#cccccc",
    "axes.labelcolor": "#cccccc",
    "text.color": "#cccccc",
    "xtick.color": "#cccccc",
    "ytick.color": "#cccccc",
}


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture as a PNG, for pages of both kinds."""

    light: bytes
    dark: bytes


def draw_loss_curves(curves: Mapping[str, Mapping[int, float]], title: str) -> Picture:
    """Draw the loss of each replica over its steps.

    Parameters
    ----------
    curves : mapping
        Loss by step, by the name of the replica. At least one is not empty; empty ones are left out.
    title : str
        The title of the picture.

    Raises
    ------
    ImportError
        matplotlib is not installed.
    """
    # Here and not above: it takes a second, and is an extra that the operator's image leaves out.
    import matplotlib as mpl
    from matplotlib.figure import Figure

    def draw() -> bytes:
        figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")  # pyplot would look for a display
        axes = figure.subplots()
        for name, curve in curves.items():
            if curve:
                axes.plot(list(curve), list(curve.values()), label=name, linewidth=1.2)
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.set_ylabel("loss")
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
        figure.savefig(png := BytesIO(), format="png")
        return png.getvalue()

    light = draw()
    with mpl.rc_context(DARK):
        return Picture(light, draw())
