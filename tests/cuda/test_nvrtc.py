"""The CUDA kernels compile for every architecture, and what the compiler makes of them fits; kept on disk safely."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import compiling
import kernel_table
import pytest
import torch
from kernel_table import resources
from repository import ROOT

from ncz_plugins.kernels.cuda import nvrtc

# Blocks of 256 threads; smaller ones, of which at least three fit on a multiprocessor.
MOST_REGISTERS = {"NCZ_KERNEL": 64, "NCZ_KERNEL_OF": 128}
MOST_REGISTERS |= dict.fromkeys(("NCZ_CHUNK_KERNEL", "NCZ_SUM_KERNEL"), 168)
# Bytes of each thread that the compiler keeps in memory, stores and loads. float64 is rare.
MOST_SPILLED = {torch.float32: 0, torch.bfloat16: 0, torch.float16: 0, torch.float64: 64}
MOST_SHARED = 48 << 10  # bytes, without asking for more
SOURCES = "".join(file.read_text() for file in sorted(nvrtc.FOLDER.glob("*.cuh")))


def declared() -> dict[str, str]:
    """The macro that declares each kernel."""
    found = re.findall(r"^(NCZ_\w*KERNEL\w*)\((?:\w+, \w+, )?(ncz_\w+)\)", SOURCES, re.MULTILINE)
    return {name: macro for macro, name in found}


# All dtypes and, of the architectures, each that has code of its own, and a newer one. float32, which has every kernel,
# also for the oldest one.
KINDS = [
    *kernel_table.KINDS,
    (torch.float32, "sm_75"),
    (torch.float64, "sm_80"),
    (torch.float16, "sm_100"),
]


@pytest.fixture(scope="module")
def compiled() -> dict[tuple[torch.dtype, str], tuple[bytes, str]]:
    """Cubin and log of each kind, by two threads."""
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(KINDS, pool.map(compiled_once, KINDS)))


def compiled_once(kind: tuple[torch.dtype, str]) -> tuple[bytes, str]:
    """What the compiler makes of one kind, kept for the next run as compiling.py keeps what g++ makes."""
    everything = nvrtc.digest(*kind), nvrtc.nvrtc.getVersion(), kernel_table.VERBOSE
    cubin = compiling.kept() / f"{hashlib.sha256(repr(everything).encode()).hexdigest()[:24]}.cubin"
    log = cubin.with_suffix(".log")
    if not cubin.exists():
        code, printed = nvrtc.compile_kernels(*kind, kernel_table.VERBOSE)
        log.write_text(printed)
        unfinished = cubin.with_suffix(f".{os.getpid()}")
        unfinished.write_bytes(code)
        unfinished.rename(cubin)  # the log is there already
    os.utime(cubin)
    os.utime(log)
    return cubin.read_bytes(), log.read_text()


@pytest.mark.parametrize(("dtype", "arch"), KINDS, ids=str)
def test_kernels_compile_and_fit(compiled, dtype, arch):
    cubin, log = compiled[dtype, arch]
    assert cubin.startswith(b"\x7fELF")
    assert "warning" not in log and "error" not in log
    found = resources(log)
    for name, needed in found.items():
        assert max(needed.stack, needed.spilled) <= MOST_SPILLED[dtype], (name, needed)
        assert needed.registers <= MOST_REGISTERS[declared()[name]], (name, needed)
        assert needed.shared <= MOST_SHARED, (name, needed)


def listed_in(source: str) -> set[str]:
    return set(re.findall(r"\bX\((ncz_\w+)\)", source))


@pytest.mark.parametrize(("dtype", "arch"), KINDS, ids=str)
def test_every_kernel_is_compiled_and_listed(compiled, dtype, arch):
    """The lists are where the emulator finds the kernels that it tests."""
    listed = listed_in(SOURCES)
    assert set(declared()) == listed
    if dtype != torch.float32:  # what works on codes alone is in that module only
        for name in ("huffman.cuh", "select.cuh", "open.cuh"):
            listed -= listed_in((nvrtc.FOLDER / name).read_text())
    if dtype == torch.float64:  # which neither of these serves
        for name in ("fixed_rate.cuh", "differences.cuh"):
            listed -= listed_in((nvrtc.FOLDER / name).read_text())
    if dtype in (torch.bfloat16, torch.float16):  # which steps don't have
        listed -= listed_in((nvrtc.FOLDER / "scales.cuh").read_text())
    assert set(resources(compiled[dtype, arch][1])) == listed


def test_the_table_of_kernels_is_what_the_compiler_makes(compiled):
    """What got slower is seen without a GPU: more registers, fewer blocks at a time, spills, more instructions."""
    compiler, rows = kernel_table.table_of(compiled)
    of_table, expected = kernel_table.read(kernel_table.FILE.read_text())
    if compiler != of_table:
        pytest.skip(f"{kernel_table.FILE.name} is of NVRTC {of_table}, which is not installed; this is {compiler}")
    changed = "\n".join(kernel_table.differences(expected, rows))
    assert not changed, f"the kernels are not those of kernels.txt:\n{changed}\nIf so meant: {kernel_table.COMMAND}"
    assert kernel_table.written(compiler, rows) == kernel_table.FILE.read_text()


def test_the_table_of_kernels_is_of_the_compiler_that_is_tested():
    """With another one its test is skipped, or fails, where all packages are required."""
    of_table, _ = kernel_table.read(kernel_table.FILE.read_text())
    assert f"nvidia-cuda-nvrtc=={of_table}" in (ROOT / "constraints.txt").read_text().split()


def test_a_kernel_that_grew_is_named_with_what_it_took_and_takes():
    _, rows = kernel_table.read(kernel_table.FILE.read_text())
    before = rows["float32 decode"]
    now = rows | {"float32 decode": before._replace(registers=before.registers + 8, blocks=before.blocks - 1)}
    del now["float32 pad"]
    assert kernel_table.differences(rows, now) == [
        f"float32 decode: registers {before.registers} -> {before.registers + 8}, "
        f"blocks {before.blocks} -> {before.blocks - 1}",
        "float32 pad is gone",
    ]


@pytest.mark.parametrize(
    ("registers", "shared", "threads", "blocks"),
    [(32, 0, 256, 8), (33, 0, 256, 6), (16, 0, 32, 32), (64, 0, 128, 8), (255, 0, 128, 2), (32, 48 << 10, 128, 4)],
)
def test_as_many_blocks_fit_on_a_multiprocessor_as_cuda_says(registers, shared, threads, blocks):
    """Numbers of CUDA's occupancy calculator for compute capability 9.0."""
    assert kernel_table.resident_blocks(registers, shared, threads) == blocks


