"""`ncz plan` from its options to its output, and what is known about machines."""

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from repository import ROOT

from ncz_plugins.cli import main as cli
from ncz_plugins.cli.plan.catalogue import load
from ncz_plugins.cli.plan.simulation import calls
from ncz_plugins.cli.plan.simulation.calls import Group
from ncz_plugins.cli.plan.simulation.fleet import Link
from ncz_plugins.cli.plan.step import Setup, predict
from ncz_plugins.cli.plan.strategy import STRATEGIES, sendings
from ncz_plugins.cli.plan.verdict import judge
from ncz_plugins.cli.plan.workload import Interval, Workload, compute_from_tokens
from ncz_plugins.core.config import CoderCosts, Config
from ncz_plugins.core.errors import ConfigError
from ncz_plugins.core.tuning.tuning_file import SpeedComparison, Trial, Tuning

RESULTS = ROOT / "benchmarks" / "results"
PARAMETERS = 26_214_400  # of four buckets, which are cut into equal segments: those are simulated soonest
SLOW = ["plan", "--parameters", str(PARAMETERS), "--compute-seconds", "0.5", "--link-gbps", "1"]
FAST = [*SLOW[:-1], "400"]


def plan(capsys, *options: str) -> dict:
    """The JSON of a plan."""
    assert cli.main([*options, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refusal(capsys, *options: str) -> str:
    assert cli.main(list(options)) == 2
    return capsys.readouterr().err


def setup(strategy="ddp", gbps=1.0, itemsize=4, compute=0.5, nodes=4, per_node=1, parameters=PARAMETERS, **config):
    workload = Workload("GPT", parameters, itemsize, Interval.exactly(compute), "said")
    group = Group(nodes, per_node, Link(gbps, 5e-5), load().cost("cpu"), cores=per_node)
    return Setup(workload, sendings(strategy, workload), group, Config(**config))


# ------------------------------------------------------------------ the answer


def test_yes_on_a_slow_link(capsys):
    [found] = plan(capsys, *SLOW)["plans"]
    plain, half, ours = found["steps"]
    assert (plain["kind"], half["kind"], ours["kind"]) == ("plain", "bfloat16", "compressed")
    assert found["verdict"]["pays"] == "yes"
    assert found["verdict"]["against"] == "bfloat16"
    assert ours["seconds"]["low"] < ours["seconds"]["middle"] < ours["seconds"]["high"] < half["seconds"]["low"]
    assert plain["wire_bytes"] == pytest.approx(4 * PARAMETERS, rel=0.01)
    assert plain["wire_bytes"] / ours["wire_bytes"] > 6
    assert max(found["verdict"]["limits"], key=found["verdict"]["limits"].get) in ("computing", "the link")


def test_the_guide_shows_what_is_printed(capsys):
    text = (ROOT / "docs" / "guides" / "planning.md").read_text()
    command, shown = (text.split(fence)[1].split("```")[0] for fence in ("```sh\n", "```text\n"))
    assert cli.main(command.split()[1:]) == 0
    assert shown.split() == capsys.readouterr().out.split()


def test_the_results_show_what_was_measured(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))  # where it finds its neighbor
    benchmark = import_module("benchmarks.plan")

    measured = json.loads((RESULTS / "plan.json").read_text())
    assert benchmark.figures(measured) in (ROOT / "docs" / "results" / "planning.md").read_text()
    assert measured["errors"]["count"] > 100


def test_dont_on_a_fast_link(capsys):
    assert cli.main(FAST) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "don't: " in printed
    assert "or slower would change that" in printed


def test_it_pays_below_the_break_even(capsys):
    edge = judge(setup(), [predict(setup(), kind) for kind in setup().kinds]).break_even_gbps
    for factor, expected in ((0.8, True), (1.3, False)):
        near = setup(gbps=factor * edge)
        ours = predict(near, "compressed").seconds.middle
        best = min(predict(near, kind).seconds.middle for kind in ("plain", "bfloat16"))
        assert (ours < 0.97 * best) == expected


def test_what_pays_here_has_a_break_even():
    """Also where it pays on no slower link: half the bytes gain nothing over bfloat16, but fewer messages do."""
    found = setup(gbps=10, nodes=8)
    found = replace(found, workload=replace(found.workload, ratio=1.9))
    verdict = judge(found, [predict(found, kind) for kind in found.kinds])
    assert verdict.pays != "no" and verdict.break_even_gbps > 10
    slowest = found.with_link(0.01)
    assert judge(slowest, [predict(slowest, kind) for kind in slowest.kinds]).pays == "no"


def test_tells_what_is_hidden_and_what_is_exposed(capsys):
    """With much computing nothing of a call is seen but the last bucket's."""
    long = predict(setup(compute=100.0), "plain")
    assert long.hidden > 0.6 * long.communication
    assert long.seconds.middle == pytest.approx(long.compute + long.exposed)
    none = predict(setup(compute=0.0), "plain")
    assert none.exposed == pytest.approx(none.communication, rel=0.2)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy(strategy, capsys):
    [found] = plan(capsys, *SLOW, "--strategy", strategy, "--ranks-per-node", "2")["plans"]
    plain, _, ours = found["steps"]
    assert ours["wire_bytes"] < plain["wire_bytes"]
    assert 0 < ours["seconds"]["middle"] <= plain["seconds"]["middle"]


def test_prices(capsys):
    options = ["plan", "--parameters", "1B", "--tokens", "4096", "--instance", "g6e.12xlarge", "--nodes", "4"]
    [found] = plan(capsys, *options)["plans"]
    step = found["steps"][0]
    assert step["dollars"]["middle"] == pytest.approx(step["seconds"]["middle"] * 1000 * 4 * 10.493 / 3600)
    assert found["ranks"] == 16
    assert "guess" in found["compute_from"]
    assert "Karpenter" in found["place"]["source"]


def test_compares_instances(capsys):
    options = ["plan", "--parameters", "1B", "--tokens", "4096", "--nodes", "2", "--strategy", "zero-2"]
    found = plan(capsys, *options, "--compare", "g6e.48xlarge,p4d.24xlarge")["plans"]
    assert [each["place"]["name"] for each in found] == ["g6e.48xlarge", "p4d.24xlarge"]
    spaced = plan(capsys, *options, "--compare", "g6e.48xlarge, p4d.24xlarge")["plans"]
    assert [each["place"]["name"] for each in spaced] == ["g6e.48xlarge", "p4d.24xlarge"]


def test_a_model(capsys, tmp_path):
    file = tmp_path / "model.py"
    file.write_text("import torch\n\ndef net() -> torch.nn.Module:\n    return torch.nn.Linear(999, 1000)\n")
    options = ["--compute-seconds", "0.1", "--link-gbps", "1"]
    [found] = plan(capsys, "plan", "--model", f"{file}:net", *options)["plans"]
    assert found["parameters"] == 1_000_000


def test_weights_are_fewer_bytes_if_they_are_compressed_too():
    gradients, both = (
        predict(setup("zero-2", roles=each), "compressed") for each in (["gradient"], ["gradient", "parameter"])
    )
    assert both.wire_bytes < gradients.wire_bytes
    assert both.seconds.middle < gradients.seconds.middle


def test_what_is_lost_is_said(capsys):
    [found] = plan(capsys, *SLOW)["plans"]
    assert "AdamW" in found["verdict"]["loss"]


def test_the_picture_is_of_the_planned_calls(monkeypatch, tmp_path):
    seen = []
    known = calls.compressed
    monkeypatch.setattr(calls, "compressed", lambda *arguments: seen.append(arguments[4:]) or known(*arguments))
    # Of up to 1,024 ranks, which large nodes make few to simulate.
    file, where = tmp_path / "plan.png", ["--ranks-per-node", "128"]
    options = [*SLOW, *where, "--dtype", "bfloat16", "--strategy", "diloco", "--ratio", "9"]
    assert cli.main([*options, "--plot", str(file)]) == 0
    assert set(seen) == {(4, 9, 1)}  # replicas tell what they have moved by in float32
    assert file.read_bytes().startswith(b"\x89PNG")


def test_what_is_printed_has_its_units(capsys):
    options = ["plan", "--parameters", str(256 * PARAMETERS), "--compute-seconds", "600", *SLOW[5:]]
    assert cli.main([*options, "--price", "0.01"]) == 0
    [row] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("plain")]
    assert " min to " in row and " min " in row and row.split()[-1].startswith("$") and "." in row.split()[-1]


