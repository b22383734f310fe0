"""On a real card: the tests that otherwise run on the emulator, and what only a card can do."""

import pytest
import test_cuda_batches
import test_cuda_coders
import test_cuda_kernels
import torch
from planes import in_order
from test_cuda_batches import *  # noqa: F403
from test_cuda_coders import *  # noqa: F403
from test_cuda_kernels import *  # noqa: F403
from test_cuda_kernels import REFERENCE, buffer, floats, steps_of

from ncz_plugins import kernels
from ncz_plugins.kernels.cuda import CudaBackend
from ncz_plugins.kernels.format import CHUNK, Coder, Coding, Predictor

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA device here", allow_module_level=True)


@pytest.fixture(scope="module")
def card():
    from card import CardLauncher  # needs CuPy

    return CudaBackend(CardLauncher())


@pytest.fixture(autouse=True)
def on_the_card(card, monkeypatch):
    for module in (test_cuda_kernels, test_cuda_coders, test_cuda_batches):
        monkeypatch.setattr(module, "cuda", lambda seed=0, sanitizer=None: card)


@pytest.mark.parametrize(
    "coding",
    [Coding(Coder.FIXED, Predictor.DELTA), Coding(Coder.HUFFMAN), Coding()],
    ids=test_cuda_kernels.coding_name,
)
def test_everything_can_be_captured_in_a_graph(coding):
    backend, count = kernels.cuda_backend(), 5 * CHUNK + 77
    values = floats(count, torch.float32).nan_to_num(0, 0, 0)
    inverse_steps, scales = steps_of(values, 6)
    expected, expected_sum, decoded = buffer(count), buffer(count), torch.empty(count)
    length = REFERENCE.encode(values, inverse_steps, coding, expected)
    sum_length = REFERENCE.reduce(expected[:length], values, inverse_steps, coding, expected_sum)
    REFERENCE.decode(expected[:length], scales, decoded)

    x, inverse, scale = values.cuda(), inverse_steps.cuda(), scales.cuda()
    frame, summed, out = buffer(count).cuda(), buffer(count).cuda(), torch.empty(count).cuda()

    def work():
        size = backend.encode(x, inverse, coding, frame)
        backend.decode(frame[:length], scale, out)
        return size, backend.reduce(frame[:length], x, inverse, coding, summed)

    work()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        size, sum_size = work()
    for tensor in (frame, summed, out):
        tensor.zero_()
    graph.replay()
    backend.check()
    assert size == length and torch.equal(in_order(frame[:length].cpu()), in_order(expected[:length]))
    assert sum_size == sum_length
    assert torch.equal(in_order(summed[:sum_length].cpu()), in_order(expected_sum[:sum_length]))
    assert torch.equal(out.cpu(), decoded)
