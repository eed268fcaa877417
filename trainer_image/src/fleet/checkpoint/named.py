"""A model under its user's names, for one process."""

import logging
from collections.abc import Mapping
from functools import cache

from torch import Tensor

from fleet.errors import ConfigurationError
from fleet.plan import Source

__all__ = ["named_state"]

_log = logging.getLogger(__name__)


def named_state(source: Source, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict under the names of the user's model.

    Parameters
    ----------
    source : Source
    values : mapping of name to Tensor
        The trained parameters; what else the module has, buffers and frozen parameters, is its own. What is
        no tensor is left out.

    Raises
    ------
    ConfigurationError
        The parameters have no names.
    """
    if not source.named:
        raise ConfigurationError(
            "the parameters have no names to export, only positions (param_0_0, …); give them theirs: "
            "fleet.distributed_optimizer(optimizer, model=model), or build the optimizer from "
            "model.named_parameters()"
        )
    if source.module is None:
        return dict(values)
    trained: dict[Tensor, Tensor] = {parameter: values[name] for name, parameter in source.parameters.items()}
    kept = source.module.state_dict(keep_vars=True)
    tensors = {name: value for name, value in kept.items() if isinstance(value, Tensor)}
    if others := kept.keys() - tensors.keys():
        _tell_of_others(", ".join(sorted(others)))
    return {
        name: trained[tensor] if tensor in trained else tensor.detach().cpu().clone()
        for name, tensor in tensors.items()
        if not hasattr(tensor, "fleet_table")  # stands for a table on the servers, and has no elements
    }


@cache
def _tell_of_others(names: str) -> None:
    """Say, once, what a file of tensors does not hold."""
    _log.warning(
        "what is exported leaves out %s of the model's state dict, which get_extra_state() returns and which "
        "is no tensor; load it by load_state_dict(..., strict=False)",
        names,
    )
