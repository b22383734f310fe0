"""Install Horovod into the environment of the Python that runs this, compiling it if that was not done before.

PyPI has Horovod as source only, and compiling it takes minutes, so the wheel is kept in the user's cache
(NCZ_CACHE, by default ~/.cache/ncz_plugins), where other clones of the project find it too. The folder's name says for
what the wheel was built, since the wheel's own name does not.

The build is for CPU tensors over Gloo: no MPI, no NCCL. Environment: NCZ_CACHE, CXX, MAKEFLAGS (only its -jN).
"""

import fcntl
import hashlib
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
# What the build imports, what the wheel asks for, and numpy, which it needs and does not ask for.
NEEDS = ["setuptools", "packaging", "PyYAML", "psutil", "cloudpickle", "cffi", "numpy"]
CMAKE = "cmake>=3.13,<4"  # from PyPI, where the machine has none
MAX_JOBS = 8  # as in Horovod's setup.py; one takes 2 GB of memory, the others less
# Horovod's CMake files put -std=c++14 last on the line, where CXXFLAGS cannot overrule it. torch needs a newer one.
# Horovod and its Gloo lack #include <cstdint> and <string>; headers of g++ 13 and newer no longer include both.
# g++ 15 and newer reject a template of Horovod's flatbuffers that is never used: template-body. Others ignore it.
COMPILER = """#!/bin/sh
exec {compiler} -include cstdint -include string "$@" -std=c++{standard} -g0 -Wno-template-body
"""
# Eight sources to a unit, so that headers, torch's above all, are read fewer times. CMake before 3.16 takes each alone.
# One of Gloo's files would not go with the others.
UNITS = {
    "CMakeLists.txt": ("project(horovod CXX)", "set(CMAKE_UNITY_BUILD ON)"),
    "third_party/gloo/gloo/CMakeLists.txt": (
        "set(GLOO_HDRS)",
        "set_source_files_properties(allreduce_local.cc PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)",
    ),
}
# They take the folder's name for a regular expression, so a + in it puts the library into the wrong place.
UNUSABLE = r"[^\w./-]"

# What the output of a failed build says, and what to do about it; what can be seen beforehand is in `missing`.
REMEDIES = (
    (
        ("Killed signal terminated program", "internal compiler error: Killed"),
        "The machine ran out of memory while compiling Horovod. Compile one file at a time: MAKEFLAGS=-j1 make setup",
    ),
    (
        ("cannot import name 'mpi_lib_v2'", "HorovodVersionMismatchError", "undefined symbol"),
        "The Horovod wheel does not load with this PyTorch: remove its folder, which is named above.",
    ),
)


def compiler() -> str:
    """The command that compiles C++, with its arguments if CXX has some."""
    return os.environ.get("CXX") or "g++"


def arch_flags(machine: str) -> str:
    """The instruction sets that Horovod's fp16 sums use; its own default would be these on every architecture."""
    return "-mf16c -mavx -mfma" if machine.lower() in ("x86_64", "amd64") else ""


def jobs(makeflags: str, cpus: int) -> int:
    """How many files to compile at once: N of -jN in MAKEFLAGS, else one per CPU up to MAX_JOBS."""
    asked = re.search(r"-j ?(\d+)", makeflags)
    return int(asked[1]) if asked else min(cpus, MAX_JOBS)


def pinned_version(constraints: str) -> str:
    return re.search(r"^horovod==(\S+)$", constraints, re.MULTILINE)[1]


def cxx_standard(torch: str) -> int:
    """The C++ standard that the headers of this version of torch need: 17 or 20."""
    major, minor = map(int, torch.split(".")[:2])
    return 20 if (major, minor) >= (2, 14) else 17


def key(horovod: str, torch: str, python: str, machine: str, compiler_version: str) -> str:
    """The folder's name: the parts a person looks for, and a hash of all that decides what the wheel contains."""
    standard = f"cxx{cxx_standard(torch)}"
    everything = [horovod, torch, python, machine, arch_flags(machine), compiler_version, COMPILER, standard]
    digest = hashlib.sha256("\n".join(everything).encode()).hexdigest()
    return re.sub(UNUSABLE, "_", f"{horovod}-torch{torch}-{standard}-{python}-{machine}-{digest[:12]}")


def cache_folder() -> Path:
    """Where the wheel for this Python, PyTorch, compiler and machine is, or will be."""
    version = subprocess.run([*shlex.split(compiler()), "--version"], capture_output=True, text=True, check=True)
    cache = Path(os.path.expandvars(os.environ.get("NCZ_CACHE") or "~/.cache/ncz_plugins")).expanduser()
    return (cache / "horovod").resolve() / key(
        pinned_version(CONSTRAINTS.read_text()),
        metadata.version("torch"),
        sys.implementation.cache_tag,
        platform.machine(),
        version.stdout.partition("\n")[0],
    )


