"""A trainer that comes back while the others go on, in one process: servers let it join one by one."""

from typing import Any

import pytest
import torch

from tests.support.parameter_server import loopback
from tests.support.threads import at_once, one_torch_thread
from tests.support.training import assert_same_bits, values_of

X = torch.linspace(-1, 1, 60).reshape(3, 20)


def backward(*models: Any) -> None:
    """Let trainers compute and send their gradients."""
    for model in models:
        model.zero_grad()
        model(X).square().mean().backward()


@pytest.mark.usefixtures("each_transport")
def test_a_step_that_ends_between_two_joins_of_a_trainer_is_the_one_before_its_next(monkeypatch):
    """The first server tells it a step of which the last one, when it is joined, has the values no more."""
    with one_torch_thread(), loopback(servers=2, trainers=3) as job:
        made = [job.make_trainer(index) for index in range(3)]
        (zero, old, two), (model_0, model_1, model_2) = zip(*(each[:2] for each in made), strict=True)
        at_once(zero.start, old.start, two.start)
        backward(model_0, model_1)
        for trainer in (zero, old):
            trainer.session.flush()  # so that both are in the sums
        last = job.servers[1].server
        join = last.join

        def join_after_the_step(request: Any) -> Any:
            backward(model_2)
            at_once(zero.step, two.step)
            backward(model_0)  # begins the sums of the next step
            zero.session.flush()
            return join(request)

        monkeypatch.setattr(last, "join", join_after_the_step)
        new, model_new, _ = job.make_trainer(1, attempt=1)
        new.start()
        assert new.current_step == 1
        backward(model_new, model_2)
        at_once(zero.step, new.step, two.step)
        assert_same_bits(values_of(model_new), values_of(model_0))
        assert_same_bits(values_of(model_2), values_of(model_0))
        assert new.current_step == 2
