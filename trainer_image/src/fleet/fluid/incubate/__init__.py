"""The part of ``fluid.incubate`` that scripts use."""

from fleet.fluid.incubate import data_generator as data_generator

__all__ = ["data_generator"]
