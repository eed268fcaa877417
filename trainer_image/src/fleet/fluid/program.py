"""`Program`: captured from PyTorch, shown as text, written as JSON, compared with other processes' programs.

The default programs are those of the latest capture, for scripts that name none.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

from fleet.errors import ConfigurationError
from fleet.fluid.ir import ProgramData
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

__all__ = ["Program", "default_main_program", "default_startup_program"]


class Program(ProgramData):
    """What a process executes: blocks of operators, the first of which is the global block.

    Attributes
    ----------
    blocks : list of Block
    attrs : dict
        Facts about the whole program, put there by the transpiler: the role, the endpoints, the mode.
    startup_program : Program or None
        The program that creates this one's persistable variables.
    plan : TrainingSpec, JobPlan, CollectivePlan or None
        What the program shows, and the runtime follows; not part of what the program says.
    part : str
        ``main``, or ``startup`` of a program that prepares another one.
    plan : TrainingSpec, JobPlan, CollectivePlan or None
        What the program shows, and the runtime follows; not part of what the program says.
    part : str
        ``main``, or ``startup`` of a program that prepares another one.
    source : Source or None
        The PyTorch objects behind it; not part of what the program says.
    mode : object or None
        A training mode of the user's own that the program was transpiled for; not part of what it says.

    Notes
    -----
    The original's ``fluid.framework.Program``. Here it is captured from a PyTorch model and its optimizer.
    """

    @property
    def random_seed(self) -> int:
        """The original's seed of initial values and dropout: 0, as PyTorch draws both.

        Raises
        ------
        ConfigurationError
            Another one is set; the message says what to write instead.
        """
        return 0

    @random_seed.setter
    def random_seed(self, seed: int) -> None:
        if seed != 0:
            raise ConfigurationError(
                f"program.random_seed is {seed!r}, and a program draws no numbers: PyTorch draws a module's "
                "initial values as it is built, and its dropout as it runs; call "
                f"torch.manual_seed({seed!r}) before you build the model, and leave random_seed at 0"
            )

    def clone(self, for_test: bool = False) -> Self:
        """Return an independent copy over the same source; its startup program is copied too.

        Parameters
        ----------
        for_test : bool
            Must be False.

        Returns
        -------
        Program
            Equal to this one.

        Raises
        ------
        ConfigurationError
            `for_test` asks for the original's program without a backward pass.
        """
        if for_test:
            raise ConfigurationError(
                "program.clone(for_test=True): a program is a whole training step, and no part of it is run "
                "alone; test with the module itself, whose parameters are the newest after each run: "
                "model.eval(), then model(x) within torch.no_grad(), and model.train() before the next step"
            )
        return super().clone()

    def fingerprint(self) -> str:
        """Return a hex digest that is equal for programs whose processes may train together."""
        if isinstance(self.plan, JobPlan):
            return fingerprint_of(self.plan.agreement)
        return fingerprint_of(self.spec.agreement() if self.spec is not None else {})

    def to_string(self, *, with_details: bool = False) -> str:
        """Return the program as text that reads like code.

        Parameters
        ----------
        with_details : bool
            Show output slots and book-keeping too.

        Returns
        -------
        str
            One line for each variable and operator.
        """
        return format_program(self, with_details=with_details)

    def difference(self, other: "Program") -> str:
        """Say how another program differs from this one; empty when the two are equal.

        Parameters
        ----------
        other : Program

        Returns
        -------
        str
            The lines of both programs' text, with details, around each difference: those of this program
            alone begin with ``-``, those of `other` alone with ``+``.
        """
        return "" if self == other else format_difference(self, other)

    def to_json(self) -> str:
        """Return the program as JSON, with its startup program; `from_json` reads it back.

        Returns
        -------
        str
            What the program says. The PyTorch objects behind it stay behind.

        Raises
        ------
        TranspileError
            An attribute is no plain value.
        """
        return write_program(self)

    @classmethod
    def from_json(cls, text: str) -> "Program":
        """Build a program from what `to_json` returned.

        Parameters
        ----------
        text : str

        Returns
        -------
        Program
            Equal to the one that was written, without a `source`: it can be printed, compared and lowered,
            and to run it needs the `source` of a program that was captured here.

        Raises
        ------
        TranspileError
            The text is cut off, of another format or version, or damaged; the message says where.
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
        """Describe one training step of a PyTorch script, without running or tracing the model.

        Parameters
        ----------
        model : torch.nn.Module
            Its parameters give the program's names.
        loss_fn : callable
            Called as ``loss_fn(model, **feed)``; returns the scalar loss, or a dict of named scalars and
            tensors with ``loss`` among them. The names in its signature are the program's data.
        optimizer : torch.optim.Optimizer
            Its class and param groups give the optimize operators.
        grad_clip : ClipGradByValue, ClipGradByNorm or ClipGradByGlobalNorm, optional
            Clip the gradients before the optimize operators.

        Returns
        -------
        Program
            Also `fleet.default_main_program()` from now on; its `startup_program` is
            `fleet.default_startup_program()`.

        Raises
        ------
        TranspileError
            Something here cannot be trained by parameter servers; the message names it.
        """
        from fleet.plan.capture import capture_step  # not above: programs are read and printed without torch

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
        """Describe the step of a loop that calls ``loss.backward()`` and ``optimizer.step()`` itself.

        Parameters
        ----------
        optimizer : torch.optim.Optimizer
            Its parameters are the program's.
        model : torch.nn.Module, optional
            Gives the names. Without it they come from ``torch.optim.X(model.named_parameters())``, else
            they are ``param_{group}_{i}``.
        grad_clip : ClipGradByValue, ClipGradByNorm or ClipGradByGlobalNorm, optional
            As in `capture`.

        Returns
        -------
        Program
            The default programs stay as they are.

        Raises
        ------
        TranspileError
            As in `capture`.
        """
        from fleet.plan.capture import capture_loop  # as above

        return _captured(*capture_loop(optimizer, model, grad_clip))

    def __str__(self) -> str:
        return self.to_string()


def step_program(spec: TrainingSpec) -> Program:
    """Return the program of a training step in one process."""
    program = Program()
    program.plan = spec
    append_step(program.global_block(), spec)
    return program


def startup_program(spec: TrainingSpec) -> Program:
    """Return the program that prepares a training step in one process."""
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


def default_main_program() -> Program:
    """Return the program of the latest `Program.capture`; an empty one before the first.

    Notes
    -----
    The original's ``fluid.default_main_program``.
    """
    return _defaults.setdefault("main", Program())


def default_startup_program() -> Program:
    """Return the startup program of the latest `Program.capture`; an empty one before the first.

    Notes
    -----
    The original's ``fluid.default_startup_program``.
    """
    return _defaults.setdefault("startup", Program())
