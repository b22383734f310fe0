"""Arrays of other libraries as tensors over the same memory, and what is refused."""

import warnings

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.distributed as dist
from foreign import Foreign
from torch._jit_internal import _extract_tensors

from ncz_plugins import UnsupportedError
from ncz_plugins.core.arrays import giving, tensor_of
from ncz_plugins.core.runtime.worker import Worker

SUM, AVG, MAX = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX


def test_a_tensor_is_taken_as_it_is():
    for tensor in (torch.ones(3), torch.ones(3, 4).t(), torch.ones(()), torch.nn.Parameter(torch.ones(2))):
        assert tensor_of(tensor) is tensor


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "?"])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5), (3, 0, 2)])
def test_a_numpy_array_is_shared_whatever_its_order(dtype, shape):
    for order in "CF":
        array = np.zeros(shape, dtype, order=order)
        tensor = tensor_of(array)
        assert tuple(tensor.shape) == shape and str(tensor.dtype).removeprefix("torch.") == array.dtype.name
        array[...] = 1
        assert tensor.eq(1).all() and (not array.size or tensor.data_ptr() == array.ctypes.data)


def test_bfloat16_of_ml_dtypes_is_shared():
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    for array in (np.ones((3, 4), bfloat16), np.ones((3, 4), bfloat16).T[::2], np.ones((), bfloat16)):
        tensor = tensor_of(array)
        assert (tensor.dtype, tuple(tensor.shape)) == (torch.bfloat16, array.shape)
        tensor.fill_(1.5)
        assert (array == 1.5).all()


def test_views_of_numpy_arrays_are_shared():
    array = np.arange(60.0).reshape(6, 10)
    for view in (array[::2], array.T, array[:, 3], array[1:4, 2:9:3], np.broadcast_to(array[:1], (4, 10))):
        tensor = tensor_of(view, is_written=False)
        assert np.array_equal(tensor.numpy(), view) and tensor.data_ptr() == view.ctypes.data


def test_a_memory_map_is_shared(tmp_path):
    array = np.memmap(tmp_path / "values", np.float32, "w+", shape=(5,))
    tensor_of(array).fill_(3)
    assert (array == 3).all()


def test_other_arrays_are_shared_by_dlpack():
    tensor = torch.zeros(3, 4, dtype=torch.bfloat16)
    for foreign in (Foreign(tensor), Foreign(tensor.t())):
        shared = tensor_of(foreign)
        assert (shared.data_ptr(), shared.dtype) == (tensor.data_ptr(), tensor.dtype)
        assert shared.stride() == foreign.tensor.stride()


def test_what_is_only_read_may_be_read_only():
    array = np.arange(5.0)
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = tensor_of(array, is_written=False)
        del array  # the tensor keeps the memory
        assert tensor.tolist() == [0, 1, 2, 3, 4]
        assert tensor_of(pa.array([1.0, 2.0]), is_written=False).tolist() == [1, 2]


class Array(Foreign):
    __module__ = "jaxlib.array"


STRUCTURED = np.zeros(3, [("a", "f4"), ("b", "i2")])
READ_ONLY = np.zeros(3)
READ_ONLY.flags.writeable = False
REFUSED = {
    "a list": ([1.0], "list: not a torch.Tensor"),
    "a number": (np.float32(1), "float32: not a torch.Tensor"),
    "None": (None, "NoneType: not a torch.Tensor"),
    "read-only": (READ_ONLY, "read-only numpy array", "array.copy()"),
    "broadcast": (np.broadcast_to(np.zeros(1), 3), "read-only numpy array"),
    "negative strides": (np.zeros(3)[::-1], "negative strides (-8,)", "numpy.ascontiguousarray"),
    "byte order": (np.zeros(3, ">f4"), "dtype >f4", "astype"),
    "a field": (STRUCTURED["a"], "numpy array of dtype float32", "strides"),
    "fields": (STRUCTURED, "numpy array of dtype", "a"),
    "objects": (np.zeros(3, object), "numpy array of dtype object"),
    "words": (np.array(["a"]), "numpy array of dtype <U1"),
    "a mask": (np.ma.masked_array([1.0, 2.0], [True, False]), "masked", "filled()"),
    "pyarrow": (pa.array([1.0]), "pyarrow.DoubleArray", "must not be written to", "numpy.array"),
    "an immutable library": (Array(torch.zeros(3)), "jaxlib.Array", "must not be written to"),
    "sparse": (torch.ones(3).to_sparse(), "to_dense()"),
    "negated": (torch.ones(3, dtype=torch.complex64).conj().imag, "resolve_neg()"),
    "conjugated": (torch.ones(3, dtype=torch.complex64).conj(), "resolve_conj()"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_served_is_refused_by_name(case):
    array, *words = REFUSED[case]
    with pytest.raises(UnsupportedError) as error:
        tensor_of(array)
    assert all(word in str(error.value) for word in words), error.value


def test_what_dlpack_refuses_is_told():
    with pytest.raises(UnsupportedError, match="Foreign: torch.from_dlpack can't take it: .*grad"):
        tensor_of(Foreign(torch.zeros(3, requires_grad=True)))


@pytest.mark.parametrize("kind", [torch.complex64, torch.complex128, np.complex64, np.complex128])
def test_complex_numbers_are_pairs_of_floats(kind):
    for shape in ((), (0,), (3,), (2, 3)):
        array = torch.zeros(shape, dtype=kind) if isinstance(kind, torch.dtype) else np.zeros(shape, kind)
        pairs = tensor_of(array, SUM)
        pairs[..., 0], pairs[..., 1] = 3, 4
        assert pairs.numel() == 2 * (array.numel() if isinstance(array, torch.Tensor) else array.size)
        assert pairs.dtype == (torch.float32 if "64" in str(kind) else torch.float64)
        assert (array == 3 + 4j).all()
        assert tensor_of(array, AVG).shape == tensor_of(array).shape == pairs.shape
        with pytest.raises(ValueError, match="MAX.*complex"):
            tensor_of(array, MAX)


@pytest.mark.parametrize(
    "view",
    [
        lambda tensor: tensor[:, None].expand(12, 4),
        lambda tensor: tensor[:1].expand(12),
        lambda tensor: tensor.unfold(0, 5, 2),
        lambda tensor: torch.view_as_complex(tensor.view(6, 2)).expand(3, 6),
    ],
)
def test_elements_that_share_memory_are_read_but_not_written_to(view):
    tensor = view(torch.arange(12.0))
    assert tensor_of(tensor, is_written=False).data_ptr() == tensor.data_ptr()
    with pytest.raises(UnsupportedError, match=r"strides .*, whose elements share memory.*clone"):
        tensor_of(tensor)


def test_elements_of_strided_tensors_are_apart():
    tensor = torch.zeros(4, 6, 5)
    for view in (tensor.permute(2, 0, 1), tensor[::3, 1::2], tensor[:, 2], tensor[:, :1].expand(4, 1, 5)):
        assert tensor_of(view) is view


def test_the_future_of_other_arrays_waits_for_their_memory():
    memory, given = torch.zeros(3), [Foreign(torch.zeros(3)), lambda: "can't be pickled"]
    worker = Worker("test")
    handle = giving(worker.submit(lambda: None), given, memory)
    value = handle.get_future().wait()
    worker.close(10)
    assert value == given
    # What torch takes for the memory that a stream must wait for.
    assert [each.data_ptr() for each in _extract_tensors(value)] == [memory.data_ptr()]
