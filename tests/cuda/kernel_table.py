"""Table of what the compiler makes of each CUDA kernel for sm_90, so that a slower kernel is seen without a GPU.

    python tests/cuda/kernel_table.py      compiles the kernels (15 s) and writes kernels.txt beside this file

tests/cuda/test_nvrtc.py compares kernels.txt with what the compiler makes. Columns:

    registers       of each thread
    spilled         bytes of each thread that go to memory for want of registers, stores and loads
    shared          bytes of shared memory of each block
    threads         of each block
    blocks          that a multiprocessor runs at a time: the fewer, the less of memory's latency is hidden
    instructions    of the whole kernel, executed or not

Kernels of bfloat16 and float64 that are as those of float32 have no row.
"""

from __future__ import annotations

import re
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch

from ncz_plugins.kernels.cuda import nvrtc

FILE = Path(__file__).with_name("kernels.txt")
COMMAND = "python tests/cuda/kernel_table.py"
ARCH = "sm_90"
DTYPES = (torch.float32, torch.bfloat16, torch.float64)  # float16 is as bfloat16
KINDS = [(dtype, ARCH) for dtype in DTYPES]
VERBOSE = ("--ptxas-options=-v",)

# A multiprocessor of sm_90: CUDA's table of compute capabilities.
REGISTERS, REGISTERS_AT_A_TIME = 65536 // 4, 256  # of each of its four parts, and what a warp gets a multiple of
SHARED, SHARED_AT_A_TIME, SHARED_OF_SYSTEM = 228 << 10, 128, 1 << 10  # bytes; the last in each block
MOST_WARPS, MOST_BLOCKS = 64, 32
# In the machine code.
INSTRUCTION_BYTES = 16
NOP = 0x918  # the lowest 12 bits of the instruction that fills the end of a kernel
MAX_THREADS = b"\x04\x05\x0c\x00"  # attribute of a kernel with three numbers: its launch bounds


class Kernel(NamedTuple):
    """One row of the table, without its name."""

    registers: int
    spilled: int
    shared: int
    threads: int
    blocks: int
    instructions: int


class Resources(NamedTuple):
    """What one kernel takes, in bytes of each thread or of each block."""

    stack: int
    spilled: int
    registers: int
    shared: int


def resources(log: str) -> dict[str, Resources]:
    """By kernel, from what ptxas says when it is verbose."""
    found = {}
    for name, stack, stores, loads, registers, rest in re.findall(
        r"Function properties for (ncz_\w+)\W*(?:ptxas)?\W*(\d+) bytes stack frame, (\d+) bytes spill stores, "
        r"(\d+) bytes spill loads\W*ptxas info\W*Used (\d+) registers(.*)",
        log,
    ):
        shared = re.search(r"(\d+) bytes smem", rest)
        found[name] = Resources(int(stack), int(stores) + int(loads), int(registers), int(shared[1]) if shared else 0)
    return found


def table_of(compiled: dict[tuple[torch.dtype, str], tuple[bytes, str]]) -> tuple[str, dict[str, Kernel]]:
    """The compiler's version, and the rows by "float32 decode".

    Args:
        compiled: cubin and log of each of KINDS, compiled with VERBOSE.
    """
    rows: dict[str, Kernel] = {}
    for dtype, arch in KINDS:
        for name, row in kernels_of(*compiled[dtype, arch]).items():
            if dtype == DTYPES[0] or row != rows.get(f"float32 {name}"):
                rows[f"{str(dtype).removeprefix('torch.')} {name}"] = row
    return compiler_of(compiled[KINDS[0]][0]), rows


def kernels_of(cubin: bytes, log: str) -> dict[str, Kernel]:
    """The kernels of one module, by their names without "ncz_"."""
    parts, found = sections(cubin), {}
    for name, takes in sorted(resources(log).items()):
        attributes = parts[f".nv.info.{name}"]
        threads, *_ = struct.unpack_from("<3I", attributes, attributes.index(MAX_THREADS) + len(MAX_THREADS))
        blocks = resident_blocks(takes.registers, takes.shared, threads)
        instructions = instructions_in(parts[f".text.{name}"])
        row = Kernel(takes.registers, takes.spilled, takes.shared, threads, blocks, instructions)
        found[name.removeprefix("ncz_")] = row
    return found


