"""Compressed tensor as bytes that describe themselves, for files and measurements.

All numbers are little endian. The head:

| offset | size | field | |
|---|---|---|---|
| 0 | 4 | magic | `4E 43 5A 43`, "NCZC" |
| 4 | 1 | version | 1 |
| 5 | 1 | dtype | 0 float32, 1 bfloat16, 2 float16, 3 float64 |
| 6 | 1 | kind | 0 error_bound, 1 stochastic, 2 lossless |
| 7 | 1 | dimensions | |
| 8 | 4 | frame elements | in each frame but the last: a multiple of 4,096 |
| 12 | 8 | block | elements that share a scale: a multiple of 128; 0 all of them, or kind is lossless |
| 20 | 4 | checksum | of the head, as in a frame |
| 24 | 8 per dimension | shape | |
| | 4 or 8 per block | scales | float64 if dtype is, else float32; none if kind is lossless |

The frames follow, in the wire format. Before each frame stands its size in bytes, as a 64-bit number. The tensor is
flattened.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ... import kernels
from ...kernels.backend import Backend
from ...kernels.format import CHUNK, DTYPES, RANS_LANES, RANS_PAGE, SCALE_BLOCK, blocks_of
from ..config import Config, QuantizerConfig
from ..errors import BoundError, FrameError, UnsupportedError
from ..runtime.device import Host
from .coded_tensor import CodedTensor
from .from_config import codec_for
from .layout import Layout, Window
from .quantize import Scales, derive, measure, smallest_value, work_dtype

_MAGIC = 0x435A434E  # "NCZC", little endian
_VERSION = 1
_HEAD = struct.Struct("<IBBBBIQI")  # the checksum stands where a frame has its own, so one function computes both
_KINDS = ("error_bound", "stochastic", "lossless")
_LOSSLESS = _KINDS.index("lossless")
_SIZE_BYTES = 8  # before each frame
_MAX_DIMENSIONS = 255
_MAX_FRAME_ELEMENTS = 1 << 25  # 64 MiB of 16-bit floats
# The smallest coded page is one of RANS in which all codes are the most frequent one: states, and one table entry.
_MIN_PAGE_BYTES = 4 * RANS_LANES + 4


def compress(tensor: Tensor, config=None, *, threads: int = 1) -> Tensor:
    """Compress `tensor` within the error bound that `config` sets. `decompress` restores it.

    Args:
        tensor: of dtype float32, bfloat16, float16 or float64, any shape and strides, in host memory.
        config: a Config or anything that `Config.load` takes. Of the transport's settings, only `frame_bytes` and
            `link_gbps` have an effect.
        threads: frames to encode at the same time. The bytes do not depend on it.

    Returns: uint8, [bytes].

    The bound is strict for all dtypes. Bounds below 4 times the smallest normal number are raised to that. The tensor
    is stored without loss if it holds NaN or infinity, if it can't be quantized, or if quantizing would hardly shrink
    it.

    Raises BoundError if the bound is too fine for 32-bit codes and a larger one is not, UnsupportedError for other
    tensors and for mode bits, and ConfigError.
    """
    config = Config.load(config).resolved()
    if config.quantizer.bits is not None:
        raise UnsupportedError(
            "quantizer.mode: bits is for collectives, not for stored tensors: use mode rel, rms, range or abs"
        )
    flat = _flat(tensor)
    device = Host()
    layout = Layout.of([flat.numel()], config.transport.frame_bytes_in_effect() // flat.element_size())
    scales = _scales(device.backend, flat, layout, config)
    codec = codec_for(config, device, CodedTensor(layout, source=Window(flat)), scales)
    frames = _in_threads(threads, lambda index: codec.encode(0, index), range(layout.frames))
    chunks = [_head(device.backend, tensor, config.quantizer, layout, scales)]
    for frame in frames:
        chunks += [_bytes(struct.pack("<Q", frame.numel())), frame]
    return torch.cat(chunks)


def decompress(data: Tensor, *, threads: int = 1) -> Tensor:
    """Restore a tensor from the bytes that `compress` returned.

    Args:
        data: uint8, [bytes], in host memory.
        threads: frames to decode at the same time.

    Returns a contiguous tensor of the original shape and dtype.

    Raises FrameError if `data` is damaged; if the head is damaged, before any memory is allocated. Raises
    UnsupportedError if `data` is not a flat uint8 tensor in host memory.
    """
    if not isinstance(data, Tensor) or data.dtype != torch.uint8 or data.dim() != 1 or data.device.type != "cpu":
        raise UnsupportedError("decompress takes what compress returned: a flat uint8 tensor in host memory")
    found = contents_of(data.contiguous())
    flat = torch.empty(found.layout.numel, dtype=found.dtype, device="cpu")
    # Frames say how they were written, so any configuration will do.
    codec = codec_for(Config(), Host(), CodedTensor(found.layout, output=Window(flat)), found.scales)
    _in_threads(threads, lambda index: codec.decode(0, index, found.frames[index]), range(found.layout.frames))
    return flat.view(found.shape)


class Contents(NamedTuple):
    """Contents of a compressed tensor.

    Attributes:
        scales: the quantization steps; None if the tensor is stored without loss.
        frames: the frames in order, each uint8, [bytes].
    """

    dtype: torch.dtype
    shape: list[int]
    layout: Layout
    scales: Scales | None
    frames: list[Tensor]


def contents_of(data: Tensor) -> Contents:
    """Read the head of a compressed tensor, and find its frames without decoding them.

    Args:
        data: uint8, [bytes], in host memory.

    Raises FrameError if the head is damaged, or the sizes of frames are impossible.
    """
    if data.numel() < _HEAD.size:
        raise FrameError(f"{data.numel()} bytes are too few for a compressed tensor")
    magic, version, dtype, kind, dimensions, frame_elements, block, checksum = _HEAD.unpack(data[: _HEAD.size].numpy())
    if magic != _MAGIC:
        raise FrameError(f"magic is {magic:#010x}, not {_MAGIC:#010x}: not a compressed tensor")
    if version != _VERSION:
        raise FrameError(f"the compressed tensor has version {version}; this build reads version {_VERSION}")
    if dtype >= len(DTYPES) or kind >= len(_KINDS) or block % SCALE_BLOCK or (kind == _LOSSLESS and block):
        raise FrameError(f"dtype {dtype}, kind {kind} or block {block} of a compressed tensor is unknown")
    if frame_elements % CHUNK or not 0 < frame_elements <= _MAX_FRAME_ELEMENTS:
        raise FrameError(f"frames of {frame_elements} elements are impossible")

    # The shape and the scales, whose number follows from the shape.
    sizes, rest = _numbers(data[_HEAD.size :], "<i8", dimensions)
    shape = sizes.tolist()
    if min(shape, default=0) < 0 or math.prod(max(1, size) for size in shape) >= 1 << 62:
        raise FrameError(f"shape {shape} is impossible")
    count = math.prod(shape)
    work = np.dtype(work_dtype(DTYPES[dtype]))
    blocks = 0 if kind == _LOSSLESS else -(-count // block) if block else 1
    scales, rest = _numbers(rest, work.newbyteorder("<"), blocks)

    # The checksum. A head with a valid checksum may still hold impossible numbers, so these are checked as well.
    if (actual := kernels.cpu_backend().checksum(data[: data.numel() - rest.numel()])) != checksum:
        raise FrameError(f"the head of a compressed tensor has checksum {actual:#010x}, it says {checksum:#010x}")
    if not (np.isfinite(scales) & (scales > 0)).all():
        raise FrameError("a scale is not a positive number")
    layout = Layout((count,), frame_elements)
    if len(rest) < layout.frames * _SIZE_BYTES + -(-count // RANS_PAGE) * _MIN_PAGE_BYTES:
        raise FrameError(f"{len(rest)} bytes can't hold the {count} elements that the head says")
    steps = None if kind == _LOSSLESS else _steps(scales.astype(work), block, blocks_of(count))
    return Contents(DTYPES[dtype], shape, layout, steps, _split(rest, layout.frames))


def _flat(tensor: Tensor) -> Tensor:
    """`tensor` as a contiguous one of one dimension. Raises UnsupportedError for tensors that `compress` refuses."""
    if not isinstance(tensor, Tensor):
        raise UnsupportedError(f"compress takes a tensor, not {type(tensor).__name__}: make one by torch.as_tensor")
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.dtype not in DTYPES:
        raise UnsupportedError(
            f"a tensor of {tensor.dtype} on {tensor.device}, layout {tensor.layout}; compress takes dense tensors of "
            f"{', '.join(map(str, DTYPES))} in host memory: convert it first"
        )
    if tensor.dim() > _MAX_DIMENSIONS:
        raise UnsupportedError(f"a tensor of {tensor.dim()} dimensions; compress takes {_MAX_DIMENSIONS}: reshape it")
    return tensor.detach().resolve_neg().contiguous().view(-1)


def _scales(backend: Backend, flat: Tensor, layout: Layout, config: Config) -> Scales | None:
    """The quantization steps of the tensor; None if it is stored without loss. Raises BoundError."""
    quantizer = config.quantizer
    if quantizer.kind == "lossless" or not flat.numel():
        return None
    measured = measure(backend, Window(flat), layout, range(1), quantizer, largest=True)
    derived = derive(measured, layout, quantizer, flat.dtype, addends=1)
    if derived.finite and derived.scales is None:
        smallest = smallest_value(measured, quantizer, flat.dtype)
        if smallest is not None:
            raise BoundError(
                f"quantizer.value: {quantizer.value:g} (mode {quantizer.mode}, {quantizer.kind_in_effect}) is too fine "
                f"a bound for 32-bit codes of this {flat.dtype} tensor; the smallest that will do is "
                f"{smallest * 1.006:.3g}. Use that or more, or quantizer.kind: lossless"
            )
    return derived.scales if derived.is_worthwhile(flat.dtype) else None


def _head(
    backend: Backend, tensor: Tensor, quantizer: QuantizerConfig, layout: Layout, scales: Scales | None
) -> Tensor:
    """The bytes before the first frame: uint8, [bytes]."""
    kind, block, block_scales = _LOSSLESS, 0, b""
    if scales is not None:
        kind, block = _KINDS.index(quantizer.kind_in_effect), quantizer.block_in_effect
        of_blocks = scales.scales[:: block // SCALE_BLOCK] if block else scales.scales[:1]
        block_scales = of_blocks.numpy().tobytes()
    dtype = DTYPES.index(tensor.dtype)
    fields = _HEAD.pack(_MAGIC, _VERSION, dtype, kind, tensor.dim(), layout.frame_elements, block, 0)
    head = _bytes(fields + np.array(tensor.shape, dtype="<u8").tobytes() + block_scales)
    head[_HEAD.size - 4 : _HEAD.size] = _bytes(struct.pack("<I", backend.checksum(head)))
    return head


def _steps(block_scales: np.ndarray, block: int, count: int) -> Scales:
    """The `count` quantization steps of a tensor, from one scale for each block: float32 or float64, [blocks]."""
    repeated = np.repeat(block_scales, min(block // SCALE_BLOCK, count) if block else count)[:count]
    scales = torch.from_numpy(repeated)
    return Scales(inverse_steps=1 / scales, scales=scales)


def _split(data: Tensor, count: int) -> list[Tensor]:
    """Split `data`, which holds `count` frames and nothing else. Raises FrameError."""
    frames = []
    for _ in range(count):
        (size,), data = _numbers(data, "<u8", 1)
        if size > len(data):
            raise FrameError(f"frame {len(frames)} has {size} bytes, only {len(data)} are left")
        frames.append(data[: int(size)])
        data = data[int(size) :]
    if len(data):
        raise FrameError(f"{len(data)} bytes follow the last frame")
    return frames


def _numbers(data: Tensor, dtype, count: int) -> tuple[np.ndarray, Tensor]:
    """Read `count` numbers from the front of `data`. Returns the numbers, and the rest of `data`. Raises FrameError."""
    size = count * np.dtype(dtype).itemsize
    if size > len(data):
        raise FrameError(f"a compressed tensor ends where {size} bytes should follow: {len(data)} are left")
    return np.frombuffer(data[:size].numpy().tobytes(), dtype=dtype), data[size:]


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _in_threads(threads: int, function: Callable, items: Iterable) -> list:
    """Call `function` for each item, `threads` at the same time. Returns the results in the order of the items."""
    if threads == 1:
        return [function(item) for item in items]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(function, items))
