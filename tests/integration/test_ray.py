"""Ray Train's TorchTrainer, with real processes of Ray: the backend `ncz` by its name, and the hook of DDP."""

import json
import os
import shutil
import tempfile
from importlib.util import find_spec

import pytest
from on_rank import folder
from scenarios import on_ranks

from ncz_plugins.torch import private

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")]
STEPS = 4


def train_on_two_workers(backend: str) -> dict[str, list[dict]]:
    """What both workers of a TorchTrainer with this backend see, in trainings that reduce gradients in several ways."""
    os.environ |= {
        "HOME": str(folder()),  # Ray writes a token and results there
        "RAY_USAGE_STATS_ENABLED": "0",
        # Busy machines start processes slowly.
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "200",
        "RAY_raylet_start_wait_time_s": "200",
    }
    import ray
    from ray.train import ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    def loop(config):
        # Ray sends this function to the workers, which can't import the module of the test.
        import torch
        import torch.distributed as dist
        from ray.train.torch import prepare_data_loader, prepare_model

        from ncz_plugins.torch import backend, ddp

        def trained(hook: bool, group: dist.ProcessGroup | None = None) -> dict:
            torch.manual_seed(0)
            layers = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))
            model = prepare_model(layers, parallel_strategy_kwargs={"process_group": group})
            compression = ddp.compress(model, "ncclz") if hook else None
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            inputs = torch.randn(64, 256)
            dataset = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
            losses = []
            for x, y in prepare_data_loader(torch.utils.data.DataLoader(dataset, batch_size=8)):
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            weights = torch.cat([each.detach().flatten() for each in model.parameters()])
            everyone = [torch.empty_like(weights) for _ in range(2)]
            dist.all_gather(everyone, weights)
            seen = {"same": torch.equal(*everyone), "losses": losses}
            if compression:
                seen["counted"] = compression.stats.total.compressed_calls
            return seen

        gloo = dist.new_group(backend="gloo")
        found = {"plain": trained(False, gloo), "hook": trained(True, gloo)}
        if dist.get_backend() == "ncz":
            found["backend"] = trained(False)
            average = torch.tensor(found["backend"]["losses"])
            dist.all_reduce(average, dist.ReduceOp.AVG)
            total = backend.of_group().stats.total
            found["backend"]["average"] = average.tolist()
            found["backend"]["min_bytes"] = backend.of_group().training.config.transport.min_bytes
            found["backend"]["counted"] = {"compressed": total.compressed_calls} | total.bypasses
        with open(f"{config['folder']}/worker{dist.get_rank()}.json", "w") as file:
            json.dump(found, file)

    place = tempfile.mkdtemp(prefix="ray")  # the paths of Ray's sockets must be short
    settings = folder() / "settings.yaml"
    settings.write_text("transport: {min_bytes: 100KiB}\n")
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 << 20,
        runtime_env={"env_vars": {"NCZ_CONFIG": str(settings)}},
        _temp_dir=place,
    )
    try:
        TorchTrainer(
            loop,
            train_loop_config={"folder": str(folder())},
            torch_config=TorchConfig(backend=backend),
            scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
        ).fit()
    finally:
        ray.shutdown()
        shutil.rmtree(place, ignore_errors=True)
    first, second = (json.loads((folder() / f"worker{rank}.json").read_text()) for rank in (0, 1))
    return {way: [first[way], second[way]] for way in first}


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> dict[str, list[dict]]:
    """What both workers see, for each way to reduce gradients."""
    # Before torch 2.14 a backend has its name once its module is imported.
    backend = "ncz" if private.PythonBackend else "gloo"
    [seen] = on_ranks(1, train_on_two_workers, tmp_path_factory.mktemp("ray"), backend, seconds=290)
    return seen


def check(found: list[dict], plain: list[dict]) -> None:
    """Fail unless both workers have the same weights, and losses near those of plain training."""
    for each, its_plain in zip(found, plain):
        assert each["same"] and len(each["losses"]) == STEPS
        assert each["losses"] == pytest.approx(its_plain["losses"], rel=0.02)
        assert each["losses"] != its_plain["losses"]


@pytest.mark.skipif(private.PythonBackend is None, reason="before torch 2.14 the name must be imported")
def test_the_trainer_takes_the_backend_by_its_name(seen):
    found = seen["backend"]
    check(found, seen["plain"])
    exact = [sum(pair) / 2 for pair in zip(*(each["losses"] for each in found))]
    for each in found:
        assert each["average"] == pytest.approx(exact, rel=1e-6)  # what is no gradient is averaged exactly
        counted = each["counted"]
        counted.pop("not compressed by the backend")
        assert counted == {"compressed": STEPS, "role not enabled": 1}
        assert each["min_bytes"] == 100 << 10  # NCZ_CONFIG has reached the workers


def test_a_model_that_the_trainer_prepared_takes_the_hook(seen):
    check(seen["hook"], seen["plain"])
    assert [each["counted"] for each in seen["hook"]] == [STEPS, STEPS]
