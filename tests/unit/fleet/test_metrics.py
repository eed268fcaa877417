"""Metrics of samples that are spread over trainers, beside scikit-learn's of all samples at once."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as sklearn

from fleet.errors import ConfigurationError
from fleet.metrics import AUC, Accuracy, Mean, Metrics, Sum, numbers_of

SAMPLES = st.lists(st.tuples(st.floats(0, 1, width=32), st.integers(0, 1)), min_size=2, max_size=60)


class Trainers:
    """Trainers that compute a metric one after the other; the last one has what all of them have."""

    def __init__(self):
        self.total = 0

    def reduce(self, numbers):
        self.total = self.total + numbers
        return self.total


def over_trainers(make, samples, trainers=3):
    """Return the metric of samples that are dealt out to trainers."""
    shared = Trainers()
    for index in range(trainers):
        metric = make(shared.reduce)
        for scores, labels in samples[index::trainers]:
            metric.update(np.array([scores]), np.array([labels]))
        value = metric.compute()
    return value, metric


@given(samples=SAMPLES, buckets=st.sampled_from([1, 2, 7, 1 << 14]))
def test_auc_is_off_by_at_most_half_the_share_of_pairs_within_a_bucket(samples, buckets):
    scores, labels = (np.array(column) for column in zip(*samples, strict=True))
    found, metric = over_trainers(lambda reduce: AUC(reduce, buckets), samples)
    if len(set(labels.tolist())) < 2:
        assert math.isnan(found)
        assert math.isnan(metric.error)
        return
    exact = sklearn.roc_auc_score(labels, scores)
    place = np.minimum((scores.astype(np.float64) * buckets).astype(int), buckets - 1)
    within = sum(a == b for a in place[labels == 1] for b in place[labels == 0])
    share = within / ((labels == 1).sum() * (labels == 0).sum())
    assert metric.error == pytest.approx(share / 2)
    assert abs(found - exact) <= metric.error + 1e-12


def test_auc_of_many_samples_is_scikit_learn_s_to_four_digits():
    random = np.random.default_rng(0)
    labels = random.integers(0, 2, 50_000)
    scores = torch.sigmoid(torch.from_numpy(random.normal(size=50_000) + labels)).float()
    metric = AUC(lambda counts: counts)
    for begin in range(0, 50_000, 1000):
        metric.update(scores[begin : begin + 1000], torch.from_numpy(labels[begin : begin + 1000]))
    assert metric.compute() == pytest.approx(sklearn.roc_auc_score(labels, scores), abs=5e-5)
    metric.reset()
    assert math.isnan(metric.compute())


@pytest.mark.parametrize(
    ("scores", "labels", "said"),
    [
        (
            [0.5, 1.5],
            [0, 1],
            r"AUC: scores holds 1\.5 at 1, expected probabilities from 0 to 1, as of a sigmoid",
        ),
        ([0.5, float("nan")], [0, 1], r"AUC: scores holds nan at 1"),
        ([0.5, 0.5], [0, 2], r"AUC: labels holds 2 at 1, expected 0 or 1"),
        ([0.5, 0.5], [0], r"AUC: 2 scores and 1 labels, expected equal numbers"),
        (["a"], [0], r"AUC: scores are of type <U1, expected numbers"),
    ],
)
def test_what_auc_cannot_count_is_refused(scores, labels, said):
    metric = AUC(lambda counts: counts)
    with pytest.raises(ConfigurationError, match=said):
        metric.update(scores, labels)
    assert math.isnan(metric.compute())


def test_auc_needs_a_bucket():
    with pytest.raises(ConfigurationError, match="buckets is 0, expected at least 1"):
        AUC(lambda counts: counts, 0)


@given(samples=SAMPLES)
def test_accuracy_is_that_of_all_samples(samples):
    scores, labels = (np.array(column) for column in zip(*samples, strict=True))
    found, _ = over_trainers(Accuracy, samples)
    assert found == pytest.approx(sklearn.accuracy_score(labels, scores > 0.5))


def test_accuracy_takes_a_number_for_each_class():
    metric = Accuracy(lambda numbers: numbers)
    metric.update(torch.tensor([[0.1, 0.9, 0.0], [2.0, 1.0, 0.0]]).bfloat16(), torch.tensor([1, 2]))
    metric.update(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long))
    assert metric.compute() == 0.5
    with pytest.raises(ConfigurationError, match=r"3 outputs for 2 labels"):
        metric.update([0.1, 0.2, 0.3], [0, 1])


def test_a_mean_is_of_samples_and_not_of_trainers():
    shared = Trainers()
    one, other = Mean(shared.reduce), Mean(shared.reduce)
    one.update(torch.tensor(2.0), count=30)
    other.update([5.0, 5.0])
    assert (one.compute(), other.compute()) == (2.0, 70.0 / 32)
    one.reset()
    shared.total = 0
    assert math.isnan(one.compute())


def test_a_sum_is_over_all_trainers():
    shared = Trainers()
    one, other = Sum(shared.reduce), Sum(shared.reduce)
    one.update([1, 2])
    other.update(torch.tensor([0.5], requires_grad=True))
    assert (one.compute(), other.compute()) == (3.0, 3.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_sum_is_as_exact_as_the_numbers_are(dtype):
    one = Sum(lambda numbers: numbers)
    one.update(torch.tensor([1.0 + torch.finfo(dtype).eps], dtype=dtype))
    assert one.compute() == 1.0 + torch.finfo(dtype).eps


def test_the_metrics_of_a_job_add_over_its_trainers():
    metrics = Metrics(lambda numbers: 2 * numbers)
    assert isinstance(metrics.auc(buckets=3), AUC)
    assert isinstance(metrics.accuracy(), Accuracy)
    assert isinstance(metrics.mean(), Mean)
    total = metrics.sum()
    total.update(4.0)
    assert total.compute() == 8.0


@pytest.mark.parametrize(
    "values",
    [
        pytest.param("12", id="text"),
        pytest.param(["a", "b"], id="texts"),
        pytest.param(None, id="none"),
        pytest.param([1, object()], id="object"),
        pytest.param([[1, 2], [3]], id="ragged"),
        pytest.param(np.array("2026-01-01", dtype="datetime64[D]"), id="date"),
        pytest.param(torch.ones(2, dtype=torch.bfloat16), id="bfloat16"),
    ],
)
def test_what_is_no_number_is_the_users_mistake(values):
    with pytest.raises(ConfigurationError, match=r"^all_reduce_worker"):
        numbers_of(values)


@pytest.mark.parametrize(
    ("values", "dtype"), [(True, "int64"), (3, "int64"), ([0.5], "float64"), (1j, "complex128")]
)
def test_numbers_keep_their_type_and_truths_are_counted(values, dtype):
    assert numbers_of(values).dtype == dtype