# ------------------------------------------------------------------ a tuning file


def tuned(tmp_path: Path, **changes) -> Path:
    """A configuration that names a tuning file of 2 ranks with these choices."""
    choices = {"schedule": "direct", "frame_bytes": 1 << 20, "min_bytes": 1 << 17, "link_gbps": 1.0} | changes
    Tuning(
        format=1,
        world_size=2,
        **choices,
        costs=CoderCosts(raw=1200, fixed=1100, huffman=2400, rans=2000, rans_rest=4000),
        latency_seconds=1e-4,
        trials=(Trial(schedule="direct", frame_bytes=1 << 20, nbytes=1 << 26, seconds=0.1),),
        comparisons=(SpeedComparison(nbytes=1 << 26, plain_seconds=0.2, compressed_seconds=0.1),),
        quantizer=Config().quantizer.describe(),
        kernels="avx2",
        version="0.1.0",
    ).write(tmp_path / "tuned.json")
    file = tmp_path / "ours.yaml"
    file.write_text("transport: {tuning: tuned.json, min_bytes: auto, frame_bytes: auto}\n")
    return file


def test_the_choices_of_a_tuning_file_count(capsys, tmp_path):
    [found] = plan(capsys, *SLOW, "--config", str(tuned(tmp_path)))["plans"]
    assert found["steps"][2]["compressed_calls"] == 1
    assert found["costs_from"].endswith(f", coders from {tmp_path / 'tuned.json'}")
    [found] = plan(capsys, *SLOW, "--config", str(tuned(tmp_path, min_bytes="never")))["plans"]
    assert found["steps"][2]["compressed_calls"] == 0 and found["verdict"]["pays"] == "no"
    plan(capsys, *SLOW, "--costs", "gpu", "--config", str(tuned(tmp_path, schedule="halving")))  # which GPUs leave open


