"""Output files: plain ones are replaced as a whole, all else is written to, and nothing becomes what it was not."""

import ast
import contextlib
import errno
import os
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from repository import ROOT

from ncz_plugins.core import whole_files
from ncz_plugins.core.whole_files import open_to_append, replacing, require_writable, write_whole

LARGE = bytes(range(256)) * 2048  # more than a pipe holds


@contextlib.contextmanager
def read_all(fifo: Path):
    """Read a FIFO to its end meanwhile; yields what holds the bytes then."""
    got = []
    reader = threading.Thread(target=lambda: got.append(fifo.read_bytes()), daemon=True)
    reader.start()
    yield got
    reader.join(30)


# Modules that write files themselves: this one, what only this user's cache holds, and temporary files.
WRITERS = {"core/whole_files.py", "kernels/cache.py", "cli/perf/launch.py"}
PACKAGE = ROOT / "ncz_plugins"


def writes(call: ast.Call) -> bool:
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    mode = next((each.value for each in call.args[:2] if isinstance(each, ast.Constant)), "")
    return name in ("write_text", "write_bytes", "save_file", "tofile") or (
        name == "open" and bool({*str(mode)} & {*"wax+"})
    )


def test_nothing_else_writes_files():
    found = [
        f"{file.relative_to(PACKAGE)}:{node.lineno}"
        for file in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Call) and writes(node)
    ]
    assert {each.partition(":")[0] for each in found} <= WRITERS, found
    assert found  # the package itself must write somewhere


# ------------------------------------------------------------------ plain files


def test_a_disk_that_fails_while_a_file_is_written_is_told(tmp_path, monkeypatch):
    """The system tells it once, to the thread that brings what was written to the disk."""
    file, fsync, calls = tmp_path / "f", os.fsync, []
    write_whole(file, b"old")

    def fails_once(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fails_once)
    monkeypatch.setattr(whole_files, "_SYNC_BYTES", len(LARGE))
    with pytest.raises(OSError, match="Input/output error"):
        write_whole(file, [LARGE] * 3)
    assert file.read_bytes() == b"old" and os.listdir(tmp_path) == ["f"]
    write_whole(file, [LARGE] * 3)
    assert file.read_bytes() == LARGE * 3


def test_a_new_file_has_the_mode_of_the_umask_and_an_old_one_keeps_its_own(tmp_path):
    file = tmp_path / "f"
    before = os.umask(0o027)
    try:
        write_whole(file, b"one")
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    for mode in (0o600, 0o755, 0o666):
        file.chmod(mode)
        write_whole(file, "zwölf")
        assert stat.S_IMODE(file.stat().st_mode) == mode and file.read_text("utf-8") == "zwölf"
    assert os.listdir(tmp_path) == ["f"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_an_old_file_keeps_its_owner(tmp_path):
    file = tmp_path / "f"
    file.touch(0o600)
    os.chown(file, 1234, 2345)
    write_whole(file, b"data")
    found = file.stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (1234, 2345, 0o600)


def test_a_reader_keeps_the_old_file_which_is_replaced(tmp_path):
    file = tmp_path / "f"
    file.write_bytes(b"old")
    with open(file, "rb") as reader:
        write_whole(file, b"new")
        assert reader.read() == b"old" and file.read_bytes() == b"new"


def test_links_are_followed_and_stay(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "first").symlink_to("second")
    (tmp_path / "second").symlink_to("there/file")  # which is not there
    for data in (b"made", b"replaced"):
        write_whole(tmp_path / "first", data)
        assert (tmp_path / "there" / "file").read_bytes() == data
    assert os.readlink(tmp_path / "first") == "second" and os.readlink(tmp_path / "second") == "there/file"
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="symbolic links"):
        write_whole(tmp_path / "loop", b"")


@pytest.mark.parametrize("name", ["", "folder", "folder/", "none/", "link"])
def test_a_folder_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("link").symlink_to("folder")
    for refuse in (require_writable, lambda name: write_whole(name, b"")):
        with pytest.raises(IsADirectoryError, match="is a folder: name a file in it"):
            refuse(name)


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path):
    file, linked = tmp_path / "f", tmp_path / "link"
    file.write_bytes(b"old")
    linked.symlink_to("f")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 * len(LARGE), limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_whole(linked, 10 * LARGE)
        with pytest.raises(OSError, match="File too large"):
            write_whole(tmp_path / "new", 10 * LARGE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file.read_bytes() == b"old" and sorted(os.listdir(tmp_path)) == ["f", "link"]


def test_what_is_interrupted_leaves_the_old_file_and_nothing_else(tmp_path):
    (tmp_path / "f").write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "f") as file:
        file.write(b"new")
        raise KeyboardInterrupt
    assert (tmp_path / "f").read_bytes() == b"old" and os.listdir(tmp_path) == ["f"]


IN_A_NAMESPACE = """
import os, sys
from ncz_plugins.core.whole_files import write_whole

os.chdir(sys.argv[1])
write_whole("mounted", b"short")
assert open("mounted", "rb").read() == open("disk/f", "rb").read() == b"short"
for file in ("mounted", "disk/new", "disk/f"):
    try:
        write_whole(file, bytes(1 << 20))
    except OSError as error:
        assert error.strerror == "No space left on device", error
    else:
        raise AssertionError(file)
assert open("mounted", "rb").read() == open("disk/f", "rb").read() == b"short"
assert os.listdir("disk") == ["f"]
"""


