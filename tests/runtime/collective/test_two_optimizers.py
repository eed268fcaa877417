"""Two optimizers of one job: a generator against a discriminator, or two for the parts of one model."""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[3] / "docs" / "collective.md").read_text()

GAN = """
fleet.init()
rank, size = fleet.worker_index(), fleet.worker_num()

def built():
    torch.manual_seed(0)
    generator = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 6))
    discriminator = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    return generator, discriminator

def optimizers(generator, discriminator):
    return (
        torch.optim.Adam(generator.parameters(), lr=0.01, betas=(0.5, 0.999)),
        torch.optim.Adam(discriminator.parameters(), lr=0.02, betas=(0.5, 0.999)),
    )

judge = torch.nn.functional.binary_cross_entropy_with_logits

def train(generator, discriminator, of_generator, of_discriminator, ranks):
    for step in range(5):
        real = torch.cat([batch(step, each)[0] for each in ranks])
        noise = torch.cat([batch(step + 50, each)[0][:, :3] for each in ranks])
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        of_discriminator.zero_grad()
        judge(discriminator(real), ones).backward()
        fake = generator(noise)
        judge(discriminator(fake.detach()), zeros).backward()
        of_discriminator.step()
        of_generator.zero_grad()
        judge(discriminator(fake), ones).backward()  # gives the discriminator gradients, too
        of_generator.step()

generator, discriminator = built()
of_generator, of_discriminator = optimizers(generator, discriminator)
of_generator = fleet.distributed_optimizer(of_generator, model=generator)
of_discriminator = fleet.distributed_optimizer(of_discriminator, model=discriminator)
train(generator, discriminator, of_generator, of_discriminator, [rank])
try:
    fleet.save_check_point("saves")
except fleet.ConfigurationError as error:
    assert "fleet has 2 distributed optimizers; expected exactly one" in str(error), error
else:
    raise AssertionError("it saved one of two")
fleet.stop_worker()
alone = built()
train(*alone, *optimizers(*alone), range(size))
for one, other in zip(alone, (generator, discriminator), strict=True):
    for expected, found in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
"""


def test_a_gan_with_two_optimizers_trains_as_in_one_process(trainers):
    (recipe,) = re.findall(r"^## Two optimizers\n.*?```python\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL)
    assert recipe in GAN
    for process in trainers(GAN):
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err


ONE_LEAVES_LATE = """
def loss(first, second, rank):
    # The second part's gradients come first, and leave at once; where one is missing, when backward() ends.
    loss = 3 * (first[0] + first[1]).sum()
    return (1 + rank) * (loss + (second[1] if rank == 1 else second[0] * 2 + second[1]).sum())
"""

EACH_ENDS_WITH_ANOTHER = """
def loss(first, second, rank):
    # Neither part has all gradients on any trainer; which of the parts comes first differs.
    both = [3 * first[rank].sum(), second[rank].sum()]
    both = both if rank else both[::-1]
    return (1 + rank) * sum(both)
"""

PARTS = """
fleet.init()
rank, size = fleet.worker_index(), fleet.worker_num()

def built():
    torch.manual_seed(0)
    first, second = (torch.nn.ParameterList([torch.ones(4), torch.ones(4)]) for _ in range(2))
    return first, second

first, second = built()
sgds = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (first, second)]
optimizers = [fleet.distributed_optimizer(sgd) for sgd in sgds]
for _ in range(3):
    loss(first, second, rank).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
fleet.stop_worker()
one, other = built()
sgd = torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.1)
for _ in range(3):
    sgd.zero_grad()
    (sum(loss(one, other, each) for each in range(size)) / size).backward()
    sgd.step()
for expected, found in zip([*one, *other], [*first, *second], strict=True):
    torch.testing.assert_close(found, expected)
"""


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(ONE_LEAVES_LATE, id="one-leaves-late"),
        pytest.param(EACH_ENDS_WITH_ANOTHER, id="each-ends-with-another"),
    ],
)
def test_gradients_of_two_optimizers_never_mix_though_trainers_use_different_parts(trainers, loss):
    for process in trainers(loss + PARTS):
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err


