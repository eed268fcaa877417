"""Pure functions that render the summary of a run as a self-contained HTML page with loss curves."""

from __future__ import annotations

from base64 import b64encode
from dataclasses import dataclass
from datetime import timedelta
from html import escape
from io import BytesIO
from typing import TYPE_CHECKING, Any

from fleet_operator.api import ConditionType
from fleet_operator.cli.lines import duration
from fleet_operator.client.summary import ABSENT
from fleet_operator.local.log import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import datetime

    from fleet_operator.cli.replica import ReplicaView
    from fleet_operator.cli.run import RunResult

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
    """An image as two PNGs, for light and dark pages."""

    light: bytes
    dark: bytes


def draw_loss_curves(curves: Mapping[str, Mapping[int, float]], title: str) -> Picture:
    """Plot the loss of each replica over its steps.

    Parameters
    ----------
    curves : mapping
        The loss by step, keyed by replica name. At least one curve is not empty; empty curves are left out.
    title : str
        The title of the picture.

    Raises
    ------
    ImportError
        matplotlib is not installed.
    """
    # Imported here, because the import takes a second and the operator's image lacks this extra.
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


COLUMNS = ("replica", "state", "started", "ran for", "restarts", "exit codes", "step", "loss")

# The Content-Security-Policy blocks scripts and external resources, whatever a log contains.
_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }}
h1 {{ font-size: 1.5rem; }} h2 {{ font-size: 1.1rem; margin-top: 2rem; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; }}
th, td {{ text-align: left; padding: .2rem 1rem .2rem 0; border-bottom: 1px solid #8884; }}
th, td {{ white-space: nowrap; }}
img {{ max-width: 100%; }}
p {{ overflow-wrap: anywhere; }}
pre {{ overflow-y: auto; max-height: 24rem; padding: .6rem; background: #8881; font-size: .85rem; }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; }}
.Succeeded {{ color: #1a7f37; }} .Failed {{ color: #cf222e; }} .Stopped {{ color: #0b7285; }}
@media (prefers-color-scheme: dark) {{
.Succeeded {{ color: #56d364; }} .Failed {{ color: #ff7b72; }} .Stopped {{ color: #66d9e8; }}
}}
</style>
</head>
<body>
"""


def render_page(result: RunResult, picture: Picture | str, logs: Mapping[str, Sequence[str]]) -> str:
    """Return the HTML page; its links are relative to the log folder.

    Parameters
    ----------
    result : RunResult
        How the run ended.
    picture : Picture or str
        The loss curves, or why there are none.
    logs : mapping
        The last lines of each log, by the replica's name.
    """
    view = result.view
    replicas = sorted(view.replicas.values(), key=lambda replica: _trouble(replica, result))
    state = result.state
    parts = [
        _HEAD.format(title=escape(f"{view.job.name}: {state}")),
        f'<h1>{escape(view.job.name)}: <span class="{state}">{state}</span></h1>\n',
        *(f"<p>{escape(line)}</p>\n" for line in _sentences(result)),
        _table("replicas", COLUMNS, [_row(replica, result) for replica in replicas]),
    ]
    if view.metrics:
        rows = [(name, f"{value:.6g}") for name, value in sorted(view.metrics.items())]
        parts.append("<h2>Metrics</h2>\n" + _table("metrics", ("name", "value"), rows))
    parts.append("<h2>Loss</h2>\n" + _picture(picture))
    for replica in replicas:
        if replica.name in logs:
            text = "\n".join(printable(line) for line in logs[replica.name])
            parts.append(
                f'<h2 class="{replica.state}">{replica.name}: {escape(replica.state)}</h2>\n'
                f'<p>The last lines of <a href="{replica.name}.log">{replica.name}.log</a>:</p>\n'
                f"<pre>{escape(text)}</pre>\n"
            )
    return "".join([*parts, "</body>\n</html>\n"])


def _trouble(replica: ReplicaView, result: RunResult) -> int:
    """Return a sort key that puts the failure that ended the job first, followed by other failures."""
    if replica is result.failing:
        return 0
    return 1 if replica.state == "Failed" else 2


def _sentences(result: RunResult) -> Iterable[str]:
    view = result.view
    times = [replica.started_at for replica in view.replicas.values() if replica.started_at is not None]
    began = f"began {_moment(min(times))}, " if times else ""
    stopped = ", stopped before its end" if result.stopped_by and result.exit_status else ""
    yield f"{view.job.spec.mode.value}, {began}took {duration(result.wall_seconds)}{stopped}"
    if result.problem is not None:
        yield result.problem
    failed = view.status.condition(ConditionType.FAILED)
    if failed is not None and view.status.is_true(ConditionType.FAILED):
        yield failed.message or ""


def _row(replica: ReplicaView, result: RunResult) -> tuple[str, ...]:
    progress, started = replica.progress, replica.started_at
    step = loss = ABSENT
    if progress is not None and progress.step is not None:
        step = f"{progress.step}" + ("" if progress.total_steps is None else f"/{progress.total_steps}")
    if progress is not None and progress.loss is not None:
        loss = f"{progress.loss:.6g}"
    ran = ABSENT
    if started is not None:
        # A replica without an end of its own was stopped with the run.
        seconds = replica.elapsed_seconds(started + timedelta(seconds=result.wall_seconds))
        ran = ABSENT if seconds is None else duration(seconds)
    codes = ", ".join(map(str, replica.exit_codes)) or ABSENT
    began = ABSENT if started is None else _moment(started)
    return (replica.name, replica.state, began, ran, str(replica.restarts), codes, step, loss)


def _moment(moment: datetime) -> str:
    return f"{moment.astimezone():%Y-%m-%d %H:%M:%S %Z}"


def _table(name: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>\n" for row in rows)
    return (
        f'<div class="scroll"><table id="{name}">\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}</tbody>\n</table></div>\n"
    )


def _cell(text: str) -> str:
    colour = f' class="{text}"' if text in ("Succeeded", "Failed", "Stopped") else ""
    return f"<td{colour}>{escape(text)}</td>"


def _picture(picture: Picture | str) -> str:
    if isinstance(picture, str):
        return f"<p>No picture: {escape(picture)}.</p>\n"
    light, dark = (
        f"data:image/png;base64,{b64encode(png).decode()}" for png in (picture.light, picture.dark)
    )
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img alt="the loss of each trainer over its steps" src="{light}"></picture>\n'
    )
