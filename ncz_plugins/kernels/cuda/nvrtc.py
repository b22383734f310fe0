"""Compiler and launcher of the kernels: NVRTC and the CUDA driver, through CuPy's bindings of both.

There is one module for each element type and architecture. Compiling it on first use takes some seconds. Later
processes read it from disk. A GPU that is newer than NVRTC gets PTX, which its driver translates.
"""

from __future__ import annotations

import functools
import hashlib
import re
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from cupy.cuda import driver, nvrtc, runtime
from torch import Tensor

from ..cache import ENVIRONMENT, private_folder, read_private, write_private
from ..format import DTYPES
from .arguments import OF_CODES, ArgumentMemory, require_on
from .recorded import Replay

FOLDER = Path(__file__).parent
KERNELS = FOLDER / "kernels.cu"
# No contraction: a fused multiply-add rounds differently from the reference.
FLAGS = ("--std=c++17", "--fmad=false")

_opening = threading.Lock()


class CompileError(RuntimeError):
    """Error of NVRTC, with its text."""


def architecture(major: int, minor: int) -> str:
    """What to compile for a GPU of this compute capability: "sm_90", or PTX, "compute_121", if NVRTC is too old.

    Raises CompileError if NVRTC does not work.
    """
    _open_builtins()
    wanted, known = 10 * major + minor, nvrtc.getSupportedArchs()
    if wanted in known or wanted < min(known):  # for one that is too old, NVRTC's error says so
        return f"sm_{wanted}"
    return f"compute_{max(arch for arch in known if arch < wanted)}"


def compile_kernels(dtype: torch.dtype, arch: str, options: tuple[str, ...] = ()) -> tuple[bytes, str]:
    """Compile the kernels of one element type for `arch`, such as "sm_90" or "compute_90". Needs no device.

    Returns: the cubin, or PTX for "compute_90"; and what the compiler printed: with `--ptxas-options=-v`, registers and
    memory of each kernel. Raises CompileError.
    """
    _open_builtins()
    program = nvrtc.createProgram(KERNELS.read_text(), KERNELS.name, (), ())
    try:
        nvrtc.compileProgram(program, (*_flags(dtype, arch), f"--include-path={FOLDER}", *options))
        if arch.startswith("compute_"):
            return nvrtc.getPTX(program), nvrtc.getProgramLog(program)
        # CuPy's binding drops the last byte, which is part of the cubin's padding.
        return nvrtc.getCUBIN(program) + b"\0", nvrtc.getProgramLog(program)
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        raise CompileError(f"the CUDA kernels do not compile for {arch}: {error}\n{log}") from error
    finally:
        nvrtc.destroyProgram(program)


class _Thread(threading.local):
    """State of one thread for launching."""

    def __init__(self):
        self.devices: set[int] = set()  # devices whose contexts this thread has made current
        self.arguments: dict[tuple[str, torch.dtype], ArgumentMemory] = {}


class CupyLauncher:
    """Launcher that uses torch's current stream of the device where the arguments are."""

    def __init__(self):
        self._functions: dict[tuple[str, torch.dtype, int], int] = {}
        self._loaded: dict[int, set[torch.dtype]] = {}  # by device
        self._lock = threading.Lock()
        self._thread = _Thread()

    def prepared(self, kernel: str, dtype: torch.dtype, grid: int, block: int, *arguments) -> Replay:
        """See `Launcher`. The same kernel was launched with these arguments before."""
        device = next(a.get_device() for a in arguments if isinstance(a, Tensor))
        function, memory = self._functions[kernel, dtype, device], ArgumentMemory(arguments)
        pointers, noise_bytes = memory.filled(arguments), memory.noise_bytes()

        def replay(noise: bytes) -> None:
            for place in noise_bytes:
                place[:] = noise
            stream = torch._C._cuda_getCurrentRawStream(device)
            driver.launchKernel(function, grid, 1, 1, block, 1, 1, 0, stream, pointers, 0)

        replay.memory = memory  # which `pointers` is an address in
        return replay

    def launch(self, kernel: str, dtype: torch.dtype, grid: int, block: int, *arguments) -> None:
        """See `Launcher`. At least one of `arguments` is a tensor. Raises WrongTensor."""
        device = next(a.get_device() for a in arguments if isinstance(a, Tensor))
        require_on(device, arguments)
        if device == torch.cuda.current_device():  # nearly always so; entering the context takes longer than this check
            self._launch(kernel, dtype, device, grid, block, arguments)
        else:
            with torch.cuda.device(device):
                self._launch(kernel, dtype, device, grid, block, arguments)

    def _launch(self, kernel: str, dtype: torch.dtype, device: int, grid: int, block: int, arguments: tuple) -> None:
        mine = self._thread
        if device not in mine.devices:
            runtime.setDevice(device)  # makes the device's context current, also in a new thread
            mine.devices.add(device)
        if (kernel, dtype, device) not in self._functions:
            self._load(dtype, device)
        function = self._functions[kernel, dtype, device]
        memory = mine.arguments.get((kernel, dtype))
        if memory is None:
            memory = mine.arguments[kernel, dtype] = ArgumentMemory(arguments)
        # A private name of torch, tried on 2.13.0: the public torch.cuda.current_stream takes several microseconds.
        stream = torch._C._cuda_getCurrentRawStream(device)
        # CUDA copies the values before it returns.
        driver.launchKernel(function, grid, 1, 1, block, 1, 1, 0, stream, memory.filled(arguments), 0)

    def _load(self, dtype: torch.dtype, device: int) -> None:
        """Load all kernels of a module, and those that work on codes alone.

        To load a kernel, CUDA may wait until the GPU is idle. A GPU on which NCCL waits for a peer is not, and the peer
        may wait for this kernel. So no kernel is loaded in the middle of a call.
        """
        arch = architecture(*torch.cuda.get_device_capability(device))
        with self._lock:
            for each in {dtype, OF_CODES} - self._loaded.get(device, set()):
                code = compiled(each, arch)
                module = driver.moduleLoadData(code)
                for kernel in kernels_in(code):
                    function = driver.moduleGetFunction(module, kernel)
                    # A multiprocessor that changes its share of shared memory must be idle: the same for all kernels.
                    # Setting it loads the kernel.
                    driver.funcSetAttribute(function, driver.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100)
                    self._functions[kernel, each, device] = function
                self._loaded.setdefault(device, set()).add(each)


