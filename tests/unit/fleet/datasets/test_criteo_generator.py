"""Generated click logs: of Criteo's format, and with a truth that a model can find."""

import sys

import pytest
import torch
from sklearn.metrics import roc_auc_score

from fleet.datasets import CriteoFiles
from fleet.datasets.criteo_generator import main, write


def test_a_model_comes_to_the_planted_truth(tmp_path):
    train, test = tmp_path / "train", tmp_path / "test.gz"
    write(train, 30_000, vocabulary=20)
    reachable = write(test, 10_000, vocabulary=20, seed=1)
    torch.manual_seed(0)
    weights, dense = torch.nn.EmbeddingBag(100_003, 1, mode="sum"), torch.nn.Linear(13, 1)
    torch.nn.init.zeros_(weights.weight)
    optimizer = torch.optim.Adam([*weights.parameters(), *dense.parameters()], lr=0.02)
    for _ in range(2):
        for batch in CriteoFiles([train], 500, hash_size=100_003):
            optimizer.zero_grad()
            logits = (weights(batch.ids) + dense(batch.dense))[:, 0]
            torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels).backward()
            optimizer.step()
    (held_out,) = CriteoFiles([test], 10_000, hash_size=100_003)
    with torch.no_grad():
        found = roc_auc_score(held_out.labels, (weights(held_out.ids) + dense(held_out.dense))[:, 0])
    assert 0.75 < reachable < 0.9
    assert reachable - 0.02 < found < reachable + 0.005


def test_files_are_the_same_for_the_same_seed_alone(tmp_path):
    paths = [tmp_path / name for name in ("one", "again", "other")]
    for path, seed in zip(paths, (5, 5, 6), strict=True):
        write(path, 50, seed=seed)
    one, again, other = (path.read_bytes() for path in paths)
    assert one == again
    assert not set(one.splitlines()) & set(other.splitlines())


def test_categories_are_zipf_distributed(tmp_path):
    write(tmp_path / "day", 4000, vocabulary=1000, skew=1.2)
    firsts = [text.split(b"\t")[14] for text in (tmp_path / "day").read_bytes().splitlines()]
    counts = sorted((firsts.count(each) for each in set(firsts) - {b""}), reverse=True)
    assert counts[0] / counts[1] == pytest.approx(2**1.2, rel=0.15)
    assert counts[0] / counts[3] == pytest.approx(4**1.2, rel=0.25)


def test_the_command_writes_files_and_says_how_good_a_model_can_be(tmp_path, monkeypatch, capsys):
    files = [str(tmp_path / "data" / name) for name in ("a.gz", "b.gz")]
    monkeypatch.setattr(sys, "argv", ["criteo_generator", *files, "--lines", "40", "--vocabulary", "9"])
    main()
    said = capsys.readouterr().out.splitlines()
    assert [text.split(": ")[0] for text in said] == files
    assert all(" 40 lines, AUC of a perfect model 0." in text for text in said)
    assert sum(len(batch.labels) for batch in CriteoFiles(files, 10)) == 80
