"""A file written in parts: whole in the end, and not begun anew after a kill."""

from __future__ import annotations

import json

import pytest

from st_sparse_rescale.jsonl import read_jsonl
from st_sparse_rescale.jsonl_parts import write_in_parts


def squares(part):
    return ({"x": x, "text": "\u2028é"} for x in part for _ in range(x % 2))  # the odd ones


def write(path, make=squares, record=None, items=range(10), **settings):
    defaults = {"record": record or {"seed": 1}, "part_size": 3, "show_progress_bar": False}
    return write_in_parts(path, items, make, **(defaults | settings))


def test_the_file_holds_all_rows_in_order_and_nothing_is_left_beside_it(tmp_path):
    assert write(tmp_path / "out.jsonl") == 5
    assert [row for _, row in read_jsonl(tmp_path / "out.jsonl")] == [
        {"x": x, "text": "\u2028é"} for x in (1, 3, 5, 7, 9)
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


def test_a_killed_writer_goes_on_with_the_parts_that_are_missing(tmp_path):
    made = []

    def dies(part):
        if part[0] == 6:
            yield {"x": "half a part"}
            raise KeyboardInterrupt
        made.append(list(part))
        yield from squares(part)

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "out.jsonl", dies)
    assert made == [[0, 1, 2], [3, 4, 5]]
    assert not (tmp_path / "out.jsonl").exists()
    seen = []

    def goes_on(part):
        seen.append(list(part))
        return squares(part)

    assert write(tmp_path / "out.jsonl", goes_on) == 5
    assert seen == [[6, 7, 8], [9]]
    assert [row["x"] for _, row in read_jsonl(tmp_path / "out.jsonl")] == [1, 3, 5, 7, 9]


def test_parts_of_another_call_are_refused_by_what_differs(tmp_path):
    def dies(part):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "out.jsonl", dies)
    with pytest.raises(ValueError, match=r"out.jsonl.parts holds the parts of another call \(seed was 1, is 2\)"):
        write(tmp_path / "out.jsonl", record={"seed": 2})
    with pytest.raises(ValueError, match="part_size was 3, is 4"):
        write(tmp_path / "out.jsonl", part_size=4)


def test_a_file_that_is_there_is_never_replaced(tmp_path):
    (tmp_path / "out.jsonl").write_text(json.dumps({"years": "of work"}))
    with pytest.raises(FileExistsError, match="is there already: choose another"):
        write(tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_text() == '{"years": "of work"}'
