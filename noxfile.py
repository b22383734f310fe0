"""Tests in fresh environments, one for each pair of Python and torch below: `make versions`.

    make versions ARGS="-p 3.14"              environments with one Python
    make versions ARGS="-t torch-2.6.0"       environments with one torch
    make versions ARGS="-R -- -k ring"        a part of the tests, in the environments that are there; writes no table
    make installed                            the wheel that `make wheels` left in dist/, with the oldest and the newest
                                              Python and torch: `ncz info`, a call of two ranks, DeepSpeed
    make versions ARGS="-s deepspeed_master"  those of DeepSpeed alone, with its main branch, or with what the variable
                                              DEEPSPEED gives pip, such as a folder; writes no table

nox skips environments whose Python is not on the PATH. pyenv puts several there: PYENV_VERSION=3.11.7:3.13.0. A folder
with a newer Debian, made by debootstrap, has the newest: run the command inside.

Each environment that ran replaces its row in docs/reference/compatibility.md. It takes 1.5 GB in .cache/nox, or 6.5 GB
with torch for CUDA, and 15 minutes on two cores. Environment variables: TORCH_INDEX_URL and NCZ_CACHE, as for make.
"""

import os
import platform
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import nox
from nox.command import CommandFailed

ROOT = Path(__file__).parent
PAGE = ROOT / "docs" / "reference" / "compatibility.md"
CONSTRAINTS = (ROOT / "constraints.txt").read_text()
NEWEST = re.search(r"^torch==(\S+)$", CONSTRAINTS, re.MULTILINE)[1]
ENVIRONMENTS = [("3.11", "2.6.0"), ("3.11", "2.13.0"), ("3.11", NEWEST), ("3.14", NEWEST)]
OPTIONS = ["-q", "-n", "2", "--dist", "loadscope", "--no-loadscope-reorder"]
OPEN = ("torch", "nvidia-cuda-nvrtc")  # packages of constraints.txt whose versions differ between environments

# Columns of the table: what is installed for them, and which tests run. Each adds to what the columns before installed.
HOROVOD = "Horovod"
COLUMNS = {
    "Core": (
        ["-e.[dev,plot,tensorboard]"],
        ["tests/unit/core", "tests/unit/kernels", "tests/unit/torch", "tests/distributed/test_collectives.py"],
    ),
    "DDP": ([], ["tests/distributed/test_ddp.py"]),
    "FSDP2": ([], ["tests/distributed/test_fsdp.py"]),
    "Backend `ncz`": ([], ["tests/distributed/test_backend.py", "tests/distributed/test_torch_backend.py"]),
    "DeepSpeed": (["deepspeed"], ["tests/unit/deepspeed", "tests/integration/test_deepspeed_zero.py"]),
    HOROVOD: ([], ["tests/unit/horovod", "tests/integration/test_horovod_functions.py"]),
    "Lightning": (["lightning"], ["tests/distributed/test_fabric.py"]),
    "Transformers, Accelerate": (["transformers", "accelerate"], ["tests/integration/test_hugging_face.py"]),
    "torchft": (["torchft"], ["tests/distributed/test_torchft.py"]),
}

nox.options.envdir = ROOT / ".cache" / "nox"
nox.options.default_venv_backend = "venv"


@nox.session
@nox.parametrize("python,torch", [nox.param(*pair, tags=[f"torch-{pair[1]}"]) for pair in ENVIRONMENTS])
def tests(session: nox.Session, torch: str):
    constraints = install_torch(session, torch)
    cells = {column: run_column(session, column, constraints) for column in COLUMNS}
    if not session.posargs:
        write_row(session.python, torch, cells)
    if any("fail" in cell for cell in cells.values()):
        session.error(", ".join(f"{column}: {cell}" for column, cell in cells.items()))


