"""What is found about an optimizer's step: whether servers may make it parameter by parameter, in slices."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fleet.errors import TranspileError
from fleet.fluid import DistributeTranspiler, Program
from fleet.fluid.render import server_plan
from fleet.plan import DistributeTranspilerConfig
from fleet.plan.elementwise import Findings, try_out
from tests.support.programs import Parameters, never

PLAIN = (
    "SGD",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "Adagrad",
    "Adadelta",
    "RMSprop",
    "Rprop",
    "ASGD",
)
OF_WHOLE_PARAMETERS = ("Muon", "Adafactor")


def parameters(count: int) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(2, 3)) for _ in range(count)]


def found(make: Callable[[Any], torch.optim.Optimizer], counts: tuple[int, ...] = (2,)) -> Findings:
    """Try the first param group of an optimizer whose groups have so many parameters."""
    groups: list[dict[str, Any]] = [{"params": parameters(count)} for count in counts]
    return try_out(make(groups), 0, dict(enumerate(counts)))


class Clips(torch.optim.SGD):
    """Clips by the norm of all gradients."""

    def step(self, closure: Any = None) -> Any:
        every = [each for group in self.param_groups for each in group["params"]]
        torch.nn.utils.clip_grad_norm_(every, 1.0)
        return super().step(closure)


class ClipsByLists(torch.optim.SGD):
    """The same by torch's operations on lists, a group at a time, and from a large norm on only."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            grads = [each.grad for each in group["params"]]
            norm = torch.stack(torch._foreach_norm(grads)).norm()
            if norm > 1000.0:
                torch._foreach_mul_(grads, (1000.0 / norm).item())
        return super().step(closure)


class SkipsSmall(torch.optim.SGD):
    """Makes no step by small gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        every = [each.grad for group in self.param_groups for each in group["params"]]
        return None if sum(grad.abs().sum() for grad in every) < 0.2 else super().step(closure)


class ByDistance(torch.optim.Optimizer):
    """Learns its rate from how far all parameters have come, as Prodigy and D-Adaptation do."""

    def __init__(self, params: Any, lr: float = 1.0, d: float = 1e-6) -> None:
        super().__init__(params, {"lr": lr, "d": d})
        self._rate = d

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        del closure
        above, below = 0.0, 1e-12
        for group in self.param_groups:
            for each in group["params"]:
                state = self.state[each]
                start = state.setdefault("start", each.clone())
                above += float((each.grad * (start - each)).sum())
                below += float(each.grad.abs().sum())
        self._rate = max(self._rate, above / below)
        for group in self.param_groups:
            for each in group["params"]:
                each.sub_(each.grad.sign(), alpha=group["lr"] * self._rate)


class ByPlace(torch.optim.SGD):
    """Steps later parameters less, as layer-wise rates do: slices of one are no matter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for place, each in enumerate(group["params"]):
                each.grad.mul_(0.5**place)
        return super().step(closure)


class Cautious(torch.optim.SGD):
    """Fails on gradients that are large."""

    def step(self, closure: Any = None) -> Any:
        if any(float(each.grad.max()) > 10 for group in self.param_groups for each in group["params"]):
            raise ArithmeticError("a gradient is out of range")
        return super().step(closure)


class Noisy(torch.optim.SGD):
    """Adds noise to the weights: stochastic gradient Langevin dynamics."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for each in group["params"]:
                each.add_(torch.randn_like(each), alpha=0.01)
        return super().step(closure)


class NoisyByPython(torch.optim.SGD):
    """Draws by other generators than torch's."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for each in group["params"]:
                each.add_(random.random() + np.random.random())  # noqa: NPY002, S311 - as a script may
        return super().step(closure)


class RoundsByChance(torch.optim.SGD):
    """Draws for weights of two bytes only."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for each in group["params"]:
                if each.dtype == torch.bfloat16:
                    each.mul_(1 + 0.01 * torch.rand_like(each))
        return super().step(closure)


class CountsInItsGroup(torch.optim.SGD):
    """Lowers its rate by a count that it keeps among its options, as schedule-free optimizers do."""

    def __init__(self, params: Any, lr: float = 0.1, k: int = 0) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group["k"] = k
        self.defaults["k"] = k

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        del closure
        for group in self.param_groups:
            group["k"] += 1
            for each in group["params"]:
                each.sub_(each.grad, alpha=group["lr"] / group["k"])


class HasAnArgument(torch.optim.SGD):
    """Has an argument that is in no param group."""

    def __init__(self, params: Any, lr: float = 0.1, max_value: float = 100.0, of: Any = None) -> None:
        super().__init__(params, lr=lr)
        self.max_value, self._of = max_value, of


class WantsMore(torch.optim.SGD):
    """Is stepped after a call only that no other class has, as schedule-free optimizers are."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self._trains = False

    def train(self) -> None:
        self._trains = True

    def step(self, closure: Any = None) -> Any:
        if not self._trains:
            raise RuntimeError("call train() first")
        return super().step(closure)


