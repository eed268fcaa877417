"""Which option is carried out where: one table for every field of a strategy and of a transpiler's config.

A value that a way to train does not carry out is refused by its name there, and never passed over. The
checks of the strategy, the transpiler and both fleets read this table, ``docs/reference/options.md`` is made
from it, and a test tries every field in every way. A field that is added without a row fails that test.
Beside the fields stand the other options that some way to train reads, and another leaves alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

__all__ = ["MODES", "OPTIONS", "Rule", "Verdict", "Where", "refusal", "rule_for"]

MODES: Final = ("sync", "async", "half_async", "geo", "own")
"""How trainers and servers keep step; ``own`` stands for a mode of the user's own."""


class Verdict(Enum):
    """What becomes of a value other than the default."""

    CARRIED_OUT = "yes"
    SAYS_THE_MODE = "says the mode"
    CHANGES_NOTHING = "changes nothing"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Where:
    """One way to train.

    Attributes
    ----------
    servers : bool
        With parameter servers; collective otherwise.
    mode : str
        One of `MODES`; empty in collective training, and where it is not known yet.
    by_executor : bool
        An `Executor` makes the steps, of a program of ``minimize()`` or of a transpiler called by hand; a
        loop of the script's own otherwise. In collective training it is True only for a transpiler called
        by hand.
    """

    servers: bool
    mode: str = ""
    by_executor: bool = False

    def __str__(self) -> str:
        if not self.servers:
            return "in collective training"
        place = "with parameter servers" + (" and an Executor" if self.by_executor else "")
        return f"{place}, where the mode is {self.mode}" if self.mode else place


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What becomes of an option; of several rules the first that applies counts.

    Attributes
    ----------
    verdict : Verdict
    text : str
        What it does; or why it changes nothing; or why it is refused, and what works instead.
    shown_by : str
        The test that shows it, ``path::name``; of a refusal the test of this table.
    servers, collective : bool
        Where it applies.
    modes : tuple of str
        With parameter servers: the modes in which it applies.
    values : tuple
        The values to which it applies; every value other than the default where there are none.
    by_executor : bool or None
        Whether it applies to an Executor's steps, or to a loop's; to both where it is None.
    """

    verdict: Verdict
    text: str
    shown_by: str = ""
    servers: bool = True
    collective: bool = True
    modes: tuple[str, ...] = MODES
    values: tuple[object, ...] = ()
    by_executor: bool | None = None

    def applies(self, value: object, where: Where) -> bool:
        """Whether this rule is about a value in one way to train."""
        if not (self.servers if where.servers else self.collective):
            return False
        if where.servers and (self.modes != MODES if not where.mode else where.mode not in self.modes):
            return False
        if self.by_executor not in (None, where.by_executor):
            return False
        return not self.values or value in self.values


def _done(text: str, shown_by: str, *modes: str, values: tuple[object, ...] = ()) -> Rule:
    return Rule(
        verdict=Verdict.CARRIED_OUT,
        text=text,
        shown_by=shown_by,
        collective=False,
        modes=modes or MODES,
        values=values,
    )


def _says_the_mode(text: str) -> Rule:
    return Rule(
        verdict=Verdict.SAYS_THE_MODE,
        text=text,
        shown_by="tests/unit/fleet/fluid/test_edge_cases.py::test_mode",
        collective=False,
        modes=MODES[:-1],
    )


def _done_in_collective(
    text: str, shown_by: str, *, values: tuple[object, ...] = (), by_executor: bool | None = None
) -> Rule:
    return Rule(
        verdict=Verdict.CARRIED_OUT,
        text=text,
        shown_by=shown_by,
        servers=False,
        values=values,
        by_executor=by_executor,
    )


def _not_with_servers(text: str, *modes: str, by_executor: bool | None = None) -> Rule:
    return Rule(
        verdict=Verdict.REFUSED, text=text, collective=False, modes=modes or MODES, by_executor=by_executor
    )


def _not_in_collective(text: str) -> Rule:
    return Rule(verdict=Verdict.REFUSED, text=text, servers=False)


_NO_SERVERS = _not_in_collective("there are no parameter servers")
_ALWAYS_WAITED_FOR = _not_in_collective("trainers wait for each other, in fleet.init")
_ALWAYS_TOGETHER = _not_in_collective(
    "its trainers exchange the gradients of every step; other modes need parameter servers, "
    "fleet.parameter_server"
)
_ONLY_COLLECTIVE = _not_with_servers("collective training has a fleet of its own, fleet.collective")
_OWN_MODE = _not_with_servers("a mode of your own is asked for already", "own")
_ONE_LEVEL = _not_in_collective("there is one all-reduce over all trainers; NCCL finds its own hierarchy")
_PROGRAMS = "tests/unit/fleet/fluid/"
_PLANS = "tests/unit/fleet/plan/"
_RUNS = "tests/runtime/parameter_server/"
_COMPRESSED = "tests/runtime/collective/test_compression.py::"

OPTIONS: Final[Mapping[str, tuple[Rule, ...]]] = {
    "strategy.sync_mode": (
        _says_the_mode("True: sync; False: the asynchronous mode that the config asks for, else half_async"),
        Rule(
            verdict=Verdict.CHANGES_NOTHING,
            text="collective training is synchronous",
            servers=False,
            values=(True,),
        ),
        _OWN_MODE,
        _ALWAYS_TOGETHER,
    ),
    "strategy.mode": (
        _done(
            "trains in a mode of your own",
            f"{_RUNS}test_own_mode.py::test_a_job_trains_with_it_by_its_strategy_alone",
        ),
        _ALWAYS_TOGETHER,
    ),
    "strategy.overlap": (
        Rule(
            verdict=Verdict.CHANGES_NOTHING,
            text="no gradient leaves: the trainer's own optimizer steps",
            collective=False,
            modes=("geo",),
        ),
        _done(
            "True: gradients leave during the backward pass, from the first step on; False: in "
            "optimizer.step()",
            f"{_RUNS}test_forms.py::test_what_the_strategy_says_reaches_a_session_of_either_form",
        ),
        Rule(
            verdict=Verdict.CHANGES_NOTHING,
            text="gradients leave during the backward pass, and are averages when backward() returns",
            servers=False,
        ),
    ),
    "strategy.cross_step": (
        _not_with_servers(
            "an Executor returns from each step with its values in place; train in a loop of your own",
            by_executor=True,
        ),
        _not_with_servers(
            "optimizer.step() does not wait for its own values there; use the mode sync or async",
            *("half_async", "geo"),
        ),
        _done(
            "True: new values are awaited layer by layer in the next forward pass",
            f"{_RUNS}test_cross_step.py::"
            "test_two_trainers_that_wait_in_the_forward_pass_train_as_one_process_does",
        ),
        _NO_SERVERS,
    ),
    "strategy.server_kernels": (
        _not_with_servers("servers add changes and step nothing; give your own optimizer fused=True", "geo"),
        _done(
            "fused: the servers step with the class's fused kernel",
            "tests/unit/fleet/update/test_dense.py::test_a_fused_update_is_the_fused_optimizers_own",
        ),
        _NO_SERVERS,
    ),
    "strategy.transport": (
        _done(
            "tcp: never through shared memory; shared_memory: a server on another host is an error",
            f"{_RUNS}test_transport.py::test_shared_memory_learns_what_tcp_learns_to_the_bit",
        ),
        _NO_SERVERS,
    ),
    "strategy.wire_dtype": (
        Rule(
            verdict=Verdict.REFUSED,
            text="parameter servers know 'bfloat16', which loses digits and overflows nowhere",
            collective=False,
            values=("float16",),
        ),
        _done(
            "bfloat16: what travels is rounded",
            f"{_RUNS}test_wire_dtype.py::test_every_mode_learns_nearly_the_same",
        ),
        _done_in_collective(
            "gradients travel as shorter numbers", f"{_COMPRESSED}test_rounded_gradients_take_half_the_bytes"
        ),
    ),
    "strategy.local_sgd": (
        _not_with_servers("GEO exchanges every k steps there, fleet.create_geo_strategy(k)"),
        _done_in_collective(
            "parameters are averaged, every k steps",
            "tests/runtime/collective/test_local_sgd.py::test_it_is_what_it_is_said_to_be_to_the_bit",
        ),
    ),
    "strategy.power_sgd": (
        _not_with_servers("wire_dtype='bfloat16' halves what travels there"),
        _done_in_collective(
            "gradients travel as products of narrow matrices",
            f"{_COMPRESSED}test_matrices_travel_as_products_of_narrow_ones",
        ),
    ),
    "strategy.broadcast_buffers": (
        Rule(
            verdict=Verdict.CHANGES_NOTHING,
            text="each trainer has buffers of its own; trainer 0's are saved",
            collective=False,
        ),
        _done_in_collective(
            "False: each trainer's buffers are its own; trainer 0's are saved",
            "tests/runtime/collective/test_buffers.py::test_buffers_follow_trainer_0s_unless_they_are_not_to",
        ),
    ),
    "strategy.non_finite": (
        _not_with_servers(
            "the trainer's own optimizer steps; check in the loop before optimizer.step()", "geo"
        ),
        _done(
            "stop: an error before a gradient with NaN or infinity leaves; skip: the step is not made",
            f"{_RUNS}test_non_finite.py::test_a_step_with_a_gradient_that_is_no_number_is_made_by_nobody",
        ),
        _done_in_collective(
            "stop: an error where an average holds NaN or infinity; skip: no trainer makes the step",
            "tests/runtime/collective/test_non_finite.py::test_a_step_with_a_gradient_that_is_no_number",
        ),
    ),
    "strategy.grad_clip": (
        _done(
            "clips the averaged gradients on the servers",
            f"{_RUNS}test_clipping.py::test_the_result_is_torch_s_and_two_runs_are_equal_to_the_bit",
            "sync",
        ),
        _not_with_servers(
            "clipping gradients on the servers needs synchronous training; set sync_mode=True, or clip in "
            "the loop before optimizer.step(), with DistributedStrategy(overlap=False)",
            *MODES[1:],
        ),
        _not_in_collective(
            "there are no servers to clip; call torch.nn.utils.clip_grad_norm_ or clip_grad_value_ between "
            "backward() and step(), where the gradients are averaged already"
        ),
    ),
    "config.slice_var_up": (
        _done(
            "False: parameters stay whole",
            f"{_PROGRAMS}test_edge_cases.py::test_optimizers_of_whole_parameters_are_never_cut",
        ),
        _NO_SERVERS,
    ),
    "config.split_method": (
        _done(
            "dispatches the blocks",
            f"{_PLANS}test_dispatch.py::test_parameter_and_gradient_share_a_server",
        ),
        _NO_SERVERS,
    ),
    "config.min_block_size": (
        _done(
            "blocks have at least as many elements",
            f"{_PLANS}test_blocks.py::test_no_block_but_the_last_is_smaller_than_the_least",
        ),
        _NO_SERVERS,
    ),
    "config.enable_dc_asgd": (
        _done(
            "compensates for delay; with sync_mode = False and no other mode asked for, the mode is async",
            f"{_PROGRAMS}test_mode_programs.py::test_delay_is_compensated_by_operators_before_everything_else",
            "async",
        ),
        _not_with_servers(
            "it compensates for the delay of asynchronous training; set sync_mode = False, "
            "which then means the mode async",
            *("sync", "half_async", "geo"),
        ),
        _not_with_servers("a mode of your own applies gradients its own way", "own"),
        _NO_SERVERS,
    ),
    "config.mode": (
        _ONLY_COLLECTIVE,
        _done_in_collective(
            "collective: what fleet.collective does anyway",
            "tests/unit/fleet/test_options.py::test_each_value_is_carried_out_or_refused_by_name",
            values=("collective",),
        ),
        _done_in_collective(
            "nccl2: of a transpiler called by hand; trainers meet in the startup program, and it chooses no "
            "backend",
            "tests/runtime/collective/test_programs.py::test_two_trainers_learn_what_one_process_learns",
            values=("nccl2",),
            by_executor=True,
        ),
        _not_in_collective(
            "NCCL carries gradients that are on a GPU, and gloo those that are not, whatever the script "
            "says; 'collective' is accepted, and 'nccl2' of a transpiler that is called by hand"
        ),
    ),
    "config.print_log": (
        _done(
            "prints where each block goes",
            f"{_PROGRAMS}test_edge_cases.py::test_print_log_tells_where_each_block_goes",
        ),
        _NO_SERVERS,
    ),
    "config.wait_port": (
        _done(
            "False: the call that joins a server waits for it, and no other",
            f"{_PROGRAMS}test_transpiler.py::"
            "test_wait_port_of_the_config_reaches_a_startup_program_that_runs_first",
        ),
        _ALWAYS_WAITED_FOR,
    ),
    "config.runtime_split_send_recv": (
        _says_the_mode("async, where nothing else is asked for"),
        _OWN_MODE,
        _ALWAYS_TOGETHER,
    ),
    "config.sync_mode": (
        _says_the_mode("False: half_async, where nothing else is asked for"),
        _OWN_MODE,
        _ALWAYS_TOGETHER,
    ),
    "config.half_async": (_says_the_mode("half_async"), _OWN_MODE, _ALWAYS_TOGETHER),
    "config.completely_not_async": (
        _says_the_mode("sync all the same"),
        _OWN_MODE,
        _ALWAYS_TOGETHER,
    ),
    "config.geo_sgd_mode": (_says_the_mode("geo"), _OWN_MODE, _ALWAYS_TOGETHER),
    "config.geo_sgd_need_push_nums": (
        _done(
            "steps between two exchanges",
            "tests/unit/fleet/test_strategy.py::test_geo_pushes_as_often_as_the_strategy_says",
            "geo",
        ),
        _not_with_servers("it belongs to GEO; set config.geo_sgd_mode = True", *MODES[:3], "own"),
        _NO_SERVERS,
    ),
    "config.nccl_comm_num": (
        _ONLY_COLLECTIVE,
        _not_in_collective("all buckets travel through one communicator"),
    ),
    "config.use_hierarchical_allreduce": (_ONLY_COLLECTIVE, _ONE_LEVEL),
    "config.hierarchical_allreduce_inter_nranks": (_ONLY_COLLECTIVE, _ONE_LEVEL),
    "config.collective_mode": (
        _ONLY_COLLECTIVE,
        _done_in_collective(
            "grad_allreduce: what fleet.collective does anyway",
            "tests/unit/fleet/test_options.py::test_each_value_is_carried_out_or_refused_by_name",
            values=("grad_allreduce",),
        ),
        _done_in_collective(
            "local_sgd: parameters are averaged after every step; strategy.local_sgd says how often",
            "tests/unit/fleet/test_strategy.py::test_the_configs_local_sgd_averages_after_every_step",
            values=("local_sgd",),
        ),
        _not_in_collective("one process has one device; 'grad_allreduce' and 'local_sgd' are accepted"),
    ),
    "DistributeTranspiler.mode": (
        _done(
            "trains in a mode of your own",
            f"{_RUNS}test_own_mode.py::test_a_program_does_not_run_without_the_modes_object",
        ),
        _ALWAYS_TOGETHER,
    ),
    "transpile.sync_mode": (
        _says_the_mode("False: the asynchronous mode that the config asks for, else half_async"),
        Rule(
            verdict=Verdict.CHANGES_NOTHING,
            text="a mode of your own is asked for, and counts",
            collective=False,
            modes=("own",),
        ),
        _ALWAYS_TOGETHER,
    ),
    "transpile.pservers": (
        _done("the servers", f"{_PLANS}test_dispatch.py::test_parameter_and_gradient_share_a_server"),
        _NO_SERVERS,
    ),
    "get_trainer_program.wait_port": (
        _done(
            "False: as config.wait_port",
            f"{_PROGRAMS}test_transpiler.py::test_wait_port_needs_both_and_holds_for_the_startup_program_too",
        ),
        _ALWAYS_WAITED_FOR,
    ),
    "transpile.current_endpoint": (
        Rule(
            verdict=Verdict.CHANGES_NOTHING,
            text="a server is asked for by its endpoint; of a trainer's the modes nccl2 and collective tell",
            collective=False,
        ),
    ),
    "Executor.place": (
        Rule(
            verdict=Verdict.CARRIED_OUT,
            text="CUDAPlace: trainers compute on that GPU; a parameter server computes on the processor",
            shown_by="tests/unit/fleet/fluid/test_executor.py::test_a_place_is_the_trainers",
        ),
    ),
    "FLEET_SYNC_MODE": (
        _says_the_mode("the mode of a strategy that says none; transpile() by hand says its own"),
        _ALWAYS_TOGETHER,
    ),
}


def rule_for(name: str, value: object, where: Where) -> Rule:
    """Return what becomes of an option's value in one way to train.

    Parameters
    ----------
    name : str
        A key of `OPTIONS`.
    value : object
        Other than the default.
    where : Where

    Raises
    ------
    LookupError
        The table says nothing about it, which is a mistake in the table.
    """
    for rule in OPTIONS[name]:
        if rule.applies(value, where):
            return rule
    raise LookupError(f"no rule for {name} = {value!r} {where}")


def refusal(name: str, value: object, default: object, where: Where) -> str | None:
    """Return why a value is refused in one way to train; None if it is not, or is the default.

    Examples
    --------
    >>> refusal("config.nccl_comm_num", 2, 1, Where(servers=False))
    'config.nccl_comm_num = 2 is not carried out in collective training: all buckets travel through one
    communicator; leave it at 1'
    """
    if value == default:
        return None
    rule = rule_for(name, value, where)
    if rule.verdict is not Verdict.REFUSED:
        return None
    return f"{name} = {value!r} is not carried out {where}: {rule.text}; leave it at {_shown(default)}"


def _shown(value: object) -> str:
    return value.__name__ if isinstance(value, type) else repr(value)
