"""Tables as plain tensors."""

import numpy as np
import pytest
import torch

from fleet.errors import ConfigurationError
from fleet.tables import Normal, Table, TableConfig, TableRows
from fleet.tables.export import dense, pruned
from fleet.tables.rows import join, part
from fleet.tables.rules import SGD


def table(num_embeddings):
    tried = Table(TableConfig("t", 4, SGD(), num_embeddings, Normal()))
    ids = np.arange(0, 70_000, 7)
    tried.update(ids, torch.ones(ids.size, 4), 1)
    return tried


def test_a_bounded_table_is_one_tensor_of_what_looking_up_gives():
    tried = table(70_000)
    halves = [part(tried.rows(), range(100)), part(tried.rows(), range(100, 256))]
    whole = dense(tried.config, join(halves))
    assert torch.equal(whole, tried.look_up(np.arange(70_000)))
    torch.nn.Embedding.from_pretrained(whole)


def test_a_table_of_any_id_is_no_tensor():
    tried = table(None)
    with pytest.raises(ConfigurationError, match=r"takes any 64-bit id, so it has no dense tensor"):
        dense(tried.config, tried.rows())


def test_rows_of_another_table_are_refused():
    with pytest.raises(ConfigurationError, match=r"id 9 at position 0, expected 0 to 8"):
        dense(TableConfig("t", 1, SGD(), 9), TableRows(np.array([9]), torch.ones(1, 1), {}))


@pytest.mark.parametrize("wanted", [[7, 3, 7, 69_993], [-5, 10**12], [69_993, 69_994], []])
def test_given_ids_alone_have_what_looking_up_gives(wanted):
    tried = table(None)
    found = pruned(tried.config, tried.rows(), torch.tensor(wanted, dtype=torch.int64))
    assert found.ids.tolist() == sorted(set(wanted))
    assert torch.equal(found.values, tried.look_up(found.ids))
