"""`ncz check FILE --model SPEC`, run as a user runs it: models found, what their parameters get, and every mistake."""

import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
import yaml
from repository import ROOT
from torch import nn

from ncz_plugins import ConfigError
from ncz_plugins.cli.check import treatments
from ncz_plugins.cli.check.model import load_model
from ncz_plugins.cli.main import main
from ncz_plugins.core.bypass import Bypass
from ncz_plugins.core.config import Config

GPT = ROOT / "examples" / "gpt.py"

MODELS = """
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import Linear
from neighbor import WIDTH


@dataclass
class Sizes:
    width: int = WIDTH


class Net(nn.Sequential):
    def __init__(self, sizes: Sizes | None = None):
        super().__init__(nn.Linear((sizes or Sizes()).width, 2))


class Needy(nn.Module):
    def __init__(self, width, *, depth):
        super().__init__()


def small() -> Net:
    return Net(Sizes(3))


def bare():
    return small()


def reads_values():
    net = small()
    assert net[0].weight[0, 0].item() < 9
    return net


def broken():
    raise RuntimeError("no weights here")


def leaves():
    raise SystemExit(3)


def number():
    return 7


def lazy():
    return nn.LazyLinear(3)


ready = small()
ANSWER = 42
"""


@pytest.fixture
def models(tmp_path, monkeypatch):
    """The folder of a file that holds models and mistakes, and of what it imports."""
    monkeypatch.chdir(tmp_path)
    Path("zoo.py").write_text(MODELS)
    Path("neighbor.py").write_text("WIDTH = 5\n")
    before = set(sys.modules)
    yield tmp_path
    for name in {"zoo", "neighbor", "ncz_check_zoo"} & set(sys.modules) - before:
        del sys.modules[name]


@pytest.fixture
def check(capsys, tmp_path):
    """Run `ncz check` with these settings on a model: exit code, stdout, stderr."""

    def run(settings, *arguments, name="c.yaml"):
        (tmp_path / name).write_text(settings)
        code = main(["check", str(tmp_path / name), *map(str, arguments)])
        output = capsys.readouterr()
        return code, output.out, output.err

    return run


def cells(output):
    """Every line's cells, by the first one."""
    lines = (re.split(r"\s{2,}", line.strip()) for line in output.splitlines() if line.strip())
    return {line[0]: line[1:] for line in lines}


# ------------------------------------------------------------------ finding and building models


@pytest.mark.parametrize(
    "spec, elements",
    [("zoo.py:Net", 12), ("zoo:Net", 12), ("zoo.py:small", 8), ("zoo.py:bare", 8), ("zoo.py:reads_values", 8)],
)
def test_what_makes_a_model_without_arguments_is_found(models, spec, elements):
    path = list(sys.path)
    name, model = load_model(spec)
    assert name == spec.split(":")[1] and sum(p.numel() for p in model.parameters()) == elements
    assert all(p.is_meta for p in model.parameters()) == (name != "reads_values")
    assert sys.path == path


def test_a_model_that_is_there_is_taken_as_it_is(models):
    _, model = load_model(f"{models}/zoo.py:ready")
    assert isinstance(model, nn.Module) and not any(p.is_meta for p in model.parameters())


def test_a_name_may_be_left_out_where_there_is_one_model_only(models):
    assert load_model(str(GPT))[0] == "GPT"
    Path("one.py").write_text("from zoo import Net, small\nclass One(Net): pass\ndef main(): raise SystemExit\n")
    assert load_model("one.py")[0] == "One"
    Path("odd.py").write_text(
        "from __future__ import annotations\nfrom zoo import Net\nclass One(Net): pass\n"
        "def unknown() -> What: raise SystemExit\n"  # an annotation that nothing makes sense of
    )
    assert load_model("odd.py")[0] == "One"
    Path("none.py").write_text("from zoo import Net, small\n")
    for spec, found in (("zoo.py", "contains several models, Net, small, ready"), ("none.py", "contains no model")):
        with pytest.raises(ConfigError, match=f"--model {spec}: .*{found}: add :NAME"):
            load_model(spec)


def test_a_model_too_large_for_any_memory_costs_nothing(models):
    Path("huge.py").write_text(
        "from torch import nn\ndef huge() -> nn.Module:\n    return nn.Linear(1 << 22, 1 << 22)\n"
    )
    found = treatments.rows(load_model("huge.py")[1], Config(), 0)
    assert found[0].numel == 1 << 44


