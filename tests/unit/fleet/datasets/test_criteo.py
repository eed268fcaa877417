"""Files of Criteo's format: what is read of them, what is skipped, and what ends the reading."""

import gzip
import re
import tracemalloc

import pytest
import torch
from torch.utils.data import DataLoader

from fleet.datasets import CriteoFiles
from fleet.datasets.criteo import CATEGORIES, COUNTS
from fleet.errors import ConfigurationError


def line(label="0", counts=None, categories=None):
    counts = counts or [str(number) for number in range(COUNTS)]
    categories = categories or [f"{number:08x}" for number in range(CATEGORIES)]
    return "\t".join([label, *counts, *categories]) + "\n"


def written(path, lines):
    if path.suffix == ".gz":
        with gzip.open(path, "wt") as file:
            file.writelines(lines)
    else:
        path.write_text("".join(lines))
    return path


def numbered(numbers):
    """Return lines that are known again by their first count."""
    return [line(counts=[str(number), *["0"] * 12]) for number in numbers]


def numbers_in(batches):
    return [round(float(number)) for batch in batches for number in batch.dense[:, 0].expm1()]


@pytest.mark.parametrize("name", ["day.tsv", "day.gz"])
def test_a_line_is_a_label_counts_and_ids(tmp_path, name):
    counts = ["", "0", "-2", "1", "999999", *["7"] * 8]
    path = written(tmp_path / name, [line("1", counts), line("0")])
    (batch,) = CriteoFiles([path], 2)
    assert batch.labels.tolist() == [1.0, 0.0]
    expected = torch.log1p(torch.tensor([0.0, 0.0, 0.0, 1.0, 999999.0, *[7.0] * 8]))
    torch.testing.assert_close(batch.dense[0], expected)
    assert (batch.dense.dtype, batch.ids.dtype) == (torch.float32, torch.int64)
    assert batch.ids.shape == (2, CATEGORIES)
    assert torch.equal(batch.ids[0], batch.ids[1])
    assert 0 <= int(batch.ids.min()) <= int(batch.ids.max()) < 1_000_001


def test_a_category_is_another_id_in_another_place_and_so_is_a_missing_one(tmp_path):
    same, missing = ["0badcafe"] * CATEGORIES, [""] * CATEGORIES
    zeros, most = ["00000000"] * CATEGORIES, ["ffffffff"] * CATEGORIES
    path = written(tmp_path / "day", [line(categories=each) for each in (same, missing, zeros, most)])
    (batch,) = CriteoFiles([path], 4)
    assert len(set(batch.ids.reshape(-1).tolist())) == 4 * CATEGORIES


def test_ids_are_spread_over_the_hash_size(tmp_path):
    lines = [line(categories=[f"{number:08x}"] * CATEGORIES) for number in range(2000)]
    (batch,) = CriteoFiles([written(tmp_path / "day", lines)], 2000, hash_size=100)
    counts = torch.bincount(batch.ids.reshape(-1), minlength=100)
    assert counts.numel() == 100
    assert counts.min() > 0.7 * counts.float().mean()


def test_files_are_read_in_their_order_and_what_fills_no_batch_is_dropped(tmp_path):
    files = [written(tmp_path / f"day_{day}", numbered(range(day * 5, day * 5 + 5))) for day in (1, 0)]
    batches = list(CriteoFiles(files, 3))
    assert numbers_in(batches) == [5, 6, 7, 8, 9, 0, 1, 2, 3]
    assert numbers_in(CriteoFiles(files, 3)) == numbers_in(batches)


@pytest.mark.parametrize("workers", [0, 2])
def test_trainers_and_their_workers_share_the_lines(tmp_path, workers):
    path = written(tmp_path / "day.gz", numbered(range(48)))
    found = []
    for trainer in range(3):
        dataset = CriteoFiles([path], 4, share=(trainer, 3))
        mine = numbers_in(DataLoader(dataset, batch_size=None, num_workers=workers))
        assert {number % 3 for number in mine} == {trainer}
        found += mine
    assert sorted(found) == list(range(48))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "a line of 1 fields, expected 40"),
        (line().replace("\t", " "), "a line of 1 fields, expected 40"),
        (line("2"), "a line with the label b'2', expected 0 or 1"),
        (line(counts=["many", *["0"] * 12]), "not a line of numbers: .*many"),
        (line(categories=["xyz", *["0"] * 25]), "not a line of numbers: .*xyz"),
        (line(categories=["0x1f", *["0"] * 25]), "not a line of numbers: it has b'x'"),
        (line(categories=["1_f", *["0"] * 25]), "not a line of numbers: it has b'_'"),
        (line(counts=[" +1", *["0"] * 12]), "not a line of numbers: it has b' \\+'"),
        (line(categories=["100000000", *["0"] * 25]), "a line with a number out of range"),
        (line(categories=["123456789", *["0"] * 25]), "a line with a number out of range"),
        (line(categories=["-1", *["0"] * 25]), "a line with a number out of range"),
        (line(counts=["9" * 30, *["0"] * 12]), "a line with a number out of range"),
        (line(counts=["-" + "9" * 400, *["0"] * 12]), "a line with a number out of range"),
    ],
)
def test_a_malformed_line_is_passed_over_counted_and_told_with_its_file_and_number(
    tmp_path, caplog, text, said
):
    path = written(tmp_path / "day", [*numbered([1, 2]), text.rstrip("\n") + "\n", *numbered([3, 4])])
    dataset = CriteoFiles([path], 2)
    found = numbers_in(dataset)
    assert found == [1, 2, 3, 4]
    assert dataset.malformed == 1
    (told,) = caplog.messages
    assert re.search(rf"{re.escape(str(path))}, line 3 is skipped: {said}", told)


def test_many_malformed_lines_are_told_by_their_number(tmp_path, caplog):
    path = written(tmp_path / "day", [*numbered([1]), *["?\n"] * 30, *numbered([2])])
    dataset = CriteoFiles([path], 1)
    assert numbers_in(dataset) == [1, 2]
    assert dataset.malformed == 30
    assert len(caplog.messages) == 4
    assert caplog.messages[-1] == f"{path}: 30 malformed lines were skipped; the first ones are logged above"


def test_a_file_of_another_format_ends_the_reading(tmp_path):
    path = written(tmp_path / "day.csv", ["1,2,3\n"] * 1500)
    with pytest.raises(ConfigurationError, match=r"day\.csv: 1000 of the first 1000 lines are malformed"):
        list(CriteoFiles([path], 1))


@pytest.mark.parametrize("damage", [lambda whole: whole[:-2000], lambda whole: whole[:20] + b"\xff" * 600])
def test_a_file_that_is_damaged_ends_the_reading(tmp_path, damage):
    path = written(tmp_path / "day.gz", numbered(range(5000)))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(
        ConfigurationError, match=r"day\.gz cannot be read to its end: .* download complete\?"
    ):
        list(CriteoFiles([path], 1))


@pytest.mark.parametrize("name", ["day.gz", "day"])
def test_a_file_is_read_as_a_stream(tmp_path, name):
    path = written(tmp_path / name, [line(categories=[f"{number:08x}"] * 26) for number in range(30_000)])
    tracemalloc.start()
    try:
        batches = iter(CriteoFiles([path], 100))
        for _ in range(200):
            next(batches)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 30_000 * len(line()) / 8


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigurationError, match=r"day_9.* cannot be read to its end: .*No such file"):
        list(CriteoFiles([tmp_path / "day_9"], 1))
    with pytest.raises(ConfigurationError, match="no file to read"):
        CriteoFiles([], 1)