def missing(headers: Path) -> list[str]:
    """What the build needs and this machine lacks, each with how to get it; the headers are Python's."""
    lacks = []
    program = shlex.split(compiler())[0]
    if not shutil.which(program):
        lacks.append(f"There is no {program}, which compiles the native library and Horovod: apt-get install g++")
    if not shutil.which("make"):
        lacks.append("There is no make, which Horovod's build runs: apt-get install make")
    if not (headers / "Python.h").exists():
        version = ".".join(map(str, sys.version_info[:2]))
        lacks.append(f"There is no Python.h in {headers}, which Horovod includes: apt-get install python{version}-dev")
    return lacks


def cmake() -> str:
    """The machine's CMake, or else one from PyPI, put beside this Python."""
    found = shutil.which("cmake")
    if found:
        output = subprocess.run([found, "--version"], capture_output=True, text=True).stdout
        version = re.search(r"version (\d+)\.(\d+)", output)
        if version and (int(version[1]), int(version[2])) >= (3, 13):
            return found
    run([*PIP, "install", CMAKE])
    return str(Path(sysconfig.get_path("scripts")) / "cmake")


def run(command: list, **options):
    print("$", shlex.join(map(str, command)), flush=True)
    subprocess.run(command, check=True, **options)


def build(folder: Path):
    """Compile the wheel and put it into the folder. What an interrupted build leaves behind, the next one removes."""
    work = folder / "build"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    wrapper = work / "c++"
    wrapper.write_text(COMPILER.format(compiler=compiler(), standard=cxx_standard(metadata.version("torch"))))
    wrapper.chmod(0o755)
    environment = {
        **os.environ,
        "TMPDIR": str(work),
        "CXX": str(wrapper),
        "MAKEFLAGS": f"-j{jobs(os.environ.get('MAKEFLAGS', ''), os.cpu_count() or 1)}",
        "HOROVOD_CMAKE": cmake(),
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # Gloo's files ask for less than CMake 4 accepts
        "HOROVOD_BUILD_ARCH_FLAGS": arch_flags(platform.machine()),
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITHOUT_MPI": "1",
    }
    version = pinned_version(CONSTRAINTS.read_text())
    # Not in isolation, as it must see the torch that it will run with.
    options = ["--no-cache-dir", "--no-deps", "--no-build-isolation"]
    run([*PIP, "download", *options, "--no-binary", "horovod", "--dest", work, f"horovod=={version}"])
    source = work / f"horovod-{version}"
    shutil.unpack_archive(f"{source}.tar.gz", work)
    # Where torch is a CUDA build and nvcc is installed, Horovod would compile for the GPU, and its kernels are too old
    # for today's nvcc.
    find_torch = source / "cmake" / "Modules" / "FindPytorch.cmake"
    find_torch.write_text(re.sub("(CUDA|ROCM)_HOME is not None", "False", find_torch.read_text()))
    for name, (line, added) in UNITS.items():
        text = (source / name).read_text()
        (source / name).write_text(text.replace(line, f"{line}\n{added}"))
    run([*PIP, "wheel", "--verbose", *options, "--wheel-dir", work, source], env=environment)
    (wheel,) = work.glob("horovod-*.whl")
    install(wheel)  # so that only a wheel that works gets into the cache
    wheel.rename(folder / wheel.name)  # within one file system, so it appears whole or not at all
    shutil.rmtree(work)


def make_private(folder: Path):
    """Make the folder, where nobody else may write: what is kept there will run."""
    for each in (*reversed(folder.parents), folder):
        if not each.exists():
            each.mkdir(mode=0o700, exist_ok=True)
    for each in (folder, *folder.parents[:2], *folder.glob("*.whl")):
        found = each.stat()
        anybody_can_write = found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX
        if anybody_can_write or found.st_uid not in (os.getuid(), 0):
            sys.exit(f"Others can write to {each}, and what is kept there runs: chmod go-w, or set NCZ_CACHE.")
    if folder.stat().st_mode & stat.S_IWGRP:  # made where groups are private; still, what is in it could be anybody's
        folder.chmod(0o755)
        for wheel in folder.glob("*.whl"):
            wheel.unlink()


def install(wheel: Path):
    # By force, since a wheel for another torch has the same version.
    run([*PIP, "install", "--force-reinstall", "--no-deps", wheel])
    run([sys.executable, "-c", "from horovod.torch import mpi_lib_v2"])  # horovod.torch alone imports even without it


def main():
    folder = cache_folder()
    print(f"Horovod's wheel is kept in {folder}", flush=True)
    if re.search(UNUSABLE, str(folder)):
        sys.exit(
            f"Horovod cannot be compiled in {folder}: besides letters and digits, only . - _ / may be in the name. "
            "Set NCZ_CACHE to another folder."
        )
    os.umask(os.umask(0) | 0o022)  # others may read what is built, not change it
    try:
        make_private(folder)
        lock = open(folder / "lock", "w")
    except OSError as error:
        sys.exit(f"Cannot write to the cache, {error}. Set NCZ_CACHE to a folder where you can.")
    run([*PIP, "install", "--constraint", CONSTRAINTS, *NEEDS])
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another clone may be building the same; then this one takes its wheel
        wheels = list(folder.glob("*.whl"))
        if wheels:
            install(wheels[0])
        else:
            build(folder)


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(str(error))
