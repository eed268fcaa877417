"""The executor on local programs: what goes in, what comes out, and what is refused by name."""

import copy
import json
import math
import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import fleet
from fleet.errors import ConfigurationError, FleetError
from fleet.fluid import executor as executor_module
from fleet.fluid import originals


def mean_square(model: Any, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
    predicted = model(x)
    return {"loss": (predicted - y).square().mean(), "predicted": predicted, "rows": len(x)}


FEED = {"x": np.ones((4, 3), dtype=np.float32), "y": np.zeros((4, 1), dtype=np.float32)}


@pytest.fixture
def model() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(3, 1)


def program_of(model: torch.nn.Module, loss_fn: Any = mean_square) -> fleet.Program:
    return fleet.Program.capture(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_run_is_one_step_of_the_optimizer(model):
    program_of(model)
    torch.manual_seed(0)
    alone = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    executor = fleet.Executor(fleet.CPUPlace())
    assert executor.run(fleet.default_startup_program()) == []
    for _ in range(3):
        (loss,) = executor.run(feed=FEED, fetch_list=["loss"])
        optimizer.zero_grad()
        expected = mean_square(alone, torch.ones(4, 3), torch.zeros(4, 1))["loss"]
        expected.backward()
        optimizer.step()
        assert loss == expected.item()
    assert torch.equal(model.weight, alone.weight)
    executor.close()


@pytest.mark.parametrize(
    ("clip", "in_torch"),
    [
        (fleet.ClipGradByValue(0.01, -0.02), lambda p: [each.grad.clamp_(-0.02, 0.01) for each in p]),
        (
            fleet.ClipGradByNorm(0.05),
            lambda p: [torch.nn.utils.clip_grad_norm_(each, 0.05) for each in p],
        ),
        (fleet.ClipGradByGlobalNorm(0.05), lambda p: torch.nn.utils.clip_grad_norm_(p, 0.05)),
    ],
)
def test_a_local_run_clips_as_the_program_says(clip, in_torch, model):
    torch.manual_seed(0)
    alone = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    program = fleet.Program.capture(
        model, mean_square, torch.optim.SGD(model.parameters(), lr=0.1), grad_clip=clip
    )
    fleet.Executor().run(program, FEED)
    mean_square(alone, torch.ones(4, 3), torch.zeros(4, 1))["loss"].backward()
    in_torch(list(alone.parameters()))
    optimizer.step()
    assert torch.equal(model.weight, alone.weight)
    assert torch.equal(model.bias, alone.bias)


def test_what_is_bfloat16_is_fetched_as_float32():
    def half(model: Any, x: torch.Tensor) -> dict[str, Any]:
        return {"loss": model(x).sum(), "predicted": model(x)}

    model = torch.nn.Linear(3, 1).bfloat16()
    names: list[str | fleet.Variable] = ["loss", "predicted", "weight@GRAD"]
    feed = {"x": torch.ones(4, 3, dtype=torch.bfloat16)}
    loss, predicted, gradient = fleet.Executor().run(program_of(model, half), feed, names)
    assert {each.dtype for each in (loss, predicted, gradient)} == {np.dtype("float32")}
    assert gradient.tolist() == [[4.0, 4.0, 4.0]]


def test_outputs_parameters_and_gradients_can_be_fetched(model):
    program = program_of(model)
    fetched: list[str | fleet.Variable] = [
        "predicted",
        "rows",
        "weight",
        "weight@GRAD",
        program.global_block().var("bias"),
    ]
    predicted, rows, weight, gradient, bias = fleet.Executor().run(program, FEED, fetched)
    assert (predicted.shape, int(rows)) == ((4, 1), 4)
    assert np.array_equal(weight, model.weight.detach().numpy())
    assert model.weight.grad is not None
    assert np.array_equal(gradient, model.weight.grad.numpy())
    assert bias.shape == (1,)


def test_what_was_fetched_does_not_change_afterwards(model):
    program, executor = program_of(model), fleet.Executor()
    (weight,) = executor.run(program, FEED, ["weight"])
    before = weight.copy()
    executor.run(program, FEED)
    assert np.array_equal(weight, before)


@pytest.mark.filterwarnings("error")
def test_a_fetched_loss_is_read_as_in_pytorch_and_as_in_paddle(model):
    fetches: list[Any] = fleet.Executor().run(program_of(model), FEED, ["loss"])
    (loss,) = fetches
    number = loss.item()
    assert fetches[0][0] == loss[0] == loss[-1] == float(loss) == number
    assert isinstance(fetches[0][0], np.float32)
    assert f"{loss:.4f}" == f"{loss[0]:.4f}" == f"{number:.4f}" == format(loss, ".4f")
    assert "%f" % loss == "%f" % loss[0] == "%f" % (loss,) == f"{number:f}"  # noqa: UP031 (as scripts of Paddle do)
    assert "{:.2e}".format(loss) == f"{number:.2e}"  # noqa: UP032
    assert math.exp(loss) == math.exp(number)
    assert (round(loss, 2), round(loss)) == (round(number, 2), round(number))
    assert (loss.shape, loss.dtype, len(loss), list(loss)) == ((1,), np.dtype("float32"), 1, [number])
    assert f"{loss}" == str(loss) == str(np.array([number], np.float32))
    with pytest.raises(IndexError):
        loss[1]


@pytest.mark.filterwarnings("error")
def test_a_whole_number_that_was_fetched_is_one(model):
    (rows,) = fleet.Executor().run(program_of(model), FEED, ["rows"])
    assert (int(rows), "%d" % rows, f"{rows:03d}", list(range(rows))) == (4, "4", "004", [0, 1, 2, 3])  # noqa: UP031


@pytest.mark.filterwarnings("error")
def test_what_is_computed_from_fetched_numbers_is_read_as_they_are(model):
    program, executor = program_of(model), fleet.Executor()
    total: Any = 0.0
    losses = [executor.run(program, FEED, ["loss"])[0] for _ in range(3)]
    for loss in losses:
        total += loss
    numbers = [float(loss) for loss in losses]
    mean = total / len(losses)
    assert "%f" % mean == f"{mean:f}" == f"{np.mean(losses):f}" == f"{np.float32(sum(numbers)) / 3:f}"  # noqa: UP031
    assert (loss * 2)[0] == float(2 * loss) == float(np.multiply(loss, 2)) == numbers[-1] * 2
    assert [bool(loss < 100), bool(loss > 100)] == [True, False]
    assert losses == sorted(losses, reverse=True)
    assert np.concatenate(losses).tolist() == np.array(losses).ravel().tolist() == numbers
    assert all(
        isinstance(each, np.generic) for each in (loss.sum(), loss.mean(), np.max(loss), np.mean(losses))
    )


def test_what_becomes_of_a_fetched_number_elsewhere_is_numpys_own(model, tmp_path):
    (loss,) = fleet.Executor().run(program_of(model), FEED, ["loss"])
    plain = loss.view(np.ndarray)
    others = (np.asarray(loss), np.stack([loss, loss]), loss + np.ones(3), np.ones((2, 2)) * loss)
    assert {type(each) for each in others} == {np.ndarray}
    np.save(tmp_path / "loss.npy", loss)
    for back in (np.load(tmp_path / "loss.npy"), pickle.loads(pickle.dumps(loss))):  # noqa: S301
        assert type(back) is np.ndarray
        assert (back.shape, back.dtype, back) == ((1,), loss.dtype, loss)
    for copied in (copy.copy(loss), copy.deepcopy(loss)):
        assert f"{copied:f}" == f"{loss:f}"
        assert copied is not loss
    assert repr(loss) == repr(plain)
    assert torch.from_numpy(loss).item() == loss
    loss += 1
    assert f"{loss:f}" == f"{plain[0]:f}"
    assert json.dumps(loss.tolist()) == json.dumps([loss.item()])


@pytest.mark.parametrize(("name", "given"), [("feed", FEED), ("fetch_list", ["loss"])])
def test_what_only_a_training_step_takes_is_refused_elsewhere(model, name, given):
    startup = program_of(model).startup_program
    with pytest.raises(
        ConfigurationError, match=f"{name} has .*, but the program does not make a training step"
    ):
        fleet.Executor().run(startup, **{name: given})


@pytest.mark.parametrize(
    ("feed", "words"),
    [
        pytest.param({}, "feed has nothing; expected the data of the program: x, y", id="nothing"),
        pytest.param({"x": 1}, "feed has x; expected the data of the program: x, y", id="too-little"),
        pytest.param({**FEED, "z": 1}, "feed has x, y, z; expected", id="too-much"),
    ],
)
def test_a_feed_that_does_not_fit_is_refused(model, feed, words):
    with pytest.raises(ConfigurationError, match=words):
        fleet.Executor().run(program_of(model), feed)


def test_a_name_that_nothing_has_is_refused_before_the_step(model):
    program, before = program_of(model), model.weight.detach().clone()
    expected = r"fetch_list names accuracy; expected .*loss, predicted, rows"
    with pytest.raises(ConfigurationError, match=expected):
        fleet.Executor().run(program, FEED, ["loss", "accuracy"])
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        pytest.param(lambda loss: loss.repeat(2), r"a tensor of shape \[2\]", id="a-vector"),
        pytest.param(lambda loss: {"cost": loss}, "a dict of cost", id="no-loss"),
        pytest.param(lambda _: {}, "a dict of nothing", id="nothing"),
        pytest.param(lambda loss: loss.item(), "a float", id="a-number"),
        pytest.param(lambda loss: (loss, loss), "a tuple", id="a-tuple"),
    ],
)
def test_a_loss_function_that_returns_no_loss_is_refused(model, returned, words):
    def loss_fn(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        return returned(mean_square(model, x, y)["loss"])

    with pytest.raises(ConfigurationError, match=f"loss_fn returned {words}; expected the loss"):
        fleet.Executor().run(program_of(model, loss_fn), FEED)


def test_a_gradient_that_was_not_computed_is_named(model):
    def only_the_bias(model: Any, x: torch.Tensor) -> Any:
        return model.bias.sum() * x.mean()

    with pytest.raises(FleetError, match="weight@GRAD was fetched, but this step computed no gradient"):
        fleet.Executor().run(program_of(model, only_the_bias), {"x": torch.ones(1)}, ["weight@GRAD"])


def test_a_trainers_program_needs_its_startup_program_first(model):
    program = program_of(model)
    transpiler = fleet.DistributeTranspiler()
    transpiler.transpile(0, program=program, pservers="127.0.0.1:1", trainers=1)
    with pytest.raises(ConfigurationError, match=r"run the startup program first"):
        fleet.Executor().run(transpiler.get_trainer_program(), FEED)


def test_a_place_is_the_trainers(model, monkeypatch):
    moved: list[str] = []
    monkeypatch.setattr(torch.nn.Module, "to", lambda _, device: moved.append(device))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    transpiler = fleet.DistributeTranspiler()
    transpiler.transpile(0, program=program_of(model), pservers="127.0.0.1:1", trainers=1)
    executor = fleet.Executor(fleet.CUDAPlace(1))
    executor.run(transpiler.get_startup_program("127.0.0.1:1"))
    assert moved == []
    executor.run(program_of(model).startup_program)
    assert moved == ["cuda:1"]
    make: Any = fleet.Executor
    with pytest.raises(ConfigurationError, match=r"place is 'gpu'; expected fleet\.CPUPlace\(\)"):
        make("gpu")


def test_a_collective_startup_program_is_told_the_place(model, monkeypatch):
    places: list[fleet.CUDAPlace] = []
    started = SimpleNamespace(start=lambda _plan, _source, place: places.append(place))
    monkeypatch.setattr(executor_module, "collective", lambda: started)
    monkeypatch.setattr(torch.nn.Module, "to", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    transpiler = fleet.DistributeTranspiler(fleet.DistributeTranspilerConfig(mode="nccl2"))
    main = program_of(model)
    mine = "127.0.0.1:1"
    transpiler.transpile(0, program=main, trainers=f"{mine},127.0.0.1:2", current_endpoint=mine)
    fleet.Executor(fleet.CUDAPlace(1)).run(main.startup_program)
    assert places == [fleet.CUDAPlace(1)]


@pytest.mark.parametrize(
    ("count", "visible", "said"),
    [
        pytest.param(0, None, r"0 GPUs on this machine; expected fleet\.CPUPlace\(\)", id="no-gpu"),
        pytest.param(2, "4,5", r"2 GPUs .*_DEVICES is '4,5'\); expected a number from 0 to 1", id="too-few"),
    ],
)
def test_a_gpu_that_is_not_there_is_named(model, monkeypatch, count, visible, said):
    program = program_of(model)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    executor = fleet.Executor(fleet.CUDAPlace(2))
    for run in (lambda: executor.run(program.startup_program), lambda: executor.run(program, FEED)):
        with pytest.raises(ConfigurationError, match=rf"place is CUDAPlace\(2\), and PyTorch finds {said}"):
            run()


def test_after_close_nothing_runs(model):
    executor = fleet.Executor()
    executor.close()
    executor.close()
    with pytest.raises(ConfigurationError, match=r"run\(\) after close\(\)"):
        executor.run(program_of(model), FEED)


def test_a_captured_program_that_was_read_from_text_cannot_run(model):
    with pytest.raises(ConfigurationError, match="no PyTorch objects behind it"):
        fleet.Executor().run(fleet.Program.from_json(program_of(model).to_json()))


def test_an_empty_startup_program_does_nothing():
    assert fleet.Executor().run(fleet.Program()) == []


def test_one_entry_for_the_one_device_may_be_fed(model):
    program = program_of(model)
    assert len(fleet.Executor().run(program, [FEED], ["loss"])) == 1


@pytest.mark.parametrize(
    ("feed", "found"),
    [
        pytest.param([FEED, FEED], "a list of 2", id="of-two-devices"),
        pytest.param([], r"\[\]", id="of-none"),
        pytest.param("x", "'x'", id="a-name"),
    ],
)
def test_what_is_fed_for_several_devices_is_refused(model, feed, found):
    with pytest.raises(ConfigurationError, match=f"feed is {found}; expected a dict .*fleet.launch starts"):
        fleet.Executor().run(program_of(model), feed)


def test_the_originals_arguments_that_change_nothing_are_told_once(model, caplog):
    caplog.set_level("INFO")
    originals._tell.cache_clear()
    program, executor = program_of(model), fleet.Executor()
    for _ in range(2):
        executor.run(program, FEED, use_program_cache=True, feed_var_name="feed", scope=None)
    said = "Executor.run: use_program_cache has no effect: a program that has run needs no preparation"
    assert [record.getMessage() for record in caplog.records] == [said]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"scope": "inner"}, "scope is 'inner', and values are in the model.*; leave it at None"),
        ({"return_merged": False}, "return_merged is False, and one process has one device"),
        ({"use_prune": True}, "use_prune is True, and each run of a training program is a whole step"),
    ],
)
def test_the_originals_arguments_that_are_not_carried_out_are_named(model, arguments, said):
    with pytest.raises(ConfigurationError, match=f"Executor.run: {said}"):
        fleet.Executor().run(program_of(model), FEED, **arguments)


def test_an_argument_that_nobody_knows_is_a_type_error(model):
    with pytest.raises(TypeError, match=r"Executor\.run got an unexpected keyword argument 'fetches'"):
        fleet.Executor().run(program_of(model), FEED, fetches=["loss"])
