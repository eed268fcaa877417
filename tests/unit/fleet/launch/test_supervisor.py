"""What the launchers show of a failed process."""

from fleet.launch.supervisor import TAIL_LINES, last_lines


def test_the_end_of_a_log_is_shown_without_reading_all_of_it(tmp_path):
    path = tmp_path / "workerlog.0"
    lines = [f"line {number}" for number in range(100)]
    with path.open("wb") as file:
        file.truncate(1 << 40)  # without blocks: it takes no disk, and would take as much memory to be read
        file.seek(1 << 40)
        file.write(b"\n" + "\n".join(lines).encode())
    assert last_lines(path) == lines[-TAIL_LINES:]


def test_a_short_log_is_shown_whole(tmp_path):
    path = tmp_path / "workerlog.0"
    path.write_bytes(b"first\nnot utf-8: \xff\n")
    assert last_lines(path) == ["first", "not utf-8: \ufffd"]
