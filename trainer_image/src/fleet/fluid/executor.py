"""The executor, which runs a local or transpiled program for one step per call.

A script's own loop and an executor use the same sessions; see `fleet.parameter_server.sessions`.
"""

import operator
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fleet.errors import ConfigurationError, FleetError
from fleet.fluid.compiler import CompiledProgram, uncompiled
from fleet.fluid.computation import Computation
from fleet.fluid.dataset import FetchHandler, QueueDataset, run_from_dataset
from fleet.fluid.execution import (
    computation_of,
    compute,
    feed_of,
    fetched_gradients,
    initialize,
    initialize_once,
    is_built,
    module_of,
    prepare,
    ready,
    resume,
    sequences_of,
    share_optimizer_state,
)
from fleet.fluid.ir import Variable
from fleet.fluid.lod import LoDTensor
from fleet.fluid.originals import FROM_DATASET, RUN, check_arguments
from fleet.fluid.place import CPUPlace, Place, check_place
from fleet.fluid.preview import previewed
from fleet.fluid.program import Program, default_main_program
from fleet.fluid.reader import read_feed
from fleet.fluid.render import check_unedited, server_plan, trainer_plan
from fleet.parameter_server.sessions import (
    complete,
    find_trainer,
    serve,
    serves_within,
    start_server,
    start_trainer,
)
from fleet.parameter_server.trainer.trainer import Trainer
from fleet.plan.clipping import GradClip, clip_gradients
from fleet.plan.job import CollectivePlan
from fleet.plan.source import Source
from fleet.plan.spec import TrainingSpec
from fleet.process import lifecycle
from fleet.role_maker import JobIdentity
from fleet.role_maker.role import identity_of
from fleet.role_maker.variables import Variables

if TYPE_CHECKING:
    from fleet.collective.trainer import Trainer as CollectiveTrainer

__all__ = ["Executor", "Feed", "FetchHandler", "FetchedNumber", "fetched", "source_of"]

_GRADIENT = "@GRAD"
Feed = Mapping[str, Any] | Sequence[Mapping[str, Any]]


def source_of(program: Program) -> Source:
    """Return the PyTorch objects that run a program's steps.

    Raises
    ------
    ConfigurationError
        The program has none.
    """
    if program.source is None or program.plan is None:
        missing = "PyTorch objects behind it" if program.source is None else "plan"
        raise ConfigurationError(
            f"the program has no {missing}, so it cannot run; build it with Program.capture"
        )
    return program.source


