"""The tables that benchmarks write into docs/results and docs/notebook are those of the committed files."""

import fnmatch
import json
import re
from collections.abc import Iterator
from statistics import fmean

import ddp_hooks
import evidence
import frontier
import pytest
import run as fuzz
import soak
from evidence import GPT, Cell
from outcome import interval
from repository import ROOT

from benchmarks import (
    codec_table,
    coming_from,
    demo_page,
    gains,
    gpu_page,
    opening,
    pages,
    patch_files,
    performance,
    plan,
    remake,
    schedules,
    weight_dtypes,
    weight_ways,
    weights,
)
from benchmarks.thirdparty import run as third_party


def committed(name):
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text())


def test_the_codec():
    found, kernels = committed("codec-data.json"), committed("codec-cpu.json")
    for table in (codec_table.summary(found["rows"]), codec_table.kernels_summary(kernels)):
        assert table in codec_table.MARKDOWN.read_text()
    assert codec_table.page(found["rows"], found, kernels) == codec_table.NOTEBOOK.read_text()


def test_what_the_page_of_the_codec_shows_is_measured():
    measured = {(row["data"], row["bound"]) for row in committed("codec-data.json")["rows"]}
    assert {(name, bound) for name, bounds in codec_table.SHOWN.items() for bound in bounds} <= measured


def test_what_is_gained_at_which_link():
    assert gains.table(gains.gains()) in gains.PAGE.read_text()


def test_performance():
    page = performance.PAGE.read_text()
    for name, table in performance.TABLES.items():
        assert f"<!-- {name} -->\n{table()}\n<!-- end of {name} -->" in page


def test_gpus():
    page = gpu_page.PAGE.read_text()
    for name, table in gpu_page.TABLES.items():
        assert f"<!-- {name} -->\n{table()}\n<!-- end of {name} -->" in page


def test_tests_of_others():
    assert third_party.markdown(committed("third-party.json")["suites"]) in third_party.PAGE.read_text()


def test_schedules():
    assert schedules.markdown(committed("schedules.json")["records"]) in schedules.PAGE.read_text()


def test_weights():
    found = committed("weights.json")["found"]
    assert weights.summary(found) in weights.PAGE.read_text()
    assert weights.markdown(found) in weights.NOTEBOOK.read_text()


def test_schedules_by_the_number_of_ranks():
    found = committed("plan-ranks.json")["calls"]
    assert plan.table_of_ranks(found) in plan.PAGE.read_text()


def test_dtypes_of_weights():
    assert weight_dtypes.markdown(committed("weight-dtypes.json")["found"]) in weight_dtypes.PAGE.read_text()


def test_ways_to_send_weights():
    assert weight_ways.summary(committed("weight-ways.json")) in weight_ways.PAGE.read_text()


def test_patches_of_files():
    assert patch_files.summary(committed("patch-files.json")["found"]) in patch_files.PAGE.read_text()


README, INDEX = ROOT / "README.md", ROOT / "docs" / "index.md"


def of_losses() -> Iterator[tuple]:
    """What the default, and both ways for Muon, add to the loss."""
    found = evidence.results(frontier.committed())

    def told(optimizer: str, task: str) -> str:
        added = found[Cell(optimizer, task, 2), frontier.DEFAULT].added
        return f"{100 * fmean(added):.2f} % ± {100 * interval(added):.2f}"

    small, large = told("AdamW", GPT), told("AdamW", "GPT of 11 M")
    ratio = found[Cell("AdamW", GPT, 2), frontier.DEFAULT].ratio
    yield README, f"grows by [{small}](docs/results/convergence.md), of 11 M by {large}."
    yield INDEX, f"grows by [{small}](results/convergence.md), of 11 M by {large}."
    fewer = f"at {ratio:.1f} times fewer bytes than fp32 and {ratio / 2:.1f} than bf16"
    yield evidence.PAGE, f"{small} of its training loss, {fewer}; one of 11 M {large} (three seeds)."
    muon = {key: 100 * fmean(each.added) for key, each in found.items() if key[0].optimizer == "Muon"}
    default = [added for (_, candidate), added in muon.items() if candidate == frontier.DEFAULT]
    others = [added for (_, candidate), added in muon.items() if candidate in (frontier.FED, frontier.TURNED)]
    span = f"{min(default):.1f} to {max(default):.1f} %"
    yield README, f"Muon's loss grows by {span} with the default"
    yield evidence.PAGE, f"**Muon suffers: {span}**;"
    yield evidence.PAGE, f"which cost it at most {max(others):.2f} %."


