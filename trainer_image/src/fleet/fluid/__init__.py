"""The ``paddle.fluid`` interface, which scripts import with ``from fleet import fluid``.

A program describes a training step as operators over variables. `ir` defines the data, `printer` formats a
program, and `serialise` writes and reads it. A module with the same name as one in ``paddle.fluid``, such as
`core`, contains the names that scripts import from there. The other modules, by what they do with a program:

- Building it with `layers` and `optimizer`: `building` appends operators, whose kinds are in `operators`;
  `minimization` appends clipping, regularization and updates to the gradients of `backward`, and records them
  in `training`.
- Capturing it from PyTorch: `program`, with the operators of `step_operators`.
- Transpiling it: `transpiler` plans the job, and `render` returns the programs of a plan. They come from
  `built_programs` if the program was built, from `trainer_program` and `pserver_program` if it was captured,
  and from `collective_program` in a collective job.
- Running it: `executor`; for a built program, `module` creates its PyTorch module and optimizer,
  `computation` calls the functions of its operators, and `execution` computes on this process's device.
- Feeding it: `reader`, `dataset` and `data_feeder`, with sequences as in `lod`.

A public name is imported from its module when it is first used, so that a captured program can be read,
printed and transpiled without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from fleet.fluid.names import missing

if TYPE_CHECKING:
    from fleet.fluid import (
        backward,
        clip,
        compiler,
        core,
        executor,
        framework,
        incubate,
        initializer,
        io,
        layers,
        optimizer,
        param_attr,
        regularizer,
        transpiler,
        unique_name,
    )
    from fleet.fluid.backward import append_backward
    from fleet.fluid.compiler import BuildStrategy, CompiledProgram, ExecutionStrategy
    from fleet.fluid.data_feeder import DataFeeder
    from fleet.fluid.dataset import DatasetFactory, InMemoryDataset, QueueDataset
    from fleet.fluid.executor import Executor
    from fleet.fluid.framework import data, is_compiled_with_cuda, name_scope
    from fleet.fluid.ir import Attribute, Block, Operator, OpRole, Variable
    from fleet.fluid.lod import LoDTensor, create_lod_tensor, create_random_int_lodtensor
    from fleet.fluid.parallel_executor import ParallelExecutor
    from fleet.fluid.param_attr import ParamAttr
    from fleet.fluid.place import CPUPlace, CUDAPlace
    from fleet.fluid.program import Program, default_main_program, default_startup_program, program_guard
    from fleet.fluid.scope import global_scope, scope_guard
    from fleet.fluid.transpiler import DistributeTranspiler
    from fleet.plan.config import DistributeTranspilerConfig
    from fleet.plan.dispatch import HashName, RoundRobin

_NAMES_IN = {
    "backward": ("append_backward",),
    "compiler": ("BuildStrategy", "CompiledProgram", "ExecutionStrategy"),
    "data_feeder": ("DataFeeder",),
    "dataset": ("DatasetFactory", "InMemoryDataset", "QueueDataset"),
    "executor": ("Executor",),
    "framework": ("data", "is_compiled_with_cuda", "name_scope"),
    "ir": ("Attribute", "Block", "OpRole", "Operator", "Variable"),
    "lod": ("LoDTensor", "create_lod_tensor", "create_random_int_lodtensor"),
    "parallel_executor": ("ParallelExecutor",),
    "param_attr": ("ParamAttr",),
    "place": ("CPUPlace", "CUDAPlace"),
    "program": ("Program", "default_main_program", "default_startup_program", "program_guard"),
    "scope": ("global_scope", "scope_guard"),
    "transpiler": ("DistributeTranspiler",),
}
_BESIDE = {
    "DistributeTranspilerConfig": "fleet.plan.config",
    "HashName": "fleet.plan.dispatch",
    "RoundRobin": "fleet.plan.dispatch",
}
_MODULES = (
    "backward",
    "clip",
    "compiler",
    "core",
    "executor",
    "framework",
    "incubate",
    "initializer",
    "io",
    "layers",
    "optimizer",
    "param_attr",
    "regularizer",
    "transpiler",
    "unique_name",
)
"""The modules that scripts use as attributes, as in ``fluid.layers.fc``."""

_NAMES = {name: f"fleet.fluid.{module}" for module, names in _NAMES_IN.items() for name in names} | _BESIDE
__all__ = [
    "Attribute",
    "Block",
    "BuildStrategy",
    "CPUPlace",
    "CUDAPlace",
    "CompiledProgram",
    "DataFeeder",
    "DatasetFactory",
    "DistributeTranspiler",
    "DistributeTranspilerConfig",
    "ExecutionStrategy",
    "Executor",
    "HashName",
    "InMemoryDataset",
    "LoDTensor",
    "OpRole",
    "Operator",
    "ParallelExecutor",
    "ParamAttr",
    "Program",
    "QueueDataset",
    "RoundRobin",
    "Variable",
    "append_backward",
    "backward",
    "clip",
    "compiler",
    "core",
    "create_lod_tensor",
    "create_random_int_lodtensor",
    "data",
    "default_main_program",
    "default_startup_program",
    "executor",
    "framework",
    "global_scope",
    "incubate",
    "initializer",
    "io",
    "is_compiled_with_cuda",
    "layers",
    "name_scope",
    "optimizer",
    "param_attr",
    "program_guard",
    "regularizer",
    "scope_guard",
    "transpiler",
    "unique_name",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name in _MODULES:
            return import_module(f"fleet.fluid.{name}")
        if name in _NAMES:
            value = globals()[name] = getattr(import_module(_NAMES[name]), name)
            return value
        return missing("")(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
