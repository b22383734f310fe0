"""Makes a folder with all that a machine with a GPU, torch and no network lacks for `make gpu`; and unpacks it there.

    make carry                                  here: carry/ in this checkout, for this version of Python
    make carry ARGS="--python 3.12 --cupy"      for another version, and for a machine that lacks CuPy (70 MB more)
    python3 benchmarks/gpu.py                   there, in a copy of the checkout with carry/: unpacks it by itself

Both machines have Linux and the same kind of processor. Needs the network and what `make setup` installed.

    carry/python      the version of Python
    carry/wheels      Python packages in the versions that are tested: all but torch, what torch brings along, Horovod
                      and, by default, CuPy
    carry/library     the native library
    carry/kernels     CUDA kernels, compiled for sm_90
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CARRIED = ROOT / "carry"
UNPACKED = ROOT / ".cache" / "carried"
NATIVE = ROOT / "ncz_plugins" / "kernels" / "cpu"
ARCH = "sm_90"
# What the stages of benchmarks/gpu.py run, and what comes with torch. typing-extensions does too, but maybe an old one.
ROOTS = ["ncz_plugins", "deepspeed", "hypothesis", "jsonschema", "pytest", "pytest-timeout", "pytest-xdist"]
OF_TORCH = ["torch", "cuda-pathfinder"]
NO_WHEEL = {"deepspeed"}  # PyPI has its sources only
GLIBC = range(17, 40)  # 2.17 to 2.39, in the platform tags of wheels


# ------------------------------------------------------------------ here


def pack(python: str, cupy: bool) -> None:
    """Make the folder."""
    subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=ROOT, check=True)
    shutil.rmtree(CARRIED, ignore_errors=True)
    for folder in ("wheels", "library", "kernels"):
        (CARRIED / folder).mkdir(parents=True)
    (CARRIED / "python").write_text(python)
    download(packages(cupy), python)
    for library in NATIVE.glob("*.so"):
        folder = CARRIED / "library" / sources_of_library()
        folder.mkdir(exist_ok=True)
        shutil.copy(library, folder)
    compile_kernels()
    size = sum(file.stat().st_size for file in CARRIED.rglob("*") if file.is_file())
    lacks = "torch" if cupy else "torch and CuPy"
    print(f"carry/ has {size / 1e6:.0f} MB for Python {python} with {lacks}")


def packages(cupy: bool) -> list[str]:
    """What is needed, as installed here: "name==version" of each."""
    of_torch = needs(OF_TORCH) - {"typing-extensions"}
    found = needs(ROOTS + ["cupy-cuda13x"] * cupy, of_torch) - {"ncz-plugins"}
    return [f"{name}=={metadata.version(name)}" for name in sorted(found)]


def needs(names: list[str], without: set[str] = frozenset()) -> set[str]:
    """Names of these distributions and of all that they need in turn."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    found: set[str] = set()
    to_do = [Requirement(name) for name in names]
    while to_do:
        wanted = to_do.pop()
        name = canonicalize_name(wanted.name)
        if name in without or name in found:
            continue
        found.add(name)
        for requirement in map(Requirement, metadata.requires(name) or []):
            extras = {"", *wanted.extras}
            if not requirement.marker or any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
                to_do.append(requirement)
    return found


