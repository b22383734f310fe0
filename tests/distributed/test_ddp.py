"""What compression does to DistributedDataParallel."""

import contextlib
import copy
import gc
import io
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from on_rank import device, digest, raises, rank, same_on_all_ranks, world_size
from scenarios import ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from turns import Pair, Passes, by_turns

from ncz_plugins import Communicator, MismatchError, Training, UnsupportedError
from ncz_plugins.core.call import plain_wire_bytes
from ncz_plugins.core.config import Config
from ncz_plugins.torch import ddp

SMALL = {"transport": {"min_bytes": 0}}
LOSSLESS = SMALL | {"quantizer": {"kind": "lossless"}}
WIDTH = 307  # a prime


class Net(nn.Module):
    """Parameters of 1, of prime, and of some hundred thousand elements; `spare` is used only where asked for."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 7)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x, spare: bool = True):
        x = self.second(self.first(x).relu()).relu()
        if spare:
            x = self.spare(x).relu()
        return self.last(x) * self.scale


class Layered(nn.Module):
    """Two layers with numbers between an embedding and a head."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(50, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.head = nn.Linear(64, 50)

    def forward(self, tokens):
        x = self.tokens(tokens)
        for layer in self.layers:
            x = x + layer(x).relu()
        return self.head(x)


def wrapped(group, dtype=torch.float32, **options) -> DistributedDataParallel:
    torch.manual_seed(0)
    model = Net().to(device, dtype)
    return DistributedDataParallel(model, process_group=group, **{"bucket_cap_mb": 0.4} | options)


def batches(count: int, dtype=torch.float32, seed: int = 0):
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    for _ in range(count):
        x = torch.randn(16, 64, generator=generator).to(device, dtype)
        yield x, torch.randint(0, 7, (16,), generator=generator).to(device)