class Executor:
    """Runs programs on a device.

    Parameters
    ----------
    place : CPUPlace or CUDAPlace, optional
        The device of a trainer's model; by default the CPU. A parameter server always uses the CPU.

    Notes
    -----
    Paddle's ``fluid.Executor``. For a captured program, this executor runs the PyTorch model and
    optimizer from which the program was captured.

    Examples
    --------
    ::

        executor = fleet.Executor(fleet.CPUPlace())
        executor.run(fleet.default_startup_program())
        for x, y in batches:
            (loss,) = executor.run(program, feed={"x": x, "y": y}, fetch_list=["loss"])
        executor.close()
    """

    def __init__(self, place: Place | None = None) -> None:
        self._place = place if place is not None else CPUPlace()
        if not isinstance(self._place, Place):
            raise ConfigurationError(
                f"Executor: place is {place!r}; expected fleet.CPUPlace(), fleet.CUDAPlace(number) or nothing"
            )
        self._trainer: Trainer | None = None
        self._collective: CollectiveTrainer | None = None
        self._closed = False

    @overload
    def run(
        self,
        program: Program | CompiledProgram | None = None,
        feed: Feed | None = None,
        fetch_list: Sequence[str | Variable] | None = None,
        *,
        return_numpy: Literal[True] = True,
        **originals: Any,
    ) -> list[npt.NDArray[Any]]: ...

    @overload
    def run(
        self,
        program: Program | CompiledProgram | None = None,
        feed: Feed | None = None,
        fetch_list: Sequence[str | Variable] | None = None,
        *,
        return_numpy: bool,
        **originals: Any,
    ) -> list[Any]: ...

    def run(
        self,
        program: Program | CompiledProgram | None = None,
        feed: Feed | None = None,
        fetch_list: Sequence[str | Variable] | None = None,
        *,
        return_numpy: bool = True,
        **originals: Any,
    ) -> list[Any]:
        """Run a program once, and return the fetched values.

        A startup program prepares the process. On a trainer, the module holds the servers' values afterwards;
        a server accepts trainers from then on. A trainer's main program makes one training step. A server's
        main program serves until every trainer has completed.

        Parameters
        ----------
        program : Program, optional
            By default ``fleet.default_main_program()``.
        feed : mapping of name to array or tensor, optional
            The program's data: the arguments of its `loss_fn`. May also be a list of one mapping, for the one
            device.
        fetch_list : sequence of str or Variable, optional
            The values to return: results of `loss_fn` by name (a single tensor is ``loss``), parameters after
            the step, or gradients, by a parameter's name with ``@GRAD``.
        return_numpy : bool
            False returns LoDTensors, which have the lengths of a variable's sequences besides its values.
        **originals
            Other arguments of Paddle. Those that would have another effect here are refused by name.

        Returns
        -------
        list of numpy.ndarray or LoDTensor
            One per entry of `fetch_list`. A number such as the loss has the shape ``(1,)``; ``loss[0]``,
            ``float(loss)``, ``"%f" % loss`` and ``f"{loss:.4f}"`` all work.

        Raises
        ------
        ConfigurationError
            The program cannot run with these arguments, because a name is unknown or an input is missing.
        FleetError
            As for ``optimizer.step()``.
        """
        if self._closed:
            raise ConfigurationError("run() after close(); make another Executor")
        check_arguments("Executor.run", originals, RUN)
        chosen = uncompiled(program) if program is not None else default_main_program()
        role = chosen.attrs.get("role")
        if is_built(chosen) and role is None:
            given = _of_one_device(feed) or read_feed(chosen)
            return self._run_built(chosen, given, _names(fetch_list), return_numpy=return_numpy)
        source = source_of(chosen)
        if role == "pserver" or chosen.part == "startup":
            _check_unasked(feed, fetch_list)
        if role == "pserver":
            return self._run_server(chosen, source)
        check_place(self._place)
        check_unedited(chosen)
        if chosen.part == "startup":
            return self._start_up(chosen, source)
        trainer = self._session(chosen, source) if role == "trainer" else None
        averages = "trainers" in chosen.attrs and trainer is None
        if averages:
            collective().check_started(chosen, source)
        names = _names(fetch_list)
        inputs = self._inputs(chosen, source, _of_one_device(feed), names)
        clip = chosen.spec.clip if chosen.spec is not None else None
        values = self._step(source, trainer, inputs, names, clip, averages=averages)
        if return_numpy:
            return values
        built = chosen.origin is not None
        return _lod_tensors(names, values, module_of(source).computation if built else None, inputs)

    def train_from_dataset(
        self,
        program: Program | CompiledProgram | None = None,
        dataset: QueueDataset | None = None,
        scope: Any = None,
        thread: int = 0,
        debug: bool = False,
        fetch_list: Sequence[str | Variable] | None = None,
        fetch_info: Sequence[str] | None = None,
        print_period: int = 100,
        fetch_handler: FetchHandler | None = None,
    ) -> None:
        """Run a program on each batch of a dataset.

        Parameters
        ----------
        program : Program, optional
            By default ``fleet.default_main_program()``.
        dataset : QueueDataset or InMemoryDataset
        scope : optional
            As in Paddle; a value that would have an effect is refused.
        thread : int
            The number of threads that read the files; 0 for the dataset's number.
        debug : bool
            As `scope`.
        fetch_list : sequence of str or Variable, optional
            The variables to print.
        fetch_info : sequence of str, optional
            The text to print before each variable; by default its name.
        print_period : int
            The number of batches between two printed lines.
        fetch_handler : FetchHandler, optional
            Receives values between two steps.

        Raises
        ------
        ConfigurationError, FleetError
            As for `run`, and for a dataset that cannot be read.
        """
        check_arguments("Executor.train_from_dataset", {"scope": scope, "debug": debug}, FROM_DATASET)
        run_from_dataset(
            lambda feed, fetched: self.run(program, feed=feed, fetch_list=fetched),
            dataset,
            threads=thread,
            fetch_list=fetch_list,
            fetch_info=fetch_info,
            print_period=print_period,
            fetch_handler=fetch_handler,
        )

    def infer_from_dataset(
        self,
        program: Program | CompiledProgram | None = None,
        dataset: QueueDataset | None = None,
        scope: Any = None,
        thread: int = 0,
        debug: bool = False,
        fetch_list: Sequence[str | Variable] | None = None,
        fetch_info: Sequence[str] | None = None,
        print_period: int = 100,
        fetch_handler: FetchHandler | None = None,
    ) -> None:
        """Run a program on each batch of a dataset, without changing parameters.

        Parameters
        ----------
        program : Program, optional
            By default ``fleet.default_main_program()``. The operators of its backward pass and its updates
            are left out, as by ``program.clone(for_test=True)``.
        dataset, scope, thread, debug, fetch_list, fetch_info, print_period, fetch_handler
            As for `train_from_dataset`.
        """
        chosen = uncompiled(program) if program is not None else default_main_program()
        if chosen.training is not None:
            chosen = chosen.clone(for_test=True)
        self.train_from_dataset(
            chosen, dataset, scope, thread, debug, fetch_list, fetch_info, print_period, fetch_handler
        )

    def close(self) -> None:
        """Report that this trainer has completed; repeated calls, and calls on a server, report nothing."""
        self._closed = True
        trainer, self._trainer = self._trainer, None
        if trainer is not None and not lifecycle.refuses("close()"):
            complete(trainer)
        joined, self._collective = self._collective, None
        if joined is not None:
            joined.complete()

    def _run_built(
        self, program: Program, feed: Mapping[str, Any], names: Sequence[str], *, return_numpy: bool
    ) -> list[Any]:
        """Run a program that was built with layers, without other processes."""
        check_place(self._place)
        device = self._place.device
        if program.training is None:
            computation = computation_of(program)
            inputs: dict[str, Any] = dict(feed_of(computation, feed, device))
            values = [_array(each) for each in compute(program, inputs, names, device)]
        else:
            source = prepare(program, device)
            computation = module_of(source).computation
            inputs = ready(source, feed, names, device)
            clip = program.spec.clip if program.spec is not None else None
            values = self._step(source, None, inputs, names, clip)
        return values if return_numpy else _lod_tensors(names, values, computation, inputs)

    def _start_up(self, program: Program, source: Source) -> list[npt.NDArray[Any]]:
        if source.module is not None:
            source.module.to(self._place.device)
        if isinstance(program.plan, TrainingSpec) or previewed(program):
            return []
        if isinstance(program.plan, CollectivePlan):
            if program.origin is not None and not collective().is_started(source):
                initialize(source, self._place.device)
                share_optimizer_state(program, source)
            self._collective = collective().start(program.plan, source, self._place)
            return []
        self._trainer = find_trainer(source)
        if self._trainer is None:
            initialize(source, self._place.device, tables=serves_within(source))
            self._trainer = start_trainer(trainer_plan(program), source, _job())
            resume(source, self._trainer, joined=True)
        return []

    def _run_server(self, program: Program, source: Source) -> list[npt.NDArray[Any]]:
        plan = server_plan(program)
        if previewed(program):
            return []
        if program.part == "startup":
            initialize(source, "cpu", tables=True)
        else:
            initialize_once(source, "cpu", tables=True)
            serve(start_server(plan, source, _job()))
        return []

    def _session(self, program: Program, source: Source) -> Trainer:
        trainer = self._trainer = find_trainer(source)
        if trainer is None:
            previewed(program)
            raise ConfigurationError(
                "there is no session with the parameter servers; run the startup program first, "
                "fleet.default_startup_program()"
            )
        return trainer

    def _inputs(
        self, program: Program, source: Source, feed: Mapping[str, Any], names: Sequence[str]
    ) -> dict[str, Any]:
        if program.origin is not None:
            return ready(source, feed or read_feed(program), names, self._place.device)
        expected = {variable.name for variable in program.global_block().vars.values() if variable.is_data}
        if set(feed) != expected:
            raise ConfigurationError(
                f"feed has {', '.join(sorted(feed)) or 'nothing'}; "
                f"expected the data of the program: {', '.join(sorted(expected)) or 'nothing'}"
            )
        return {name: self._on_place(value) for name, value in feed.items()}

    def _on_place(self, value: object) -> object:
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(value)
        return value.to(self._place.device) if isinstance(value, Tensor) else value

    def _step(
        self,
        source: Source,
        trainer: Trainer | None,
        inputs: Mapping[str, Any],
        names: Sequence[str],
        clip: GradClip | None,
        *,
        averages: bool = False,
    ) -> list[npt.NDArray[Any]]:
        if source.loss_fn is None:
            raise ConfigurationError(
                "the program has no loss_fn to run; it describes a loop that calls backward() itself"
            )
        source.optimizer.zero_grad()
        returned = source.loss_fn(source.module, **inputs)
        outputs = returned if isinstance(returned, Mapping) else {"loss": returned}
        loss = outputs.get("loss")
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ConfigurationError(
                f"loss_fn returned {_summary(returned)}; expected the loss, a tensor of one element, "
                "or a dict of named tensors with 'loss' among them"
            )
        # Before the step, so that a run that fails leaves the parameters unchanged.
        unknown = [name for name in names if not _known(name, outputs, source)]
        if unknown:
            raise ConfigurationError(
                f"fetch_list names {', '.join(unknown)}; expected what loss_fn returns "
                f"({', '.join(outputs)}), a parameter, or a parameter's name with {_GRADIENT}"
            )
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = (
            {} if averages else fetched_gradients(source, names, outputs, local=trainer is None)
        )  # averages are fetched after the step
        if trainer is None:
            if clip is not None:
                clip_gradients(clip, source.parameters.values())
            source.optimizer.step()
        else:
            trainer.step_as_the_own()
        return [
            _array(gradients[name]) if name in gradients else _fetch(name, outputs, source) for name in names
        ]


