"""What a script's optimizer brings along, from hooks to a step of its own: it counts, or is refused by name.

One server and one trainer in this process, over loopback, beside the plain script.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import fleet as package
from fleet.errors import ConfigurationError, FleetError, TranspileError
from fleet.parameter_server import Fleet
from fleet.process import lifecycle
from fleet.role_maker import Role, UserDefinedRoleMaker
from tests.support.processes import free_ports
from tests.support.threads import one_torch_thread

X = torch.linspace(-1, 1, 60).reshape(3, 20)
MODES = ("sync", "async", "half_async", "geo")

Make = Callable[[Any], torch.optim.Optimizer]


@pytest.fixture(autouse=True)
def _leave_the_test_process_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("start", "finish"):
        monkeypatch.setattr(lifecycle, name, lambda *_: None)
    monkeypatch.setenv("FLAGS_rpc_deadline", "20000")
    with one_torch_thread():
        yield


def build() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(20, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))


def loss_fn(model: Any, x: Any) -> Any:
    return (model(x) - 3.0).square().mean()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.5)


def strategy_of(mode: str) -> package.DistributedStrategy:
    config = package.DistributeTranspilerConfig()
    if mode == "geo":
        config.geo_sgd_mode, config.geo_sgd_need_push_nums = True, 2
    elif mode != "sync":
        config.sync_mode = False
        config.half_async, config.runtime_split_send_recv = mode == "half_async", mode == "async"
    return package.DistributedStrategy(transpiler=config)


class Replica:
    """One role's script, up to where it serves or joins; `prepare` is what it does to its torch optimizer."""

    def __init__(
        self,
        role: Any,
        endpoint: str,
        make: Make = sgd,
        mode: str = "sync",
        prepare: Callable[[torch.optim.Optimizer], Any] = lambda _: None,
    ) -> None:
        self.fleet = Fleet()
        self.fleet.init(UserDefinedRoleMaker(0, role, 1, [endpoint]))
        self.model = build()
        self.wrapped = make(self.model.parameters())
        prepare(self.wrapped)
        self.optimizer = self.fleet.distributed_optimizer(self.wrapped, strategy_of(mode), model=self.model)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss_fn(self.model, X).backward()
            self.optimizer.step()


@contextmanager
def job(
    make: Make = sgd,
    mode: str = "sync",
    prepare: Callable[[torch.optim.Optimizer], Any] = lambda _: None,
    *,
    ends: bool = True,
) -> Iterator[Replica]:
    """Give a trainer that has not joined, beside a server that serves; it leaves at the end if it `ends`."""
    endpoint = f"127.0.0.1:{free_ports(1)[0]}"
    served = Replica(Role.SERVER, endpoint, make, mode)
    served.fleet.init_server()
    server = served.fleet._server
    assert server is not None
    thread = threading.Thread(target=served.fleet.run_server, daemon=True)
    thread.start()
    trainer = Replica(Role.WORKER, endpoint, make, mode, prepare)
    try:
        yield trainer
        if ends:
            trainer.fleet.stop_worker()
            thread.join(60)
            assert not thread.is_alive(), "the server still serves"
    finally:
        if trainer.fleet._trainer is not None:
            trainer.fleet._trainer.close()
            trainer.fleet._trainer.completed = True  # nobody is to be reminded of stop_worker()
        server.close()


def alone(
    make: Make, steps: int, prepare: Callable[[torch.optim.Optimizer], Any] = lambda _: None
) -> dict[str, torch.Tensor]:
    model = build()
    optimizer = make(model.parameters())
    prepare(optimizer)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_fn(model, X).backward()
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


def check_equal(model: torch.nn.Module, expected: dict[str, torch.Tensor]) -> None:
    assert [
        name for name, value in model.state_dict().items() if not torch.equal(value, expected[name])
    ] == []