def download(wanted: list[str], python: str) -> None:
    """Get packages as wheels for that Python."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    wheels = str(CARRIED / "wheels")
    # pip takes each tag by itself: a wheel for an older glibc is not found by the tag of a newer one.
    tags = [f"manylinux_2_{number}" for number in GLIBC] + ["manylinux2014", "manylinux2010", "manylinux1", "linux"]
    platforms = [f"--platform={tag}_{platform.machine()}" for tag in tags]
    built = [each for each in wanted if each.partition("==")[0] in NO_WHEEL]
    ready = [each for each in wanted if each not in built]
    that_python = ["--only-binary=:all:", "--python-version", python, *platforms]
    subprocess.run([*pip, "download", "--no-deps", *that_python, "--dest", wheels, *ready], check=True)
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", wheels, *built], check=True)


def sources_of_library() -> str:
    """Hash of the sources of the native library: one of other sources is not used."""
    files = sorted([*NATIVE.glob("*.cpp"), *NATIVE.glob("*.h"), *(NATIVE.parent / "common").glob("*.h")])
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def compile_kernels() -> None:
    """Compile the kernels of all element types to carry/kernels."""
    from ncz_plugins.kernels.cuda import nvrtc
    from ncz_plugins.kernels.format import DTYPES

    with ThreadPoolExecutor(len(DTYPES)) as pool:
        compiled = pool.map(lambda dtype: nvrtc.compile_kernels(dtype, ARCH)[0], DTYPES)
        for dtype, code in zip(DTYPES, compiled):
            file_of(dtype, ARCH).write_bytes(code)


def file_of(dtype, arch: str) -> Path:
    """Where the kernels of one element type are, if they were carried. Those of other sources have other names."""
    from ncz_plugins.kernels.cuda import nvrtc

    return CARRIED / "kernels" / f"{str(dtype).removeprefix('torch.')}-{arch}-{nvrtc.digest(dtype, arch)[:16]}.cubin"


# ------------------------------------------------------------------ there


def unpack() -> None:
    """Make what was carried importable, here and in processes that this one starts. Nothing, if nothing was carried.

    To be called before anything else is imported. Ends the process if carry/ is for another Python.
    """
    if not CARRIED.exists():
        return
    python, here = (CARRIED / "python").read_text(), ".".join(map(str, sys.version_info[:2]))
    if python != here:
        sys.exit(f'carry/ is for Python {python}, and this is {here}: make carry ARGS="--python {here}", or remove it')
    shutil.rmtree(UNPACKED, ignore_errors=True)
    # Wheels are archives of what is to be importable; so no pip is needed.
    for wheel in (CARRIED / "wheels").glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(UNPACKED / "packages")
    for library in (CARRIED / "library" / sources_of_library()).glob("*.so"):
        shutil.copy(library, NATIVE)
    sys.path.insert(0, str(UNPACKED / "packages"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [sys.path[0], os.environ.get("PYTHONPATH")]))
    # Not in carry/, whose files may belong to another user after a copy: those would not be used.
    os.environ["NCZ_CACHE"] = str(UNPACKED / "cache")


def prepare_kernels(arch: str | None = None) -> None:
    """Put carried kernels where the package looks for compiled ones, and compile those that were not carried.

    Args:
        arch: what for; None: the current device, which must also be able to load them.
    """
    import torch

    from ncz_plugins.kernels.cuda import nvrtc
    from ncz_plugins.kernels.format import DTYPES

    on_device = arch is None
    if on_device:
        torch.zeros(1, device="cuda")  # makes a context, for loading
        arch = nvrtc.architecture(*torch.cuda.get_device_capability())
    for file, dtype in ((file_of(dtype, arch), dtype) for dtype in DTYPES):
        problem = "not carried" if not file.exists() else cannot_be_loaded(file.read_bytes()) if on_device else None
        print(f"{file.name}: {problem + ', so compiled here' if problem else 'carried'}", flush=True)
        if not problem:
            nvrtc.keep(dtype, arch, file.read_bytes())
    nvrtc.compile_ahead(arch)


def cannot_be_loaded(code: bytes) -> str | None:
    """Why the driver refuses a cubin, as that of an older CUDA does."""
    from cupy.cuda import driver

    try:
        driver.moduleUnload(driver.moduleLoadData(code))
    except driver.CUDADriverError as error:
        return f"refused by the driver ({error})"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = ".".join(map(str, sys.version_info[:2]))
    parser.add_argument("--python", default=here, help="version of Python there (default: %(default)s)")
    parser.add_argument("--cupy", action="store_true", help="with CuPy, which the machine lacks")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))  # the kernels of this checkout
    pack(arguments.python, arguments.cupy)


if __name__ == "__main__":
    main()
