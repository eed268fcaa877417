"""Gradients on their way out: what leaves when, and every way to change what has left."""

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from fleet.errors import ConfigurationError, FleetError
from fleet.fluid import DistributeTranspiler, Program
from fleet.fluid.render import trainer_plan
from fleet.parameter_server.modes import TrainerMode
from fleet.parameter_server.trainer.gradients import GradientFlow
from fleet.parameter_server.trainer.own_optimizer import Scaling
from fleet.plan import PlannedBlock
from fleet.wire import NO_STEP


class Recorder(TrainerMode):
    """A mode that writes down what it is told."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.hyper: Any = None
        self.bytes: dict[str, bytes] = {}

    def begin(self, hyper_parameters: Any) -> None:
        self.said.append("begin")
        self.hyper = hyper_parameters

    def send(self, block: PlannedBlock, payload: memoryview) -> None:
        self.said.append(block.name)
        self.bytes[block.name] = bytes(payload)

    def finish(self, absent: Sequence[PlannedBlock]) -> None:
        self.said.append("finish" + "".join(f" -{block.name}" for block in absent))

    def take(self) -> list[str]:
        said, self.said = self.said, []
        return said


class Setup:
    """A model of two layers whose first weight is cut in two, its optimizer and its flow."""

    def __init__(self, *, overlap: bool | None = True, model: torch.nn.Module | None = None) -> None:
        torch.manual_seed(0)
        self.model: Any = model or torch.nn.Sequential(torch.nn.Linear(100, 200), torch.nn.Linear(200, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        program = Program.from_optimizer(self.optimizer, self.model)
        transpiler = DistributeTranspiler()
        transpiler.transpile(
            0, program=program, pservers="a:1,b:1", trainers=1, startup_program=program.startup_program
        )
        plan = trainer_plan(transpiler.get_trainer_program())
        assert program.source is not None
        self.mode = Recorder()
        self.flow = GradientFlow(plan, program.source.parameters, self.optimizer, self.mode, overlap=overlap)
        self.flow.attach()

    def backward(self, layers: int = 2) -> None:
        self.model[2 - layers :](torch.ones(3, 100 if layers == 2 else 200)).square().mean().backward()


def unscale(model: Any) -> None:
    """Do what GradScaler.step() does before it calls the optimizer's."""
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    scaler.unscale_(torch.optim.SGD(model.parameters(), lr=0.1))


SENT = {"1.bias", "1.weight", "0.bias", "0.weight.block0", "0.weight.block1"}


def test_each_gradient_leaves_during_the_backward_pass_after_the_hyper_parameters():
    setup = Setup()
    setup.backward()
    begin, *blocks = setup.mode.take()
    assert begin == "begin"
    assert set(blocks) == SENT
    assert blocks.index("1.weight") < blocks.index("0.weight.block0")
    assert setup.mode.hyper[0]["lr"] == 0.1
    assert setup.mode.hyper[0]["momentum"] == 0.9
    assert "foreach" not in setup.mode.hyper[0]
    setup.flow.step()
    assert setup.mode.take() == ["finish"]


def test_the_bytes_are_those_of_the_gradients_blocks():
    setup = Setup()
    setup.backward()
    gradient = setup.model[0].weight.grad
    both = setup.mode.bytes["0.weight.block0"] + setup.mode.bytes["0.weight.block1"]
    assert both == gradient.numpy().tobytes()


def test_without_overlap_everything_leaves_in_step():
    setup = Setup(overlap=False)
    setup.backward()
    assert setup.mode.take() == []
    setup.flow.check_nothing_in_flight("a test")
    torch.nn.utils.clip_grad_norm_(setup.model.parameters(), 1e-3)
    setup.optimizer.param_groups[0]["lr"] = 0.7
    setup.flow.step()
    begin, *blocks, finish = setup.mode.take()
    assert (begin, set(blocks), finish) == ("begin", SENT, "finish")
    assert setup.mode.hyper[0]["lr"] == 0.7
    assert setup.mode.bytes["1.bias"] == setup.model[1].bias.grad.numpy().tobytes()


