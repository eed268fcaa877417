"""Learning-rate schedules, as operators that count steps and compute the rate from the count.

The counter is a variable of the program, and is incremented before it is used: the first step is step 0, or
step 1 for `noam_decay`. A trainer computes the rate with the forward operators, before its optimizer steps.
With `staircase`, a rate changes only every `decay_steps` steps.
"""

import math
from contextlib import AbstractContextManager
from typing import Any

from fleet.errors import ConfigurationError
from fleet.fluid import initializer, unique_name
from fleet.fluid.building import ProgramVariable, append_operator, create_variable, equals, start_with
from fleet.fluid.layers.control_flow import Switch
from fleet.fluid.layers.elements import (
    assign,
    cast,
    ceil,
    cos,
    elementwise_min,
    exp,
    fill_constant,
    floor,
)
from fleet.fluid.program import default_main_program, default_startup_program

__all__ = [
    "autoincreased_step_counter",
    "cosine_decay",
    "create_global_var",
    "exponential_decay",
    "inverse_time_decay",
    "linear_lr_warmup",
    "natural_exp_decay",
    "noam_decay",
    "piecewise_decay",
    "polynomial_decay",
]

Var = ProgramVariable
_COUNTER = "@LR_DECAY_COUNTER@"


def _schedule() -> AbstractContextManager[None]:
    return default_main_program()._lr_schedule_guard()  # noqa: SLF001 - Paddle's name


def create_global_var(
    shape: list[int],
    value: float,
    dtype: str,
    persistable: bool = False,
    force_cpu: bool = False,
    name: str | None = None,
) -> Var:
    """Create a variable that the startup program sets to a constant value.

    Parameters
    ----------
    shape : list of int
    value : float
    dtype : str
    persistable : bool
        Whether it persists from one step to the next.
    force_cpu : bool
        Only shown in the program.
    name : str, optional

    Returns
    -------
    ProgramVariable
        Gradients end here.
    """
    name = name or unique_name.generate("global_var")
    start = initializer.Constant(float(value), force_cpu=force_cpu)
    facts: dict[str, Any] = {"persistable": persistable, "stop_gradient": True}
    start_with(default_startup_program(), name, shape, dtype, start)
    return create_variable(default_main_program().global_block(), name, shape, dtype, **facts)


def autoincreased_step_counter(counter_name: str | None = None, begin: int = 1, step: int = 1) -> Var:
    """Return a counter that the program's first operator increments in each run.

    Parameters
    ----------
    counter_name : str, optional
        By default ``@STEP_COUNTER@``. Calls with one name share the counter.
    begin : int
        Its value in the first step.
    step : int
        The increment in each later step.

    Returns
    -------
    ProgramVariable
        Of dtype int64 and shape (1,).
    """
    name, block = counter_name or "@STEP_COUNTER@", default_main_program().global_block()
    known = block.vars.get(name)
    if isinstance(known, ProgramVariable):
        return known
    counter = create_global_var([1], begin - 1, "int64", persistable=True, force_cpu=True, name=name)
    append_operator(block, "increment", {"X": counter}, {"step": float(step)}, {"Out": counter}, index=0)
    return counter


def _decay_step_counter(begin: int = 0) -> Var:
    """Return the step number as float32."""
    return cast(autoincreased_step_counter(_COUNTER, begin), "float32")


def noam_decay(d_model: int, warmup_steps: int, learning_rate: float | Var = 1.0) -> Var:
    """Warm up linearly for `warmup_steps` steps, then decay with the inverse square root of the step.

    Parameters
    ----------
    d_model : int
        The size of the model's vectors.
    warmup_steps : int
    learning_rate : float or ProgramVariable
        A factor.

    Notes
    -----
    Vaswani et al., "Attention is all you need", 2017, section 5.3.
    """
    with _schedule():
        step = _decay_step_counter(1)
        falling = step**-0.5
        rising = (warmup_steps**-1.5) * step
        rate: Var = learning_rate * (d_model**-0.5) * elementwise_min(falling, rising)
        return rate


def exponential_decay(
    learning_rate: float, decay_steps: int, decay_rate: float, staircase: bool = False
) -> Var:
    """Decrease the rate exponentially: ``learning_rate * decay_rate ** (step / decay_steps)``."""
    with _schedule():
        return learning_rate * (decay_rate ** _periods(decay_steps, staircase))