def of_calls_and_steps() -> Iterator[tuple]:
    """The fastest calls of each link, and training steps."""
    cells = [performance.by_cell(f"perf-default-{ranks}-ranks") for ranks in (2, 4)]
    best: dict[str, float] = {}
    for (link, _), peers in (item for each in cells for item in each.items()):
        if peers["ncz"]["ratio"] > 1.5:
            best[link] = max(best.get(link, 0), peers["ncz"]["speedup"])
    slow, usual, fast = (f"{best[link]:.1f} times" for link in ("100mbit", "1gbit", "10gbit"))
    yield performance.PAGE, f"is up to {slow} as fast as plain gloo at 100 Mbit/s, {usual} at 1 Gbit/s and {fast} at 10"
    runs = [
        run["speed_up"]
        for file, framework, _ in performance.STEPS
        for run in performance.read(file)["runs"]
        if run["framework"] == framework and run["name"] in ("ncclz", "weights too")
    ]
    yield performance.PAGE, f"Training steps at 1 Gbit/s are {min(runs):.1f} to {max(runs):.1f} times as fast."


def of_gpus() -> Iterator[tuple]:
    """How many times as fast as plain NCCL calls are by default."""
    found = gpu_page.calls_of(committed("gpu.json"))

    def span(dtype: str, *sizes: int, digits: int = 0) -> str:
        speeds = [each["default"]["speed_up"] for (_, of, mib), each in found.items() if of == dtype and mib in sizes]
        return f"{min(speeds):.1f} to {max(speeds):.{digits}f} times"

    single, half = span("float32", 64, 256), span("bfloat16", 64, 256)
    yield README, f"{single} as fast as [plain NCCL over sockets](docs/results/gpus.md)"
    yield README, f"from 64 MiB of float32 on, {half} in bfloat16."
    single, large = span("float32", 64, digits=1), span("float32", 256)
    half = span("bfloat16", 64, 256, digits=1)
    words = f"64 MiB of float32 is {single} as fast as plain NCCL, one of 256 MiB {large}; bfloat16 is {half}"
    yield gpu_page.PAGE, words
    step = {row["kind"]: f"{1e3 * row['seconds']:.0f}" for row in committed("gpu-steps.json")["rows"]}
    yield gpu_page.PAGE, f"a step took {step['weights too']} ms, a plain one {step['plain']} (`gpu-steps.json`)."


def of_plans_and_weights() -> Iterator[tuple]:
    """How far off predictions are, and how few bytes changes of weights take."""
    plans = committed("plan.json")
    calls, steps = plans["errors"]["median"], plans["errors_of_steps"]["median"]
    yield plan.PAGE, f"off by less than {100 * calls:.1f} % for half of the calls, and by less than {100 * steps:.1f} %"
    seconds = {
        each["nbytes"]: each["seconds"]
        for each in committed("plan-ranks.json")["calls"]
        if (each["case"], each["ranks"], each["schedule"]) == ("all alike", 4096, "halving")
    }
    told = f"1 MiB in {1e3 * seconds[1 << 20]:.0f} ms and 256 MiB in {seconds[1 << 28]:.2f} s"
    yield plan.PAGE, f"4,096 ranks at 10 Gbit/s add up {told}."

    def fewer(model: str, dtype: str) -> list[float]:
        bits = 32 if dtype == "float32" else 16
        found = committed("weights.json")["found"]
        return [bits / each["sent"] for each in found if model in each["model"] and each["dtype"] == dtype]

    small, tuned, whole = fewer("GPT", "bfloat16"), fewer("CREPE", "bfloat16"), fewer("", "float32")
    yield README, f"{min(small):.1f} to {max(small):.0f} times fewer bytes in bf16."
    yield (
        weights.PAGE,
        f"take {min(small):.1f} (in step 2) to {max(small):.0f} times fewer bytes while a small GPT trains",
    )
    yield weights.PAGE, f"{min(tuned):.1f} to {max(tuned):.0f} times fewer while a pretrained network is fine-tuned."
    yield weights.PAGE, f"In float32 it is {min(whole):.1f} to {max(whole):.1f} times."