@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc on the PATH")
def test_nvcc_compiles_them_without_a_warning(tmp_path):
    command = ["nvcc", "--std=c++17", "-arch=sm_90", "--fmad=false", "-ptx", "-Werror", "all-warnings"]
    command += ["-DNCZ_DTYPE=0", "-o", str(tmp_path / "ptx"), nvrtc.KERNELS]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_kernels_of_a_module_are_found_in_it(compiled):
    """They are loaded together, before a call waits for peers."""
    for kind in KINDS:
        cubin, log = compiled[kind]
        assert set(nvrtc.kernels_in(cubin)) == set(resources(log))


def test_the_first_launch_loads_all_kernels_with_one_split_of_shared_memory(compiled, monkeypatch):
    """With a driver that notes what it is told: no kernel is loaded later, while NCCL waits for a peer."""
    done, here = [], torch.empty(1).get_device()
    driver = {
        "moduleLoadData": lambda code: code,
        "moduleGetFunction": lambda code, kernel: (code, kernel),
        "funcSetAttribute": lambda function, attribute, value: done.append((function, attribute, value)),
        "launchKernel": lambda function, *_: done.append((function, "launched")),
    }
    for name, function in driver.items():
        monkeypatch.setattr(nvrtc.driver, name, function)
    monkeypatch.setattr(nvrtc.runtime, "setDevice", lambda device: None)
    monkeypatch.setattr(nvrtc, "compiled", lambda *kind: compiled[kind][0])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: here)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)

    launcher, codes = nvrtc.CupyLauncher(), [compiled[dtype, "sm_90"][0] for dtype in (torch.float32, torch.bfloat16)]
    for _ in range(2):
        launcher.launch("ncz_pack", torch.bfloat16, 1, 256, torch.zeros(1))
    share = nvrtc.driver.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100
    assert set(done[:-2]) == {((code, kernel), *share) for code in codes for kernel in nvrtc.kernels_in(code)}
    assert done[-2:] == 2 * [((codes[1], "ncz_pack"), "launched")]