# ------------------------------------------------------------------ what is measured of trainings


@pytest.mark.parametrize(
    ("file", "framework", "strategy"),
    [("end-to-end-ddp", "DDP", "ddp"), ("end-to-end-weights", "DeepSpeed", "zero-2")],
)
def test_sends_what_frameworks_were_seen_to_send(file, framework, strategy):
    """Bytes that the kernel counted, with the headers of TCP and IP."""
    runs = json.loads((RESULTS / f"{file}.json").read_text())["runs"]
    measured = next(run for run in runs if run["framework"] == framework and run["name"] == "plain")
    predicted = predict(setup(strategy, nodes=2, parameters=25_486_848), "plain")
    assert predicted.wire_bytes == pytest.approx(measured["bytes_per_step"], rel=0.01)


def test_computing_from_tokens():
    found, how = compute_from_tokens(10**9, 1000, 100.0, None)
    assert found.middle == pytest.approx(6e12 / 4e13)
    assert found.low < found.middle < found.high
    assert "guess" in how
    assert "guess" not in compute_from_tokens(10**9, 1000, 100.0, 0.5)[1]
    with pytest.raises(ConfigError, match="--tflops"):
        compute_from_tokens(10**9, 1000, None, None)


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--parameters", "1M", "--compute-seconds", "1"], "--instance, --link-gbps and --compare"),
        (["--link-gbps", "1", "--compute-seconds", "1"], "--parameters, --model and --run"),
        ([*SLOW[1:], "--instance", "p5.48xlarge"], "give one of --instance"),
        ([*SLOW[1:], "--tokens", "10"], "--compute-seconds and --tokens"),
        ([*SLOW[1:], "--nodes", "1"], "nothing crosses the network between nodes"),
        ([*SLOW[1:], "--nodes", "0"], "--nodes 0: allowed: a number above 0"),
        ([*SLOW[1:], "--latency-us", "-1"], "--latency-us -1: allowed: a number of 0 or more"),
        ([*SLOW[1:], "--flow-gbps", "nan"], "--flow-gbps nan: allowed: a number above 0"),
        (["--parameters", "1M", "--tokens", "10", "--efficiency", "0", *SLOW[5:]], "--efficiency 0: allowed"),
        (
            ["--parameters", "1M", "--tokens", "10", "--efficiency", "40", *SLOW[5:]],
            "--efficiency 40: allowed: a share",
        ),
        (
            [*SLOW[1:], "--bound", "bits:4", "--ratio", "8"],
            "--ratio 8: has no effect, as quantizer.mode: bits always sends 4",
        ),
        (["--parameters", "1M", "--tokens", "10", "--compare", "x1,"], "--compare x1: unknown; known are"),
        ([*SLOW[1:], "--costs", "tpu"], "--costs tpu: unknown; known are cpu, gpu"),
        ([*SLOW[1:], "--bound", "abs:0.1"], "give --ratio"),
        (["--parameters", "many", *SLOW[3:]], "--parameters many: allowed"),
        (["--parameters", "1e999", *SLOW[3:]], "--parameters 1e999: allowed"),
        (["--parameters", "1M", "--compute-seconds", "fast", "--link-gbps", "1"], "--compute-seconds fast: allowed"),
        (["--parameters", "1M", "--tokens", "10", "--instance", "x1"], "--instance x1: unknown; known are"),
        (["--parameters", "1M", "--tokens", "10", "--instance", "g5.48xlarge"], "add --tflops"),
        (["--run", "nowhere.jsonl", "--link-gbps", "1"], "cannot be read"),
    ],
)
def test_refusals(options, words, capsys):
    assert words in refusal(capsys, "plan", *options)


