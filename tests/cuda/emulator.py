"""Runs the CUDA kernels without a GPU: compiled by g++, each CUDA thread a fibre. emulator/cuda.h says what that shows.

    launcher = EmulatedLauncher(seed=1)                        # in this process
    launcher = EmulatedLauncher(seed=1, sanitizer="address")   # ASan and UBSan; or "thread": TSan
    launcher.launch("ncz_decode", torch.float32, grid, block, tensor, np.int64(5), structure, None)

What is compiled is kept for a week: tests/helpers/compiling.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import itertools
import os
import shutil
import signal
import struct
import subprocess
import tempfile
import threading
import weakref
from pathlib import Path
from typing import IO, NamedTuple

import compiling
import numpy as np
import torch
from torch import Tensor

from ncz_plugins.kernels.cuda.arguments import ArgumentMemory, Table
from ncz_plugins.kernels.format import DTYPES

HERE = Path(__file__).resolve().parent
EMULATOR = HERE / "emulator"
KERNELS = HERE.parent.parent / "ncz_plugins" / "kernels" / "cuda" / "kernels.cu"

# No contraction: a fused multiply-add would round other than the reference. No strict aliasing: the kernels look at
# shared memory as bytes and as words, which CUDA's compilers bear.
FLAGS = ["-std=c++17", "-O2", "-g1", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing"]
SANITIZERS = {
    None: [],
    "address": ["-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all"],
    "thread": ["-fsanitize=thread"],
}
SANITIZED = ["-O1", "-fno-omit-frame-pointer", "-ftls-model=initial-exec"]
DEFINES = {None: [], "address": ["-DEMULATOR_ADDRESS"], "thread": ["-DEMULATOR_THREAD"]}
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:history_size=0",
}
ALIGNMENT = 256  # bytes; of what a GPU's allocator gives
_one_launch = threading.Lock()  # the emulator runs one kernel at a time
INTEGER = struct.Struct("<q")


class EmulatorError(RuntimeError):
    """A launch that CUDA would not have survived, or that waits for ever. The text says where."""


class SanitizerReport(EmulatorError):
    """What ASan, UBSan or TSan said of a launch."""


def compiler() -> str:
    return os.environ.get("CXX", "g++")


# ---------------------------------------------------------------- building


@functools.cache
def build(dtype: torch.dtype, sanitizer: str | None = None, source: Path = KERNELS) -> Path:
    """The kernels of `source` for one element type: a shared library, or with a sanitizer a program (runner.cpp).

    `source` ends with a list NCZ_KERNELS(X) of its kernels, all of them extern "C". Raises RuntimeError with the
    compiler's messages.
    """
    flags = [*FLAGS, *(SANITIZED if sanitizer else []), *SANITIZERS[sanitizer], f"-DNCZ_DTYPE={DTYPES.index(dtype)}"]
    place = f'-DNCZ_SOURCE="{source.resolve()}"'
    objects = [compiling.object_of(compiler(), EMULATOR / "unit.cpp", flags, [place])]
    for file in ("emulator.cpp", *(["runner.cpp"] if sanitizer else [])):  # never instrumented
        objects.append(compiling.object_of(compiler(), EMULATOR / file, [*FLAGS, *DEFINES[sanitizer]]))
    return compiling.program_of(compiler(), objects, SANITIZERS[sanitizer] if sanitizer else ["-shared"])


# ---------------------------------------------------------------- arguments


def parse_kernels(text: str) -> dict[str, list[str]]:
    """The parameters of each kernel, such as p8 (pointer), i4, u8, f4 or s24 (structure)."""
    return {name: parameters for name, *parameters in map(str.split, text.splitlines())}


def check_arguments(kernel: str, parameters: list[str], arguments: tuple) -> None:
    """Raise TypeError unless all arguments have the kinds and sizes of the parameters: CUDA would not check.

    And ValueError for tensors that kernels can't work on.
    """
    found = [_kind(argument) for argument in arguments]
    if found != parameters:
        raise TypeError(f"{kernel} takes {' '.join(parameters)}, got {' '.join(found)}")
    for argument in arguments:
        for _, tensor in _tensors(argument):
            _address(tensor)


def _kind(argument) -> str:
    if argument is None or isinstance(argument, Tensor):
        return f"p{ctypes.sizeof(ctypes.c_void_p)}"
    if isinstance(argument, ctypes.Structure):
        return f"s{ctypes.sizeof(argument)}"
    if isinstance(argument, Table):
        return f"s{len(argument.value)}"
    if isinstance(argument, np.generic):
        return f"{'u' if argument.dtype.kind == 'b' else argument.dtype.kind}{argument.dtype.itemsize}"
    raise TypeError(f"{type(argument).__name__} cannot be an argument of a kernel")


def _address(tensor: Tensor) -> int:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError("kernels of the emulator take contiguous CPU tensors")
    return tensor.data_ptr()


def _bytes(argument) -> bytes:
    if isinstance(argument, Table):
        return argument.value
    return argument.tobytes() if isinstance(argument, np.generic) else bytes(argument)


def _tensors(argument) -> list[tuple[int, Tensor]]:
    """The tensors whose addresses stand in an argument, and where in it."""
    return argument.tensors if isinstance(argument, Table) else [(0, argument)] if isinstance(argument, Tensor) else []


# ---------------------------------------------------------------- launching


class EmulatedLauncher:
    """Launches kernels on CPU tensors. `seed` 0: threads and blocks in order; others: in an order drawn from it.

    Each launch draws another order. With a sanitizer, launches run in a process of their own, and see exactly the
    bytes of each tensor: what lies beside it, in the same storage or not, is out of bounds. A launch may take `seconds`
    of processor time.
    """

    def __init__(self, seed: int = 0, sanitizer: str | None = None, source: Path = KERNELS, seconds: int = 60):
        self.seed = seed
        self.sanitizer = sanitizer
        self.source = source
        self.seconds = seconds
        self._launches = itertools.count()
        self._machines: dict[torch.dtype, _Library | _Process] = {}

    def launch(self, kernel: str, dtype: torch.dtype, grid: int, block: int, *arguments) -> None:
        """Run `kernel` of the module for `dtype`, to its end.

        Arguments: contiguous CPU tensors, numpy scalars, ctypes structures, or None for a null pointer. Raises
        TypeError if they don't fit the kernel, EmulatorError for what CUDA would not have survived.
        """
        with _one_launch:
            machine = self._machine(dtype)
            if kernel not in machine.kernels:
                raise EmulatorError(f"there is no kernel {kernel}")
            check_arguments(kernel, machine.kernels[kernel], arguments)
            machine.launch(kernel, grid, block, self._next_seed(), self.seconds, arguments)

    def prepared(self, kernel: str, dtype: torch.dtype, grid: int, block: int, *arguments):
        """See `Launcher.prepared`. Without a sanitizer."""
        library, memory = self._machine(dtype), ArgumentMemory(arguments)
        pointers, places = memory.filled(arguments), memory.noise_bytes()

        def replay(noise: bytes) -> None:
            for place in places:
                place[:] = noise
            with _one_launch:
                library.run(kernel, grid, block, self._next_seed(), self.seconds, pointers)

        replay.memory = memory  # which `pointers` is an address in
        return replay

    def _next_seed(self) -> int:
        launch = next(self._launches)
        if self.seed == 0:
            return 0
        digest = hashlib.sha256(f"{self.seed} {launch}".encode()).digest()
        return int.from_bytes(digest[:4], "little") + 1

    def _machine(self, dtype: torch.dtype) -> _Library | _Process:
        machine = self._machines.get(dtype)
        if machine is None or not machine.alive:
            program = build(dtype, self.sanitizer, self.source)
            machine = self._machines[dtype] = _Process(program) if self.sanitizer else _Library(program)
        return machine


class _Library:
    """Kernels in this process."""

    alive = True

    def __init__(self, path: Path):
        self._library = ctypes.CDLL(str(path))
        self._library.emulator_kernels.restype = self._library.emulator_error.restype = ctypes.c_char_p
        self._library.emulate.argtypes = [
            ctypes.c_char_p,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_ulonglong,
            ctypes.c_void_p,
        ]
        self.kernels = parse_kernels(self._library.emulator_kernels().decode())
        self._memory: dict[str, ArgumentMemory] = {}

    def launch(self, kernel: str, grid: int, block: int, seed: int, seconds: int, arguments: tuple) -> None:
        if kernel not in self._memory:
            self._memory[kernel] = ArgumentMemory(arguments)
        self.run(kernel, grid, block, seed, seconds, self._memory[kernel].filled(arguments))

    def run(self, kernel: str, grid: int, block: int, seed: int, seconds: int, pointers: int) -> None:
        self._library.emulator_limit(seconds)
        if self._library.emulate(kernel.encode(), grid, block, seed, pointers):
            raise EmulatorError(self._library.emulator_error().decode())


class Region(NamedTuple):
    """Memory that one tensor lies in, or several that overlap."""

    begin: int  # address
    end: int
    skip: int  # the address modulo ALIGNMENT that it would have on a GPU


def regions_of(tensors: list[Tensor]) -> list[Region]:
    """The memory of all tensors, each byte once, those that overlap in one region."""
    pieces = sorted(
        (address, address + tensor.nbytes, (address - tensor.untyped_storage().data_ptr()) % ALIGNMENT)
        for tensor in tensors
        if (address := _address(tensor))
    )
    regions: list[Region] = []
    for begin, end, skip in pieces:
        if regions and begin < regions[-1].end:
            regions[-1] = regions[-1]._replace(end=max(regions[-1].end, end))
        else:
            regions.append(Region(begin, end, skip))
    return regions


class _Process:
    """Kernels in a process of their own, which ends with the first report of its sanitizer."""

    def __init__(self, program: Path):
        self._messages = tempfile.TemporaryFile()
        self._process = self._start([str(program)])
        try:
            self.kernels = parse_kernels(self._read_text())
        except EmulatorError as error:
            # TSan cannot place its memory under some kernels' randomization of addresses.
            if "unexpected memory mapping" not in str(error) or not shutil.which("setarch"):
                raise
            self._messages = tempfile.TemporaryFile()
            self._process = self._start(["setarch", "-R", str(program)])
            self.kernels = parse_kernels(self._read_text())

    def _start(self, command: list[str]) -> subprocess.Popen:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._messages,
            env={**os.environ, **OPTIONS},
        )
        weakref.finalize(self, _end, process, self._messages)
        return process

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def launch(self, kernel: str, grid: int, block: int, seed: int, seconds: int, arguments: tuple) -> None:
        regions = regions_of([tensor for argument in arguments for _, tensor in _tensors(argument)])
        request = [_text(kernel), _integers(grid, block, seed, seconds, len(regions))]
        for region in regions:
            request += [_integers(region.skip, region.end - region.begin), _memory(region)]
        request.append(_integers(len(arguments)))
        request += [_encoded(argument, regions) for argument in arguments]
        self._write(b"".join(request))
        error = self._read_text()
        if error:
            self._process.wait()
            raise EmulatorError(error)
        for region in regions:
            ctypes.memmove(region.begin, self._read(region.end - region.begin), region.end - region.begin)

    def _write(self, request: bytes) -> None:
        try:
            self._process.stdin.write(request)
            self._process.stdin.flush()
        except BrokenPipeError:
            self._report()

    def _read(self, count: int) -> bytes:
        data = self._process.stdout.read(count)
        if len(data) < count:
            self._report()
        return data

    def _read_text(self) -> str:
        return self._read(*INTEGER.unpack(self._read(INTEGER.size))).decode()

    def _report(self) -> None:
        status = self._process.wait()
        if status == -signal.SIGVTALRM:
            raise EmulatorError("a launch still runs after its time")
        self._messages.seek(0)
        messages = self._messages.read().decode(errors="replace")
        raise SanitizerReport(f"the process ended with status {status}\n{messages}")


def _end(process: subprocess.Popen, messages: IO[bytes]) -> None:
    process.kill()
    for file in (process.stdin, process.stdout, messages):
        with contextlib.suppress(BrokenPipeError):
            file.close()
    process.wait()


def _integers(*values: int) -> bytes:
    return b"".join(map(INTEGER.pack, values))


def _text(text: str) -> bytes:
    return _integers(len(text.encode())) + text.encode()


def _memory(region: Region) -> bytes:
    return ctypes.string_at(region.begin, region.end - region.begin)


def _encoded(argument, regions: list[Region]) -> bytes:
    """As runner.cpp reads it: how many bytes, these, how many addresses in them, and where, region, offset of each."""
    value = bytes(8) if argument is None or isinstance(argument, Tensor) else _bytes(argument)
    addresses = [(at, *place) for at, tensor in _tensors(argument) if (place := _place(tensor, regions))]
    return _integers(len(value)) + value + _integers(len(addresses), *itertools.chain(*addresses))


def _place(tensor: Tensor, regions: list[Region]) -> tuple[int, int] | None:
    """The region that a tensor lies in, and where; None for an empty tensor."""
    address = _address(tensor)
    for number, region in enumerate(regions):
        if region.begin <= address < region.end:
            return number, address - region.begin
    return None