def test_a_gpu_newer_than_the_compiler_gets_ptx(compiled):
    assert nvrtc.architecture(9, 0) == "sm_90"
    arch = nvrtc.architecture(99, 0)
    assert arch == f"compute_{max(nvrtc.nvrtc.getSupportedArchs())}"
    code, _ = compiled_once((torch.float16, arch))
    assert code.lstrip().startswith(b"//") and b".target sm_" in code
    assert set(nvrtc.kernels_in(code)) == set(nvrtc.kernels_in(compiled[torch.float16, "sm_100"][0]))


def test_what_does_not_compile_is_an_error_that_says_why(monkeypatch, tmp_path):
    broken = tmp_path / "kernels.cu"
    broken.write_text("this is not CUDA")
    monkeypatch.setattr(nvrtc, "KERNELS", broken)
    with pytest.raises(nvrtc.CompileError, match=r"do not compile for sm_90(.|\n)*kernels.cu\(1\)"):
        nvrtc.compile_kernels(torch.float32, "sm_90")


# ------------------------------------------------------------------ kept on disk


@pytest.fixture
def compilations(monkeypatch, tmp_path, compiled):
    """What is compiled, as a list that grows; the cache is in tmp_path."""
    kinds = []

    def compile_kernels(dtype, arch):
        kinds.append((dtype, arch))
        return compiled[dtype, arch]

    monkeypatch.setenv(nvrtc.ENVIRONMENT, str(tmp_path / "cache"))
    monkeypatch.setattr(nvrtc, "compile_kernels", compile_kernels)
    return kinds


def test_each_module_is_compiled_once(compilations, compiled, tmp_path):
    kinds = [(torch.float32, "sm_75"), (torch.float16, "sm_100"), (torch.bfloat16, "sm_90")]
    for kind in kinds * 2:
        assert nvrtc.compiled(*kind) == compiled[kind][0]
    assert compilations == kinds
    folder = tmp_path / "cache" / "cuda"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert len(list(folder.iterdir())) == len(kinds)


def test_other_sources_flags_or_compilers_are_compiled_again(compilations, monkeypatch):
    kind = (torch.float32, "sm_75")
    nvrtc.compiled(*kind)
    monkeypatch.setattr(nvrtc, "FLAGS", (*nvrtc.FLAGS, "--use_fast_math"))
    nvrtc.compiled(*kind)
    monkeypatch.setattr(nvrtc, "_digest_of_sources", lambda: "other")
    nvrtc.compiled(*kind)
    monkeypatch.setattr(nvrtc.nvrtc, "getVersion", lambda: (99, 0))
    nvrtc.compiled(*kind)
    assert compilations == [kind] * 4


def test_kernels_that_were_compiled_elsewhere_are_found(compilations, monkeypatch):
    """By another version of the compiler, for one."""
    kind = (torch.float32, "sm_75")
    monkeypatch.setattr(nvrtc.nvrtc, "getVersion", lambda: (99, 0))
    nvrtc.keep(*kind, b"\x7fELF of another machine")
    assert nvrtc.compiled(*kind) == b"\x7fELF of another machine" and compilations == []


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"", lambda data: data[:-1] + b"\x01"])
def test_a_damaged_file_is_compiled_again(compilations, compiled, tmp_path, damage):
    kind = (torch.float32, "sm_75")
    nvrtc.compiled(*kind)
    (file,) = (tmp_path / "cache" / "cuda").iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert nvrtc.compiled(*kind) == compiled[kind][0]
    assert file.read_bytes() == whole and compilations == [kind] * 2


def test_a_folder_that_others_can_write_to_is_not_used(compilations, compiled, tmp_path):
    folder = tmp_path / "cache" / "cuda"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="others can write"):
        assert nvrtc.compiled(torch.float32, "sm_75") == compiled[torch.float32, "sm_75"][0]
    assert not list(folder.iterdir())


def test_a_folder_of_another_user_is_not_used(compilations, monkeypatch, tmp_path):
    (tmp_path / "cache" / "cuda").mkdir(parents=True)
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.warns(RuntimeWarning, match="belongs to another user"):
        nvrtc.compiled(torch.float32, "sm_75")
    assert not list((tmp_path / "cache" / "cuda").iterdir())


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("/"), lambda path: path.write_text("")])
def test_what_is_no_folder_is_not_used(compilations, tmp_path, make):
    (tmp_path / "cache").mkdir()
    make(tmp_path / "cache" / "cuda")
    with pytest.warns(RuntimeWarning, match="compiled CUDA kernels can't be kept"):
        nvrtc.compiled(torch.float32, "sm_75")
    assert compilations == [(torch.float32, "sm_75")]
