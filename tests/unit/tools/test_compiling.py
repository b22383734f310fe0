"""What tests compile is kept for others, several of which may look for it at once."""

import os
import sys

import compiling


def test_files_that_go_while_they_are_looked_at_are_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(compiling, "kept", lambda: tmp_path)
    old = tmp_path / "old.o"
    old.touch()
    os.utime(old, (0, 0))
    (tmp_path / "0.unfinished").symlink_to(tmp_path / "gone")  # as if renamed since it was listed
    command = [sys.executable, "-c", "import sys; open(sys.argv[2], 'w').close()"]
    made = compiling.made(command, b"contents", ".o")
    assert made.is_file() and not old.exists()
