"""What docs/guides/coming-from.md says of DeepSpeed: what is to be deleted is refused, what is to be written trains.

Also names of hivemind. The other diffs are run elsewhere: tests/docs runs that of DDP, the guides of Horovod and DiLoCo
the same lines.
"""

import json
import re
import subprocess
import sys

import pytest

pytest.importorskip("deepspeed")

from repository import ROOT
from scenarios import DEEPSPEED, ranks
from small_engine import engine_of, loss_of, train, without_key

import ncz_plugins.deepspeed  # noqa: F401

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs" / "guides" / "coming-from.md").read_text()
DIFFS = re.findall(r"^```diff\n( \{.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
# How DeepSpeed refuses the old side of each.
REFUSALS = (
    "OneBitAdam is not a supported DeepSpeed Optimizer",
    "'zero_optimization.zeropp_loco_param' is no longer supported",
)


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


def test_what_is_to_be_deleted_of_hivemind_exists():
    pytest.importorskip("hivemind")
    names = sorted(set(re.findall(r"^-.*\b(hivemind(?:\.\w+)+)", PAGE, re.MULTILINE)))
    assert len(names) == 3
    program = "import pkgutil, sys; [pkgutil.resolve_name(name) for name in sys.argv[1:]]"
    subprocess.run([sys.executable, "-W", "ignore", "-c", program, *names], check=True, timeout=60)
