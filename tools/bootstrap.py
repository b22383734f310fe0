"""Make .venv with what the project needs, unless that has been done already.

    python tools/bootstrap.py [demo | tools | all]

A profile says how much is installed: `demo` what `make demo` runs, `tools` all but Horovod, which takes longest as it
is compiled, and `all` (the default) that too. Each includes the ones before it.

Called by the Makefile with any Python 3.11 to 3.14; uses the standard library only. Environment: TORCH_INDEX_URL (a
package index for torch alone), what horovod_wheel.py reads, and pip's own variables.
"""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections import deque
from pathlib import Path

import horovod_wheel

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOG = ROOT / ".cache" / "setup.log"
KERNELS = ROOT / "ncz_plugins" / "kernels"
NATIVE = KERNELS / "cpu"  # where the native library is built
# The extras of setup.cfg that each profile installs, from the smallest profile to the largest.
PROFILES = {
    "demo": "deepspeed,plot",
    "tools": "deepspeed,dev,plot,tensorboard,compare,peers,cuda,docs",
    "all": "deepspeed,dev,plot,tensorboard,compare,peers,cuda,docs,frameworks",  # and Horovod, by horovod_wheel.py
}
TITLES = {
    "demo": "install DeepSpeed, build ncz_plugins",
    "tools": "install DeepSpeed and tools, build ncz_plugins",
    "all": "install DeepSpeed, tools and Horovod (compiled the first time: 2 to 5 minutes), build ncz_plugins",
}
LOG_TAIL = 25  # lines shown when a stage fails

# What a failed stage's output says, and what to do about it.
REMEDIES = (
    (("ensurepip", "No module named venv"), "Python's venv module is missing: apt-get install python3-venv"),
    (("No space left on device",), "The disk is full; torch and DeepSpeed need about 1.5 GB (without CUDA)."),
    (
        ("NewConnectionError", "Temporary failure in name resolution", "Read timed out", "ProxyError", "SSLError"),
        "The package index cannot be reached. Check the network, or set PIP_INDEX_URL, PIP_PROXY or PIP_CERT.",
    ),
    (("No matching distribution found",), "The package index lacks a version that constraints.txt asks for."),
    *horovod_wheel.REMEDIES,
)


class SetupError(Exception):
    """Set-up cannot go on; the message says why and what to do."""


