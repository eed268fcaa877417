"""What the benchmark of the network is asked to measure, and what the links allow."""

import re

import pytest

from benchmarks.cases import Case, limit_seconds, memory_bytes, parse_cases

MEGABYTES_100 = 100_000_000


def test_cases_are_read_as_they_are_written():
    text = "4+4@400,2+2@400,4+2@1000x64"
    cases = parse_cases(text)
    assert cases == [Case(4, 4, 400), Case(2, 2, 400), Case(4, 2, 1000, batch=64)]
    assert ",".join(map(str, cases)) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "'' is no case; expected trainers+servers@Mbit/s, as 4+4@400", id="nothing"),
        pytest.param("4+4", "'4+4' is no case", id="no-rate"),
        pytest.param("4+4@400,", "'' is no case", id="an-empty-one"),
        pytest.param("4+4@400 ", "is no case", id="a-blank"),
        pytest.param("1+4@400", "expected 2 trainers or more", id="one-trainer-has-no-ring"),
        pytest.param("4+0@400", "1 server or more", id="no-server"),
        pytest.param("200+51@400", "250 in all", id="more-hosts-than-addresses"),
        pytest.param("4+4@0", "1 Mbit/s or more", id="no-bandwidth"),
        pytest.param("4+4@400x65", "batches of 1 to 64", id="more-samples-than-there-are"),
        pytest.param("4+4@400,4+4@400", "has a case twice", id="twice"),
        pytest.param("4+4@400,4+4@400x1", "has a case twice", id="twice-in-other-words"),
    ],
)
def test_what_is_no_case_is_refused_with_what_was_expected(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_cases(text)


@pytest.mark.parametrize(
    ("system", "case", "seconds"),
    [
        pytest.param("fleet", Case(4, 4, 400), 2.0, id="as-many-servers-the-parameters-once"),
        pytest.param("cross", Case(4, 4, 800), 1.0, id="twice-the-rate"),
        pytest.param("fleet", Case(4, 2, 400), 4.0, id="half-as-many-servers-are-the-bottleneck"),
        pytest.param("fleet", Case(2, 4, 400), 2.0, id="more-servers-than-trainers-do-not-help"),
        pytest.param("bf16", Case(4, 4, 400), 1.0, id="half-the-bytes"),
        pytest.param("ddp", Case(4, 4, 400), 3.0, id="a-ring-of-four"),
        pytest.param("ddp", Case(2, 2, 400), 2.0, id="a-ring-of-two"),
        pytest.param("ddphalf", Case(4, 2, 400), 1.5, id="a-ring-has-no-servers"),
        pytest.param("compute", Case(4, 4, 400), 0.0, id="nothing-travels"),
    ],
)
def test_the_limit_is_what_the_busiest_link_needs(system, case, seconds):
    assert limit_seconds(system, case, MEGABYTES_100) == pytest.approx(seconds)


def test_memory_grows_with_processes_and_with_what_servers_keep_of_every_trainer():
    def needed(system: str, num_trainers: int, num_servers: int) -> int:
        return memory_bytes(system, Case(num_trainers, num_servers, 400), MEGABYTES_100)

    assert needed("ddp", 4, 4) == needed("ddp", 4, 1) == 4 * 600_000_000
    assert needed("fleet", 4, 4) == 4 * 800_000_000 + 4 * 500_000_000
    assert needed("fleet", 4, 2) == 4 * 800_000_000 + 2 * 650_000_000
