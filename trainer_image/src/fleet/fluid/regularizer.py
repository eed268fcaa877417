"""Regularizers, whose gradients are added to those of the loss after clipping."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from fleet.errors import ConfigurationError
from fleet.fluid import unique_name
from fleet.fluid.building import ProgramVariable, append_operator, create_variable
from fleet.fluid.ir import Block
from fleet.fluid.names import missing

__all__ = ["L1Decay", "L1DecayRegularizer", "L2Decay", "L2DecayRegularizer", "Regularizer"]


class Regularizer(ABC):
    """The base class of regularizers, which penalize large parameters.

    Parameters
    ----------
    regularization_coeff : float
        The factor of the penalty.

    Raises
    ------
    ConfigurationError
        The factor is not a number.
    """

    def __init__(self, regularization_coeff: float = 0.0) -> None:
        if isinstance(regularization_coeff, bool) or not isinstance(regularization_coeff, int | float):
            raise ConfigurationError(
                f"{type(self).__name__}: regularization_coeff is {regularization_coeff!r}; expected a number"
            )
        self.coefficient = float(regularization_coeff)

    @property
    @abstractmethod
    def options(self) -> Mapping[str, float]:
        """The equivalent options of a `fleet.optim` class."""

    @abstractmethod
    def term(self, parameter: ProgramVariable, block: Block) -> ProgramVariable:
        """Append the operators that compute the penalty's gradient, and return the gradient's variable.

        Parameters
        ----------
        parameter : ProgramVariable
        block : Block
            The block to which the operators are appended.

        Returns
        -------
        ProgramVariable
            The variable to add to the parameter's gradient.
        """

    def __str__(self) -> str:
        return f"{type(self).__name__.removesuffix('Regularizer')}, regularization_coeff={self.coefficient:f}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.coefficient})"


class L2DecayRegularizer(Regularizer):
    """A penalty of half the sum of squares: Paddle's ``fluid.regularizer.L2Decay``.

    Parameters
    ----------
    regularization_coeff : float
        The gradient is the parameter times this coefficient.
    """

    @property
    def options(self) -> Mapping[str, float]:
        """The equivalent ``weight_decay`` option."""
        return {"weight_decay": self.coefficient}

    def term(self, parameter: ProgramVariable, block: Block) -> ProgramVariable:
        """Append the operator that scales the parameter."""
        return _scaled(parameter, _term(parameter, block), self.coefficient)


class L1DecayRegularizer(Regularizer):
    """A penalty of the sum of absolute values: Paddle's ``fluid.regularizer.L1Decay``.

    Parameters
    ----------
    regularization_coeff : float
        The gradient is the signs of the parameter times this coefficient.
    """

    @property
    def options(self) -> Mapping[str, float]:
        """The equivalent options of a `fleet.optim` class; see `Regularizer.options`."""
        return {"l1_decay": self.coefficient}

    def term(self, parameter: ProgramVariable, block: Block) -> ProgramVariable:
        """Append the operators that scale the signs of the parameter."""
        term = _term(parameter, block)
        append_operator(block, "sign", {"X": parameter}, {}, {"Out": term})
        return _scaled(term, term, self.coefficient)


def _term(parameter: ProgramVariable, block: Block) -> ProgramVariable:
    name = unique_name.generate("_generated_var")
    return create_variable(block, name, parameter.shape, parameter.dtype, lod_level=parameter.lod_level)


def _scaled(x: ProgramVariable, out: ProgramVariable, coefficient: float) -> ProgramVariable:
    append_operator(out.block, "scale", {"X": x}, {"scale": coefficient}, {"Out": out})
    return out


L1Decay = L1DecayRegularizer
L2Decay = L2DecayRegularizer

if not TYPE_CHECKING:
    __getattr__ = missing("regularizer")
