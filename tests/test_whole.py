"""Files and folders are written whole or not at all."""

import errno

import pytest

from st_sparse_rescale.whole import written_whole


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_takes_the_place_of_the_old_one(tmp_path):
    (tmp_path / "a.txt").write_text("old")
    with written_whole(tmp_path / "a.txt") as file:
        file.write_text("new")
        assert (tmp_path / "a.txt").read_text() == "old"
    assert (tmp_path / "a.txt").read_text() == "new"
    assert names(tmp_path) == ["a.txt"]


def test_a_folder_takes_the_place_of_the_old_one_and_leaves_nothing_of_it(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "stale").touch()
    with written_whole(tmp_path / "a") as folder:
        folder.mkdir()
        (folder / "fresh").touch()
        assert names(tmp_path / "a") == ["stale"]
    assert names(tmp_path / "a") == ["fresh"]
    assert names(tmp_path) == ["a"]


def test_a_full_disk_is_named_and_relieved(tmp_path):
    def full():
        with written_whole(tmp_path / "a") as path:
            path.write_text("half")
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}/a'"):
        full()
    assert names(tmp_path) == []


@pytest.mark.parametrize("is_folder", [True, False])
def test_a_failed_writer_leaves_the_old_one_and_the_next_one_starts_clean(tmp_path, is_folder):
    def interrupted():
        with written_whole(tmp_path / "a") as path:
            path.mkdir() if is_folder else path.write_text("half")
            raise KeyboardInterrupt

    (tmp_path / "a").write_text("old")
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (tmp_path / "a").read_text() == "old"
    assert names(tmp_path) == ["a"]
    (tmp_path / "a.partial").write_text("left behind by a kill")
    with written_whole(tmp_path / "a") as path:
        assert not path.exists()
        path.write_text("new")
    assert names(tmp_path) == ["a"]