class HoldsItsParameters(torch.optim.SGD):
    """Keeps what it was given, under the name of its first argument."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        self.params = list(params)
        super().__init__(self.params, lr=lr)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


@pytest.mark.parametrize("foreach", [None, True])
@pytest.mark.parametrize("name", PLAIN)
def test_torchs_optimizers_may_be_cut_and_stepped_apart(name, foreach):
    for dtype in (torch.float32, torch.bfloat16):
        optimizer = getattr(torch.optim, name)(parameters(3), lr=0.1, foreach=foreach)
        assert try_out(optimizer, 0, {0: 3}, [dtype]) == Findings(True, "")


@pytest.mark.parametrize("name", OF_WHOLE_PARAMETERS)
def test_torchs_optimizers_of_whole_parameters_may_be_stepped_apart(name):
    optimizer = getattr(torch.optim, name)(parameters(3), lr=0.1)
    assert try_out(optimizer, 0, {0: 3}) == Findings(False, "")


def test_slices_whose_zeros_have_another_sign_are_not_those_of_the_whole():
    class SignsBySize(torch.optim.SGD):
        """Makes every value 0.0, or -0.0 in tensors of four rows and fewer."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for each in self.param_groups[0]["params"]:
                each.fill_(-0.0 if len(each) <= 4 else 0.0)

    assert found(SignsBySize, (1,)) == Findings(False, "")


@pytest.mark.parametrize("kind", [Clips, ClipsByLists, SkipsSmall, ByDistance, ByPlace])
def test_what_couples_parameters_is_refused_and_so_is_what_couples_groups(kind):
    for counts in ((2,), (2, 1)):
        refusal = found(kind, counts).refusal
        assert refusal.startswith(f"{kind.__name__} couples parameters: ")
        assert "strategy.grad_clip = fleet.ClipGradByGlobalNorm(max_norm)" in refusal
        assert "in a collective job" in refusal


def test_one_parameter_is_coupled_with_nothing():
    assert found(Clips, (1,)) == Findings(False, "")
    assert found(Clips, (1, 1)).refusal.startswith("Clips couples")
    assert found(ClipsByLists, (1, 1)) == Findings(False, "")  # it clips each group by itself


@pytest.mark.parametrize("counts", [(2,), (1,)])
@pytest.mark.parametrize("kind", [Noisy, NoisyByPython])
def test_what_draws_noise_is_another_case_with_its_own_sentence(kind, counts):
    refusal = found(kind, counts).refusal
    assert refusal.startswith(f"{kind.__name__} draws random numbers in its step")
    assert "add the noise to the gradients" in refusal


def test_a_class_that_fails_on_large_gradients_is_tried_on_small_ones():
    assert found(Cautious) == Findings(True)


def test_an_optimizer_is_tried_with_the_dtypes_that_it_will_step():
    assert found(RoundsByChance).refusal == ""
    optimizer = RoundsByChance(parameters(2), lr=0.1)
    assert "draws random numbers" in try_out(optimizer, 0, {0: 2}, [torch.bfloat16]).refusal


def test_trying_leaves_the_scripts_random_numbers_as_they_are():
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(7)
    expected = torch.rand(1), random.random(), np.random.random()  # noqa: NPY002, S311
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(7)
    for kind in (Noisy, NoisyByPython):
        found(kind, (3,))
    assert (torch.rand(1), random.random(), np.random.random()) == expected  # noqa: NPY002, S311


def test_options_that_the_step_itself_changes_are_refused_by_name():
    refusal = found(CountsInItsGroup).refusal
    assert refusal.startswith("CountsInItsGroup changes options of its param group in its step (k)")


def test_an_argument_that_servers_would_lose_is_refused_by_name():
    assert found(HasAnArgument) == Findings(True, "")
    assert found(lambda params: HasAnArgument(params, max_value=100)) == Findings(True, "")
    refusal = found(lambda params: HasAnArgument(params, max_value=2.5)).refusal
    assert refusal.startswith("HasAnArgument's argument max_value is 2.5.")
    assert "theirs would be 100.0" in refusal
    assert "argument of is <function" in found(lambda params: HasAnArgument(params, of=sgd)).refusal


def test_an_optimizer_may_hold_its_parameters_itself():
    assert found(HoldsItsParameters) == Findings(True, "")