@pytest.mark.processes
def test_a_full_disk_and_a_file_that_is_a_mount_point(tmp_path):
    """A mount point can't be replaced: it is overwritten, and a full disk leaves it as it was, too."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "mounted").touch()
    mounts = (
        "mount -t tmpfs -o size=64k none disk && printf 'what was there before' > disk/f && mount --bind disk/f mounted"
    )
    in_namespace = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    if subprocess.run([*in_namespace, mounts], cwd=tmp_path, capture_output=True).returncode:
        pytest.skip("this user can't mount file systems")
    python = [sys.executable, "-c", IN_A_NAMESPACE, str(tmp_path)]
    script = f'{mounts} && cd "$OLDPWD" && exec "$@"'
    done = subprocess.run(
        [*in_namespace, f'cd "{tmp_path}" && {script}', "sh", *python], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_a_file_of_somebody_else_is_overwritten_and_a_protected_one_refused():
    """Although its folder would allow to replace it."""
    code = (
        "import os, sys\n"
        "from ncz_plugins.core.whole_files import require_writable, write_whole\n"
        "os.chdir(sys.argv[1])\n"
        "if os.getuid() == 0:\n"
        "    os.chown('shared', 1, 1); os.setresgid(2, 2, 2); os.setresuid(2, 2, 2)\n"
        "write_whole('shared', b'new')\n"
        "for action in (lambda: write_whole('protected', b'new'), lambda: require_writable('protected')):\n"
        "    try: action()\n"
        "    except PermissionError: continue\n"
        "    raise AssertionError\n"
    )
    folder = tempfile.mkdtemp(dir="/tmp")  # pytest's own folders are closed to others
    try:
        os.chmod(folder, 0o777)
        for name, mode in (("shared", 0o666), ("protected", 0o444)):
            Path(folder, name).write_text("old")
            Path(folder, name).chmod(mode)
        done = subprocess.run([sys.executable, "-c", code, folder], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        shared = Path(folder, "shared")
        assert shared.read_text() == "new" and Path(folder, "protected").read_text() == "old"
        assert stat.S_IMODE(shared.stat().st_mode) == 0o666
        assert shared.stat().st_uid == (1 if os.getuid() == 0 else os.getuid())
    finally:
        shutil.rmtree(folder)


# ------------------------------------------------------------------ what is no plain file


def test_the_reader_of_a_fifo_gets_everything_and_the_fifo_stays(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("fifo")
    for name in ("fifo", "link"):
        with read_all(tmp_path / "fifo") as got:
            write_whole(tmp_path / name, LARGE)
        assert got == [LARGE]
    assert stat.S_ISFIFO((tmp_path / "fifo").stat().st_mode) and (tmp_path / "link").is_symlink()


def test_a_device_stays_a_device(tmp_path):
    null = tmp_path / "null"
    try:
        os.mknod(null, 0o666 | stat.S_IFCHR, os.stat("/dev/null").st_rdev)
        null.write_bytes(b"")
    except OSError as error:
        pytest.skip(f"devices can't be made or opened here: {error}")
    write_whole(null, LARGE)
    require_writable(null)
    assert stat.S_ISCHR(null.stat().st_mode) and os.listdir(tmp_path) == ["null"]


def test_a_full_device_says_so(full_device):
    with pytest.raises(OSError, match="No space left on device"):
        write_whole(full_device, b"data")
    assert stat.S_ISCHR(os.stat(full_device).st_mode)


def test_a_descriptor_is_written_to_where_it_stands(tmp_path):
    """As the shell's > and >> leave it to several programs."""
    with open(tmp_path / "f", "wb", buffering=0) as file:
        file.write(b"before ")
        (tmp_path / "link").symlink_to(f"/dev/fd/{file.fileno()}")
        for name in (f"/dev/fd/{file.fileno()}", f"/proc/self/fd/{file.fileno()}", tmp_path / "link"):
            write_whole(name, b"data ")
        file.write(b"after")
    assert (tmp_path / "f").read_bytes() == b"before data data data after"
    with pytest.raises(OSError, match="Bad file descriptor"):
        write_whole("/dev/fd/987654", b"")


@pytest.mark.parametrize("name", ["-", "stdout", "/dev/fd/1"])
def test_standard_output(tmp_path, monkeypatch, capfd, name):
    monkeypatch.chdir(tmp_path)
    os.symlink("/proc/self/fd/1", "stdout")  # as /dev/stdout, which root could lose
    require_writable(name)
    write_whole(name, b"data")
    assert capfd.readouterr().out == "data" and os.listdir(tmp_path) == ["stdout"]


def test_without_a_standard_output_no_other_file_is_taken_for_it(monkeypatch):
    monkeypatch.setattr(sys, "__stdout__", None)  # as Python says that its caller has closed it
    with pytest.raises(OSError, match="standard output is closed"):
        write_whole("-", b"")


# ------------------------------------------------------------------ files that grow


def test_lines_are_appended_to_whatever_is_there(tmp_path):
    file, fifo = tmp_path / "f", tmp_path / "fifo"
    file.write_bytes(b"one\n")
    with open_to_append(file) as stream:
        stream.write(b"two\n")
    assert file.read_bytes() == b"one\ntwo\n"
    os.mkfifo(fifo)
    with pytest.raises(OSError, match="this FIFO has no reader: start its reader first"):
        open_to_append(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    with open(reader, "rb") as pipe, open_to_append(fifo) as stream:
        assert os.get_blocking(stream.fileno()) and not stream.readable()
        stream.write(b"three\n")
        stream.flush()
        assert pipe.read(6) == b"three\n"
