"""The part of the ``paddle`` package that scripts use: ``import fleet.fluid.paddle as paddle``.

A reader is a function without arguments that returns an iterator over samples; `batch` and the decorators in
`fleet.fluid.paddle.reader` create readers from readers.
"""

from typing import TYPE_CHECKING

from fleet.fluid.names import missing
from fleet.fluid.paddle import dataset as dataset
from fleet.fluid.paddle import reader as reader
from fleet.fluid.paddle.reader import batch

__all__ = ["batch", "enable_static"]


def enable_static() -> None:
    """Do nothing, because programs always run in the static mode that this call requests."""


if not TYPE_CHECKING:
    __getattr__ = missing("paddle")