class Halves:
    """Hooks that change what is trained: each halves all gradients, and counts its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any, int, dict[str, Any]]] = []

    def register(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.register_step_pre_hook(self.before)
        optimizer.register_step_post_hook(self.after)

    def before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.calls.append(("before", optimizer, len(args), kwargs))
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.5)

    def after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.calls.append(("after", optimizer, len(args), kwargs))


@pytest.mark.parametrize("registered", ["before", "after", "after, on the torch optimizer"])
@pytest.mark.parametrize("mode", MODES)
def test_hooks_around_the_step_are_called_once_with_the_optimizer_that_the_script_holds(mode, registered):
    hooks = Halves()
    expected = alone(sgd, 5, Halves().register)
    with job(mode=mode, prepare=hooks.register if registered == "before" else lambda _: None) as trainer:
        if registered != "before":
            hooks.register(trainer.optimizer if registered == "after" else trainer.wrapped)
        trainer.fleet.init_worker()
        trainer.train(5)
    assert hooks.calls == [("before", trainer.optimizer, 1, {}), ("after", trainer.optimizer, 1, {})] * 5
    if mode == "sync":
        check_equal(trainer.model, expected)


def test_a_hook_that_is_removed_is_called_no_more():
    hooks = Halves()
    handles: list[Any] = []
    with job(
        prepare=lambda optimizer: handles.append(optimizer.register_step_pre_hook(hooks.before))
    ) as job_:
        job_.fleet.init_worker()
        job_.train(1)
        handles[0].remove()
        job_.train(2)
    assert len(hooks.calls) == 1


@pytest.mark.parametrize("mode", MODES)
def test_hooks_on_all_optimizers_are_called_for_the_one_that_the_script_steps(mode):
    called: list[Any] = []

    class Own(torch.optim.SGD):
        """Steps its own way, which servers call as it is."""

        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    with job(lambda parameters: Own(parameters, lr=0.1), mode) as trainer:
        trainer.fleet.init_worker()
        handles = [
            register(lambda optimizer, *_: called.append(optimizer))
            for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)
        ]
        try:
            trainer.train(3)
        finally:
            for handle in handles:
                handle.remove()
    assert called.count(trainer.optimizer) == 6


@pytest.mark.parametrize("by_minimize", [False, True])
@pytest.mark.parametrize("mode", ["sync", "geo"])
def test_hooks_around_the_step_are_called_by_an_executor(mode, by_minimize):
    hooks = Halves()
    expected = alone(sgd, 4, Halves().register)
    with job(mode=mode, prepare=hooks.register) as trainer:
        executor = package.Executor()
        if by_minimize:
            trainer.optimizer.minimize(loss_fn)
            program = trainer.fleet.main_program
        else:
            captured = package.Program.capture(trainer.model, loss_fn, trainer.wrapped)
            transpiler = package.DistributeTranspiler(strategy_of(mode).transpiler)
            endpoint = trainer.fleet.server_endpoints(to_string=True)
            transpiler.transpile(0, program=captured, pservers=endpoint, trainers=1)
            program = transpiler.get_trainer_program()
            executor.run(captured.startup_program)
        if by_minimize:
            executor.run(trainer.fleet.startup_program)
        for _ in range(4):
            executor.run(program, {"x": X})
        if not by_minimize:
            executor.close()
            trainer.fleet.stop_worker = lambda: None  # type: ignore[method-assign]
    assert [call[:2] for call in hooks.calls] == [("before", trainer.wrapped), ("after", trainer.wrapped)] * 4
    if mode == "sync":
        check_equal(trainer.model, expected)


@pytest.mark.parametrize("mode", ["sync", "geo"])
def test_hooks_around_the_state_are_called_with_the_optimizer_that_the_script_holds(mode):
    called: list[tuple[str, Any]] = []

    def unwrap(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> Any:
        called.append(("loading", optimizer))
        return state["wrapped in"]

    def prepare(optimizer: torch.optim.Optimizer) -> None:
        optimizer.register_state_dict_pre_hook(lambda each: called.append(("saving", each)))
        optimizer.register_state_dict_post_hook(lambda _, state: {**state, "note": "of a hook"})
        optimizer.register_load_state_dict_pre_hook(unwrap)
        optimizer.register_load_state_dict_post_hook(lambda each: called.append(("loaded", each)))

    before = sgd(build().parameters()).state_dict()
    before["param_groups"][0]["momentum"] = 0.25
    with job(mode=mode, prepare=prepare) as trainer:
        trainer.optimizer.load_state_dict({"wrapped in": before})
        assert called == [("loading", trainer.optimizer), ("loaded", trainer.optimizer)]
        assert trainer.optimizer.param_groups[0]["momentum"] == 0.25
        trainer.fleet.init_worker()
        trainer.train(1)
        state = trainer.optimizer.state_dict()
    assert called[2:] == [("saving", trainer.optimizer)]
    assert (set(state), state["note"]) == ({"state", "param_groups", "note"}, "of a hook")
    assert set(state["state"][0]) == {"momentum_buffer"}


@pytest.mark.parametrize("mode", MODES)
def test_a_step_of_the_optimizer_that_was_given_away_is_refused_in_every_mode(mode):
    with job(mode=mode) as trainer:
        trainer.fleet.init_worker()
        trainer.train(1)
        loss_fn(trainer.model, X).backward()
        with pytest.raises(FleetError, match=r"step\(\) was called on the SGD .* Step the optimizer that"):
            trainer.wrapped.step()
        trainer.optimizer.step()


def test_a_step_that_was_put_on_the_object_is_refused_by_name_and_a_schedulers_is_not():
    def replace(optimizer: Any) -> None:
        step = optimizer.step
        optimizer.step = lambda closure=None: step(closure)

    endpoint = f"127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(ConfigurationError, match=r"the SGD passed to .* has a step\(\) set on the object"):
        Replica(Role.WORKER, endpoint, prepare=replace)
    Replica(Role.WORKER, endpoint, prepare=lambda each: torch.optim.lr_scheduler.StepLR(each, 1))


class Clips(torch.optim.SGD):
    """Clips by the norm of all gradients in its own step."""

    def step(self, closure: Any = None) -> Any:
        every = [each for group in self.param_groups for each in group["params"]]
        torch.nn.utils.clip_grad_norm_(every, 0.5)
        return super().step(closure)


class Noisy(torch.optim.SGD):
    """Adds noise to the weights in its own step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for each in group["params"]:
                each.add_(torch.randn_like(each), alpha=0.01)
        return super().step(closure)