def fingerprint() -> str:
    """A hash of all that decides what .venv contains; the place counts, as an environment cannot be moved."""
    inputs = [ROOT / name for name in ("constraints.txt", "setup.cfg", "setup.py", "pyproject.toml")]
    inputs.append(Path(horovod_wheel.__file__))
    folders = (NATIVE, KERNELS / "common")
    inputs += sorted(path for folder in folders for path in folder.iterdir() if path.suffix in {".cpp", ".h"})
    digest = hashlib.sha256(f"{sys.version} {ROOT} {PROFILES}".encode())
    for path in inputs:
        if path.exists():
            digest.update(f"\n{path.name}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def stamp(profile: str) -> Path:
    """The file that holds the fingerprint with which `profile` was installed last."""
    return VENV / f"setup-stamp-{profile}"


def is_ready(profile: str) -> bool:
    return stamp(profile).exists() and stamp(profile).read_text() == fingerprint()


def mark_ready(profile: str):
    """Remember that `profile` is installed, and with it the smaller ones."""
    names = list(PROFILES)
    for name in names[: names.index(profile) + 1]:
        stamp(name).write_text(fingerprint())


def check_machine():
    """Refuse early, and with the remedy, what would fail late."""
    if not (3, 11) <= sys.version_info[:2] <= (3, 14):
        version = ".".join(map(str, sys.version_info[:3]))
        raise SetupError(f"{sys.executable} is Python {version}; needed is 3.11 to 3.14: make PYTHON=python3.12 ...")
    lacks = horovod_wheel.missing(Path(sysconfig.get_path("include")))
    if lacks:
        raise SetupError("\n".join(lacks))


class Command:
    """A command under way, whose output goes to LOG.

    Attributes:
        said: its last lines.
    """

    def __init__(self, words: list):
        words = [str(word) for word in words]
        self.said = deque(maxlen=LOG_TAIL)
        self._log = open(LOG, "a", buffering=1)
        self._log.write(f"\n$ {' '.join(words)}\n")
        self.process = subprocess.Popen(
            words,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # so that an interrupt ends the compilers that it started, too
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def ends_within(self, seconds: float) -> bool:
        self._reader.join(seconds)
        return not self._reader.is_alive()

    def kill(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self._reader.join()
        self.process.wait()

    def _read(self):
        with self._log as log:
            for line in self.process.stdout:
                log.write(line)
                self.said.append(line.rstrip())


class Stages:
    """Runs the commands one after another, showing a numbered line with the time for each.

    On a terminal the line is live (a spinner and what pip is doing); elsewhere a line is printed at the start and at
    the end. All output goes to LOG.
    """

    def __init__(self, count: int):
        self.count = count
        self.number = 0
        self.live = sys.stdout.isatty()
        LOG.parent.mkdir(exist_ok=True)
        LOG.write_text("")

    def run(self, title: str, *commands: list, meanwhile: list | None = None):
        """One stage.

        Args:
            meanwhile: a command that runs beside the others. If it fails, they come to their end first.
        """
        self.number += 1
        label = f"[{self.number}/{self.count}] {title}"
        started = time.monotonic()
        if not self.live:
            print(f"{label} ...", flush=True)
        beside = Command(meanwhile) if meanwhile else None
        try:
            for command in commands:
                self._finish(Command(command), label, started)
            if beside:
                self._finish(beside, label, started)
        except BaseException:
            if beside:
                beside.kill()
            raise
        self._line(f"{label}: {time.monotonic() - started:.1f} s", end="\n")

    def _finish(self, command: Command, label: str, started: float):
        try:
            while not command.ends_within(0.1):
                if self.live:
                    elapsed = time.monotonic() - started
                    spinner = "|/-\\"[int(elapsed * 8) % 4]
                    last = command.said[-1].strip() if command.said else ""
                    self._line(f"{spinner} {label} {elapsed:4.0f} s  {last}")
        except BaseException:
            command.kill()
            raise
        if command.process.wait():
            self._line(f"{label}: failed", end="\n")
            print("\n".join(f"    {line}" for line in command.said))
            raise SetupError(f"{remedy(LOG.read_text())}\nThe whole output is in {LOG}")

    def _line(self, text: str, end: str = ""):
        if self.live:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\033[K{text[:width]}", end=end, flush=True)
        else:
            print(text, flush=True)


def remedy(output: str) -> str:
    for signs, advice in REMEDIES:
        if any(sign in output for sign in signs):
            return advice
    return "The reason is in the lines above."


def same_python() -> bool:
    """Whether .venv exists and was made by this version of Python."""
    try:
        made_by = subprocess.run([PYTHON, "-c", "import sys; print(sys.version)"], capture_output=True, text=True)
    except FileNotFoundError:
        return False
    return made_by.stdout.strip() == sys.version


def install(stages: Stages, profile: str):
    pip_install = [PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "-c", "constraints.txt"]
    pip_install.append("--no-compile")  # Python compiles what it imports, of 24,000 files one in eight
    torch_index = os.environ.get("TORCH_INDEX_URL")

    for name in PROFILES:
        stamp(name).unlink(missing_ok=True)
    if same_python():
        stages.run("use the environment in .venv", [PYTHON, "--version"])
    else:
        stages.run("make an environment in .venv", [sys.executable, "-m", "venv", "--clear", VENV])
    # First and alone, from its own index if one is given, so that nothing else chooses the build of torch.
    torch = [*pip_install, *(["--index-url", torch_index] if torch_index else []), "torch"]
    needs = horovod_wheel.NEEDS if profile == "all" else ["setuptools"]
    stages.run("install PyTorch", torch, [*pip_install, *needs])
    # Built in isolation, where it does not see torch and so does not ask for a CUDA compiler on a machine with a GPU.
    deepspeed = [*pip_install, "--use-pep517", "deepspeed"]
    # Not in isolation, so that building again after a change needs no network.
    for library in NATIVE.glob("*.so"):
        library.unlink()
    build = [*pip_install, "--verbose", "--no-build-isolation", "--editable", f".[{PROFILES[profile]}]"]
    # Compiles what is large, once, before several processes import it at the same time.
    first_import = [PYTHON, "-c", "import torch._dynamo, deepspeed"]
    # At the same time: one compiles while the others wait for the network. What both need is there already.
    horovod = [PYTHON, ROOT / "tools" / "horovod_wheel.py"] if profile == "all" else None
    stages.run(TITLES[profile], deepspeed, build, first_import, meanwhile=horovod)
    if not any(NATIVE.glob("*.so")):
        raise SetupError(f"The native library did not compile; the compiler's messages are in {LOG}")


def main(profile: str = "all") -> int:
    if profile not in PROFILES:
        print(f"Set-up failed. {profile!r} is not a profile; there are {', '.join(PROFILES)}", file=sys.stderr)
        return 2
    if is_ready(profile):
        return 0
    for cause in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(cause, signal.default_int_handler)
    try:
        check_machine()
        install(Stages(3), profile)
    except SetupError as error:
        print(f"Set-up failed. {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nSet-up interrupted; the next make takes it up again.", file=sys.stderr)
        return 130
    mark_ready(profile)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
