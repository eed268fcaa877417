"""Programs: what a training script does, as data that the transpiler can cut up and the runtime can follow.

The form is that of the original's Programs and neutral to the front end that builds them: `ir` holds the
data, `printer` shows it, `agreement` says what processes must have in common, `capture` builds a Program
from PyTorch. Only the last one imports torch, and only when it is used.
"""

from fleet.program.agreement import agreement_of, describe_difference, facts_of_training, fingerprint_of
from fleet.program.clip import ClipGradByGlobalNorm, ClipGradByNorm, ClipGradByValue, GradClip
from fleet.program.defaults import default_main_program, default_startup_program
from fleet.program.ir import Attribute, Block, Operator, OpRole, Program, Source, Variable

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
