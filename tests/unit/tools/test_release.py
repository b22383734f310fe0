"""All places that name the version agree, and a tag that does not fit is refused."""

import pytest
from repository import ROOT


@pytest.fixture
def release(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    monkeypatch.delenv("GITHUB_REF", raising=False)
    monkeypatch.setattr("sys.argv", ["release.py"])
    import release

    return release


@pytest.fixture
def folder(tmp_path):
    """A package of which 1.2.3 is to be released."""
    (tmp_path / "ncz_plugins").mkdir()
    (tmp_path / "ncz_plugins" / "version.py").write_text('__version__ = "1.2.3"\n')
    (tmp_path / "CITATION.cff").write_text("cff-version: 1.2.0\nversion: 1.2.3\n")
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.3 - 2026-12-24\n\n- New\n\n## 1.2.2 - 2026-12-01\n")
    return tmp_path


def test_this_version_is_the_same_everywhere(release, capsys):
    assert release.main() == 0, capsys.readouterr().err


def test_a_release_of_which_all_agrees(release, folder, monkeypatch, capsys):
    monkeypatch.setenv("GITHUB_REF", "refs/tags/v1.2.3")
    assert release.main(folder) == 0
    assert capsys.readouterr().out == "1.2.3: all places agree, and so does the tag v1.2.3\n"


@pytest.mark.parametrize(
    "file,before,after,said",
    [
        ("ncz_plugins/version.py", "1.2.3", "1.2.4", "newest version is 1.2.3, ncz_plugins/version.py has 1.2.4"),
        ("CITATION.cff", "version: 1.2.3", "version: 1.2.2", "CITATION.cff has version 1.2.2"),
        ("CITATION.cff", "\nversion: 1.2.3", "", "CITATION.cff has version None"),
        ("CHANGELOG.md", "## 1.2.3 - 2026-12-24\n", "", "CHANGELOG.md's newest version is 1.2.2"),
    ],
)
def test_a_place_that_differs_is_named(release, folder, capsys, file, before, after, said):
    assert release.main(folder) == 0
    text = (folder / file).read_text()
    (folder / file).write_text(text.replace(before, after))
    assert release.main(folder) == release.FAILED
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "tag,heading,said",
    [
        ("v1.2.4", "1.2.3 - 2026-12-24", "the tag is v1.2.4"),
        ("1.2.3", "1.2.3 - 2026-12-24", "the tag is 1.2.3"),
        ("v1.2.3", "1.2.3", "CHANGELOG.md begins with '1.2.3'"),
        ("v1.2.3", "Unreleased\n\n## 1.2.3 - 2026-12-24", "CHANGELOG.md begins with 'Unreleased'"),
    ],
)
def test_a_tag_that_does_not_fit_is_refused(release, folder, monkeypatch, capsys, tag, heading, said):
    changelog = folder / "CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace("1.2.3 - 2026-12-24", heading))
    monkeypatch.setenv("GITHUB_REF", "refs/heads/main")
    assert release.main(folder) == 0  # a branch
    monkeypatch.setattr("sys.argv", ["release.py", "--tag", tag])
    assert release.main(folder) == release.FAILED
    assert said in capsys.readouterr().err
