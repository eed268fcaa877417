"""Forward passes that write to a parameter: what parameter servers own, and would overwrite."""

from fleet.errors import TranspileError
from fleet.program.ir import Source

__all__ = ["refuse_forward_writes"]


def refuse_forward_writes(source: Source | None) -> None:
    """Refuse a module that changes a trained parameter of its own in forward, if the module is known.

    Raises
    ------
    TranspileError
        There is one; it is named.
    """
    if source is None or source.module is None:
        return
    import torch  # not above: programs are read and printed where no torch is loaded

    trained = {id(each) for each in (*source.parameters.values(), *source.own_tables.values())}
    for name, module in source.module.named_modules():
        if not isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
            continue
        if module.max_norm is not None and id(module.weight) in trained:
            raise TranspileError(
                f"module {name or type(module).__name__} has max_norm={module.max_norm}: its forward pass "
                "writes to its weight on this trainer alone, and the parameter servers' next values would "
                "overwrite that; leave max_norm out, and apply torch.renorm to what the module returns; or "
                "train in the mode geo, in which trainers step by themselves (config.geo_sgd_mode = True)"
            )