def sections(cubin: bytes) -> dict[str, bytes]:
    """Contents of a cubin's sections, by name. A cubin is an ELF file of 64 bits."""
    (table,), (size, count, of_names) = struct.unpack_from("<Q", cubin, 0x28), struct.unpack_from("<3H", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + number * size) for number in range(count)]
    names = headers[of_names][4]
    found = {}
    for name, _, _, _, start, length in headers:
        text = cubin[names + name : cubin.index(b"\0", names + name)]
        found[text.decode()] = cubin[start : start + length]
    return found


def instructions_in(code: bytes) -> int:
    """How many there are before those that only fill the end."""
    operations = [low & 0xFFF for low, _ in struct.iter_unpack("<QQ", code)]
    while operations and operations[-1] == NOP:
        operations.pop()
    return len(operations)


def resident_blocks(registers: int, shared: int, threads: int) -> int:
    """How many blocks a multiprocessor of sm_90 runs at a time."""
    warps = _up(threads, 32) // 32
    by_registers = 4 * (REGISTERS // _up(32 * registers, REGISTERS_AT_A_TIME)) // warps
    by_shared = SHARED // _up(shared + SHARED_OF_SYSTEM, SHARED_AT_A_TIME)
    return min(by_registers, by_shared, MOST_WARPS // warps, MOST_BLOCKS)


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def compiler_of(cubin: bytes) -> str:
    """Version of the compiler that made a cubin, such as "13.2.86"."""
    return re.search(rb"Cuda compilation tools, release [\d.]+, V([\d.]+)", cubin)[1].decode()


# ------------------------------------------------------------------ the file


def written(compiler: str, rows: dict[str, Kernel]) -> str:
    """The table as text."""
    columns = [f"{name:>{len(name) + 2}}" for name in Kernel._fields]
    lines = [f"Made by NVRTC {compiler} for {ARCH}; `{COMMAND}` makes it again", "", f"{'':38}" + "".join(columns)]
    for name, row in rows.items():
        numbers = (f"{number:>{len(column)}}" for number, column in zip(row, columns))
        lines.append(f"{name:38}" + "".join(numbers))
    return "\n".join(lines) + "\n"


def read(text: str) -> tuple[str, dict[str, Kernel]]:
    """The compiler's version and the rows of what `written` made."""
    first, _, _, *lines = text.splitlines()
    rows = {}
    for line in lines:
        dtype, name, *numbers = line.split()
        rows[f"{dtype} {name}"] = Kernel(*map(int, numbers))
    return re.search(r"NVRTC (\S+)", first)[1], rows


def differences(before: dict[str, Kernel], now: dict[str, Kernel]) -> list[str]:
    """One line for each kernel that is another: what changed, from which number to which."""
    lines = [f"{name} is gone" for name in before if name not in now]
    lines += [f"{name} is new" for name in now if name not in before]
    for name in before.keys() & now.keys():
        pairs = zip(Kernel._fields, before[name], now[name])
        changed = [f"{field} {old} -> {new}" for field, old, new in pairs if old != new]
        lines += [f"{name}: {', '.join(changed)}"] if changed else []
    return sorted(lines)


def main() -> None:
    with ThreadPoolExecutor(len(KINDS)) as pool:
        compiled = pool.map(lambda kind: nvrtc.compile_kernels(*kind, VERBOSE), KINDS)
    compiler, rows = table_of(dict(zip(KINDS, compiled)))
    before = read(FILE.read_text())[1] if FILE.exists() else {}
    FILE.write_text(written(compiler, rows))
    print("\n".join([*differences(before, rows), f"{FILE.relative_to(ROOT)}: {len(rows)} kernels"]))


if __name__ == "__main__":
    main()
