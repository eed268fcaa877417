"""The interface that users of Paddle know: programs, the distribute transpiler and executors.

A program describes a training step as operators over variables. `ir` defines the data, `printer` formats a
program, `serialise` writes and reads it, and `program` captures one from PyTorch. Programs and the transpiler
do not import torch; only capturing and executing do.
"""

from fleet.fluid.ir import Attribute, Block, Operator, OpRole, Variable
from fleet.fluid.program import Program, default_main_program, default_startup_program
from fleet.fluid.transpiler import DistributeTranspiler

__all__ = [
    "Attribute",
    "Block",
    "DistributeTranspiler",
    "OpRole",
    "Operator",
    "Program",
    "Variable",
    "default_main_program",
    "default_startup_program",
]