@pytest.mark.parametrize(
    "spec, says",
    [
        ("nowhere.py", "nowhere.py: no such file .looked in .*; allowed: FILE.py:NAME or package.module:NAME"),
        ("nowhere:Net", "importing nowhere failed with ModuleNotFoundError: No module named 'nowhere'"),
        ("zoo.nothing:Net", "'zoo' is not a package"),
        ("no such/thing", "neither a .py file nor a module"),
        ("zoo.py:net", "contains no net; did you mean Net.; its models: Net, small, ready"),
        ("zoo.py:ANSWER", "ANSWER is int; allowed: a torch.nn.Module, or a class or function"),
        ("zoo.py:Needy", "Needy needs arguments .width, depth.: name a function"),
        ("zoo.py:broken", "building broken failed with RuntimeError: no weights here"),
        ("zoo.py:leaves", "building leaves failed with SystemExit: 3"),
        ("zoo.py:number", r"number\(\) returned int"),
        ("zoo.py:lazy", "weight has no shape before the first forward pass"),
        ("wrong.py:Net", "running wrong.py failed with ZeroDivisionError: division by zero"),
        ("wrong.part:Net", "importing wrong.part failed with ZeroDivisionError"),
        ("wrong:Net", "importing wrong failed with ZeroDivisionError"),
        ("late:Net", "importing Net failed with ModuleNotFoundError: No module named 'nowhere'"),
    ],
)
def test_what_is_wrong_with_a_model_is_said(models, check, spec, says):
    Path("wrong.py").write_text("1 / 0\n")
    Path("late.py").write_text("def __getattr__(name):\n    import nowhere\n")
    code, out, err = check("{}", "--model", spec)
    assert (code, out) == (2, "")
    assert re.match(rf"ncz: error: --model {re.escape(spec)}: .*{says}", err), err


# ------------------------------------------------------------------ what parameters get

POLICIES = """
quantizer: {error_feedback: true}
transport: {min_bytes: 0}
policies:
  - {name: ["*.bias", "*norm*"], max_elements: 4096, action: skip}
  - {name: "blocks.0.*", quantizer: {value: 0.05}}
  - {name: "blocks.0.mlp.*", quantizer: {kind: lossless}}
  - {name: "lmhead.*", action: skip}
  - {role: parameter, action: skip}
steps:
  warmup: 10
  bounds: [{step: 10, times: 0.5}, {step: 100, times: 1.0}]
"""


def test_the_first_policy_that_fits_decides(check):
    code, out, err = check(POLICIES, "--model", GPT, "--step", "100")
    assert (code, err) == (0, "")
    assert "GPT in step 100: 52 parameters, 1,853,568 elements" in out
    rows = cells(out)
    bound = "stochastic rms:{} per 128 elements, error feedback"
    assert rows["tokens.weight"] == ["256x192", "float32", "49,152", bound.format(0.375), "default"]
    assert rows["norm.weight"] == ["192", "float32", "192", "uncompressed", "policies[0]"]
    assert rows["blocks.0.mlp.0.weight"][3:] == [bound.format(0.05), "policies[1]"]
    assert rows["blocks.1.mlp.0.weight"][3:] == [bound.format(0.375), "default"]
    assert "head.weight" not in rows  # it is tokens.weight
    assert rows["policies[0]"] == ["*.bias or *norm*, max_elements 4096: skip", "34", "34"]
    assert rows["policies[1]"][1:] == ["12", "4"] and rows["policies[2]"][1:] == ["4", "0"]
    assert "Warning: policies[2] decides nothing" in out and "Warning: policies[3] fits no parameter" in out
    assert "policies[4] is for role parameter" in out and out.count("Warning") == 2


def test_the_step_says_how_far_warm_up_and_schedule_are(check):
    for step, bound in (("10", "0.1875"), ("99", "0.1875"), ("100", "0.375")):
        _, out, _ = check(POLICIES, "--model", GPT, "--step", step)
        assert f"rms:{bound} " in cells(out)["tokens.weight"][3]
    _, out, _ = check(POLICIES, "--model", GPT)
    assert "GPT in step 10:" in out and "rms:0.1875 " in cells(out)["tokens.weight"][3]
    _, out, _ = check(POLICIES, "--model", GPT, "--step", "9")
    rows = cells(out)
    assert rows["tokens.weight"][3:] == rows["norm.bias"][3:] == ["uncompressed", "warm-up"]
    assert rows["compressed"] == ["0", "0", "0.00"] and "error feedback keeps on every rank" not in rows


def test_totals_are_the_sums(check):
    _, out, _ = check(POLICIES, "--model", GPT)
    _, model = load_model(str(GPT))
    skipped = [p.numel() for name, p in model.named_parameters() if name.endswith(".bias") or "norm" in name]
    rest = model.parameter_count() - sum(skipped)
    rows = cells(out)
    assert rows["uncompressed"] == [f"{len(skipped)}", f"{sum(skipped):,}", f"{sum(skipped) * 4 / 1e6:.2f}"]
    assert rows["compressed"] == [f"{52 - len(skipped)}", f"{rest:,}", f"{rest * 4 / 1e6:.2f}"]
    assert rows["error feedback keeps on every rank"] == [*rows["compressed"][:2], f"{rest * 2 / 1e6:.2f}"]