# ------------------------------------------------------------------ the catalogue


def test_every_figure_has_a_source_and_a_date():
    catalogue = load()
    assert all(catalogue.sources[each.source].date.year >= 2026 for each in catalogue.instances.values())
    assert all(each.source for each in catalogue.costs.values())


def test_costs_are_those_that_were_measured():
    measured = json.loads((RESULTS / "plan.json").read_text())["costs"]
    assert load().cost("cpu").model_dump(exclude={"source", "fixed_rate_call_us"}) == {
        k: v for k, v in measured.items() if k != "source"
    }


def test_users_add_machines(tmp_path, capsys):
    file = tmp_path / "ours.yaml"
    entry = {"gpus": 2, "gpu": "L4", "tflops": 121, "gbps": 25, "price": 1.5, "source": "ours"}
    file.write_text(
        yaml.safe_dump({"instances": {"box": entry}, "sources": {"ours": {"date": "2026-11-24", "text": "x"}}})
    )
    options = ["plan", "--parameters", "100M", "--tokens", "1000", "--instance", "box", "--catalogue", str(file)]
    [found] = plan(capsys, *options)["plans"]
    assert found["ranks"] == 4
    file.write_text(yaml.safe_dump({"instances": {"box": entry}}))
    assert "every number needs a source" in refusal(capsys, *options)
    file.write_text(yaml.safe_dump({"instances": {"box": entry | {"gbps": -1}}}))
    assert "instances.box.gbps: -1" in refusal(capsys, *options)


# ------------------------------------------------------------------ a finished run beside its plan


