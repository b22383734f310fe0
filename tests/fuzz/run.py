"""Builds the fuzz targets with sanitizers and runs them side by side. docs/results/fuzzing.md says what they check.

    python tests/fuzz/run.py [--seconds 20] [--folder build/fuzz] [--compiler clang++] [--without-libfuzzer] [--json F]

With clang++ and its libFuzzer, that mutates, and keeps what reaches new code in FOLDER/corpus; else driver.cpp mutates.
--json writes how many inputs were tried and what was found; benchmarks/results/fuzz.json is such a file, with which the
table of docs/results/fuzzing.md is written as well.
An input that fails is kept in FOLDER. Run a target on it to see the report again: FOLDER/decode FOLDER/decode-crash...
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

import compiling
import seeds

from benchmarks.pages import put_into
from ncz_plugins.cli import machine
from ncz_plugins.version import __version__

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
KERNELS = ROOT / "ncz_plugins" / "kernels"
TARGETS = ("decode", "encode")
COMPILERS = ("clang++", "g++", "c++")

SANITIZERS = ["-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all"]
# As in setup.py where results depend on it. With sanitizers, gcc takes minutes for functions that are to be flattened.
FLAGS = ["-std=c++17", "-g1", "-fno-omit-frame-pointer", "-ffp-contract=off", "-fno-math-errno", "-Dflatten=noinline"]
COVERAGE = ["-fsanitize-coverage=inline-8bit-counters,pc-table"]  # for libFuzzer, of the kernels only
AVX2 = ["-mavx2", "-mbmi", "-mbmi2", "-mf16c", "-mlzcnt"]
LONGEST = 20000  # bytes of an input

RESULTS = ROOT / "benchmarks" / "results" / "fuzz.json"
PAGE = ROOT / "docs" / "results" / "fuzzing.md"


def compiler() -> str | None:
    """The C++ compiler to use, None if there is none."""
    return next((path for name in (os.environ.get("CXX"), *COMPILERS) if name and (path := shutil.which(name))), None)


def has_sanitizers(cxx: str) -> bool:
    return _links(cxx, "int main() { return 0; }", SANITIZERS)


def has_libfuzzer(cxx: str) -> bool:
    target = 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }'
    return _links(cxx, target, [*SANITIZERS, "-fsanitize=fuzzer"])


def _links(cxx: str, source: str, flags: list[str]) -> bool:
    command = [cxx, *flags, "-x", "c++", "-", "-o", os.devnull]
    return subprocess.run(command, input=source, text=True, capture_output=True).returncode == 0


def build(
    folder: Path,
    cxx: str,
    libfuzzer: bool,
    kernels: Path = KERNELS,
    targets: tuple[str, ...] = TARGETS,
    quickly: bool = False,
) -> None:
    """Compile `kernels`/cpu and the targets to `folder`/TARGET. Raises RuntimeError if that fails.

    Args:
        quickly: the portable kernels only, in half of the time. They run slower.
    """
    folder.mkdir(parents=True, exist_ok=True)
    portable_only = quickly or platform.machine().lower() not in ("x86_64", "amd64")
    # Without libFuzzer the run is short, and compiling must be, too.
    flags = [*FLAGS, *SANITIZERS, "-O2" if libfuzzer else "-O0" if quickly else "-Og"]
    flags += ["-DNCZ_PORTABLE_ONLY"] if portable_only else []
    coverage = COVERAGE if libfuzzer else []
    sources = {kernels / "cpu" / "portable.cpp": [*flags, *coverage]}
    if not portable_only:
        sources[kernels / "cpu" / "avx2.cpp"] = [*flags, *coverage, *AVX2]
    if not libfuzzer:
        sources[HERE / "driver.cpp"] = ["-std=c++17", "-O1"]
    main = {HERE / f"{target}.cpp": flags for target in targets}
    everything = sources | main
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = pool.map(lambda s: compiling.object_of(cxx, s, everything[s], [f"-I{kernels}"]), everything)
    objects = dict(zip(everything, map(str, made)))
    for target, source in zip(targets, main):
        libraries = [*SANITIZERS, *(["-fsanitize=fuzzer"] if libfuzzer else [])]
        compiling.run([cxx, *libraries, *(objects[s] for s in (source, *sources)), "-o", str(folder / target)])


def fuzz(folder: Path, seconds: float, libfuzzer: bool, targets: tuple[str, ...] = TARGETS) -> dict[str, str]:
    """Runs all targets at once for `seconds`. What each of those said that failed; logs are `folder`/TARGET.log."""
    seeds.write(folder / "seeds")
    running = {target: _start(folder, target, seconds, libfuzzer) for target in targets}
    try:
        failed = [target for target, process in running.items() if process.wait()]
    finally:
        for process in running.values():
            process.kill()
    return {target: (folder / f"{target}.log").read_text(errors="replace") for target in failed}


def _start(folder: Path, target: str, seconds: float, libfuzzer: bool) -> subprocess.Popen:
    options = [f"-max_total_time={seconds:.0f}", "-seed=1", f"-artifact_prefix={folder / target}-"]
    if libfuzzer:
        corpus = folder / "corpus" / target
        corpus.mkdir(parents=True, exist_ok=True)
        options += [f"-max_len={LONGEST}", "-timeout=60", "-print_final_stats=1", corpus]
    with open(folder / f"{target}.log", "w") as log:
        return subprocess.Popen([folder / target, *options, folder / "seeds" / target], stdout=log, stderr=log)


def report(log: str) -> dict[str, Any]:
    """What a target's log says: inputs tried, and the last words about what was found; None if that is nothing."""
    inputs = re.findall(r"^stat::number_of_executed_units: +(\d+)|^Done (\d+) runs", log, flags=re.MULTILINE)
    found = re.findall(r"^(?:SUMMARY|FAILED): (.*)", log, flags=re.MULTILINE)
    return {"inputs": int("".join(inputs[-1])) if inputs else None, "found": found[0] if found else None}