def kernels_in(code: bytes) -> list[str]:
    """Names of the kernels of a cubin or of PTX."""
    return sorted({name.decode() for name in re.findall(rb"(?:\.text\.|\.entry )(ncz_\w+)", code)})


# ------------------------------------------------------------------ kept on disk


def compiled(dtype: torch.dtype, arch: str) -> bytes:
    """Compiled kernels, see `compile_kernels`, from disk if they are there. Raises CompileError."""
    folder = _cache_folder()
    if folder is None:
        return compile_kernels(dtype, arch)[0]
    file = folder / f"{_key(dtype, arch)}.cubin"
    code = _read(file)
    if code is None:
        code, _ = compile_kernels(dtype, arch)
        _write(file, code)
    return code


def keep(dtype: torch.dtype, arch: str, code: bytes) -> None:
    """Put kernels on disk that were compiled elsewhere, from sources with the same `digest`."""
    folder = _cache_folder()
    if folder is not None:
        _write(folder / f"{_key(dtype, arch)}.cubin", code)


def compile_ahead(arch: str) -> None:
    """Compile all element types at once, except for those on disk."""
    with ThreadPoolExecutor(len(DTYPES)) as pool:
        list(pool.map(lambda dtype: compiled(dtype, arch), DTYPES))


def _open_builtins() -> None:
    """Let one thread use NVRTC first.

    Its first use opens a library, which fails in NVRTC 13.0 for several threads at once.
    """
    with _opening:
        _compile_nothing()


@functools.cache
def _compile_nothing() -> None:
    try:
        nvrtc.compileProgram(nvrtc.createProgram("", "nothing.cu", (), ()), ())
    except nvrtc.NVRTCError as error:
        raise CompileError(f"NVRTC does not work: {error}. Install the package nvidia-cuda-nvrtc again.") from error


def _flags(dtype: torch.dtype, arch: str) -> tuple[str, ...]:
    return (*FLAGS, f"-DNCZ_DTYPE={DTYPES.index(dtype)}", f"--gpu-architecture={arch}")


def digest(dtype: torch.dtype, arch: str) -> str:
    """Hash of the sources and flags that kernels are compiled from."""
    return hashlib.sha256("\0".join((*_flags(dtype, arch), _digest_of_sources())).encode()).hexdigest()


def _key(dtype: torch.dtype, arch: str) -> str:
    """Hash of everything that compiled kernels depend on."""
    return hashlib.sha256(f"{digest(dtype, arch)}{nvrtc.getVersion()}".encode()).hexdigest()


@functools.cache
def _digest_of_sources() -> str:
    files = [KERNELS, *FOLDER.glob("*.cuh"), *FOLDER.parent.glob("common/*.h")]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in sorted(files))).hexdigest()


def _cache_folder() -> Path | None:
    """Folder that only this user can write to, because its files will run. If there is none, warn and return None."""
    try:
        return private_folder("cuda")
    except OSError as reason:
        warnings.warn(
            f"ncz_plugins: compiled CUDA kernels can't be kept, so each process compiles them again: {reason}. "
            f"Set {ENVIRONMENT} to a folder that is yours alone.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def _read(file: Path) -> bytes | None:
    """Contents of a file that `_write` wrote. None if the file is missing or differs."""
    data = read_private(file) or b""
    size = hashlib.sha256().digest_size
    digest, code = data[:size], data[size:]
    return code if hashlib.sha256(code).digest() == digest else None


def _write(file: Path, code: bytes) -> None:
    """Write `code` with its digest. If that fails, the next process compiles again."""
    try:
        write_private(file, hashlib.sha256(code).digest() + code)
    except OSError as error:
        warnings.warn(f"ncz_plugins: {file} was not written: {error}", RuntimeWarning, stacklevel=2)
