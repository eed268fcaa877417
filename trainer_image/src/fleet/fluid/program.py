"""Programs, which can be captured from PyTorch, printed, stored as JSON and compared between processes.

Scripts that pass no program use the default programs, which `program_guard` and `Program.capture` replace.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from fleet.errors import ConfigurationError
from fleet.fluid.ir import Operator, OpRole, ProgramData
from fleet.fluid.printer import format_difference, format_program
from fleet.fluid.serialise import read_program, write_program
from fleet.fluid.step_operators import append_startup, append_step
from fleet.plan.agreement import fingerprint_of
from fleet.plan.clipping import GradClip
from fleet.plan.job import JobPlan
from fleet.plan.source import Source
from fleet.plan.spec import TrainingSpec

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

__all__ = ["Program", "default_main_program", "default_startup_program", "program_guard"]


class Program(ProgramData):
    """A program that an executor runs: a list of blocks, of which the first is the global block.

    Attributes
    ----------
    blocks : list of Block
    attrs : dict
        Facts about the whole program, set by the transpiler: the role, the endpoints, the mode.
    startup_program : Program or None
        The program that creates this one's persistable variables.
    plan : TrainingSpec, JobPlan, CollectivePlan or None
        The plan that the program shows and the runtime follows; ignored in comparisons of programs.
    part : str
        ``main``, or ``startup`` for a program that prepares another one.
    source : Source or None
        The PyTorch objects behind the program; ignored in comparisons of programs.
    mode : object or None
        The user-defined mode for which the program was transpiled; ignored in comparisons of programs.

    Notes
    -----
    Paddle's ``fluid.framework.Program``. Here a program is built with `fleet.fluid.layers`, or captured from
    a PyTorch model and its optimizer.
    """

    _random_seed = 0

    @property
    def random_seed(self) -> int:
        """The seed for initial values and dropout; with 0, each run draws different numbers.

        A captured program draws no numbers, because PyTorch does.

        Raises
        ------
        ConfigurationError
            A value other than 0 is assigned to a captured program; the message says what to write instead.
        """
        return self._random_seed

    @random_seed.setter
    def random_seed(self, seed: int) -> None:
        if self.plan is None or self.training is not None or self.origin is not None:
            self._random_seed = seed
        elif seed != 0:
            raise ConfigurationError(
                f"program.random_seed is {seed!r}, but a captured program draws no numbers: PyTorch draws a "
                "module's initial values when it is built, and its dropout when it runs; call "
                f"torch.manual_seed({seed!r}) before you build the model, and leave random_seed at 0"
            )

    def clone(self, for_test: bool = False) -> Self:
        """Return an independent copy of this program and of its startup program.

        The copy of a captured program has the same PyTorch objects.

        Parameters
        ----------
        for_test : bool
            Whether to remove the backward pass and the updates, and to switch layers to inference. Supported
            only for programs built with layers.

        Returns
        -------
        Program
            Equal to this program unless `for_test` is True.

        Raises
        ------
        ConfigurationError
            `for_test` is True, and the program was captured.
        """
        if self.origin is not None and for_test:
            return self.origin.clone(for_test=True)
        # Only variables of built programs have `copied`. Their class cannot be named here, because its module
        # imports this one.
        if self.origin is None and any(hasattr(each, "copied") for each in self.list_vars()):
            return self._clone_built(for_test=for_test)
        if for_test:
            raise ConfigurationError(
                "program.clone(for_test=True): a captured program is a whole training step, and no part of "
                "it can run alone; test with the module itself, whose parameters are up to date after each "
                "run: model.eval(), then model(x) within torch.no_grad(), and model.train() before the next "
                "step"
            )
        return super().clone()

    def _clone_built(self, *, for_test: bool) -> Self:
        """Return a copy of a built program with its own variables; used by `clone`."""
        copy = super().clone()
        copy.random_seed, copy.plan, copy.source = self.random_seed, None, None
        copy.training = None if for_test else self.training
        if for_test:  # blocks that are not the first compute learning rates
            del copy.blocks[1:]
            (block,) = copy.blocks
            kept = [_tested(op) for op in block.ops if op.attrs.get("op_role", 0) in _FORWARD]
            # Paddle removes unused variables only together with operators.
            if len(kept) < len(block.ops):
                used = {name for op in kept for name in (*op.input_arg_names, *op.output_arg_names)}
                block.vars = {name: each for name, each in block.vars.items() if name in used}
            block.ops[:] = kept
        for block in copy.blocks:
            built: Any = block.vars
            block.vars = {
                name: each.copied(block) if hasattr(each, "copied") else each for name, each in built.items()
            }
        return copy

    def fingerprint(self) -> str:
        """Return a hex digest of the facts that must be equal in all processes that train together."""
        if isinstance(self.plan, JobPlan):
            return fingerprint_of(self.plan.agreement)
        return fingerprint_of(self.spec.agreement() if self.spec is not None else {})

    def to_string(self, *, with_details: bool = False) -> str:
        """Return the program as text that reads like code.

        Parameters
        ----------
        with_details : bool
            Also show output slots and bookkeeping attributes.

        Returns
        -------
        str
            One line for each variable and operator.
        """
        return format_program(self, with_details=with_details)

    def difference(self, other: "Program") -> str:
        """Describe how another program differs from this one; return an empty string if they are equal.

        Parameters
        ----------
        other : Program

        Returns
        -------
        str
            The detailed text of both programs around each difference. Lines of this program only begin with
            ``-``, and lines of `other` only with ``+``.
        """
        return "" if self == other else format_difference(self, other)

    def to_json(self) -> str:
        """Return this program and its startup program as JSON; `from_json` reads it.

        Returns
        -------
        str
            The program, without the PyTorch objects behind it.

        Raises
        ------
        TranspileError
            An attribute is not a plain value.
        """
        return write_program(self)

    @classmethod
    def from_json(cls, text: str) -> "Program":
        """Build a program from the output of `to_json`.

        Parameters
        ----------
        text : str

        Returns
        -------
        Program
            Equal to the program that was written, but without a `source`. It can be printed, compared and
            transpiled. To run, it needs the `source` of a program that was captured in this process.

        Raises
        ------
        TranspileError
            The text is truncated, damaged, or of another format or version; the message gives the place.
        """
        return read_program(text, cls)

    @classmethod
    def capture(
        cls,
        model: "Module",
        loss_fn: Callable[..., Any],
        optimizer: "Optimizer",
        grad_clip: GradClip | None = None,
    ) -> "Program":
        """Capture a PyTorch script's training step, without running or tracing the model.

        Parameters
        ----------
        model : torch.nn.Module
            Provides the names of the parameters.
        loss_fn : callable
            Called as ``loss_fn(model, **feed)``. Returns the scalar loss, or a dict of named scalars and
            tensors that includes ``loss``. The argument names in its signature are the program's data.
        optimizer : torch.optim.Optimizer
            Its class and param groups determine the optimize operators.
        grad_clip : ClipGradByValue, ClipGradByNorm or ClipGradByGlobalNorm, optional
            How to clip the gradients before the optimize operators.

        Returns
        -------
        Program
            It becomes `fleet.default_main_program()`, and its `startup_program` becomes
            `fleet.default_startup_program()`.

        Raises
        ------
        TranspileError
            Parameter servers cannot train a part of the step; the message names it.
        """
        from fleet.plan.capture import capture_step  # programs need no torch

        spec, source = capture_step(model, loss_fn, optimizer, grad_clip)
        program = _captured(spec, source)
        _defaults.update(main=program, startup=program.startup_program or cls())
        return program

    @classmethod
    def from_optimizer(
        cls,
        optimizer: "Optimizer",
        model: "Module | None" = None,
        grad_clip: GradClip | None = None,
    ) -> "Program":
        """Capture a training loop that itself calls ``loss.backward()`` and ``optimizer.step()``.

        Parameters
        ----------
        optimizer : torch.optim.Optimizer
            Its parameters are those of the program.
        model : torch.nn.Module, optional
            Provides the names of the parameters. By default they come from
            ``torch.optim.X(model.named_parameters())``; without names there, they are ``param_{group}_{i}``.
        grad_clip : ClipGradByValue, ClipGradByNorm or ClipGradByGlobalNorm, optional
            As in `capture`.

        Returns
        -------
        Program
            The default programs do not change.

        Raises
        ------
        TranspileError
            As in `capture`.
        """
        from fleet.plan.capture import capture_loop  # imported here for the same reason

        return _captured(*capture_loop(optimizer, model, grad_clip))

    def __str__(self) -> str:
        return self.to_string()


_FORWARD = (int(OpRole.FORWARD), int(OpRole.LOSS))


def _tested(op: Operator) -> Operator:
    """Return an operator with ``is_test`` set to True, if it has this attribute."""
    return replace(op, attrs={**op.attrs, "is_test": True}) if "is_test" in op.attrs else op


def step_program(spec: TrainingSpec) -> Program:
    """Return the program of a training step in a single process."""
    program = Program()
    program.plan = spec
    append_step(program.global_block(), spec)
    return program


def startup_program(spec: TrainingSpec) -> Program:
    """Return the startup program for training in a single process."""
    program = Program()
    program.plan, program.part = spec, "startup"
    append_startup(program.global_block(), step_program(spec).list_vars())
    return program


def _captured(spec: TrainingSpec, source: Source) -> Program:
    program, startup = step_program(spec), startup_program(spec)
    program.startup_program = startup
    program.source = startup.source = source
    return program


_defaults: dict[str, Program] = {}


@contextmanager
def program_guard(main_program: Program, startup_program: Program | None = None) -> Iterator[None]:
    """Make layers in the ``with`` block append to the given programs instead of the default ones.

    Parameters
    ----------
    main_program : Program
    startup_program : Program, optional
        Receives the initial values of parameters; by default the current one.

    Notes
    -----
    Paddle's ``fluid.program_guard``.
    """
    outer = default_main_program(), default_startup_program()
    _defaults["main"], _defaults["startup"] = main_program, startup_program or outer[1]
    try:
        yield
    finally:
        _defaults["main"], _defaults["startup"] = outer


def default_main_program() -> Program:
    """Return the default program, to which layers are appended; `Program.capture` replaces it.

    Notes
    -----
    Paddle's ``fluid.default_main_program``.
    """
    return _defaults.setdefault("main", Program())


def default_startup_program() -> Program:
    """Return the default startup program; `Program.capture` replaces it.

    Notes
    -----
    Paddle's ``fluid.default_startup_program``.
    """
    return _defaults.setdefault("startup", Program())