def recorded(
    path: Path, step_seconds: float, wire_bytes: int, seconds: float, ranks: int = 2, config=None, **more
) -> Path:
    header = {"ncz_plugins": "0.1.0", "config": config or {}, "ranks": ranks}
    step = {
        "calls": 4, "compressed_calls": 4, "plain_bytes": 4 * PARAMETERS, "wire_bytes": wire_bytes, "seconds": seconds,
        "step_seconds": step_seconds, **more,
    }  # fmt: skip
    lines = [header, *({"step": number, **step} for number in range(1, 6))]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def planned(tmp_path, capsys) -> tuple[Path, dict]:
    file = tmp_path / "plan.json"
    found = plan(capsys, *SLOW)
    file.write_text(json.dumps(found))
    return file, found["plans"][0]["steps"][2]


def report(capsys, run: Path, plan: Path) -> dict:
    assert cli.main(["report", str(run), "--plan", str(plan), "--json"]) == 0
    return json.loads(capsys.readouterr().out)["plan"]


def test_a_run_as_planned(tmp_path, capsys, planned):
    file, step = planned
    run = recorded(tmp_path / "run.jsonl", step["seconds"]["middle"], round(step["wire_bytes"]), step["communication"])
    found = report(capsys, run, file)
    assert found["words"].startswith("a compressed step took 1.00 times what was planned, inside")
    assert cli.main(["report", str(run), "--plan", str(file)]) == 0
    assert "Beside the plan" in capsys.readouterr().out


def test_the_difference_is_named(tmp_path, capsys, planned):
    file, step = planned
    seconds, sent, inside = step["seconds"]["middle"], round(step["wire_bytes"]), step["communication"]
    more = report(capsys, recorded(tmp_path / "a.jsonl", seconds + 1, 2 * sent, inside + 1), file)["words"]
    assert "outside of" in more and "in collectives: 1 s more, with" in more and "more sent" in more
    slower = report(capsys, recorded(tmp_path / "b.jsonl", seconds + 1, sent, inside + 1), file)["words"]
    assert "the link or the cores were slower or faster than the plan assumed" in slower
    computing = report(capsys, recorded(tmp_path / "c.jsonl", seconds + 1, sent, inside), file)["words"]
    assert "in the rest: 1 s more" in computing


def test_plans_that_cant_be_compared(tmp_path, capsys, planned):
    file, step = planned
    run = recorded(tmp_path / "run.jsonl", 1.0, 10, 0.5, ranks=8)
    assert "is for 2 ranks, and the run had 8" in refusal(capsys, "report", str(run), "--plan", str(file))
    one = json.loads(file.read_text())["plans"][0]
    for text in ("{}", json.dumps({"plans": [one | {"steps": []}]}), '{"plans": [1]}'):
        file.write_text(text)
        assert "`ncz plan --json` writes such files" in refusal(capsys, "report", str(run), "--plan", str(file))
    other = file.with_suffix(".yaml")
    other.write_text("1: 2\n")  # a key that is no name
    assert "`ncz plan --json` writes such files" in refusal(capsys, "report", str(run), "--plan", str(other))


def test_collectives_beside_computing_leave_no_less_than_nothing(tmp_path, capsys, planned):
    run = recorded(tmp_path / "run.jsonl", 1.0, 10_000_000, 1.5)
    assert report(capsys, run, planned[0])["figures"]["the rest"]["measured"] == 0


