"""verl's own CheckpointEngineManager and workers, on CPUs in processes of Ray, with our checkpoint engine.

verl pins transformers to older versions than the other tests need, so it is not among the packages that `make setup`
installs. Run this file where `pip install verl` has been.
"""

import asyncio
import os
import shutil
import tempfile
from importlib.util import find_spec

import pytest
from on_rank import attempt, folder, leave_alone, rank, start
from scenarios import on_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("verl") is None, reason="verl pins another transformers: this runs where it is there"),
]
VERSIONS, REFUSED = 4, 3  # the latter: which version can't be published
MODULE = "ncz_plugins.weights.engines.verl"


def update_rollouts(actors: int, rollouts: int) -> list[dict]:
    """What verl's manager and all rollouts saw of each version. One rollout is new before the last one."""
    os.environ |= {"HOME": str(folder()), "RAY_USAGE_STATS_ENABLED": "0", "RAY_raylet_start_wait_time_s": "200"}
    import ray
    import torch
    from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry, CheckpointEngineWorker
    from verl.single_controller.base import Worker
    from verl.single_controller.base.decorator import Dispatch, register
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.utils.import_utils import import_external_libs
    from verl.workers.config import CheckpointEngineConfig, RolloutConfig

    class Actor(Worker):
        """A trainer whose weights change a little with each version."""

        def __init__(self, module, key_file):
            super().__init__()
            import_external_libs(module)
            # The other actors need no key.
            how = {"bucket_size": 0, "is_master": self.rank == 0, "key_file": key_file if self.rank == 0 else "none"}
            self.checkpoint_engine = CheckpointEngineRegistry.new("ncz", **how)

        @staticmethod
        def weights(version):
            random = torch.Generator().manual_seed(0)
            for at in range(4):
                weight = 0.02 * torch.randn(200, 300, generator=random)
                yield (
                    f"layers.{at}.weight",
                    (weight + 1e-5 * version * torch.randn(200, 300, generator=random)).bfloat16(),
                )

        @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
        async def update_weights(self, global_steps=None, mode="auto"):
            weights = self.weights(global_steps)
            if global_steps == REFUSED:
                weights = ((name, weight.to_sparse()) for name, weight in weights)
            return await self.checkpoint_engine.send_weights(weights, global_steps=global_steps)

        @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
        def execute_checkpoint_engine(self, method, *args, **kwargs):
            return getattr(self.checkpoint_engine, method)(*args, **kwargs)

    class Inference:
        """What an inference engine would load."""

        replica_rank, is_leader_rank = 0, True

        async def update_weights(self, weights, global_steps, wire_format):
            assert wire_format == "named_tensors"
            self.version, self.weights = global_steps, {name: tensor.clone() async for name, tensor in weights}

    class Rollout(CheckpointEngineWorker):
        def __init__(self, rollout_config, model_config):
            super().__init__(rollout_config, model_config, Inference())

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def has_weights(self):
            expected = dict(Actor.weights(self.server_adapter.version))
            found = self.server_adapter.weights
            return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def forget(self, key_file):
            if self.rank == 0:
                self.checkpoint_engine = type(self.checkpoint_engine)(bucket_size=0, key_file=key_file)

    class Replica:
        def __init__(self, workers):
            self.workers = workers

        async def nothing(self, *args, **kwargs):
            pass

        abort_all_requests = resume_generation = release_kv_cache = resume_kv_cache = nothing

    key_file = str(folder() / "key")
    (folder() / "key").write_bytes(bytes(range(32)))
    place = tempfile.mkdtemp(prefix="ray")  # the paths of Ray's sockets must be short
    ray.init(num_cpus=8, include_dashboard=False, object_store_memory=100 << 20, _temp_dir=place)
    try:
        kwargs = {"ncz": {"key_file": key_file}}
        config = CheckpointEngineConfig(backend="ncz", custom_backend_module=MODULE, engine_kwargs=kwargs)

        def group(cls, size, **arguments):
            pool = RayResourcePool([size], use_gpu=False, max_colocate_count=1)
            made = RayClassWithInitArgs(ray.remote(cls), **arguments)
            return RayWorkerGroup(pool, made, device_name="cpu")

        actor_group = group(Actor, actors, module=MODULE, key_file=key_file)
        settings = {"rollout_config": RolloutConfig(name="vllm", checkpoint_engine=config), "model_config": None}
        rollout_group = group(Rollout, rollouts, **settings)
        manager = CheckpointEngineManager(config, actor_group, [Replica([each]) for each in rollout_group.workers])
        seen = []
        for version in range(VERSIONS + 1):
            if version == VERSIONS:
                rollout_group.forget(key_file)
            try:
                found = manager.update_weights(global_steps=version)
            except ray.exceptions.RayTaskError as error:
                if version != REFUSED:
                    raise
                found = {"error": str(error)}
            seen.append(found | {"same": rollout_group.has_weights()})
        return seen
    finally:
        ray.shutdown()
        shutil.rmtree(place, ignore_errors=True)


@pytest.mark.parametrize("actors,rollouts", [(2, 3)])
def test_every_rollout_has_every_version_and_later_ones_take_few_bytes(actors, rollouts, tmp_path):
    environment = {"VERL_LOGGING_LEVEL": "WARNING", "TRANSFORMERS_OFFLINE": "1"}
    how = {"imports": "scenarios", "seconds": 280, "environment": environment}
    [seen] = on_ranks(1, update_rollouts, tmp_path, actors, rollouts, **how)
    whole = seen[0]["ncz/bytes_sent"]
    for version, found in enumerate(seen):
        assert found["same"] == [True] * rollouts
        if version == REFUSED:
            assert "UnsupportedError" in found["error"] or "could not publish" in found["error"], found
        elif version == VERSIONS:  # changes for two, all of it for the one that is new
            assert whole < found["ncz/bytes_sent"] < 1.6 * whole
        elif version:
            assert found["ncz/bytes_sent"] < 0.3 * whole


def lose(dies: int) -> None:
    """An update in which one of two workers dies after both have connected."""
    import torch
    import torch.distributed as dist
    from verl.checkpoint_engine import CheckpointEngineRegistry
    from verl.utils.import_utils import import_external_libs

    start()
    import_external_libs(MODULE)
    engine = CheckpointEngineRegistry.new("ncz", bucket_size=0, is_master=rank == 0, timeout=30)
    found = [None, None]
    dist.all_gather_object(found, engine.prepare())
    both = engine.build_topology(1, 1, found)
    engine.init_process_group(**{name: values[0] for name, values in both[rank].items()})
    dist.barrier()
    if rank == dies:
        os._exit(0)
    if rank == 0:
        leave_alone(attempt(lambda: asyncio.run(engine.send_weights(iter([("w", torch.ones(9))])))))
    leave_alone(attempt(lambda: asyncio.run(anext(engine.receive_weights()))))


@pytest.mark.parametrize("dies", [0, 1])
def test_a_dead_worker_is_an_error(dies, tmp_path):
    failed = on_ranks(2, lose, tmp_path, dies, imports="scenarios", seconds=200)[1 - dies]
    assert failed["error"] == "PeerError" and failed["seconds"] < 60, failed
