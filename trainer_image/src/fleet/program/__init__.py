"""Programs: what a training script does, as data that the transpiler can cut up and the runtime can follow.

The form is that of the original's Programs and neutral to the front end that builds them. `ir` is the data.
Above it `optimizers` and `clip` know what operators' attributes mean, `printer` shows a program, `serialise`
writes and reads it, `agreement` says what processes must have in common, `capture` builds one from PyTorch;
and `program` is what people use. Only `capture` imports torch, and only when it is used.
"""

from fleet.program.agreement import agreement_of, describe_difference, facts_of_training, fingerprint_of
from fleet.program.clip import ClipGradByGlobalNorm, ClipGradByNorm, ClipGradByValue, GradClip
from fleet.program.ir import Attribute, Block, Operator, OpRole, Source, Variable
from fleet.program.program import Program, default_main_program, default_startup_program

__all__ = [
    "Attribute",
    "Block",
    "ClipGradByGlobalNorm",
    "ClipGradByNorm",
    "ClipGradByValue",
    "GradClip",
    "OpRole",
    "Operator",
    "Program",
    "Source",
    "Variable",
    "agreement_of",
    "default_main_program",
    "default_startup_program",
    "describe_difference",
    "facts_of_training",
    "fingerprint_of",
]