def test_a_run_is_planned_anew(tmp_path, capsys):
    """What was recorded says how much is sent, and between which ends the computing lies."""
    run = recorded(tmp_path / "run.jsonl", 1.0, PARAMETERS // 2, 0.4)
    [found] = plan(capsys, "plan", "--run", str(run), "--link-gbps", "0.1")["plans"]
    assert found["parameters"] == PARAMETERS
    assert found["compute_seconds"] == {"low": pytest.approx(0.6), "middle": pytest.approx(0.8), "high": 1.0}
    assert found["steps"][0]["wire_bytes"] / found["steps"][2]["wire_bytes"] == pytest.approx(8, rel=0.05)


def test_computing_is_not_told_from_calls_that_went_plain_at_once(tmp_path, capsys):
    """Nobody measured how long these took, so all of the step may have been waiting."""
    plain = {"bypasses": {"too small": 1}, "bypassed_bytes": {"too small": 90_000_000}}
    run = recorded(tmp_path / "run.jsonl", 1.0, 92_000_000, 0.01, **plain)
    [found] = plan(capsys, "plan", "--run", str(run), "--link-gbps", "1")["plans"]
    assert found["compute_seconds"] == {"low": 0, "middle": 0.5, "high": 1.0}
    assert "98% of its bytes took is not known" in found["compute_from"]


def test_a_run_planned_where_it_ran_sends_what_it_sent(tmp_path, capsys):
    """With more than 2 ranks its ratio is that of codes and of sums."""
    sent = plan(capsys, *SLOW, "--nodes", "4")["plans"][0]["steps"][2]["wire_bytes"]
    run = recorded(tmp_path / "run.jsonl", 1.0, round(sent), 0.4, ranks=4, plain_bytes=6 * PARAMETERS)
    [found] = plan(capsys, "plan", "--run", str(run), "--link-gbps", "1", "--nodes", "4")["plans"]
    assert found["parameters"] == PARAMETERS
    assert found["steps"][2]["wire_bytes"] == pytest.approx(sent, rel=0.05)


def test_a_run_is_planned_with_its_own_settings(tmp_path, capsys):
    def sent(quantizer: dict, *options: str) -> float:
        config = Config(quantizer=quantizer, transport={"tuning": "gone.json"}).model_dump(mode="json")
        run = recorded(tmp_path / "run.jsonl", 1.0, PARAMETERS // 2, 0.4, config=config)
        [found] = plan(capsys, "plan", "--run", str(run), "--link-gbps", "0.1", *options)["plans"]
        return found["steps"][0]["wire_bytes"] / found["steps"][2]["wire_bytes"]

    assert sent({"mode": "bits", "value": 8}) == pytest.approx(4, rel=0.02)
    assert sent({"value": 0.1}) == pytest.approx(8, rel=0.05)  # as it did
    assert sent({"value": 0.1}, "--bound", "rms:0.05") < 7  # what it did says nothing of another bound


def test_what_follows_from_a_run_is_not_given_beside_it(tmp_path, capsys):
    run = str(recorded(tmp_path / "run.jsonl", 1.0, PARAMETERS // 2, 0.4))
    for option, value in (("--tokens", "10"), ("--tflops", "100"), ("--efficiency", "0.5")):
        words = refusal(capsys, "plan", "--run", run, "--link-gbps", "1", option, value)
        assert f"{option}: --run already states how long a step computes" in words


def test_settings_of_another_version_are_not_taken(tmp_path, capsys):
    run = recorded(tmp_path / "run.jsonl", 1.0, PARAMETERS // 2, 0.4, config={"quantizer": {"kind": "wavelets"}})
    [found] = plan(capsys, "plan", "--run", str(run), "--link-gbps", "0.1")["plans"]
    assert found["verdict"]["loss"] == judge(setup(), [predict(setup(), kind) for kind in setup().kinds]).loss


def test_something_must_be_trained(tmp_path, capsys):
    file = tmp_path / "model.py"
    file.write_text("import torch\n\nnet = torch.nn.Linear(9, 9).requires_grad_(False)\n")
    options = ["--compute-seconds", "0.1", "--link-gbps", "1"]
    assert "trains no parameter" in refusal(capsys, "plan", "--model", f"{file}:net", *options)
    run = recorded(tmp_path / "run.jsonl", 1.0, 0, 0.4, plain_bytes=0)
    assert f"{run}: trains no parameter" in refusal(capsys, "plan", "--run", str(run), "--link-gbps", "1")
