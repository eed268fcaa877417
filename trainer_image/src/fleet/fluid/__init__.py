"""What users of the original see: programs, the distribute transpiler, and executors.

A program shows a training step as operators over variables. `ir` is the data; above it `printer` shows a
program, `serialise` writes and reads it, and `capture` builds one from PyTorch. Programs and the transpiler
load no torch; only capturing and executing do.
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