def train(model, steps: int = 5, dtype=torch.float32, **arguments) -> list[float]:
    """The loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for x, target in batches(steps, dtype):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x, **arguments).float(), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def weights(model) -> torch.Tensor:
    return torch.cat([parameter.detach().view(-1) for parameter in model.parameters()]).cpu()


def same_replicas(model, group) -> None:
    same_on_all_ranks(digest(weights(model)), group)


def near(losses: list[float], expected: list[float]) -> None:
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=0.01, atol=0.01)


@ranks(2, 3, gpu=True)
def test_lossless_trains_as_plain_does(group):
    plain, ours = wrapped(group), wrapped(group)
    compression = ddp.compress(ours, LOSSLESS)
    expected, losses = train(plain), train(ours)
    if world_size == 2:  # then the order of sums is the same, and halving is exact
        assert losses == expected and torch.equal(weights(ours), weights(plain))
    near(losses, expected)
    same_replicas(ours, group)
    assert compression.stats.total.compressed_calls == compression.stats.total.calls > 5


@ranks(2, 3, gpu=True)
def test_at_a_bound_the_loss_is_that_of_plain(group):
    plain, ours = wrapped(group), wrapped(group)
    compression = ddp.compress(ours, SMALL)
    near(train(ours), train(plain))
    same_replicas(ours, group)
    total = compression.stats.total
    assert total.compressed_calls == total.calls and total.ratio > 5
    assert len(compression.stats.steps) == compression.training.step == 5


@ranks(2, gpu=True)
def test_at_a_fixed_rate_too(group):
    plain, ours = wrapped(group), wrapped(group)
    compression = ddp.compress(ours, SMALL | {"quantizer": {"mode": "bits", "value": 6}})
    near(train(ours), train(plain))
    same_replicas(ours, group)
    assert compression.stats.total.compressed_calls > 5


@ranks(2, gpu=True)
def test_options_of_ddp(group):
    for options in (
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"bucket_cap_mb": 25},
        {"find_unused_parameters": True},
    ):
        plain, ours = wrapped(group, **options), wrapped(group, **options)
        ddp.compress(ours, LOSSLESS)
        unused = {"spare": False} if "find_unused_parameters" in options else {}
        near(train(ours, **unused), train(plain, **unused))
        same_replicas(ours, group)


@ranks(2, gpu=True)
def test_other_dtypes(group):
    for dtype in (torch.bfloat16, torch.float64):
        plain, ours = wrapped(group, dtype), wrapped(group, dtype)
        compression = ddp.compress(ours, SMALL)
        near(train(ours, dtype=dtype), train(plain, dtype=dtype))
        same_replicas(ours, group)
        assert compression.stats.total.compressed_calls >= 5


@ranks(2, gpu=True)
def test_autocast_and_a_scaler(group):
    """Gradients that overflow come out as such: the scaler skips the step, on all ranks."""
    model = wrapped(group)
    compression = ddp.compress(model, SMALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**8)
    before = weights(model)
    for number, (x, target) in enumerate(batches(3)):
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), target)
        factor = float("inf") if number == 0 and rank == world_size - 1 else 1
        scaler.scale(loss * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(weights(model), before) == (number == 0)
    assert scaler.get_scale() == 2.0**7
    assert "non-finite" in compression.stats.total.bypasses
    same_replicas(model, group)


@ranks(2, gpu=True)
def test_gradients_are_accumulated(group):
    plain, ours = wrapped(group), wrapped(group)
    compression = ddp.compress(ours, LOSSLESS)
    for model in (plain, ours):
        steps = list(batches(4))
        for number, (x, target) in enumerate(steps):
            if number % 2 == 0:
                with model.no_sync():
                    nn.functional.cross_entropy(model(x), target).backward()
            else:
                nn.functional.cross_entropy(model(x), target).backward()
    for mine, expected in zip(ours.parameters(), plain.parameters()):
        torch.testing.assert_close(mine.grad, expected.grad)
    assert compression.training.step == 2  # only passes that reduce are steps


@ranks(2, 3, gpu=True)
def test_ranks_may_have_different_numbers_of_batches(group):
    plain, ours = wrapped(group), wrapped(group)
    compression = ddp.compress(ours, LOSSLESS)
    for model in (plain, ours):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join():
            for x, target in batches(2 + rank):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), target).backward()
                optimizer.step()
    torch.testing.assert_close(weights(ours), weights(plain))
    same_replicas(ours, group)
    assert compression.training.step == 1 + world_size


@ranks(2, gpu=True)
def test_joining_with_another_divisor_is_refused(group):
    model = wrapped(group)
    ddp.compress(model, SMALL)

    def step():
        with model.join(divide_by_initial_world_size=False):
            for x, target in batches(1):
                nn.functional.cross_entropy(model(x), target).backward()

    raises(UnsupportedError, step, "divide_by_initial_world_size")


@ranks(2, gpu=True)  # importing the compiler takes each rank longer than all else here
def test_compiled_models(group):
    plain, ours = wrapped(group, bucket_cap_mb=2), wrapped(group, bucket_cap_mb=2)  # the first one has 1 MiB
    compression = ddp.compress(ours, LOSSLESS)
    near(train(torch.compile(ours, backend="aot_eager"), 2), train(plain, 2))
    same_replicas(ours, group)
    assert compression.training.step == 2
    before = torch.compile(wrapped(group, bucket_cap_mb=2), backend="aot_eager")
    compression = ddp.compress(before, LOSSLESS)
    near(train(before, 2), train(wrapped(group, bucket_cap_mb=2), 2))
    assert compression.training.step == 2


@ranks(2, gpu=True)
def test_policies_know_parameters_by_name(group):
    model = wrapped(group)
    config = SMALL | {
        "policies": [{"name": "*.bias", "action": "skip"}, {"name": "scale", "quantizer": {"value": 0.01}}]
    }
    compression = ddp.compress(model, config)
    plain = wrapped(group)
    near(train(model), train(plain))
    same_replicas(model, group)
    assert compression.stats.total.bypasses.keys() == {"policy"} and compression.stats.total.compressed_calls > 0


@ranks(2, gpu=True)
def test_error_feedback_outlives_new_buckets(group):
    """DDP makes its buckets anew after the first step."""
    model = wrapped(group)
    compression = ddp.compress(model, SMALL | {"quantizer": {"error_feedback": True, "value": 1.0}})
    train(model, 3)
    kept = compression.training.residuals.by_name
    sizes = {name: parameter.numel() for name, parameter in model.module.named_parameters()}
    assert {name: residual.numel() for name, residual in kept.items()} == sizes
    assert kept["second.weight"].abs().max() > 0
    same_replicas(model, group)

    resumed = wrapped(group)
    resumed.load_state_dict(model.state_dict())
    again = ddp.compress(resumed, compression.communicator.config)
    again.load_state_dict(compression.state_dict())
    assert again.training.step == 3 and again.training.residuals.by_name.keys() == kept.keys()
    train(resumed, 1)
    same_replicas(resumed, group)


@ranks(2, gpu=True)
def test_policies_know_the_shapes_of_parameters(group):
    """Not that of their flat bucket."""
    plain, ours = wrapped(group), wrapped(group)
    ddp.compress(ours, SMALL | {"policies": [{"shape": "vector", "action": "skip"}]})
    for model in (plain, ours):
        train(model, 1)
    for (name, mine), expected in zip(ours.named_parameters(), plain.parameters()):
        assert torch.allclose(mine.grad, expected.grad, rtol=1e-5, atol=1e-8) == (mine.dim() < 2), name


class SomebodysMuon(torch.optim.SGD):
    """Known by its name."""


OPTIMIZERS = {each.__name__: each for each in (torch.optim.Muon, SomebodysMuon, torch.optim.SGD)}


@ranks(2)
@pytest.mark.parametrize(
    ("config", "optimizer", "warns"),
    [
        ("ncclz", "Muon", True),
        ("ncclz:small", "SomebodysMuon", True),
        ("ncclz:muon", "Muon", False),
        ("ncclz:muon-ddp", "Muon", True),  # these matrices are in no layer that has a number
        ({"policies": [{"shape": "matrix", "quantizer": {"kind": "lossless"}}]}, "Muon", False),
        ("ncclz", "SGD", False),
    ],
)
def test_the_first_rank_warns_once_of_a_bound_that_is_visible_under_muon(group, config, optimizer, warns):
    model = wrapped(group)
    compression = ddp.compress(model, config)
    others = torch.optim.Muon([nn.Parameter(torch.ones(2, 2, device=device))])  # of a model that is not compressed
    trains = OPTIMIZERS[optimizer]([each for each in model.parameters() if each.dim() == 2], lr=1e-3)
    rest = torch.optim.AdamW([each for each in model.parameters() if each.dim() != 2])
    said = io.StringIO()
    for x, target in batches(3):
        nn.functional.cross_entropy(model(x), target).backward()
        with contextlib.redirect_stderr(said):
            for each in (others, trains, rest):
                each.step()
                each.zero_grad()
    assert said.getvalue().count(f"warning: {optimizer} trains ") == int(warns and rank == 0)
    assert said.getvalue().count("warning") == int(warns and rank == 0)
    remedy = "ncclz:muon" if config == "ncclz:muon-ddp" else "ncclz:muon-ddp"
    assert said.getvalue().count(f'"{remedy}"') == int(warns and rank == 0)
    compression.close()


@ranks(2, 3, gpu=True)
def test_the_preset_for_muon_turns_the_matrices_of_layers(group):
    """And no embeddings. The first rank has nothing to warn of."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Layered().to(device), process_group=group)
    compression = ddp.compress(model, Config.load("ncclz:muon-ddp").with_transport(min_bytes=0))
    optimizer = torch.optim.Muon([each.weight for each in model.module.layers], lr=1e-3)
    generator = torch.Generator().manual_seed(rank)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randint(0, 50, (16,), generator=generator).to(device)).square().mean().backward()
            optimizer.step()
    assert "warning" not in said.getvalue()
    turned = {name.rpartition("/")[2] for name in compression.training.rotations.by_name}
    assert turned == {"layers.0.weight", "layers.1.weight"}
    same_on_all_ranks([digest(parameter.grad) for parameter in model.parameters()], group)
    compression.close()


