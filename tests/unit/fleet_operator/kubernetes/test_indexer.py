from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_operator.cluster import Key
from fleet_operator.kubernetes import indexer
from fleet_operator.kubernetes.indexer import Entry, Owner, Store, key_of, owner_of, version_of

JOB, OTHER = Key("ns", "digits"), Key("ns", "other")


def entry(name: str, version: int, *, uid: str = "", job: Key = JOB, value: str = "") -> Entry[str]:
    return Entry(Key("ns", name), uid or f"uid-{name}", version, job, None, value)


@pytest.fixture
def store() -> Store[str]:
    return Store()


def test_what_was_put_is_found_by_name_and_by_job(store: Store[str]):
    assert store.put(entry("b", 2))
    assert store.put(entry("a", 1))
    assert store.put(entry("c", 3, job=OTHER))
    assert [each.key.name for each in store.of_job(JOB)] == ["a", "b"]
    assert store.get(Key("ns", "c")) == entry("c", 3, job=OTHER)
    assert (len(store), Key("ns", "a") in store, Key("ns", "x") in store) == (3, True, False)


@pytest.mark.parametrize("version", [4, 5])
def test_a_put_never_replaces_what_is_as_new_or_newer(store: Store[str], version: int):
    store.put(entry("a", 5, value="kept"))
    assert not store.put(entry("a", version, value="late"))
    assert store.of_job(JOB)[0].value == "kept"


def test_a_newer_version_in_which_nothing_that_is_kept_has_changed_is_no_news(store: Store[str]):
    store.put(entry("a", 5, value="kept"))
    assert not store.put(entry("a", 6, value="kept"))
    assert not store.put(entry("a", 6, value="late"))
    assert store.of_job(JOB)[0].version == 6
    assert store.replace([entry("a", 7, value="kept")], 7, None) == set()
    assert store.put(entry("a", 8, value="changed"))
    assert store.put(entry("a", 9, value="changed", uid="another"))


def test_a_newer_version_replaces_and_may_change_the_job(store: Store[str]):
    store.put(entry("a", 5))
    assert store.put(entry("a", 6, job=OTHER))
    assert store.of_job(JOB) == ()
    assert len(store.of_job(OTHER)) == 1


def test_a_late_answer_does_not_bring_a_deleted_object_back(store: Store[str]):
    assert store.remove(Key("ns", "a"), "uid-a", 9) is None  # the watch was faster than the answer
    assert not store.put(entry("a", 8))
    assert len(store) == 0


def test_an_object_that_only_lost_its_label_for_a_while_comes_back(store: Store[str]):
    store.put(entry("a", 5))
    store.remove(Key("ns", "a"), "uid-a", 9)
    assert store.put(entry("a", 10))


def test_the_end_of_an_old_object_does_not_remove_the_new_one_of_its_name(store: Store[str]):
    store.put(entry("a", 5, uid="new"))
    assert store.remove(Key("ns", "a"), "old", 9) is None
    assert len(store) == 1


def test_a_fresh_list_removes_what_is_gone_and_tells_whose_it_was(store: Store[str]):
    store.put(entry("a", 1))
    store.put(entry("b", 2, job=OTHER))
    assert store.replace([entry("a", 1)], version=10, namespace=None) == {OTHER}
    assert [each.key.name for each in store] == ["a"]


def test_a_fresh_list_keeps_what_is_newer_than_it(store: Store[str]):
    store.put(entry("a", 11))  # the answer to an own write, made while the list was under way
    assert store.replace([], version=10, namespace=None) == set()
    assert len(store) == 1


def test_a_list_of_one_namespace_says_nothing_about_another(store: Store[str]):
    store.put(entry("a", 1))
    assert store.replace([], version=10, namespace="elsewhere") == set()
    assert store.replace([], version=10, namespace="ns") == {JOB}


def test_the_memory_for_the_dead_is_bounded(store: Store[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(indexer, "REMEMBERED_DEAD", 2)
    for name in "abc":
        store.remove(Key("ns", name), f"uid-{name}", 9)
    assert store.put(entry("a", 1))
    assert not store.put(entry("b", 1))


@given(st.permutations([("put", 1), ("put", 2), ("put", 3), ("remove", 4)]))
def test_the_order_of_arrival_does_not_matter(arrivals: list[tuple[str, int]]):
    store: Store[str] = Store()
    for what, version in arrivals:
        if what == "put":
            store.put(entry("a", version))
        else:
            store.remove(Key("ns", "a"), "uid-a", version)
    assert len(store) == 0


def test_what_is_read_from_a_manifest():
    owner = {"uid": "u", "kind": "FleetJob", "name": "digits", "controller": True}
    metadata = {"namespace": "ns", "name": "a", "resourceVersion": "7"}
    metadata_of_owned = {**metadata, "ownerReferences": [{"uid": "x", "kind": "Y", "name": "z"}, owner]}
    assert key_of({"metadata": metadata}) == Key("ns", "a")
    assert version_of({"metadata": metadata}) == 7
    assert owner_of({"metadata": metadata}) is None
    assert owner_of({"metadata": metadata_of_owned}) == Owner("u", "FleetJob", "digits")


def test_after_a_restore_from_a_backup_the_list_alone_counts(store: Store[str]):
    for name in ("changed", "same", "gone"):
        store.put(entry(name, 90, value="since"))
    elsewhere = Entry(Key("elsewhere", "a"), "uid", 95, OTHER, None, "since")
    store.put(elsewhere)
    store.remove(Key("ns", "deleted"), "uid-deleted", 99)
    listed = [entry("changed", 40, value="before"), entry("same", 41, value="since"), entry("deleted", 42)]
    assert store.replace(listed, 50, "ns", restored=True) == {JOB}
    assert [(each.key.name, each.version) for each in store.of_job(JOB)] == [
        ("changed", 40),
        ("deleted", 42),
        ("same", 41),
    ]
    assert store.of_job(OTHER) == (elsewhere,)
    assert store.put(entry("changed", 51, value="now"))