@pytest.mark.parametrize("sentences", [of_losses, of_calls_and_steps, of_gpus, of_plans_and_weights])
def test_sentences_that_pages_begin_with(sentences):
    for page, words in sentences():
        assert words in " ".join(page.read_text().split()), page


def test_hooks_of_ddp():
    assert ddp_hooks.markdown(committed("ddp-hooks.json")["runs"]) in ddp_hooks.PAGE.read_text()


def test_the_soak():
    kept = committed("soak.json")
    page = soak.PAGE.read_text()
    assert soak.summary(kept) in page and soak.by_kind(kept) in soak.NOTEBOOK.read_text()
    assert f"In {sum(one['calls'] for one in kept['ranks']):,} checked calls of random collectives, no result" in page


@pytest.mark.skipif(not opening.NUMBERS.exists(), reason="a quiet machine has still to leave opening.json")
def test_openings():
    assert opening.markdown(committed("opening.json")["found"]) in opening.PAGE.read_text()


def test_the_fuzzer():
    found, page = committed("fuzz.json"), " ".join(fuzz.PAGE.read_text().split())
    assert " ".join(fuzz.markdown(found).split()) in page
    assert f"or hang: {sum(each['inputs'] for each in found['targets'].values()):,} inputs in the last hour" in page


def test_the_demo():
    found = committed("demo.json")
    assert "\n".join([demo_page.MARKS[0], demo_page.markdown(found), demo_page.MARKS[1]]) in demo_page.PAGE.read_text()
    plain, ours = (found["runs"][name] for name in ("plain", "ncclz"))
    fewer = plain["interface_bytes_per_step"] / ours["interface_bytes_per_step"]
    readme = " ".join(README.read_text().split())
    assert f"a step takes {ours['slow_step_seconds']:.2f} s instead of {plain['slow_step_seconds']:.2f} s" in readme
    assert f"{fewer:.1f} times fewer gradient bytes ({fewer / 2:.1f} than bf16)" in readme
    assert f"validation loss is {ours['validation_loss']:.4f}, not {plain['validation_loss']:.4f}." in readme


def test_it_is_known_where_each_file_comes_from():
    files = {path.stem for path in (ROOT / "benchmarks" / "results").glob("*.json")}
    otherwise = {name for pattern in remake.MADE_OTHERWISE for name in fnmatch.filter(files, pattern)}
    assert files - remake.JOBS.keys() == otherwise


@pytest.mark.parametrize("name", sorted(remake.JOBS.keys() - {"evidence", "convergence", "frontier", "activations"}))
def test_a_file_names_the_command_that_makes_it_again(name):
    """So `make results` measures what pages show, with the same sizes and rounds."""
    assert options(committed(f"{name}.json")["command"]) == options(remake.JOBS[name].command)


def options(command):
    """What follows the program, without the place of the file."""
    _, words = re.split(r"-m \S+|ncz perf|\S+\.py", command, maxsplit=1)
    return re.sub(r"--json \S+", "--json", words).split()


def test_a_table_is_put_between_the_marks_of_its_page(tmp_path):
    page, marks = tmp_path / "page.md", pages.MARKS
    page.write_text(f"before\n{marks[0]}\nold\n{marks[1]}\nafter\n")
    pages.put_into(page, "new")
    assert page.read_text().split("\n") == ["before", marks[0], "new", marks[1], "after", ""]


def test_what_horovod_and_hivemind_sent():
    found, page = committed("coming-from.json"), " ".join(coming_from.PAGE.read_text().split())
    for sentence in (*coming_from.of_horovod(found), *coming_from.of_hivemind(found)):
        assert sentence in page
    # Half as many bytes are a mean of 16 bits, and a quarter of those that is none.
    plain, fp16, eight = found["hivemind"]
    assert plain["error"] < fp16["error"] < 1e-3 and eight["error"] > 0.99
