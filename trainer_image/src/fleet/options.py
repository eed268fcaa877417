"""The options of strategies and transpiler configs, and their effect in each training method.

An unsupported value raises an error that names the option; no value is ignored. The strategy, the transpiler
and both `fleet` objects check options against this table, ``docs/reference/options.md`` is generated from it,
and a test tries every field in every training method. The table also contains all other options that only
some training methods support.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

__all__ = ["MODES", "OPTIONS", "Rule", "Verdict", "Where", "refusal", "rule_for"]

MODES: Final = ("sync", "async", "half_async", "geo", "own")
"""The training modes; ``own`` stands for a user-defined mode."""


class Verdict(Enum):
    """The effect of an option that is set to a value other than its default."""

    CARRIED_OUT = "yes"
    SELECTS_THE_MODE = "selects the mode"
    CHANGES_NOTHING = "changes nothing"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Where:
    """A training method, such as synchronous training with parameter servers.

    Attributes
    ----------
    servers : bool
        True with parameter servers, False in collective training.
    mode : str
        One of `MODES`; empty in collective training, and while it is unknown.
    by_executor : bool
        True if an `Executor` runs the steps of a program, from ``minimize()`` or from a transpiler that the
        script calls; False if the script's own loop does. In collective training it is True only for such a
        transpiler.
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
    """A rule that states the effect of an option; the first applicable rule decides.

    Attributes
    ----------
    verdict : Verdict
    text : str
        The effect, why there is none, or why the value is refused and what to use instead.
    servers, collective : bool
        Whether the rule applies with parameter servers, and in collective training.
    modes : tuple of str
        The modes to which it applies, with parameter servers.
    values : tuple
        The values to which it applies; if empty, every value other than the default.
    by_executor : bool or None
        Whether it applies to an Executor's steps or to a loop's; None applies to both.
    """

    verdict: Verdict
    text: str
    servers: bool = True
    collective: bool = True
    modes: tuple[str, ...] = MODES
    values: tuple[object, ...] = ()
    by_executor: bool | None = None

    def applies(self, value: object, where: Where) -> bool:
        """Return whether this rule applies to a value of its option in a training method."""
        if not (self.servers if where.servers else self.collective):
            return False
        # While the mode is unknown, only a rule for all modes can be applied.
        if where.servers and (self.modes != MODES if not where.mode else where.mode not in self.modes):
            return False
        if self.by_executor not in (None, where.by_executor):
            return False
        return not self.values or value in self.values


def _done(text: str, *modes: str, values: tuple[object, ...] = ()) -> Rule:
    return Rule(
        verdict=Verdict.CARRIED_OUT,
        text=text,
        collective=False,
        modes=modes or MODES,
        values=values,
    )


def _changes_nothing(text: str, *modes: str, servers: bool = False, values: tuple[object, ...] = ()) -> Rule:
    return Rule(
        verdict=Verdict.CHANGES_NOTHING,
        text=text,
        servers=servers,
        collective=not servers,
        modes=modes or MODES,
        values=values,
    )


def _selects_the_mode(text: str) -> Rule:
    return Rule(
        verdict=Verdict.SELECTS_THE_MODE,
        text=text,
        collective=False,
        modes=MODES[:-1],
    )