def natural_exp_decay(
    learning_rate: float, decay_steps: int, decay_rate: float, staircase: bool = False
) -> Var:
    """Decrease the rate exponentially: ``learning_rate * exp(-decay_rate * step / decay_steps)``."""
    with _schedule():
        return learning_rate * exp(-1 * decay_rate * _periods(decay_steps, staircase))


def inverse_time_decay(
    learning_rate: float, decay_steps: int, decay_rate: float, staircase: bool = False
) -> Var:
    """Decrease the rate over time: ``learning_rate / (1 + decay_rate * step / decay_steps)``."""
    with _schedule():
        return learning_rate / (1 + decay_rate * _periods(decay_steps, staircase))


def _periods(decay_steps: int, staircase: bool) -> Var:
    periods = _decay_step_counter() / decay_steps
    return floor(periods) if staircase else periods


def polynomial_decay(
    learning_rate: float,
    decay_steps: int,
    end_learning_rate: float = 0.0001,
    power: float = 1.0,
    cycle: bool = False,
) -> Var:
    """Decrease the rate to `end_learning_rate` within `decay_steps` steps, along a polynomial.

    Parameters
    ----------
    learning_rate : float
    decay_steps : int
    end_learning_rate : float
    power : float
    cycle : bool
        Whether to stretch the decay to the next multiple of `decay_steps` after it has ended, instead of
        keeping the end rate.
    """
    with _schedule():
        step = _decay_step_counter()
        steps: Any = decay_steps
        if cycle:
            cycles = ceil(step / decay_steps)
            zero, one = fill_constant([1], "float32", 0.0), fill_constant([1], "float32", 1.0)
            with Switch() as switch, switch.case(equals(step, zero)):
                assign(one, cycles)
            steps = decay_steps * cycles
        else:
            step = elementwise_min(step, fill_constant([1], "float32", float(decay_steps)))
        rate: Var = (learning_rate - end_learning_rate) * ((1 - step / steps) ** power) + end_learning_rate
        return rate


def piecewise_decay(boundaries: list[int], values: list[float]) -> Var:
    """Use a constant rate for each interval between boundaries.

    Parameters
    ----------
    boundaries : list of int
        Numbers of steps, ascending. A rate applies to the steps below its boundary.
    values : list of float
        One more than boundaries.

    Raises
    ------
    ConfigurationError
        The number of values is not the number of boundaries plus one.
    """
    if len(values) - len(boundaries) != 1:
        raise ConfigurationError(
            f"piecewise_decay: {len(boundaries)} boundaries and {len(values)} values; expected one value more"
        )
    with _schedule():
        step = _decay_step_counter()
        rate = create_global_var([1], 0.0, "float32", persistable=True, name="learning_rate")
        with Switch() as switch:
            for boundary, value in zip(boundaries, values[:-1], strict=True):
                limit = fill_constant([1], "float32", float(boundary), force_cpu=True)
                chosen = fill_constant([1], "float32", float(value))
                with switch.case(step < limit):
                    assign(chosen, rate)
            last = fill_constant([1], "float32", float(values[-1]))
            with switch.default():
                assign(last, rate)
        return rate


def cosine_decay(learning_rate: float, step_each_epoch: int, epochs: int) -> Var:
    """Decrease the rate along a cosine, by epoch: ``learning_rate / 2 * (cos(epoch * pi / epochs) + 1)``.

    Parameters
    ----------
    learning_rate : float
    step_each_epoch : int
        The number of steps per epoch.
    epochs : int
        The number of epochs until the rate is 0.
    """
    with _schedule():
        epoch = floor(_decay_step_counter() / step_each_epoch)
        return learning_rate * 0.5 * (cos(epoch * math.pi / epochs) + 1)


def linear_lr_warmup(learning_rate: float | Var, warmup_steps: int, start_lr: float, end_lr: float) -> Var:
    """Increase the rate from `start_lr` to `end_lr` in `warmup_steps` steps, then use `learning_rate`.

    Parameters
    ----------
    learning_rate : float or ProgramVariable
        The rate after the warm-up.
    warmup_steps : int
    start_lr, end_lr : float
    """
    with _schedule():
        rate = create_global_var([1], 0.0, "float32", persistable=True, name="learning_rate_warmup")
        step = _decay_step_counter()
        rise = float(end_lr) - float(start_lr)
        with Switch() as switch:
            with switch.case(step < warmup_steps):
                assign(start_lr + rise * (step / float(warmup_steps)), rate)
            with switch.default():
                if not isinstance(learning_rate, ProgramVariable):
                    learning_rate = fill_constant([1], "float32", float(learning_rate))
                assign(learning_rate, rate)
        return rate
