"""Layers, with Paddle's names and arguments, from which scripts build programs."""

import sys
from typing import TYPE_CHECKING

from fleet.fluid.layers.elements import *  # noqa: F403
from fleet.fluid.layers.learning_rate_scheduler import *  # noqa: F403
from fleet.fluid.layers.networks import *  # noqa: F403
from fleet.fluid.names import missing
from fleet.fluid.reader import create_py_reader_by_data as create_py_reader_by_data
from fleet.fluid.reader import double_buffer as double_buffer
from fleet.fluid.reader import py_reader as py_reader
from fleet.fluid.reader import read_file as read_file

nn = ops = tensor = sys.modules[__name__]
"""The names of Paddle's modules of layers, as in ``fluid.layers.nn.fc``; all three are this module."""

if not TYPE_CHECKING:
    __getattr__ = missing("layers")