def keep(file: Path, folder: Path, seconds: float, cxx: str, command: str) -> None:
    """Write what a run has tried and found, from its logs; for the committed file, the table of the page as well."""
    version = subprocess.run([cxx, "--version"], capture_output=True, text=True).stdout.partition("\n")[0]
    document = {
        "command": command,
        "versions": {"ncz_plugins": __version__, "compiler": version},
        "cpu": machine.cpu(),
        "seconds": seconds,
        "targets": {each: report((folder / f"{each}.log").read_text(errors="replace")) for each in TARGETS},
    }
    file.write_text(json.dumps(document, indent=1) + "\n")
    if file.resolve() == RESULTS:
        put_into(PAGE, markdown(document))


def markdown(document: dict[str, Any]) -> str:
    """A row for each target."""
    lines = ["| target | minutes | inputs | sanitizer reports |", "|---|---:|---:|---|"]
    for target, each in document["targets"].items():
        cells = f"`{target}`", f"{document['seconds'] / 60:.0f}", f"{each['inputs']:,}", each["found"] or "none"
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "fuzz")
    parser.add_argument("--compiler", default=compiler())
    parser.add_argument("--without-libfuzzer", action="store_true")
    parser.add_argument("--json", type=Path, help="a file for what was tried and found")
    arguments = parser.parse_args()
    if not arguments.compiler or not has_sanitizers(arguments.compiler):
        print("There is no C++ compiler with AddressSanitizer on the PATH.", file=sys.stderr)
        return 2
    libfuzzer = not arguments.without_libfuzzer and has_libfuzzer(arguments.compiler)
    mutator = "libFuzzer" if libfuzzer else "driver.cpp"
    print(f"{arguments.compiler} with {mutator}, {arguments.seconds:g} s; logs in {arguments.folder}", flush=True)
    build(arguments.folder, arguments.compiler, libfuzzer)
    failed = fuzz(arguments.folder, arguments.seconds, libfuzzer)
    if arguments.json:
        command = shlex.join(["python", *sys.argv])
        keep(arguments.json, arguments.folder, arguments.seconds, arguments.compiler, command)
    for target in TARGETS:
        print(failed.get(target, f"{target}: nothing found"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