@pytest.mark.parametrize("overlap", [True, False])
def test_parameters_without_a_gradient_are_absent(overlap):
    setup = Setup(overlap=overlap)
    setup.backward(layers=1)
    setup.flow.step()
    assert setup.mode.take()[-1] == "finish -0.bias -0.weight.block0 -0.weight.block1"


def test_a_step_without_any_gradient_still_takes_part():
    setup = Setup()
    setup.flow.step()
    begin, finish = setup.mode.take()
    assert begin == "begin"
    assert finish.count(" -") == len(SENT)


def test_several_backward_passes_leave_as_their_sum():
    setup = Setup()
    with setup.flow.paused():
        setup.backward()
    assert setup.mode.take() == []
    setup.backward()
    setup.flow.step()
    assert set(setup.mode.take()) == {"begin", "finish", *SENT}
    assert setup.mode.bytes["1.bias"] == setup.model[1].bias.grad.numpy().tobytes()


def test_what_only_a_paused_pass_reached_leaves_in_step():
    setup = Setup()
    with setup.flow.paused():
        setup.backward()
    setup.backward(layers=1)
    assert set(setup.mode.take()) == {"begin", "1.bias", "1.weight"}
    setup.flow.step()
    assert set(setup.mode.take()) == {"0.bias", "0.weight.block0", "0.weight.block1", "finish"}


def test_the_next_step_begins_anew():
    setup = Setup()
    for _ in range(2):
        setup.optimizer.zero_grad()
        setup.backward()
        setup.flow.step()
        assert set(setup.mode.take()) == {"begin", "finish", *SENT}


def test_a_second_backward_names_both_remedies():
    setup = Setup()
    setup.backward()
    with pytest.raises(FleetError, match=r"second backward\(\) reached 1\.\w+.*no_sync\(\).*overlap=False"):
        setup.backward()


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3), id="clipped"),
        pytest.param(lambda model: model[0].weight.grad.mul_(0.5), id="unscaled"),
        pytest.param(lambda model: setattr(model[0].weight, "grad", torch.zeros(200, 100)), id="replaced"),
        pytest.param(lambda model: model[0].weight.grad.data.clamp_(-1e-9, 1e-9), id="clamped-by-data"),
        pytest.param(lambda model: setattr(model[1].bias.grad, "data", torch.zeros(1)), id="data-replaced"),
        pytest.param(lambda model: unscale(model), id="unscaled-by-a-scaler"),
        pytest.param(lambda model: model.zero_grad(), id="reset-behind-the-optimizers-back"),
    ],
)
def test_a_gradient_changed_after_it_was_sent_is_noticed(change):
    setup = Setup()
    setup.backward()
    change(setup.model)
    with pytest.raises(
        FleetError, match=r"gradient of .* changed after .*overlap=False.*strategy\.grad_clip"
    ):
        setup.flow.step()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_gradients_that_stay_as_they_were_sent_pass_in_every_round(layout):
    """Not a number is not equal to itself, and its bits are."""
    convolution = torch.nn.Conv2d(2, 3, 2).to(memory_format=layout)
    setup = Setup(model=convolution)
    for _ in range(8):
        setup.optimizer.zero_grad()
        (convolution(torch.ones(1, 2, 3, 3)).sum() * float("nan")).backward()
        assert convolution.weight.grad is not None
        assert convolution.weight.grad.is_contiguous() == (layout is torch.contiguous_format)
        setup.flow.step()
    setup.optimizer.zero_grad()
    convolution(torch.ones(1, 2, 3, 3)).sum().backward()
    assert convolution.bias is not None
    assert convolution.bias.grad is not None
    convolution.bias.grad.data.mul_(0.5)
    with pytest.raises(FleetError, match="gradient of bias was changed after"):
        setup.flow.step()