def model_of(**parameters):
    model = nn.Module()
    for name, tensor in parameters.items():
        model.register_parameter(name, nn.Parameter(tensor, requires_grad=tensor.is_floating_point()))
    return model


def test_error_feedback_takes_two_bytes_for_each_element_that_loses_something():
    model = model_of(
        two_bytes=torch.zeros(10, dtype=torch.bfloat16),
        eight_bytes=torch.zeros(10, dtype=torch.float64),
        kept=torch.zeros(10),
        counted=torch.zeros(10, dtype=torch.int64),
    )
    config = Config(
        quantizer={"error_feedback": True},
        transport={"min_bytes": 0},
        policies=[{"name": "kept", "quantizer": {"kind": "lossless"}}],
    )
    found = {row.name: row for row in treatments.rows(model, config, 0)}
    assert [found[name].residual_bytes for name in found] == [20, 80, 0, 0]
    assert [found[name].nbytes for name in found] == [20, 80, 40, 80]
    assert found["counted"].treatment is None and found["kept"].treatment.quantizer.kind == "lossless"


def test_what_is_too_small_even_together_is_said():
    model = model_of(a=torch.zeros(20_000), b=torch.zeros(20_000), c=torch.zeros(20_000))
    config = Config(policies=[{"name": "c", "quantizer": {"value": 0.1}}])
    a, b, c = (row.treatment for row in treatments.rows(model, config, 0))
    assert (a, b) == (a, a) and a.bypass is None  # 160 kB
    assert (c.bypass, c.because) == (Bypass.TOO_SMALL, "policies[0], too small")  # 80 kB


def test_roles_and_links_that_leave_nothing_to_compress_are_said(check):
    for settings, because in (
        ("roles: [parameter]", "role not enabled"),
        ("transport: {min_bytes: never}", "default, link too fast"),
    ):
        code, out, _ = check(settings, "--model", GPT)
        assert code == 0 and cells(out)["tokens.weight"][3:] == ["uncompressed", because]
        assert cells(out)["compressed"][0] == "0"


def test_a_size_that_is_yet_to_be_measured_excludes_nothing(check):
    _, out, _ = check("transport: {min_bytes: auto}", "--model", GPT)
    assert cells(out)["compressed"][0] == "52"


def test_a_frozen_parameter_has_no_gradient(models, check):
    Path("frozen.py").write_text(
        "from zoo import small\ndef half():\n    net = small()\n    net[0].bias.requires_grad = False\n    return net\n"
    )
    _, out, _ = check("policies: [{name: '*.bias', action: skip}]", "--model", "frozen.py:half")
    assert cells(out)["0.bias"][3:] == ["no gradient", "requires_grad is false"]
    assert "policies[0] fits no parameter" in out


def test_a_deepspeed_file_is_read_too_and_its_dtypes_are_left_open(check):
    section = '{"bf16": {"enabled": true}, "communication_compression": {"quantizer": {"value": 0.125}}}'
    code, out, _ = check(section, "--model", GPT, name="ds.json")
    assert code == 0 and "rms:0.125 " in cells(out)["tokens.weight"][3]
    assert "DeepSpeed may reduce in another" in out


@pytest.mark.parametrize("step", ["-1", "1.5", "ten"])
def test_a_step_is_a_number_from_zero(check, step):
    code, out, err = check("{}", "--model", GPT, f"--step={step}")
    assert (code, out) == (2, "") and f"--step must be an integer, 0 or more, got {step}" in err


def test_a_step_without_a_model_is_refused(check):
    code, out, err = check("{}", "--step", "3")
    assert (code, out) == (2, "") and "--model" in err


# ------------------------------------------------------------------ the documentation

POLICIES_MD = (ROOT / "docs" / "guides" / "policies.md").read_text()


def blocks(kind):
    return re.findall(rf"```{kind}\n(.*?)```", POLICIES_MD, re.DOTALL)


def test_the_examples_in_the_documentation_are_valid():
    loaded = [Config.load(yaml.safe_load(text)) for text in blocks("yaml")]
    assert loaded[0] == Config.load(ROOT / "configs" / "ncclz_policies.yaml")
    assert len(loaded) == 2 and len(loaded[1].policies) == 4


def test_the_table_in_the_documentation_is_real(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    (text,) = blocks("text")
    command, *shown = text.splitlines()
    assert main(shlex.split(command.removeprefix("$ ncz "))) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    gap = shown.index("...")
    assert shown[:gap] == printed[:gap] and shown[gap + 1 :] == printed[gap + 1 - len(shown) :]
