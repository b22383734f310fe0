"""What docs/guides/coming-from.md says of DeepSpeed: what is to be deleted is refused, what is to be written trains.

Also that COCCL's file, as the page writes it anew, trains; and names of hivemind. The other diffs are run elsewhere:
tests/docs runs that of DDP, the guides of Horovod and DiLoCo the same lines.
"""

import json
import re
import subprocess
import sys

import pytest

pytest.importorskip("deepspeed")

import torch
import torch.distributed as dist
from on_rank import digest, rank, start
from repository import ROOT
from scenarios import DEEPSPEED, on_ranks, ranks
from small_engine import engine_of, loss_of, train, without_key
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

import ncz_plugins.deepspeed  # noqa: F401
from ncz_plugins.torch import backend

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs" / "guides" / "coming-from.md").read_text()
DIFFS = re.findall(r"^```diff\n( \{.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
# How DeepSpeed refuses the old side of each.
REFUSALS = (
    "OneBitAdam is not a supported DeepSpeed Optimizer",
    "'zero_optimization.zeropp_loco_param' is no longer supported",
)

# What COCCL's TOML becomes: the one file in YAML on the page.
(COCCLS,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
WIDTH, STEPS = 512, 30


def side(diff: str, other: str) -> dict:
    """A configuration: what stands in a diff, but for the lines of the other side."""
    return json.loads("\n".join(line[1:] for line in diff.splitlines() if not line.startswith(other)))


def on_cpus(config: dict) -> dict:
    """The same with an optimizer that DeepSpeed does not have to compile for CPUs."""
    given = config.get("optimizer", {"type": "AdamW", "params": {"lr": 1e-3}})
    return config | {"optimizer": {**given, "params": {**given["params"], "torch_adam": True}}}


@pytest.mark.parametrize("number", range(len(REFUSALS)))
@ranks(2, launcher="torch", **DEEPSPEED)
def test_what_is_to_be_deleted_is_refused_in_the_words_of_the_page(group, number):
    old = side(DIFFS[number], other="+")
    with pytest.raises(Exception) as refused:
        engine_of(old)
    assert REFUSALS[number] in str(refused.value)
    assert REFUSALS[number] in PAGE.replace("\n", " ")


@pytest.mark.parametrize("number", range(len(REFUSALS)))
@ranks(2, launcher="torch", **DEEPSPEED)
def test_what_is_to_be_written_trains_as_the_plain_run_with_a_quarter_of_the_bytes(group, number):
    assert len(DIFFS) == len(REFUSALS)
    config = on_cpus(side(DIFFS[number], other="-"))
    losses = []
    for given in (without_key(config), config):
        engine = engine_of(given)
        train(engine, range(5))
        losses.append(loss_of(engine, 5).item())
        if given is config:
            assert engine.communication_compression.stats.total.ratio > 4
        engine.destroy()
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_coccls_file_as_the_page_writes_it_trains_at_the_ratio_of_the_page(tmp_path):
    (file := tmp_path / "ncz.yaml").write_text(COCCLS)
    environment = {"NCZ_CONFIG": str(file)}
    found = on_ranks(2, trains_by_coccls_file, tmp_path, launcher="torch", environment=environment, **DEEPSPEED)
    for each in found:
        # It learns, and as well as over gloo.
        assert each["ncz"]["losses"][-1] < each["plain"]["losses"][0] / 3
        assert each["ncz"]["losses"][-1] == pytest.approx(each["plain"]["losses"][-1], rel=0.05)
        # "8 times fewer": 4 bits of 32, and a scale for each 256 values. One call for each bucket of a step.
        assert each["gradient"]["ratio"] == pytest.approx(7.75, abs=0.25)
        assert each["compressed_calls"] >= STEPS and "too small" not in each["bypasses"], each
        # `roles` lists activations: what is exchanged is compressed, by their own default.
        assert each["activation"]["ratio"] > 5
    # Ranks have the same bits, which are not those of the plain run.
    digests = {name: {each[name]["digest"] for each in found} for name in ("plain", "ncz")}
    assert [len(each) for each in digests.values()] == [1, 1] and digests["plain"] != digests["ncz"]


def trains_by_coccls_file() -> dict:
    """Train over gloo and over "ncz", exchange activations, and say what was counted."""
    start("ncz")
    plain = dist.new_group(backend="gloo")
    found = {"plain": trained(plain, plain), "ncz": trained(None, plain)}
    activations = torch.randn(1 << 20)
    dist.all_to_all_single(torch.empty_like(activations), activations)
    total = backend.of_group().stats.total
    for role in ("gradient", "activation"):
        found[role] = {"ratio": total.plain_bytes_by_role[role] / total.wire_bytes_by_role[role]}
    return found | {"compressed_calls": total.compressed_calls, "bypasses": total.bypasses}


def trained(group: dist.ProcessGroup | None, plain: dist.ProcessGroup) -> dict:
    """The losses of all ranks in each step of a regression under DDP, and a hash of this rank's weights at the end."""
    torch.manual_seed(0)
    wanted = torch.randn(WIDTH, WIDTH) / WIDTH**0.5
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    model = DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    inputs = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(rank))
    for _ in range(STEPS):
        loss = nn.functional.mse_loss(model(inputs), inputs @ wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(of_all := loss.detach() / 2, group=plain)
        losses.append(of_all.item())
    return {"losses": losses, "digest": digest(parameters_to_vector(model.parameters()))}


def test_what_is_to_be_deleted_of_hivemind_exists():
    pytest.importorskip("hivemind")
    names = sorted(set(re.findall(r"^-.*\b(hivemind(?:\.\w+)+)", PAGE, re.MULTILINE)))
    assert len(names) == 3
    program = "import pkgutil, sys; [pkgutil.resolve_name(name) for name in sys.argv[1:]]"
    subprocess.run([sys.executable, "-W", "ignore", "-c", program, *names], check=True, timeout=60)