@pytest.mark.parametrize("rounds", [0, 5])
def test_a_small_gradient_that_the_arena_carries_is_compared_too(rounds):
    convolution = torch.nn.Conv2d(2, 3, 2, bias=False).to(memory_format=torch.channels_last)
    setup = Setup(model=convolution)
    for _ in range(rounds):
        convolution(torch.ones(1, 2, 3, 3)).sum().backward()
        setup.flow.step()
        convolution.zero_grad()
    convolution(torch.ones(1, 2, 3, 3)).sum().backward()
    assert convolution.weight.grad is not None
    convolution.weight.grad.data.mul_(0.5)
    with pytest.raises(FleetError, match="gradient of weight was changed after"):
        setup.flow.step()


@pytest.mark.parametrize("overlap", [True, False])
def test_a_step_of_the_users_own_optimizer_is_refused_until_training_has_ended(overlap):
    setup = Setup(overlap=overlap)
    setup.backward()
    with pytest.raises(FleetError, match=r"step\(\) was called on the SGD .* optimizer = fleet\."):
        setup.optimizer.step()
    setup.flow.detach()
    setup.optimizer.step()


def test_hyper_parameters_changed_after_the_first_gradient_left_are_noticed():
    setup = Setup()
    setup.backward()
    setup.optimizer.param_groups[0]["lr"] = 0.2
    with pytest.raises(
        FleetError, match=r"lr from 0\.1 to 0\.2 in param group 0.*between optimizer\.step\(\).*overlap=False"
    ):
        setup.flow.step()


def test_a_step_that_never_comes_is_noticed():
    setup = Setup()
    setup.flow.check_nothing_in_flight("zero_grad() was called")
    setup.backward()
    with pytest.raises(
        FleetError, match=r"zero_grad\(\) was called, but .* optimizer\.step\(\) .*overlap=False"
    ):
        setup.flow.check_nothing_in_flight("zero_grad() was called")


def test_a_sparse_gradient_is_refused_by_name():
    setup = Setup(overlap=False)
    setup.model[0].weight.grad = torch.zeros(200, 100).to_sparse()
    with pytest.raises(ConfigurationError, match=r"gradient of 0\.weight is sparse"):
        setup.flow.step()


def test_a_gradient_that_is_not_contiguous_goes_through_the_arena():
    setup = Setup(overlap=False)
    gradient = torch.arange(20000.0).reshape(100, 200).t()
    setup.model[0].weight.grad = gradient
    setup.flow.step()
    both = setup.mode.bytes["0.weight.block0"] + setup.mode.bytes["0.weight.block1"]
    assert both == gradient.contiguous().numpy().tobytes()


def test_after_detaching_nothing_leaves():
    setup = Setup()
    setup.flow.detach()
    setup.backward()
    assert setup.mode.take() == []


def is_early(setup: Setup) -> bool:
    """Make a step as plain as can be; return whether its gradients left during the backward pass."""
    setup.mode.take()
    setup.model.zero_grad()
    setup.backward()
    early = set(setup.mode.take()) == {"begin", *SENT}
    setup.flow.step()
    return early


def test_gradients_leave_early_once_three_steps_have_let_them_be():
    setup = Setup(overlap=None)
    assert [is_early(setup) for _ in range(5)] == [False, False, False, True, True]


def accumulate(setup: Setup) -> None:
    setup.backward()
    setup.backward()


def change_rate(setup: Setup) -> None:
    setup.backward()
    setup.optimizer.param_groups[0]["lr"] *= 0.5


def skip(setup: Setup) -> None:
    setup.backward()
    setup.flow.check_nothing_in_flight("zero_grad() was called")
    setup.model.zero_grad()
    setup.backward(layers=1)


def after(change: Any) -> Any:
    def backward(setup: Setup) -> None:
        setup.backward()
        change(setup.model)

    return backward