def loses_nothing(group, used, begin=lambda model, used: model.zero_grad(), accumulates=False, **options):
    """Fail unless the sum of all that came out differs from the exact sum by what is kept, and by no more.

    Args:
        used: gives the names that a rank uses in a pass, from the pass's number and the rank.
        begin: prepares the model for a pass, given the names that this rank uses.
        accumulates: whether only every other pass reduces, the first and the last among them.
    """
    model = DistributedDataParallel(Pair().to(device), process_group=group, **options)
    compression = ddp.compress(model, SMALL | {"quantizer": {"value": 1.0, "error_feedback": True}})
    passes, of_any = Passes(), set()
    for number in range(9):
        mine, reduces = used(number, rank), not accumulates or number % 2 == 0
        if not of_any:
            begin(model, mine)
        with contextlib.nullcontext() if reduces else model.no_sync():
            passes.backward(model, mine)
        of_any.update(name for each in range(world_size) for name in used(number, each))
        while reduces and of_any:  # of others DDP drops the result
            name = of_any.pop()
            passes.came_out(name, getattr(model.module, name).weight.grad)
    passes.require_kept(compression, group)


@ranks(2, 3, gpu=True)
def test_error_feedback_loses_nothing_of_parameters_that_take_turns(group):
    """DDP drops what comes out for a parameter that no rank used."""

    def toggle(model, used):
        model.zero_grad()
        for name, parameter in model.module.named_parameters():
            parameter.requires_grad_(name.split(".")[0] in used)

    def keep_old_gradients(model, used):
        for name in used:
            getattr(model.module, name).weight.grad = None

    def zero_in_place(model, used):
        model.zero_grad(set_to_none=False)

    for options in ({}, {"gradient_as_bucket_view": True}):
        loses_nothing(group, by_turns, find_unused_parameters=True, **options)
        loses_nothing(group, by_turns, keep_old_gradients, find_unused_parameters=True, **options)
        loses_nothing(group, by_turns, zero_in_place, find_unused_parameters=True, **options)
    loses_nothing(group, by_turns, toggle, find_unused_parameters=True)