def test_optimizers_are_tried_on_the_cpu_where_the_script_has_another_default_device():
    with torch.device("meta"):
        assert found(sgd) == Findings(True, "")
        assert found(lambda params: torch.optim.Adam(params, lr=0.1)) == Findings(True, "")
        assert found(Clips).refusal.startswith("Clips couples")


def test_hooks_that_the_script_registers_for_all_optimizers_are_not_called_by_trying():
    called: list[object] = []
    sgd(parameters(1))  # from then on SGD.step, which subclasses call, calls hooks too
    handle = register_optimizer_step_pre_hook(lambda *given: called.append(given))
    try:
        found(ByPlace, (3,))
        assert called == []
        sgd(parameters(1)).step()
        assert len(called) == 1, "it is there again"
    finally:
        handle.remove()


def test_a_rate_that_is_a_tensor_is_one_on_servers_as_float32_computes_otherwise_than_a_number():
    rate = torch.tensor(0.01)
    assert found(lambda params: torch.optim.Adam(params, lr=rate)).tensors == {"lr": "float32"}
    assert found(lambda params: torch.optim.Adam(params, lr=rate.double())).tensors == {}


def test_a_number_of_numpys_is_refused_where_it_gives_other_bits_than_a_number_of_pythons():
    rate: Any = np.float32(0.01)
    refusal = found(lambda params: torch.optim.Adam(params, lr=rate)).refusal
    assert refusal.startswith("Adam's option lr is a float32, which gives another result")
    assert refusal.endswith("0.009999999776482582; give lr as Python's float")
    assert found(lambda params: torch.optim.SGD(params, lr=rate)).refusal == ""
    assert found(lambda params: torch.optim.Adam(params, lr=np.float64(0.01))).refusal == ""
    whole: Any = np.int64(1)
    assert found(lambda params: torch.optim.Adam(params, lr=whole)).refusal == ""


def test_betas_that_are_tensors_are_refused():
    betas = (torch.tensor(0.9), torch.tensor(0.999))
    refusal = found(lambda params: torch.optim.Adam(params, lr=0.1, betas=betas)).refusal
    assert refusal.startswith("Adam's option betas is a tuple with a tensor of torch.float32 in it")


def transpiled(kind: Any, counts: dict[str, tuple[int, ...]], **fields: Any) -> DistributeTranspiler:
    module = Parameters(counts)
    config = DistributeTranspilerConfig()
    for field, value in fields.items():
        setattr(config, field, value)
    transpiler = DistributeTranspiler(config)
    program = Program.capture(module, never, kind(module.parameters(), lr=0.1))
    transpiler.transpile(
        0,
        program=program,
        pservers="127.0.0.1:6174,127.0.0.2:6174",
        trainers=2,
        sync_mode=not fields.get("half_async") and not fields.get("runtime_split_send_recv"),
        startup_program=program.startup_program,
    )
    return transpiler


@pytest.mark.parametrize("whole", [False, True], ids=["cut", "slice_var_up=False"])
@pytest.mark.parametrize(
    "fields", [{}, {"half_async": True}, {"runtime_split_send_recv": True}], ids=["sync", "half", "async"]
)
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Clips, "couples parameters"),
        (Noisy, "draws random"),
        (WantsMore, r"WantsMore cannot step a dense parameter on a parameter server: call train\(\) first"),
        (torch.optim.SparseAdam, "SparseAdam does not support dense gradients"),
    ],
)
def test_where_servers_step_such_an_optimizer_is_refused_and_no_setting_hides_it(kind, words, fields, whole):
    with pytest.raises(TranspileError, match=words) as caught:
        transpiled(kind, {"w": (400, 100), "b": (100,)}, slice_var_up=not whole, **fields)
    assert "slice_var_up" not in str(caught.value)


@pytest.mark.parametrize("kind", [Clips, Noisy, WantsMore])
def test_where_trainers_step_any_optimizer_is_welcome(kind):
    transpiler = transpiled(kind, {"w": (400, 100), "b": (100,)}, geo_sgd_mode=True)
    assert transpiler.get_trainer_program().attr("role") == "trainer"


def test_a_single_parameter_is_stepped_whole_by_the_server_that_has_it():
    with pytest.raises(TranspileError, match=r"Clips computes over whole parameters.*slice_var_up = False"):
        transpiled(Clips, {"w": (400, 100)})
    transpiler = transpiled(Clips, {"w": (400, 100)}, slice_var_up=False)
    (block,) = server_plan(transpiler.get_pserver_program("127.0.0.1:6174")).blocks
    assert block.shape == (400, 100)
