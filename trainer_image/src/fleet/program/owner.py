"""The module that an optimizer's parameters belong to, found where a script has not named it."""

import gc

from torch.nn import Module
from torch.optim import Optimizer

__all__ = ["WITHOUT_NAMES", "find_module", "without_wrapper"]

WITHOUT_NAMES = (
    "parameters are told by their places in the optimizer (param_0_0, …), as no single module holds them "
    "all; model=model in fleet.distributed_optimizer, or an optimizer that is built from named parameters, "
    "gives them names"
)
"""What a trainer's log says where `find_module` found none, and the optimizer has no names."""


def find_module(optimizer: Optimizer) -> Module | None:
    """Return the outermost module of this process that holds all of an optimizer's parameters.

    It gives the parameters the names that its script knows them by; what ``torch.compile`` has wrapped is
    looked at without its wrapper. Every replica runs the same script, and so finds the same one.

    Returns
    -------
    Module or None
        None where there is none, where several share the parameters, or where the optimizer has names.
    """
    if all("param_names" in group for group in optimizer.param_groups):
        return None
    wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    # An object may say that it is of another class than its type; and __init__ may not have run yet.
    found = (each for each in gc.get_objects() if issubclass(type(each), Module))
    modules = [each for each in found if "_modules" in vars(each)]
    inside = {id(child) for module in modules for child in module.children()}
    outermost = [module for module in modules if id(module) not in inside]
    holding = [module for module in outermost if wanted <= {id(each) for each in module.parameters()}]
    if len(holding) != 1:
        return None
    return without_wrapper(holding[0])


def without_wrapper(module: Module) -> Module:
    """Return what ``torch.compile`` has wrapped, whose names a script knows; else the module itself."""
    wrapped = getattr(module, "_orig_mod", None)
    return wrapped if isinstance(wrapped, Module) else module