@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize(
    ("what", "because"),
    [
        pytest.param(
            after(lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)),
            "the gradient of .* was changed between",
            id="clipped-by-a-norm-that-nothing-exceeds",
        ),
        pytest.param(
            after(lambda model: model[0].weight.grad.data.clamp_(-1e-9, 1e-9)),
            r"the gradient of 0\.weight was changed between",
            id="clamped-by-data",
        ),
        pytest.param(after(unscale), "the gradient of .* was changed between", id="unscaled"),
        pytest.param(accumulate, r"a second backward\(\) of a step reached 1\.\w+", id="accumulated"),
        pytest.param(change_rate, "hyper-parameters were changed between", id="another-rate"),
        pytest.param(skip, r"zero_grad\(\) was called between a backward\(\) and its", id="skipped"),
    ],
)
def test_a_script_that_changes_gradients_in_the_first_steps_is_sent_in_step_from_then_on(
    what, because, step, caplog
):
    setup = Setup(overlap=None)
    for _ in range(step):
        assert not is_early(setup)
    setup.model.zero_grad()
    with caplog.at_level("INFO"):
        what(setup)
        setup.flow.step()
    for name, parameter in setup.model.named_parameters():
        if parameter.grad is not None:
            sent = b"".join(
                setup.mode.bytes[block] for block in sorted(setup.mode.bytes) if block.startswith(name)
            )
            assert sent == parameter.grad.numpy().tobytes()
    assert [is_early(setup) for _ in range(4)] == [False] * 4
    assert len(caplog.records) == 1
    assert re.search(rf"sent in optimizer\.step\(\).*, because {because}.*overlap=False", caplog.text)


def test_a_script_that_begins_to_change_gradients_later_is_told_the_remedy():
    setup = Setup(overlap=None)
    for _ in range(3):
        is_early(setup)
    setup.model.zero_grad()
    setup.backward()
    torch.nn.utils.clip_grad_norm_(setup.model.parameters(), 1e-3)
    with pytest.raises(FleetError, match=r"gradient of .* changed after .*overlap=False"):
        setup.flow.step()


def change_one_number(model: Any) -> None:
    model[0].weight.grad.data[3, 2] = 5.0


def clamp(model: Any) -> None:
    model[0].weight.grad.data.clamp_(-1e-9, 1e-9)


@pytest.mark.parametrize("steps", [3, 4, 5, 6])
@pytest.mark.parametrize("change", [clamp, change_one_number])
def test_a_script_that_begins_to_change_gradients_of_a_small_model_by_data_is_told_at_once(change, steps):
    setup = Setup(overlap=None)
    for _ in range(steps):
        is_early(setup)
    setup.model.zero_grad()
    setup.backward()
    change(setup.model)
    with pytest.raises(FleetError, match=r"gradient of 0\.weight was changed after"):
        setup.flow.step()


def test_a_script_that_begins_to_change_one_number_of_a_large_gradient_is_told_within_one_turn(monkeypatch):
    monkeypatch.setattr("fleet.parameter_server.trainer.parameters.ROUND_BYTES", 20_000)  # of 81 KB
    setup = Setup(overlap=None)
    for _ in range(5):
        is_early(setup)

    def change_in_each_step_of_a_turn() -> None:
        for _ in range(5):
            setup.model.zero_grad()
            setup.backward()
            change_one_number(setup.model)
            setup.flow.step()

    with pytest.raises(FleetError, match=r"gradient of 0\.weight was changed after"):
        change_in_each_step_of_a_turn()


def test_gradients_leave_without_the_scale_that_a_scaler_has_given_them():
    setup = Setup(overlap=None)
    setup.backward()
    gradient = setup.model[1].bias.grad.clone()
    for parameter in setup.model.parameters():
        parameter.grad.mul_(1024.0)
    setup.flow.step(Scaling(torch.tensor(1024.0), found_inf=False))
    assert setup.mode.bytes["1.bias"] == gradient.numpy().tobytes()
    assert not is_early(setup)


def test_a_step_whose_gradients_are_not_finite_takes_part_without_any():
    setup = Setup(overlap=None)
    setup.backward()
    setup.flow.step(Scaling(torch.tensor(1024.0), found_inf=True))
    begin, finish = setup.mode.take()
    assert (begin, setup.mode.hyper, finish.count(" -")) == ("begin", NO_STEP, len(SENT))


def test_a_scaler_whose_gradients_have_left_is_told_the_remedy():
    setup = Setup()
    setup.backward()
    with pytest.raises(
        FleetError, match=r"scaler is in use, but the gradient of 1\.\w+ has already been sent.*False"
    ):
        setup.flow.step(Scaling(torch.tensor(1024.0), found_inf=False))
