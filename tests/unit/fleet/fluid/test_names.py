"""Names of the original: an error for a missing name says what to use instead."""

import re
from importlib import import_module
from pathlib import Path

import pytest

from fleet.fluid.names import EXAMPLES, here, instead, missing

ROWS = re.findall(
    r"^\| `((?:fluid|paddle)\.[\w.]+)` \| (.*) \| (.*) \|$", Path("docs/paddle.md").read_text(), re.M
)


@pytest.mark.parametrize(
    ("module", "name", "way"),
    [
        pytest.param("layers", "While", "; use a loop in a PyTorch module", id="control-flow"),
        pytest.param("layers", "beam_search", "; use a beam search over torch.topk", id="beam-search"),
        pytest.param("layers", "dynamic_gru", r"; use torch\.nn\.GRU ", id="a-class-of-pytorch"),
        pytest.param("layers", "chunk_eval", r" \(docs", id="nothing"),
        pytest.param("optimizer", "DGCMomentumOptimizer", r"; use strategy\.power_sgd", id="compression"),
        pytest.param("clip", "ErrorClipByValue", r"; use fluid\.clip\.GradientClipByValue", id="clipping"),
        pytest.param("", "dygraph", "; use PyTorch itself", id="a-module"),
        pytest.param("paddle.dataset", "mnist", r"; use torchvision\.datasets", id="a-data-set"),
    ],
)
def test_a_name_of_the_original_says_what_to_use(module: str, name: str, way: str):
    owner = import_module(f"fleet.fluid.{module}".rstrip("."))
    with pytest.raises(AttributeError, match=f"{name} is not in fleet.fluid{way}"):
        getattr(owner, name)


def test_another_name_is_a_mistake():
    with pytest.raises(
        AttributeError, match=r"'fleet\.fluid\.layers' has no attribute 'fcc' \(did you mean fc\?\)"
    ):
        missing("layers")("fcc")


def test_every_name_of_the_examples_stands_in_the_table():
    assert [name for name, _, _ in ROWS] == list(EXAMPLES)
    assert len(set(EXAMPLES)) == 180


@pytest.mark.parametrize(("name", "ours", "state"), ROWS, ids=[name for name, _, _ in ROWS])
def test_the_table_states_what_is_there_in_few_words(name: str, ours: str, state: str):
    assert len(ours.split()) <= 40
    expected = "the same name" if here(name) else "renamed" if here(instead(name)) else "refused"
    assert state == expected