def collective() -> Any:
    """Import and return the module for collective training, which other jobs do not need."""
    from fleet.fluid import collective_executor

    return collective_executor


def _check_unasked(feed: Feed | None, fetch_list: Sequence[str | Variable] | None) -> None:
    """Raise an error if `feed` or `fetch_list` is given for a program without a training step."""
    for name, given in (("feed", feed), ("fetch_list", fetch_list)):
        if given:
            raise ConfigurationError(
                f"{name} has {', '.join(map(str, given))}, but the program does not make a training step: it "
                f"prepares one, or serves; pass {name} with a trainer's main program"
            )


def _of_one_device(feed: Feed | None) -> Mapping[str, Any]:
    """Return the feed of this process; as in Paddle, it may be given as a list with one feed per device."""
    if feed is None or isinstance(feed, Mapping):
        return feed or {}
    entries = list(feed) if isinstance(feed, (list, tuple)) else []
    if len(entries) == 1 and isinstance(entries[0], Mapping):
        return entries[0]
    found = f"a list of {len(entries)}" if entries else f"{feed!r}"
    raise ConfigurationError(
        f"feed is {found}; expected a dict of arrays, or a list of one: this process has one device, and "
        "python -m fleet.launch starts a process for each"
    )


def _job() -> JobIdentity:
    return identity_of(Variables(os.environ))


