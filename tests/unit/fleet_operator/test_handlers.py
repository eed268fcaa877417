from __future__ import annotations

from kopf import Body

from fleet_operator.handlers import kopf_settings


class Uncopied(dict[str, object]):
    def __deepcopy__(self, memo: object) -> Uncopied:
        raise AssertionError("kopf copies every object with each event")


def test_kopf_keeps_and_copies_nothing_of_an_object():
    storage = kopf_settings().persistence.diffbase_storage
    body = Body({"metadata": {"name": "digits"}, "spec": Uncopied(mode="Collective")})
    assert storage.build(body=body, extra_fields=[("spec",)]) == {}
    assert storage.fetch(body=body) is None