@pytest.mark.parametrize("role", [Role.SERVER, Role.WORKER])
@pytest.mark.parametrize("mode", MODES[:-1])
@pytest.mark.parametrize(("kind", "words"), [(Clips, "couples parameters"), (Noisy, "draws random numbers")])
def test_what_servers_cannot_step_is_refused_in_every_role_before_training(kind, words, mode, role):
    endpoint = f"127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(TranspileError, match=f"{kind.__name__} {words}"):
        Replica(role, endpoint, lambda parameters: kind(parameters, lr=0.1), mode)


def test_in_geo_a_step_that_couples_parameters_is_the_scripts_own():
    def make(parameters: Any) -> torch.optim.Optimizer:
        return Clips(parameters, lr=0.1)

    with job(make, "geo") as trainer:
        trainer.fleet.init_worker()
        trainer.train(4)
    for name, value in alone(make, 4).items():
        torch.testing.assert_close(trainer.model.state_dict()[name], value)


def test_clipping_by_the_strategy_is_what_the_refusal_says_it_is():
    endpoint = f"127.0.0.1:{free_ports(1)[0]}"
    strategy = package.DistributedStrategy(grad_clip=package.ClipGradByGlobalNorm(0.5))
    served, trainer = Fleet(), Fleet()
    models = []
    for fleet, role in ((served, Role.SERVER), (trainer, Role.WORKER)):
        fleet.init(UserDefinedRoleMaker(0, role, 1, [endpoint]))
        models.append(build())
        optimizer = fleet.distributed_optimizer(
            torch.optim.SGD(models[-1].parameters(), lr=0.1), strategy, model=models[-1]
        )
    served.init_server()
    thread = threading.Thread(target=served.run_server, daemon=True)
    thread.start()
    trainer.init_worker()
    for _ in range(4):
        optimizer.zero_grad()
        loss_fn(models[-1], X).backward()
        optimizer.step()
    trainer.stop_worker()
    thread.join(60)
    for name, value in alone(lambda parameters: Clips(parameters, lr=0.1), 4).items():
        torch.testing.assert_close(models[-1].state_dict()[name], value)


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
@pytest.mark.parametrize("lr", [0.05, 0.01, 0.003])
def test_a_rate_that_is_a_tensor_gives_torchs_bits(name, lr):
    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(parameters, lr=torch.tensor(lr))
        return optimizer

    with job(make) as trainer:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(trainer.optimizer, 0.9)
        trainer.fleet.init_worker()
        for _ in range(8):
            trainer.train(1)
            scheduler.step()
    model = build()
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for _ in range(8):
        optimizer.zero_grad()
        loss_fn(model, X).backward()
        optimizer.step()
        scheduler.step()
    check_equal(trainer.model, model.state_dict())


