"""Lists of endpoints: written out, or by patterns."""

import pytest

from fleet.environment.endpoints import endpoints_problem, split_endpoints


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a:1, b:2", ["a:1", "b:2"]),
        ("t-[0-2].s:6170", ["t-0.s:6170", "t-1.s:6170", "t-2.s:6170"]),
        ("t-[9-10]:[1-2]", ["t-9:1", "t-9:2", "t-10:1", "t-10:2"]),
        ("a:1,t-[0-1]:2", ["a:1", "t-0:2", "t-1:2"]),
        ("t-[3-4]:[6170-6171+9]", ["t-3:6170", "t-3:6171", "t-4:6179", "t-4:6180"]),
        ("t-[0-1].[5-5+2].[1-1+3]", ["t-0.5.1", "t-1.7.1"]),
        ("t-[0-1+2]:1", ["t-[0-1+2]:1"]),
        ("t-[0-1]:[1-2+]", ["t-0:[1-2+]", "t-1:[1-2+]"]),
        ("t-[0-1]:[2-1+9]", ["t-[0-1]:[2-1+9]"]),
        ("[::1]:6174", ["[::1]:6174"]),
        ("t-[2-1]:1", ["t-[2-1]:1"]),
        ("t-[0-]:1", ["t-[0-]:1"]),
        ("t-[0-999999999]:[1-9]", ["t-[0-999999999]:[1-9]"]),
    ],
)
def test_ranges_stand_for_their_numbers(text, expected):
    assert split_endpoints(text) == expected


@pytest.mark.parametrize(
    ("endpoints", "said"),
    [
        (["a:1", "b:1", "a:2"], None),
        (["a:1", "b:1", "a:1"], "'a:1' occurs twice"),
        (["a:1", "b"], "'b' is not host:port"),
        (["[::1]:6174"], None),
        (["::1:6174"], "'::1:6174' has a malformed host"),
        (["pserver..fleet:6174"], "'pserver..fleet:6174' has a malformed host"),
        ([f"{'p' * 64}:6174"], f"'{'p' * 64}:6174' has a malformed host"),
        (
            ["t-[2-1]:1"],
            "'t-[2-1]:1' has brackets in its host; expected ranges as in t-[0-7]:6170, of at most",
        ),
        (["t-[0-]:1"], "'t-[0-]:1' has brackets in its host; expected ranges as in t-[0-7]:6170, of at most"),
        ([""], "it is empty"),
    ],
)
def test_what_is_wrong_with_a_list(endpoints, said):
    problem = endpoints_problem(endpoints)
    assert problem is None if said is None else str(problem).startswith(said)


def test_a_list_of_many_thousands_is_checked_at_once():
    assert endpoints_problem([f"t-{node}:6170" for node in range(50_000)]) is None
