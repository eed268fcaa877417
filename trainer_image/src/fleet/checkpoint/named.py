"""A model under its user's names, for one process."""

from collections.abc import Mapping

from torch import Tensor

from fleet.errors import ConfigurationError
from fleet.program import Source

__all__ = ["named_state"]


def named_state(source: Source, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict under the names of the user's model.

    Parameters
    ----------
    source : Source
    values : mapping of name to Tensor
        The trained parameters; what else the module has, buffers and frozen parameters, is its own.

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
    trained = {parameter: values[name] for name, parameter in source.parameters.items()}
    return {
        name: trained[tensor] if tensor in trained else tensor.detach().cpu().clone()
        for name, tensor in source.module.state_dict(keep_vars=True).items()
        if not hasattr(tensor, "fleet_table")  # stands for a table on the servers, and has no elements
    }