@pytest.mark.parametrize("when", ["before it joins", "after it has joined", "after some steps", "in a step"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES)
def test_a_model_that_is_converted_afterwards_is_an_error_with_the_parameter_and_its_dtypes(
    mode, dtype, when
):
    expected = rf"^\S+\.(weight|bias) is {dtype}, but was torch\.float32 when fleet\.distributed_optimizer"
    with job(mode=mode, ends=False) as trainer:
        if when == "before it joins":
            trainer.model.to(dtype)
            with pytest.raises(ConfigurationError, match=expected):
                trainer.fleet.init_worker()
            return
        trainer.fleet.init_worker()
        if when != "after it has joined":
            trainer.train(5)  # gradients leave early by then
        if when == "in a step":
            trainer.optimizer.zero_grad()
            loss_fn(trainer.model, X).backward()
        trainer.model.to(dtype)
        with pytest.raises(ConfigurationError, match=expected):  # noqa: PT012 - from either call
            if when != "in a step":
                loss_fn(trainer.model, X.to(dtype)).backward()
            trainer.optimizer.step()


@pytest.mark.parametrize("mode", MODES)
def test_a_model_that_is_converted_after_its_last_step_takes_no_value_that_does_not_fit(mode):
    with job(mode=mode, ends=False) as trainer:
        trainer.fleet.init_worker()
        trainer.train(3)
        trainer.model.double()
        with pytest.raises(ConfigurationError, match=r"is torch\.float64, but was torch\.float32"):
            trainer.fleet.push_parameters()
        if mode == "geo":
            with pytest.raises(ConfigurationError, match=r"is torch\.float64, but was torch\.float32"):
                trainer.fleet.stop_worker()


def test_a_server_whose_script_converts_the_model_afterwards_says_so_too():
    served = Replica(Role.SERVER, f"127.0.0.1:{free_ports(1)[0]}")
    served.model.bfloat16()
    with pytest.raises(ConfigurationError, match=r"is torch\.bfloat16, but was torch\.float32"):
        served.fleet.init_server()


def test_a_sparse_embedding_that_is_converted_afterwards_is_named():
    def build_sparse() -> Any:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Embedding(5, 2, sparse=True), torch.nn.Linear(2, 1))

    endpoint = f"127.0.0.1:{free_ports(1)[0]}"
    fleets, models = [], []
    for role in (Role.SERVER, Role.WORKER):
        fleets.append(Fleet())
        fleets[-1].init(UserDefinedRoleMaker(0, role, 1, [endpoint]))
        models.append(build_sparse())
        optimizer = fleets[-1].distributed_optimizer(
            torch.optim.SGD(models[-1].parameters(), lr=0.1), model=models[-1]
        )
    served, trainer = fleets
    served.init_server()
    server = served._server
    assert server is not None
    thread = threading.Thread(target=served.run_server, daemon=True)
    thread.start()
    trainer.init_worker()
    try:
        models[1](torch.tensor([0, 1])).sum().backward()
        models[1][0].double()
        with pytest.raises(ConfigurationError, match=r"0\.weight is torch\.float64, but was torch\.float32"):
            optimizer.step()
    finally:
        assert trainer._trainer is not None
        trainer._trainer.close()
        trainer._trainer.completed = True
        server.close()
