"""Attributes of the parameters that layers create."""

from dataclasses import dataclass
from typing import Any

from fleet.errors import ConfigurationError

__all__ = ["ParamAttr", "param_attr"]


@dataclass
class ParamAttr:
    """The settings with which a layer creates a parameter and an optimizer updates it.

    Attributes
    ----------
    name : str, optional
        Layers with the same name share the parameter. By default the layer's name with ``.w_0`` or ``.b_0``.
    initializer : Initializer, optional
        By default ``initializer.Xavier()`` for weights, and 0 for biases.
    learning_rate : float
        The factor of the optimizer's learning rate.
    regularizer : L1Decay or L2Decay, optional
        Replaces the optimizer's.
    trainable : bool
        Whether the optimizer may change the parameter.
    gradient_clip : object, optional
        Not supported; see `fleet.fluid.clip`.
    do_model_average : bool
        Has no effect.

    Notes
    -----
    Paddle's ``fluid.ParamAttr``.
    """

    name: str | None = None
    initializer: Any = None
    learning_rate: float = 1.0
    regularizer: Any = None
    trainable: bool = True
    gradient_clip: Any = None
    do_model_average: bool = False


def param_attr(given: Any) -> ParamAttr | None:
    """Convert a layer's `param_attr` or `bias_attr` argument to a ParamAttr.

    Parameters
    ----------
    given : ParamAttr, str, initializer, bool or None
        A string is a name; True and None stand for the default.

    Returns
    -------
    ParamAttr or None
        None if `given` is False: the layer then has no such parameter.

    Raises
    ------
    ConfigurationError
        The argument is none of these.
    """
    if given is False:
        return None
    if given is None or given is True:
        return ParamAttr()
    if isinstance(given, ParamAttr):
        return given
    if isinstance(given, str):
        return ParamAttr(name=given)
    if hasattr(given, "operator"):
        return ParamAttr(initializer=given)
    if hasattr(given, "coefficient"):
        return ParamAttr(regularizer=given)
    raise ConfigurationError(
        f"param_attr or bias_attr is {given!r}; expected a fluid.ParamAttr, a name, an initializer, "
        "a regularizer, or False for a layer without this parameter"
    )
