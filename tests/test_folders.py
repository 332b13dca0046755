"""A host uses only those of the notebook's folders in which nobody else could have put a file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nbddp import folders


def test_a_folder_is_refused_if_another_user_could_have_put_files_into_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    above = tmp_path / "above"
    mine = above / "mine"
    mine.mkdir(parents=True)
    link = tmp_path / "link"
    link.symlink_to(mine)
    assert folders.refusal(str(mine), "") == folders.refusal(str(link), "") == ""
    assert folders.refusal(str(mine / "none"), "") == "does not exist"
    for path in (mine, above):
        path.chmod(0o777)
        assert folders.refusal(str(mine), "") == f"is not safe: other users may write to {path}"
        assert folders.refusal(str(link), "") == f"is not safe: other users may write to {path}"
        assert folders.refusal(str(mine), folders.identity(str(mine))) == ""  # it is the notebook's own folder
        path.chmod(0o755)
    above.chmod(0o1777)  # as /tmp: there, nobody can replace what is ours
    assert folders.refusal(str(mine), "") == ""
    above.chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    monkeypatch.setattr(folders, "_user", lambda uid: "bob")
    refused = folders.refusal(str(mine), "")
    assert refused == (f"is not safe: {mine} belongs to bob" if os.getuid() else "")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")
def test_a_folder_of_another_user_and_a_groups_folder_are_refused(tmp_path: Path) -> None:
    mine, of_a_group = tmp_path / "mine", tmp_path / "of-a-group"
    for folder in (mine, of_a_group):
        folder.mkdir()
    os.chown(mine, 54321, 0)
    assert folders.refusal(str(mine), "") == f"is not safe: {mine} belongs to user 54321"
    os.chown(of_a_group, 0, 54321)
    of_a_group.chmod(0o770)
    assert folders.refusal(str(of_a_group), "") == f"is not safe: other users may write to {of_a_group}"
    os.chown(of_a_group, 0, 0)
    assert folders.refusal(str(of_a_group), "") == ""


def test_a_folders_identity_changes_with_its_content(tmp_path: Path) -> None:
    before = folders.identity(str(tmp_path))
    assert before == folders.identity(str(tmp_path)) != ""
    (tmp_path / "new").touch()
    assert folders.identity(str(tmp_path)) != before
    assert folders.identity(str(tmp_path / "none")) == ""
