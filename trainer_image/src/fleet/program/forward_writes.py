"""Forward passes that write to a parameter: what parameter servers own, and would overwrite."""

from typing import Final

from fleet.errors import TranspileError
from fleet.program.ir import Source

__all__ = ["refuse_forward_writes"]

_IN_GEO: Final = (
    "; or train in the mode geo, in which trainers step by themselves (config.geo_sgd_mode = True)"
)


def refuse_forward_writes(source: Source | None, *, steps_alone: bool) -> None:
    """Refuse a module that changes a trained parameter of its own in forward, if the module is known.

    Parameters
    ----------
    source : Source or None
    steps_alone : bool
        Whether a trainer steps its own values, as in GEO; its rows are copies beside the weight even there.

    Raises
    ------
    TranspileError
        There is one; it is named.
    """
    if source is None or source.module is None:
        return
    import torch  # not above: programs are read and printed where no torch is loaded

    rows = {id(each) for each in source.own_tables.values()}
    blocks = set() if steps_alone else {id(each) for each in source.parameters.values()}
    for name, module in source.module.named_modules():
        if not isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
            continue
        if module.max_norm is None or id(module.weight) not in rows | blocks:
            continue
        raise TranspileError(
            f"module {name or type(module).__name__} has max_norm={module.max_norm}: its forward pass "
            "writes to its weight on this trainer alone, and the values of the next step would overwrite "
            "that; leave max_norm out, and apply torch.renorm to what the module returns"
            f"{'' if id(module.weight) in rows else _IN_GEO}"
        )
