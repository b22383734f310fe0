"""What the plugin asks of DeepSpeed's engine, and says about it."""

from types import SimpleNamespace

import pytest

pytest.importorskip("deepspeed")

from deepspeed.comm.torch import TorchBackend
from deepspeed.runtime.engine import DeepSpeedEngine
from repository import ROOT

from ncz_plugins import Config, UnsupportedError
from ncz_plugins.deepspeed import GradientCompression, compression, patches
from ncz_plugins.deepspeed.engine import ATTRIBUTE, end_step, require_replaced


class ReducesByItself(TorchBackend):
    """As DeepSpeed's backend for oneCCL does."""

    def all_reduce(self, *arguments, **more):
        pass


def test_a_backend_that_reduces_by_itself_is_refused():
    require_replaced(object.__new__(TorchBackend))
    with pytest.raises(UnsupportedError, match="communicates by ReducesByItself"):
        require_replaced(object.__new__(ReducesByItself))


def test_a_deepspeed_that_is_too_old_is_refused(monkeypatch):
    monkeypatch.setattr("deepspeed.__version__", "0.17.6+abc")
    with pytest.raises(UnsupportedError, match=r"needs DeepSpeed 0\.19\.8 or newer, and 0\.17\.6\+abc is installed"):
        patches.install()
    assert f"deepspeed>={patches.OLDEST}\n" in (ROOT / "setup.cfg").read_text()  # which pip goes by


def engine_of(settings: dict, **attributes) -> SimpleNamespace:
    return SimpleNamespace(_config=SimpleNamespace(_param_dict=settings), **attributes)


def test_an_engine_that_is_older_than_the_plugin_does_not_train_uncompressed_without_a_word():
    steps = []
    take_step = end_step(steps.append)
    with pytest.raises(UnsupportedError, match="imported after deepspeed.initialize had made this engine"):
        take_step(engine_of({"communication_compression": "ncclz"}))
    assert not steps


def test_an_engine_without_the_key_takes_its_steps():
    steps = []
    take_step = end_step(steps.append)

    class Older(SimpleNamespace):
        communication_compression = None  # as the plugin leaves it on the class

    take_step(Older(_config=SimpleNamespace(_param_dict={"train_batch_size": 8})))
    take_step(engine_of({}, **{ATTRIBUTE: None}))
    assert len(steps) == 2


def test_the_first_line_says_where_ranks_have_nothing_to_send_each_other(monkeypatch):
    ranks = SimpleNamespace(is_initialized=lambda: True, get_world_size=lambda: 4)
    monkeypatch.setattr(compression, "dist", ranks)
    active = GradientCompression(Config())
    assert "gradient reductions are compressed (ZeRO 1, 4 ranks): " in compression.describe(active, 1, 4)
    assert "gradient reductions are compressed (ZeRO 1, 2 of 4 ranks): " in compression.describe(active, 1, 2)
    # As with pipeline stages of one rank each.
    line = compression.describe(active, 1, 1)
    assert line.endswith("nothing is compressed, as no two ranks of this engine have the same parameters (ZeRO 1)")
    never = GradientCompression(Config(transport={"min_bytes": "never"}))
    assert compression.describe(never, 1, 2).endswith("nothing is compressed, as transport.min_bytes is never (ZeRO 1)")


@pytest.mark.parametrize("gone", ["deepspeed.runtime.bf16_optimizer", "deepspeed.runtime.zero.stage3"])
def test_a_deepspeed_without_a_module_that_is_hooked_into_is_named_and_left_as_it_is(gone, monkeypatch):
    def import_module(name: str):
        if name == gone:
            raise ModuleNotFoundError(f"No module named {name!r}")
        return installed(name)

    installed = patches.import_module
    monkeypatch.setattr(patches, "import_module", import_module)
    monkeypatch.delattr(DeepSpeedEngine, ATTRIBUTE)  # as if nothing had been replaced yet
    before = dict(vars(DeepSpeedEngine))
    with pytest.raises(UnsupportedError, match=f"has no {gone}"):
        patches.install()
    assert dict(vars(DeepSpeedEngine)) == before