OTHERS_UNUSED = """
fleet.init()
rank, size = fleet.worker_index(), fleet.worker_num()

def built():
    torch.manual_seed(0)
    return torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(6))

def loss(layers, step, rank):
    x = torch.full((2, 4), 0.1 * (1 + step % 7 + rank))
    for number, layer in enumerate(layers):
        if (step + number + rank) % 3 or number == step % 6:  # which are left out differs by rank and step
            x = torch.tanh(layer(x))
    return x.square().sum()

def optimizers(layers):
    halves = [[each for layer in part for each in layer.parameters()] for part in (layers[:3], layers[3:])]
    return [torch.optim.Adam(half, lr=0.01, weight_decay=0.1) for half in halves]

layers = built()
together = [fleet.distributed_optimizer(each, model=layers) for each in optimizers(layers)]
for step in range(200):
    loss(layers, step, rank).backward()
    for optimizer in together:
        optimizer.step()
        optimizer.zero_grad()
fleet.stop_worker()
one = built()
alone = optimizers(one)
for step in range(200):
    (sum(loss(one, step, each) for each in range(size)) / size).backward()
    for optimizer in alone:
        optimizer.step()
        optimizer.zero_grad()
for expected, found in zip(one.parameters(), layers.parameters(), strict=True):
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
"""


def test_200_steps_in_which_each_trainer_leaves_out_other_layers_are_those_of_one_process(trainers):
    for process in trainers(OTHERS_UNUSED):
        _, err = process.communicate(timeout=100)
        assert process.returncode == 0, err


SHARED = """
fleet.init()
rank, size = fleet.worker_index(), fleet.worker_num()
encoder, one, other = torch.nn.Linear(6, 4), torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
for head in (one, other):
    both = torch.nn.Sequential(encoder, head)
    fleet.distributed_optimizer(torch.optim.SGD(both.parameters(), lr=0.1), model=both)
    assert head is one
"""


def test_a_parameter_of_two_optimizers_is_refused_by_name(trainers):
    for process in trainers(SHARED):
        _, err = process.communicate(timeout=60)
        assert process.returncode == 2, err
        assert "0.weight is also a parameter of an earlier distributed optimizer" in err
        assert "expected one distributed optimizer that holds all parameters" in err


ONE_FOR_ALL = """
fleet.init()
rank, size = fleet.worker_index(), fleet.worker_num()

def built():
    torch.manual_seed(0)
    encoder, heads = torch.nn.Linear(6, 4), [torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)]
    parts = [torch.nn.Sequential(encoder, head) for head in heads]
    optimizers = [torch.optim.Adam(part.parameters(), lr=0.01) for part in parts]
    return torch.nn.ModuleList([encoder, *heads]), parts, optimizers

def train(model, parts, optimizers, loss):
    for step in range(6):
        number = step % 2
        model.zero_grad()
        loss(parts[number], step).backward()
        optimizers[number].step()

model, parts, optimizers = built()
fleet.distributed_optimizer(torch.optim.SGD(model.parameters()), model=model)
train(model, parts, optimizers, lambda part, step: loss_of(part, step, rank))
fleet.stop_worker()
alone, parts, optimizers = built()
mean = lambda part, step: sum(loss_of(part, step, each) for each in range(size)) / size
train(alone, parts, optimizers, mean)
for expected, found in zip(alone.parameters(), model.parameters(), strict=True):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
"""


def test_optimizers_that_share_parameters_step_on_what_another_one_averages(trainers):
    for process in trainers(ONE_FOR_ALL):
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err


def test_an_optimizer_that_is_handed_over_again_is_refused_before_anybody_is_asked(trainers):
    body = """
    fleet.init()
    model = build(seed=0)
    given = torch.optim.SGD(model.parameters(), lr=0.1)
    returned = fleet.distributed_optimizer(given, model=model)
    if fleet.worker_index() == 1:  # the other trainer would be waited for, were it asked
        for again in (given, returned):
            try:
                fleet.distributed_optimizer(again, model=model)
            except fleet.ConfigurationError as error:
                assert "this SGD was already passed to it, or returned by it" in str(error), error
            else:
                raise AssertionError("it was taken")
    fleet.stop_worker()
    """
    for process in trainers(body):
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
