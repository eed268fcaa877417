"""The base class of optimizers, which appends the backward pass and the parameter updates to a program.

It relies on these properties of the classes in `fleet.fluid.optimizer`, `regularizer` and `clip`:

- A subclass of `Optimizer` declares its operator (`type`, `accumulators`, `renamed`, `constants`) and, with
  `torch_class` and `options`, the class of `fleet.optim` that computes the updates.
- A regularizer has ``term(parameter, block)``, which appends operators and returns the variable to add to the
  gradient, and ``options``, the options of `fleet.optim` for it: ``{"weight_decay": 0.1}``.
- A clipping has ``append(params_grads, as_attribute=...)``, which appends operators and returns the
  parameters with their new gradients, and ``plan``, the same clipping as an object of `fleet.plan.clipping`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fleet.errors import ConfigurationError
from fleet.fluid import unique_name
from fleet.fluid.backward import append_backward, loss_of
from fleet.fluid.building import ProgramVariable, append_operator, create_variable, start_with
from fleet.fluid.initializer import Constant
from fleet.fluid.ir import Attribute, Operator, OpRole, Variable
from fleet.fluid.operators.rows import is_distributed
from fleet.fluid.program import Program, default_startup_program, program_guard
from fleet.fluid.training import Trained, Training

__all__ = ["Accumulator", "Optimizer"]

Pairs = list[tuple[ProgramVariable, ProgramVariable]]
_OPTIMIZE = int(OpRole.OPTIMIZE)


@dataclass(frozen=True)
class Accumulator:
    """The declaration of one kind of optimizer state, a tensor per parameter.

    Attributes
    ----------
    slot : str
        The operator's input; the output has the suffix ``Out``.
    suffix : str
        The suffix of the variable's name, after the parameter's name.
    initial : float or str
        The initial value, or the name of the option that is the initial value.
    scalar : bool
        Whether the tensor has one element instead of the parameter's shape.
    """

    slot: str
    suffix: str
    initial: float | str = 0.0
    scalar: bool = False


class Optimizer:
    """The base class of optimizers; the subclasses are in `fleet.fluid.optimizer`.

    Parameters
    ----------
    learning_rate : float or ProgramVariable
        A number, or the result of a schedule such as ``layers.exponential_decay``.
    parameter_list : iterable of Variable or str, optional
        The parameters to train; by default all.
    regularization : L1Decay or L2Decay, optional
        For parameters whose ParamAttr has no regularizer.
    grad_clip : GradientClipByValue, GradientClipByNorm or GradientClipByGlobalNorm, optional
    name : str, optional
        Part of the names of the variables of its state.
    **options
        The options of `torch_class`, without the learning rate and regularization.

    Notes
    -----
    Paddle's ``fluid.optimizer.Optimizer``.
    """

    type: ClassVar[str]
    torch_class: ClassVar[Any]
    """The class of `fleet.optim` that computes the updates."""
    accumulators: ClassVar[Sequence[Accumulator]] = ()
    """The tensors of optimizer state that each parameter has."""
    renamed: ClassVar[Mapping[str, str]] = {}
    """Attribute names that differ from the option's, by option; empty if programs do not show the option."""
    constants: ClassVar[Mapping[str, Attribute]] = {}
    """The attributes with fixed values, which are not options."""

    def __init__(
        self,
        learning_rate: Any,
        parameter_list: Iterable[str | Variable] | None = None,
        regularization: Any = None,
        grad_clip: Any = None,
        name: str | None = None,
        **options: float,
    ) -> None:
        if not isinstance(learning_rate, int | float | ProgramVariable):
            raise ConfigurationError(
                f"{type(self).__name__}: learning_rate is {learning_rate!r}; expected a number, or the "
                "variable that a schedule such as fluid.layers.exponential_decay returns"
            )
        self.learning_rate = learning_rate
        self.regularization = regularization
        self.grad_clip = grad_clip
        self.name = name
        self._parameter_list = parameter_list
        self._rates: dict[int, ProgramVariable] = {}
        self.options: Mapping[str, Any] = options

    @property
    def attributes(self) -> Mapping[str, Attribute]:
        """The attributes of the optimizer's operator."""
        named = {self.renamed.get(name, name): value for name, value in self.options.items()}
        return {**{name: value for name, value in named.items() if name}, **self.constants}

    def minimize(
        self,
        loss: ProgramVariable,
        startup_program: Program | None = None,
        parameter_list: Iterable[str | Variable] | None = None,
        no_grad_set: Iterable[str | Variable] | None = None,
        grad_clip: Any = None,
    ) -> tuple[list[Operator], Pairs]:
        """Append the backward pass and the updates that minimize a loss.

        Parameters
        ----------
        loss : ProgramVariable
            A variable of one element.
        startup_program : Program, optional
            Receives the initial values of the optimizer's state; by default the default startup program.
        parameter_list : iterable of Variable or str, optional
            The parameters to train; by default all.
        no_grad_set : iterable of Variable or str, optional
            Variables at which gradients end.
        grad_clip : object, optional
            Replaces the constructor's `grad_clip`.

        Returns
        -------
        list of Operator, list of (ProgramVariable, ProgramVariable)
            The updates, as `apply_gradients` returns them, and the parameters with their gradients: in the
            order of `parameter_list`, or else of creation.

        Raises
        ------
        ConfigurationError
            The program has already been minimized, or has nothing to train.
        """
        if grad_clip is not None:
            self.grad_clip = grad_clip
        pairs = self.backward(loss, startup_program, parameter_list, no_grad_set)
        main = loss.block.program
        with program_guard(main, startup_program or default_startup_program()):  # type: ignore[arg-type]
            operators = self.apply_gradients(pairs)
        return operators, pairs

    def backward(
        self,
        loss: ProgramVariable,
        startup_program: Program | None = None,
        parameter_list: Iterable[str | Variable] | None = None,
        no_grad_set: Iterable[str | Variable] | None = None,
        callbacks: Any = None,
    ) -> Pairs:
        """Append the backward pass, the first half of `minimize`."""
        main = loss.block.program
        if main.training is not None:
            raise ConfigurationError(
                f"the program already minimizes {main.training.loss}; expected one call of minimize() per "
                "program: build another program within fluid.program_guard()"
            )
        ended = [each for each in main.global_block().all_parameters() if not each.trainable]
        ended += no_grad_set or ()  # type: ignore[arg-type]  # names are ended too
        pairs = append_backward(loss, parameter_list or self._parameter_list, ended, callbacks)
        if not pairs:
            raise ConfigurationError(
                f"no parameter has a gradient of the loss {loss.name}: there is nothing to train"
            )
        main.startup_program = startup_program or default_startup_program()
        return pairs

    def apply_gradients(self, params_grads: Pairs) -> list[Operator]:
        """Append clipping, regularization and the updates, the second half of `minimize`.

        Returns
        -------
        list of Operator
            The updates, and the operators that scale the learning rate of single parameters.
        """
        # Paddle appends the updates in alphabetical order of the parameters.
        pairs = sorted(params_grads, key=lambda pair: pair[0].name)
        block = pairs[0][0].block.program.global_block()
        plain = {pair[0].name for pair in pairs if self.type != "sgd" and is_distributed(block, pair[0].name)}
        if plain:  # Paddle updates such a table by SGD, regardless of the optimizer
            self._global_rate(block.program)  # type: ignore[arg-type]
        tables = [pair for pair in pairs if pair[0].name in plain]
        pairs = [pair for pair in pairs if pair[0].name not in plain]
        clip = self.grad_clip or block.program.gradient_clip
        if clip is not None:
            pairs = clip.append(pairs, as_attribute=self.grad_clip is None)
        pairs = [self._regularized(parameter, gradient) for parameter, gradient in pairs]
        state = {
            parameter.name: [(each, self._accumulate(parameter, each)) for each in self.accumulators]
            for parameter, _ in pairs
        }
        rate = self._global_rate(block.program)  # type: ignore[arg-type]
        self._record(params_grads, state, rate, clip)
        begin = len(block.ops)
        for parameter, gradient in (*tables, *pairs):
            with block.program.roles(_OPTIMIZE, (parameter.name, gradient.name)):
                inputs: dict[str, Any] = {
                    "Grad": gradient,
                    "LearningRate": self._rate_of(parameter, rate),
                    "Param": parameter,
                }
                outputs: dict[str, Any] = {"ParamOut": parameter}
                for each, variable in state.get(parameter.name, ()):
                    inputs[each.slot], outputs[f"{each.slot}Out"] = variable, variable
                if parameter.name in plain:
                    append_operator(block, "sgd", inputs, {}, outputs)
                else:
                    append_operator(block, self.type, inputs, self.attributes, outputs)
        return block.ops[begin:]

    def regularizer_of(self, parameter: ProgramVariable) -> Any:
        """Return a parameter's regularizer, from its ParamAttr or else from the optimizer."""
        return parameter.regularizer if parameter.regularizer is not None else self.regularization

    def _record(
        self,
        params_grads: Pairs,
        state: Mapping[str, Sequence[tuple[Accumulator, ProgramVariable]]],
        rate: ProgramVariable,
        clip: Any,
    ) -> None:
        block = rate.block.program.global_block()
        gradients = {parameter.name: gradient.name for parameter, gradient in params_grads}
        trained = []
        for parameter in block.all_parameters():
            if parameter.name in gradients:
                regularizer = self.regularizer_of(parameter)  # type: ignore[arg-type]
                plain = parameter.name not in state
                options = dict(regularizer.options) if regularizer is not None and not plain else {}
                held = {each.suffix: variable.name for each, variable in state.get(parameter.name, ())}
                gradient = gradients[parameter.name]
                trained.append(
                    Trained(parameter.name, gradient, parameter.learning_rate, options, held, plain)
                )
        loss = loss_of(block)
        assert loss is not None  # noqa: S101 - backward() came first
        plan = clip.plan if clip is not None else None
        block.program.training = Training(loss, rate.name, tuple(trained), self, plan)

    def _regularized(
        self, parameter: ProgramVariable, gradient: ProgramVariable
    ) -> tuple[ProgramVariable, ProgramVariable]:
        regularizer = self.regularizer_of(parameter)
        if regularizer is None:
            return parameter, gradient
        block = parameter.block
        with block.program.roles(_OPTIMIZE, (parameter.name, gradient.name)):
            term = regularizer.term(parameter, block)
            total = gradient
            if gradient.type == "SELECTED_ROWS":
                total = create_variable(block, f"{gradient.name}@NEWGRAD@", parameter.shape, parameter.dtype)
            append_operator(block, "sum", {"X": [gradient, term]}, {}, {"Out": total})
        return parameter, total

    def _accumulate(self, parameter: ProgramVariable, accumulator: Accumulator) -> ProgramVariable:
        own = "" if self.name is None else f"{self.name}_"
        name = unique_name.generate(f"{parameter.name}_{own}{accumulator.suffix}")
        shape = (1,) if accumulator.scalar else parameter.shape
        start = default_startup_program()
        initial = accumulator.initial
        value = self.options[initial] if isinstance(initial, str) else initial
        start_with(start, name, shape, parameter.dtype, Constant(value))
        return create_variable(parameter.block, name, shape, parameter.dtype, persistable=True)

    def _global_rate(self, program: Program) -> ProgramVariable:
        """Return the learning-rate variable, creating it if necessary."""
        if isinstance(self.learning_rate, ProgramVariable):
            return self.learning_rate
        known = self._rates.get(id(program))  # a program lives as long as its variables, so its id is unique
        if known is None:
            name = unique_name.generate("learning_rate")
            start = Constant(float(self.learning_rate))
            start_with(default_startup_program(), name, (1,), "float32", start)
            known = self._rates[id(program)] = create_variable(
                program.global_block(), name, (1,), "float32", persistable=True, stop_gradient=True
            )
        return known

    def _rate_of(self, parameter: ProgramVariable, rate: ProgramVariable) -> ProgramVariable:
        """Return the learning rate of a parameter, multiplied by the parameter's own factor, if any."""
        if parameter.learning_rate == 1.0:
            return rate
        with parameter.block.program.roles(_OPTIMIZE | int(OpRole.SCHEDULE)):
            return rate * parameter.learning_rate
