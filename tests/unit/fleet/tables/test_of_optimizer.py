"""Which rule stands for which class of torch.optim, and what none stands for."""

import pytest
import torch

from fleet.errors import ConfigurationError
from fleet.tables.rules import rule_of


def group_of(optimizer: type, **options: object) -> dict[str, object]:
    """Return the param group of an optimizer with these options."""
    made = optimizer([torch.nn.Parameter(torch.zeros(1))], **options)
    return {name: value for name, value in made.param_groups[0].items() if name != "params"}


@pytest.mark.parametrize(
    ("optimizer", "options", "rule"),
    [
        (torch.optim.SGD, {"lr": 0.5}, "SGD"),
        (torch.optim.SGD, {"lr": 0.5, "momentum": 0.9}, "Momentum"),
        (torch.optim.Adagrad, {"lr": 0.5}, "Adagrad"),
        (torch.optim.Adam, {"lr": 0.5}, "Adam"),
        (torch.optim.SparseAdam, {"lr": 0.5}, "Adam"),
        (torch.optim.AdamW, {"lr": 0.5, "weight_decay": 0.0}, "Adam"),
        (torch.optim.RMSprop, {"lr": 0.5}, "RMSprop"),
    ],
    ids=["sgd", "momentum", "adagrad", "adam", "sparse-adam", "adamw-without-decay", "rmsprop"],
)
def test_a_class_has_a_rule_with_its_options(optimizer, options, rule):
    found, of_rule = rule_of("users", optimizer, group_of(optimizer, **options))
    assert type(found).__name__ == rule
    assert of_rule["lr"] == 0.5
    assert of_rule.keys() <= found.defaults().keys()


@pytest.mark.parametrize(
    ("optimizer", "options", "words"),
    [
        (torch.optim.Adadelta, {}, "as torch.optim.adadelta.Adadelta does it; expected SGD"),
        (torch.optim.Adam, {"amsgrad": True}, "amsgrad=True"),
        (torch.optim.AdamW, {"weight_decay": 0.1}, "weight_decay=0.1"),
        (torch.optim.AdamW, {"weight_decay": 0.0, "amsgrad": True}, "amsgrad=True"),
        (torch.optim.RMSprop, {"momentum": 0.9}, "momentum=0.9"),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}, "dampening=0.1"),
    ],
    ids=["unknown", "amsgrad", "adamw-with-decay", "adamw-amsgrad", "rmsprop-momentum", "dampening"],
)
def test_what_no_rule_does_is_refused_with_a_remedy(optimizer, options, words):
    with pytest.raises(ConfigurationError, match="table users: rows cannot be stepped") as refusal:
        rule_of("users", optimizer, group_of(optimizer, **options))
    assert words in str(refusal.value)
    assert "rule=fleet.tables.rules" in str(refusal.value)