def _names(fetch_list: Sequence[str | Variable] | None) -> list[str]:
    return [entry if isinstance(entry, str) else entry.name for entry in fetch_list or ()]


def _known(name: str, outputs: Mapping[str, Any], source: Source) -> bool:
    return name in outputs or name.removesuffix(_GRADIENT) in source.parameters


def _fetch(name: str, outputs: Mapping[str, Any], source: Source) -> npt.NDArray[Any]:
    if name in outputs and not name.endswith(_GRADIENT):
        value = outputs[name]
    elif name in source.parameters:
        value = source.parameters[name]
    else:
        parameter = source.parameters.get(name.removesuffix(_GRADIENT))
        value = None if parameter is None else parameter.grad
        if value is None:
            raise FleetError(f"{name} was fetched, but this step computed no gradient for it")
    return _array(value if isinstance(value, Tensor) else torch.as_tensor(value))


def _array(tensor: Tensor) -> npt.NDArray[Any]:
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    if tensor.dtype is torch.bfloat16:  # NumPy has no bfloat16; float32 represents all of its values
        tensor = tensor.float()
    # A copy, because the next step changes parameters and gradients in place.
    return fetched(tensor.detach().to("cpu", copy=True).numpy())


def _lod_tensors(
    names: Sequence[str],
    values: Sequence[npt.NDArray[Any]],
    computation: Computation | None,
    inputs: Mapping[str, Any],
) -> list[LoDTensor]:
    """Return fetched values with the lengths of their sequences, which only a built program has."""
    tensors = []
    for name, value in zip(names, values, strict=True):
        lengths = [] if computation is None else sequences_of(name, computation, inputs)
        # An operator may compute other rows from sequences, as `accuracy` does.
        fits = bool(lengths) and sum(lengths[-1]) == len(value)
        tensors.append(LoDTensor(value, lengths if fits else []))
    return tensors


def _summary(value: object) -> str:
    if isinstance(value, Mapping):
        return f"a dict of {', '.join(map(str, value)) or 'nothing'}"
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"a {type(value).__name__}"


class FetchedNumber(np.ndarray[Any, Any]):
    """An array of shape ``(1,)`` that can be used wherever Python expects a number.

    A result computed from such an array, for example a running sum of losses, is of this class if it has the
    same shape, and a plain NumPy array otherwise. The array is pickled and saved as a plain array.
    """

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        return operator.index(self.item())

    def __round__(self, digits: int | None = None) -> Any:
        return round(self.item(), digits)

    def __format__(self, spec: str) -> str:
        """Format as a number if a format specification is given, else as an array."""
        return format(self.item(), spec) if spec else str(self)

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        """Return a result of shape ``(1,)`` as a FetchedNumber, and any other as a plain array."""
        if array is self:  # an in-place operation
            return self
        plain = np.asarray(array)
        if return_scalar:
            return plain[()]
        return plain.view(FetchedNumber) if plain.shape == (1,) else plain

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain array, so that loading does not require fleet."""
        return self.view(np.ndarray).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> "FetchedNumber":
        """Return a copy that is also a FetchedNumber, unlike NumPy's own method."""
        return self.copy()

    def __repr__(self) -> str:
        return repr(self.view(np.ndarray))


def fetched(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return an array, converted to a `FetchedNumber` if its shape is ``()`` or ``(1,)``."""
    return values.reshape(1).view(FetchedNumber) if values.shape in ((), (1,)) else values