def _done_in_collective(
    text: str, *, values: tuple[object, ...] = (), by_executor: bool | None = None
) -> Rule:
    return Rule(
        verdict=Verdict.CARRIED_OUT,
        text=text,
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
_ONLY_COLLECTIVE = _not_with_servers("collective training has a separate fleet, fleet.collective")
_OWN_MODE = _not_with_servers("a mode of your own is already in use", "own")
_ONE_LEVEL = _not_in_collective("there is one all-reduce over all trainers; NCCL finds its own hierarchy")

OPTIONS: Final[Mapping[str, tuple[Rule, ...]]] = {
    "strategy.sync_mode": (
        _selects_the_mode("True: sync; False: the asynchronous mode of the config, else half_async"),
        _changes_nothing("collective training is synchronous", values=(True,)),
        _OWN_MODE,
        _ALWAYS_TOGETHER,
    ),
    "strategy.mode": (
        _done("trains in a mode of your own"),
        _ALWAYS_TOGETHER,
    ),
    "strategy.overlap": (
        _changes_nothing("no gradient is sent: the trainer's own optimizer steps", "geo", servers=True),
        _done(
            "True: gradients are sent during the backward pass, from the first step on; False: in "
            "optimizer.step()",
        ),
        _changes_nothing(
            "gradients are averaged during the backward pass, and ready when backward() returns"
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
        _done("True: new values are awaited layer by layer in the next forward pass"),
        _NO_SERVERS,
    ),
    "strategy.server_kernels": (
        _not_with_servers("servers only add changes; pass fused=True to your own optimizer", "geo"),
        _done("fused: the servers step with the class's fused kernel"),
        _NO_SERVERS,
    ),
    "strategy.transport": (
        _done("tcp: never through shared memory; shared_memory: a server on another host is an error"),
        _NO_SERVERS,
    ),
    "strategy.wire_dtype": (
        Rule(
            verdict=Verdict.REFUSED,
            text="parameter servers support 'bfloat16', which loses precision but does not overflow",
            collective=False,
            values=("float16",),
        ),
        _done("bfloat16: gradients and values are rounded in transit"),
        _done_in_collective("gradients are sent in a shorter number format"),
    ),
    "strategy.local_sgd": (
        _not_with_servers("GEO exchanges every k steps there, fleet.create_geo_strategy(k)"),
        _done_in_collective("parameters are averaged, every k steps"),
    ),
    "strategy.power_sgd": (
        _not_with_servers("wire_dtype='bfloat16' halves the traffic there"),
        _done_in_collective("gradients are sent as products of narrow matrices"),
    ),
    "strategy.broadcast_buffers": (
        _changes_nothing("each trainer has buffers of its own; trainer 0's are saved", servers=True),
        _done_in_collective("False: each trainer's buffers are its own; trainer 0's are saved"),
    ),
    "strategy.non_finite": (
        _not_with_servers(
            "the trainer's own optimizer steps; check the gradients in the loop before optimizer.step()",
            "geo",
        ),
        _done("stop: an error before a gradient with NaN or infinity is sent; skip: the step is skipped"),
        _done_in_collective(
            "stop: an error if an average holds NaN or infinity; skip: all trainers skip the step"
        ),
    ),
    "strategy.grad_clip": (
        _done(
            "clips the averaged gradients on the servers",
            "sync",
        ),
        _not_with_servers(
            "clipping gradients on the servers needs synchronous training; set sync_mode=True, or clip in "
            "the loop before optimizer.step(), with DistributedStrategy(overlap=False)",
            *MODES[1:],
        ),
        _not_in_collective(
            "no server clips there; call torch.nn.utils.clip_grad_norm_ or clip_grad_value_ between "
            "backward() and step(), where the gradients are already averaged"
        ),
    ),
    "config.slice_var_up": (
        _done("False: parameters stay whole"),
        _NO_SERVERS,
    ),
    "config.split_method": (
        _done("dispatches the blocks"),
        _NO_SERVERS,
    ),
    "config.min_block_size": (
        _done("blocks have at least as many elements"),
        _NO_SERVERS,
    ),
    "config.enable_dc_asgd": (
        _done(
            "compensates for delay; with sync_mode = False and no other mode requested, the mode is async",
            "async",
        ),
        _not_with_servers(
            "it compensates for the delay of asynchronous training; set sync_mode = False, "
            "which then means the mode async",
            *("sync", "half_async", "geo"),
        ),
        _not_with_servers("your own mode decides how gradients are applied", "own"),
        _NO_SERVERS,
    ),
    "config.mode": (
        _ONLY_COLLECTIVE,
        _done_in_collective(
            "collective: fleet.collective does this anyway",
            values=("collective",),
        ),
        _done_in_collective(
            "nccl2: for a transpiler that the script calls; trainers rendezvous in the startup program, and "
            "the backend is not affected",
            values=("nccl2",),
            by_executor=True,
        ),
        _not_in_collective(
            "NCCL carries gradients that are on a GPU, and gloo the others, whatever the script sets; "
            "'collective' is accepted, and so is 'nccl2' for a transpiler that the script calls"
        ),
    ),
    "config.print_log": (
        _done("prints the server of each block"),
        _NO_SERVERS,
    ),
    "config.wait_port": (
        _done("False: only the call that joins a server waits for it"),
        _ALWAYS_WAITED_FOR,
    ),
    "config.remote_prefetch": (
        _done(
            "False: each trainer has a copy of the is_sparse tables of a program that is built with layers. "
            "No effect on modules of PyTorch: torch.nn.Embedding(sparse=True) always has copies, "
            "fleet.nn.DistributedEmbedding never"
        ),
        _NO_SERVERS,
    ),
    "config.runtime_split_send_recv": (
        _selects_the_mode("async, unless another mode is requested"),
        _OWN_MODE,
        _ALWAYS_TOGETHER,
    ),
    "config.sync_mode": (
        _selects_the_mode("False: half_async, unless another mode is requested"),
        _OWN_MODE,
        _ALWAYS_TOGETHER,
    ),
    "config.half_async": (_selects_the_mode("half_async"), _OWN_MODE, _ALWAYS_TOGETHER),
    "config.completely_not_async": (
        _selects_the_mode("the mode stays sync"),
        _OWN_MODE,
        _ALWAYS_TOGETHER,
    ),
    "config.geo_sgd_mode": (_selects_the_mode("geo"), _OWN_MODE, _ALWAYS_TOGETHER),
    "config.geo_sgd_need_push_nums": (
        _done(
            "steps between two exchanges",
            "geo",
        ),
        _not_with_servers("it belongs to GEO; set config.geo_sgd_mode = True", *MODES[:3], "own"),
        _NO_SERVERS,
    ),
    "config.nccl_comm_num": (
        _ONLY_COLLECTIVE,
        _not_in_collective("all buckets share one communicator"),
    ),
    "config.use_hierarchical_allreduce": (_ONLY_COLLECTIVE, _ONE_LEVEL),
    "config.hierarchical_allreduce_inter_nranks": (_ONLY_COLLECTIVE, _ONE_LEVEL),
    "config.collective_mode": (
        _ONLY_COLLECTIVE,
        _done_in_collective(
            "grad_allreduce: fleet.collective does this anyway",
            values=("grad_allreduce",),
        ),
        _done_in_collective(
            "local_sgd: parameters are averaged after every step; strategy.local_sgd sets how often",
            values=("local_sgd",),
        ),
        _not_in_collective("one process has one device; 'grad_allreduce' and 'local_sgd' are accepted"),
    ),
    "DistributeTranspiler.mode": (
        _done("trains in a mode of your own"),
        _ALWAYS_TOGETHER,
    ),
    "transpile.sync_mode": (
        _selects_the_mode("False: the asynchronous mode of the config, else half_async"),
        _changes_nothing("a mode of your own takes precedence", "own", servers=True),
        _ALWAYS_TOGETHER,
    ),
    "transpile.pservers": (
        _done("sets the servers"),
        _NO_SERVERS,
    ),
    "get_trainer_program.wait_port": (
        _done("False: as config.wait_port"),
        _ALWAYS_WAITED_FOR,
    ),
    "transpile.current_endpoint": (
        _changes_nothing(
            "get_pserver_program names the server; the modes nccl2 and collective use a trainer's",
            servers=True,
        ),
    ),
    "Executor.place": (
        Rule(
            verdict=Verdict.CARRIED_OUT,
            text="CUDAPlace: trainers compute on that GPU; parameter servers compute on the CPU",
        ),
    ),
    "FLEET_SYNC_MODE": (
        _selects_the_mode(
            "the mode of a strategy that sets none; a script's call of transpile() sets its own"
        ),
        _ALWAYS_TOGETHER,
    ),
}


def rule_for(name: str, value: object, where: Where) -> Rule:
    """Return the rule that applies to an option's value in a training method.

    Parameters
    ----------
    name : str
        A key of `OPTIONS`.
    value : object
        A value other than the default.
    where : Where

    Raises
    ------
    LookupError
        The table has no rule for it, which is a mistake in the table.
    """
    for rule in OPTIONS[name]:
        if rule.applies(value, where):
            return rule
    raise LookupError(f"no rule for {name} = {value!r} {where}")


def refusal(name: str, value: object, default: object, where: Where) -> str | None:
    """Return the error message for an unsupported value, or None if the value is supported.

    Examples
    --------
    >>> refusal("config.nccl_comm_num", 2, 1, Where(servers=False))
    'config.nccl_comm_num = 2 is not supported in collective training: all buckets share one communicator;
    leave it at 1'
    """
    if value == default:
        return None
    rule = rule_for(name, value, where)
    if rule.verdict is not Verdict.REFUSED:
        return None
    return f"{name} = {value!r} is not supported {where}: {rule.text}; leave it at {_shown(default)}"


def _shown(value: object) -> str:
    return value.__name__ if isinstance(value, type) else repr(value)
