"""The state of the servers' optimizers, as a trainer fetches it: in torch's form, or refused by name."""

import math
from functools import partial
from typing import Any

import pytest
import torch

from fleet.errors import ConfigurationError, FleetError
from fleet.parameter_server.store import Put
from tests.support.parameter_server import loopback, small_model

X = torch.linspace(-1, 1, 60).reshape(3, 20)


def loss_of(model: Any) -> Any:
    return model(X).square().mean()


class Keeping(torch.optim.SGD):
    """Keeps of each parameter what no tensor is, too."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] |= {
                    "nothing": None,
                    "count": 3,
                    "rate": math.inf,
                    "warm": True,
                    "phase": "first",
                    "pair": (1, [torch.arange(2), torch.ones(())]),
                    "signs": parameter.detach().sign(),
                }
        return super().step(closure)


def assert_the_same(found: Any, expected: Any) -> None:
    """Compare values, and their types with them."""
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, list | tuple):
        for one, other in zip(found, expected, strict=True):
            assert_the_same(one, other)
    else:
        assert found == expected


@pytest.mark.parametrize(
    ("optimizer_class", "options"), [(torch.optim.Adam, {"amsgrad": True}), (Keeping, {"momentum": 0.9})]
)
def test_the_state_is_fetched_in_the_form_of_torch(optimizer_class, options):
    make = partial(optimizer_class, lr=0.01, **options)
    with loopback(servers=2, optimizer=make) as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        loss_of(model).backward()
        trainer.step()
        state = trainer.fetch_state()
        alone = small_model()
        optimizer = make(alone.parameters())
        loss_of(alone).backward()
        optimizer.step()
        for name, parameter in alone.named_parameters():
            expected = optimizer.state[parameter]
            assert state[name].keys() == expected.keys()
            for entry in expected:
                assert_the_same(state[name][entry], expected[entry])


def test_state_that_cannot_travel_is_refused_by_name():
    with loopback(optimizer=partial(Keeping, lr=0.1)) as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        loss_of(model).backward()
        trainer.step()
        store = job.servers[0].server._shard.store
        store.apply(Put(0, store.values()[0][1], {"seen": {1, 2}}))
        with pytest.raises(ConfigurationError, match="seen is a set, which a checkpoint cannot hold"):
            trainer.fetch_state()


def test_state_that_is_asked_for_after_the_end_is_an_error_and_not_empty():
    with loopback() as job:
        trainer, _, _ = job.make_trainer()
        trainer.start()
        trainer.complete()
        with pytest.raises(FleetError, match=r"has ended; .* before fleet.stop_worker\(\)"):
            trainer.fetch_state()