@nox.session(default=False)
@nox.parametrize("python,torch", [ENVIRONMENTS[0], ENVIRONMENTS[-1]])
def installed(session: nox.Session, torch: str):
    """What is published works without a checkout: a wheel with its compiled library, in a folder with nothing else."""
    [wheel] = (ROOT / "dist").glob(f"ncz_plugins-*{platform.machine()}.whl")
    constraints = install_torch(session, torch)
    session.install("-c", str(constraints), f"{wheel}[deepspeed]")
    folder = Path(session.create_tmp())
    program = shutil.copy(ROOT / "tests" / "integration" / "installed.py", folder)
    shutil.copy(ROOT / "README.md", folder)  # whose lines for DeepSpeed the program trains with
    alone = {"PYTHONPATH": "", "PYTHONSAFEPATH": "1", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    session.chdir(folder)
    session.run("ncz", "info", env=alone)
    session.run("torchrun", "--nproc-per-node", "2", program, env=alone)


@nox.session(default=False)
def deepspeed_master(session: nox.Session):
    """What DeepSpeed has changed since its last release: the same tests, and those of its single features."""
    source = os.environ.get("DEEPSPEED", "git+https://github.com/deepspeedai/DeepSpeed@master")
    released = Path(session.create_tmp()) / "constraints.txt"
    released.write_text("\n".join(line for line in CONSTRAINTS.splitlines() if not line.startswith("deepspeed==")))
    session.install("-c", str(released), "-e.[dev,tensorboard]", "transformers")
    # DeepSpeed's setup.py imports torch, which pip hides from it otherwise.
    session.install("-c", str(released), "setuptools", "wheel", "py-cpuinfo", "ninja")
    session.install("-c", str(released), "--no-build-isolation", source, env={"DS_BUILD_OPS": "0"})
    _, paths = COLUMNS["DeepSpeed"]
    session.run("pytest", *OPTIONS, *paths, "tests/integration/test_deepspeed_features.py", *session.posargs)


def install_torch(session: nox.Session, torch: str) -> Path:
    """Install this torch. Returns constraints of its environment: those that are tested together, but for torch."""
    constraints = Path(session.create_tmp()) / "constraints.txt"
    fixed = [line for line in CONSTRAINTS.splitlines() if line.partition("==")[0] not in OPEN]
    constraints.write_text("\n".join([*fixed, f"torch=={torch}"]))
    index = os.environ.get("TORCH_INDEX_URL")
    session.install(f"torch=={torch}", *(["--index-url", index] if index else []))
    return constraints


def run_column(session: nox.Session, column: str, constraints: Path) -> str:
    """Install what the column needs and run its tests. Returns the cell of the table."""
    packages, paths = COLUMNS[column]
    try:
        if packages:
            session.install("-c", str(constraints), *packages)
        if column == HOROVOD:
            session.run("python", "tools/horovod_wheel.py")
    except CommandFailed:
        return "can't be installed"
    report = constraints.with_name("report.xml")
    # 1: some tests fail, 5: all were skipped. 2 to 4, for example an error in an import, ends the environment.
    session.run("pytest", *OPTIONS, f"--junitxml={report}", *paths, *session.posargs, success_codes=[0, 1, 5])
    return cell_of(report)


def cell_of(report: Path) -> str:
    """How many tests passed, out of pytest's report in JUnit's format."""
    suite = ElementTree.parse(report).getroot().find("testsuite")
    count = {name: int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped")}
    ran, failed = count["tests"] - count["skipped"], count["failures"] + count["errors"]
    if failed:
        return f"{failed} of {ran} fail"
    return f"{ran} pass" if ran else "skipped"


def write_row(python: str, torch: str, cells: dict[str, str]):
    """Replace the row of an environment, and drop rows of environments that are no longer in the list."""
    before, header, *rest = re.split(r"(?m)^(\| Python .*\n\|[-|]*\n)", PAGE.read_text())
    table, after = re.fullmatch(r"((?:\|[^\n]*\n)*)(.*)", rest[0], re.DOTALL).groups()
    rows = dict(re.findall(r"(?m)^(\| \S+ \| \S+ \|)(.*\n)", table))
    rows[f"| {python} | {torch} |"] = f" {' | '.join(cells.values())} |\n"
    names = [f"| {python} | {torch} |" for python, torch in ENVIRONMENTS]
    header = f"| Python | torch | {' | '.join(cells)} |\n|{'---|' * (len(cells) + 2)}\n"
    PAGE.write_text(before + header + "".join(name + rows[name] for name in names if name in rows) + after)