@ranks(2, 3, gpu=True)
def test_error_feedback_loses_nothing_of_parameters_that_some_ranks_use(group):
    def on_one_rank(number, rank):
        return ["left", "right"] if number % world_size == rank else ["left"]

    loses_nothing(group, on_one_rank, find_unused_parameters=True)


@ranks(2, gpu=True)
def test_error_feedback_loses_nothing_where_gradients_are_accumulated(group):
    def both(number, rank):
        return ["left", "right"]

    def in_some_pass(number, rank):
        return [("left", "right")[number // 3 % 2]]

    loses_nothing(group, both, accumulates=True)
    loses_nothing(group, both, accumulates=True, static_graph=True)
    loses_nothing(group, by_turns, accumulates=True, find_unused_parameters=True)
    loses_nothing(group, in_some_pass, accumulates=True, find_unused_parameters=True)


@ranks(2, gpu=True)
def test_the_guard_ends_a_training(group):
    model = wrapped(group)
    guard = {"every": 1, "max_relative_error": 1e-6, "on_alarm": "stop"}
    ddp.compress(model, SMALL | {"guard": guard})
    raises(RuntimeError, lambda: train(model, 1), "AccuracyError", "relative error")


@ranks(2, gpu=True)
def test_a_group_of_one_rank_trains(group):
    alone = [torch.distributed.new_group([each]) for each in range(world_size)][rank]
    model = wrapped(alone, bucket_cap_mb=0.02)
    compression = ddp.compress(model, SMALL)
    train(model, 20)
    assert compression.training.step == 20 and compression.stats.total.bypasses.keys() == {"one rank"}


class Sparse(nn.Module):
    """Gradients that are sparse, complex and ordinary."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(1000, 16, sparse=True)
        # With torch 2.6, whose process groups have no `abort`, Gloo broadcasts no complex numbers.
        is_torch_2_6 = not hasattr(dist.ProcessGroup, "abort")
        self.turn = nn.Parameter(torch.ones(16, dtype=torch.float64 if is_torch_2_6 else torch.complex64))
        self.last = nn.Linear(16, 7)

    def forward(self, tokens):
        return self.last((self.embedding(tokens).mean(1) * self.turn).real.float())


@ranks(2, gpu=True)
def test_sparse_and_complex_gradients(group):
    if device.type == "cuda":
        return  # NCCL has no sums of sparse tensors
    gradients = []
    for config in (None, LOSSLESS):
        torch.manual_seed(0)
        model = DistributedDataParallel(Sparse(), process_group=group)
        compression = config and ddp.compress(model, config)
        tokens = torch.randint(0, 1000, (8, 4), generator=torch.Generator().manual_seed(rank))
        for _ in range(2):
            model.zero_grad()
            model(tokens).square().sum().backward()
        gradients.append([each.grad.to_dense() for each in model.parameters()])
    for mine, expected in zip(*gradients):
        torch.testing.assert_close(mine, expected)
    stats, sparse = compression.stats, model.module.embedding.weight.grad
    sent = plain_wire_bytes("all_reduce", sparse._indices().nbytes + sparse._values().nbytes, world_size)
    assert stats.total.bypasses == {"sparse": 2} and stats.total.bypassed_bytes == {"sparse": 2 * sent}
    assert compression.training.step == 2 and [each.calls for each in stats.steps] == [3, 3]


@ranks(2, gpu=True)
def test_the_hook_by_itself(group):
    model = wrapped(group)
    state = ddp.Compression(SMALL, group, model.module.named_parameters())
    model.register_comm_hook(state, ddp.hook)
    train(model, 2)
    assert state.training.step == 2 and state.stats.total.compressed_calls > 0
    same_replicas(model, group)
    state.close()


@ranks(2, gpu=True)
def test_buckets_go_with_their_model(group):
    """Also where compression outlives it, and Python collects no garbage."""
    state, buffers = ddp.Compression(SMALL, group), []

    def noting(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        buffers.append(weakref.ref(buffer))
        return ddp.hook(state, bucket)

    gc.collect()
    gc.disable()
    model = wrapped(group)
    model.register_comm_hook(state, noting)
    train(model, 2)
    del model
    deadline = time.monotonic() + 10
    while any(each() is not None for each in buffers):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    gc.enable()
    assert len(buffers) > 2
    state.close()


@ranks(2, gpu=True)
def test_two_models_share_a_training(group):
    training = Training(SMALL)
    models = [wrapped(group), wrapped(group)]
    for model in models:
        ddp.compress(model, training=training)
        train(model, 2)
        same_replicas(model, group)
    assert training.step == 4 and training.stats.total.compressed_calls > 0


@ranks(2, gpu=True)
def test_two_models_share_a_training_and_a_backward_pass(group):
    """A step of the one ends among calls of the other, on some ranks later: warm-up ends with the same call on all."""
    training = Training(SMALL | {"steps": {"warmup": 3}})
    models = [wrapped(group), wrapped(group)]
    for model in models:
        communicator = ddp.compress(model, training=training).communicator

        def late(end_step=communicator.end_step):
            time.sleep(0.05 * (rank == 1))
            return end_step()

        communicator.end_step = late
    for x, target in batches(3):
        sum(nn.functional.cross_entropy(model(x), target) for model in models).backward()
    assert training.step == 6 and {"warm-up"} == training.stats.total.bypasses.keys()
    for model in models:
        same_on_all_ranks(digest(torch.cat([each.grad.view(-1) for each in model.parameters()]).cpu()), group)


@ranks(2, gpu=True)
def test_copies_of_a_model(group):
    """Averaged, and of a file: torch gives them no hook, until they are compressed themselves."""
    model = wrapped(None)  # torch copies those of the default group only
    compression = ddp.compress(model, SMALL)
    average = torch.optim.swa_utils.AveragedModel(model)
    train(model, 1)
    average.update_parameters(model)
    calls = compression.stats.total.calls
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        of_other = ddp.compress(other, SMALL)
        train(other, 1)
        same_replicas(other, group)
        assert of_other.stats.total.compressed_calls > 0 and compression.stats.total.calls == calls


@ranks(2, gpu=True)
def test_what_can_not_be_served_is_refused(group):
    model = wrapped(group)
    raises(UnsupportedError, lambda: ddp.compress(model.module), "Net", "wrap")
    ddp.compress(model, SMALL)
    raises(UnsupportedError, lambda: ddp.compress(model, SMALL), "hook already")
    raises(MismatchError, lambda: ddp.compress(wrapped(group), {"quantizer": {"value": 0.1 + rank}}), "value")
    if device.type == "cpu":  # the buffer of those that wait is in host memory, or where `device_ids` says
        net = Net()
        late = {"delay_all_reduce_named_params": [("second.weight", net.second.weight)]}
        late = DistributedDataParallel(net, process_group=group, param_to_hook_all_reduce=net.first.weight, **late)
        raises(UnsupportedError, lambda: ddp.compress(late, SMALL), "delay_all_reduce_named_params", "leave it out")
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        model = wrapped(group)
    raises(UnsupportedError, lambda: ddp.compress(model, SMALL), "python_reducer", "default")


@ranks(2, gpu=True)
def test_futures_of_handles(group):
    with Communicator(SMALL | {"policies": [{"name": "b", "action": "skip"}]}, group) as communicator:
        from ncz_plugins import ParameterSlice

        whole = torch.full([30], rank + 1.0, device=device)
        parts = [ParameterSlice("a", 10), ParameterSlice("b", 20)]
        large = torch.full([100_000], rank + 1.0, device=device)
        integers = torch.arange(5, device=device)
        handles = [
            communicator.all_reduce(large, async_op=True),
            communicator.all_reduce(whole, async_op=True, parts=parts),
            communicator.all_reduce(integers, async_op=True),
        ]
        futures = [handle.get_future() for handle in handles]
        doubled = futures[0].then(lambda done: 2 * done.value()[0]).wait()
        exact = sum(range(1, world_size + 1))
        torch.testing.assert_close(doubled.cpu(), torch.full([100_000], 2.0 * exact), rtol=0.5, atol=0)
        for future, tensor in zip(futures, (large, whole, integers)):
            [result] = future.wait()
            assert result is tensor
        assert torch.equal(whole[10:].cpu(), torch.full([20], float(exact)))
        assert integers.tolist() == [world_size * i for i in range(5)]
