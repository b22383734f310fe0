"""`ncz report`: what it reads, what it makes of that, and how it says it."""

import json
import math
import re
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from repository import ROOT

from ncz_plugins.cli.main import main
from ncz_plugins.cli.output import duration, size
from ncz_plugins.cli.report.read import read
from ncz_plugins.cli.report.summary import LATE, summarize
from ncz_plugins.cli.report.verdict import verdict
from ncz_plugins.core.config import Config
from ncz_plugins.core.errors import ConfigError
from ncz_plugins.core.reasons import REMEDIES, Bypass
from ncz_plugins.core.runtime.statistics import Counters
from ncz_plugins.core.training.guard import Finding
from ncz_plugins.core.training.report import CompressionReport
from ncz_plugins.core.training.state import Training

HEADER = {"ncz_plugins": "1.2", "config": {"guard": {"max_relative_error": 0.5}}, "ranks": 4}
CALL = Counters(  # 8 MB in place of 80, in 40 ms
    calls=1,
    compressed_calls=1,
    bytes_in=53_000_000,
    plain_bytes=80_000_000,
    wire_bytes=8_000_000,
    agree_seconds=0.004,
    measure_seconds=0.002,
    encode_seconds=0.01,
    decode_seconds=0.008,
    wait_seconds=0.026,  # 0.002 of it in agreeing
    seconds=0.04,
    coders={"huffman": 80},
)


def record(step: int = 1, step_seconds: float | None = 0.1, guard=(), **counters) -> dict:
    done = Counters(**asdict(CALL) | counters).to_dict()
    found = {"guard": [finding._asdict() for finding in guard]} if guard else {}
    return {"step": step, "time": 1.7e9, "step_seconds": step_seconds, **done, "bound_times": 1.0, **found}


@pytest.fixture
def file(tmp_path):
    """Writes lines, each a mapping or text, to a file."""

    def write(*lines: dict | str, end: str = "\n") -> Path:
        path = tmp_path / "run.jsonl"
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + end)
        return path

    return write


@pytest.fixture
def ncz(capsys, monkeypatch):
    """Run the command in this process: exit code, stdout, stderr."""
    monkeypatch.setenv("COLUMNS", "2000")  # no line breaks in tables

    def run(*arguments):
        code = main([str(argument) for argument in arguments])
        return (code, *capsys.readouterr())

    return run


# ------------------------------------------------------------------ what a training writes is what is read


def trained(path: Path, count: int, state: dict | None = None, **config) -> Training:
    """A training of one process, so many steps long, in which the counters of its calls are made up."""
    training = Training({"statistics": {"jsonl": str(path)}, **config})
    if state:
        training.load_state_dict(state)
    training.begin(ranks=1, backend="gloo", link_gbps=None)
    for _ in range(count):
        training.stats.record(CALL)
        training.stats.record(Counters(calls=1, plain_bytes=100, wire_bytes=100, bypasses={"policy": 1}))
        training.end_step()
    return training


def test_what_a_training_records_is_read_in_full(tmp_path):
    training = trained(tmp_path / "run.jsonl", 3, steps={"bounds": [{"step": 2, "times": 0.5}]})
    run = read(tmp_path / "run.jsonl")
    assert run.header.ranks == 1 and run.header.config.model_dump() == training.config.model_dump(mode="json")
    assert [step.step for step in run.steps] == [1, 2, 3] and list(run.starts) == [1] and not run.notes
    assert [step.bound_times for step in run.steps] == [1, 1, 0.5]
    assert [step.step_seconds is None for step in run.steps] == [True, False, False]
    for counted, step in zip(training.stats.steps, run.steps):
        known = step.model_dump(exclude={"step", "run", "step_seconds", "bound_times", "guard"})
        assert known == {name: value for name, value in asdict(counted).items() if name in known}
        assert step.ratio == counted.ratio
    assert set(asdict(CALL)) - set(known) == {"bytes_in"}


def test_a_resumed_training_goes_on_where_the_one_before_it_stopped(tmp_path):
    path = tmp_path / "run.jsonl"
    state = trained(path, 3).state_dict()
    trained(path, 4)  # from scratch: the run before it counts no more
    trained(path, 2, state)
    run = read(path)
    assert [step.step for step in run.steps] == [1, 2, 3, 4, 5] and list(run.starts) == [1, 4]
    assert run.notes == [
        "steps 1 to 3 were made again from line 6 on: the later run counts",
        "step 4 was made again from line 11 on: the later run counts",
    ]
    assert summarize(run).runs == 2 and summarize(run).times.steps == 3  # but for the first after each start


# ------------------------------------------------------------------ several trainings in one file


def test_trainings_at_the_same_time_are_told_apart(tmp_path, ncz):
    path = tmp_path / "run.jsonl"
    one, two = (Training({"statistics": {"jsonl": str(path)}, "quantizer": {"value": v}}) for v in (0.25, 0.5))
    for training, calls in ((one, 0), (two, 0), (one, 1), (two, 2), (two, 2), (one, 1), (two, 2)):
        if not calls:
            training.begin(ranks=2)
        else:
            training.stats.record(Counters(calls=calls, plain_bytes=100 * calls, wire_bytes=100))
            training.end_step()
    first, second = read(path, 1), read(path)
    assert [(step.step, step.calls) for step in first.steps] == [(1, 1), (2, 1)]
    assert [(step.step, step.calls) for step in second.steps] == [(1, 2), (2, 2), (3, 2)]
    assert (first.training, second.training, second.trainings) == (1, 2, 2)
    assert summarize(first).runs == summarize(second).runs == 1
    [note] = second.notes
    assert "this is number 2" in note and note.endswith("number 1 has steps 1 to 2 (quantizer.value 0.25, here 0.5)")
    code, out, _ = ncz("report", path, "--training", 1)
    assert code == 0 and "training 1 of 2, steps 1 to 2, 2 ranks" in out
    where = ["--compute-seconds", "1", "--link-gbps", "1"]
    code, out, _ = ncz("plan", "--run", path, "--training", 1, "--link-gbps", "1")
    assert code == 0 and "training 1 of the 2 in the file" in " ".join(out.split())
    code, _, err = ncz("plan", "--parameters", "1M", "--training", 1, *where)
    assert code == 2 and "--training 1: needs --run" in err
    code, _, err = ncz("report", path, "--training", 3)
    assert code == 2 and "--training 3: is not in" in err and "allowed: 1 to 2" in err


def test_a_start_continues_the_training_with_its_settings(file):
    """After two trainings at the same time have ended, which were killed and are resumed."""
    a, b = ({"config": {"quantizer": {"value": value}}} for value in (0.25, 0.5))
    headers = [HEADER | config | {"run": run} for run, config in (("a", a), ("b", b), ("a2", a), ("b2", b))]
    steps = [record(1) | {"run": "a"}, record(1) | {"run": "b"}, record(2) | {"run": "a2"}, record(2) | {"run": "b2"}]
    path = file(*headers[:2], *steps[:2], *headers[2:], *steps[2:])
    assert [[step.run for step in read(path, number).steps] for number in (1, 2)] == [["a", "a2"], ["b", "b2"]]


def test_a_mixture_without_names_of_runs_is_said_to_be_one(file):
    """As an earlier version wrote it. It takes the time of one training, and a few notes."""
    steps = [record(step) for step in range(1, 5001) for _ in range(2)]
    run = read(file(HEADER, HEADER, *steps))
    assert [step.step for step in run.steps] == list(range(1, 5001)) and summarize(run).runs == 1
    assert len(run.notes) == 7 and run.notes[0] == "4,995 notes like the next one are left out"
    assert "steps go back 5,000 times without a header: if several trainings" in run.notes[-1]


def test_a_rerun_with_other_settings_is_said_to_have_them(file):
    other = HEADER | {"config": {"quantizer": {"value": 0.5}}}
    run = read(file(HEADER | {"config": {"quantizer": {"value": 0.25}}}, record(1), record(2), other, record(1)))
    assert run.notes == [
        "steps 1 to 2 were made again with other settings (quantizer.value 0.25, now 0.5) from line 5 on: "
        "the later run counts"
    ]


def test_many_starts_take_few_notes(file):
    starts = [line for step in range(1, 101) for line in (HEADER, record(step), record(step + 1))]
    run = read(file(*starts))
    assert len(run.steps) == 101 and summarize(run).runs == 100 and len(run.notes) == 6


# ------------------------------------------------------------------ reading


@pytest.mark.parametrize("hole", ["", "   ", "\0" * 5000, json.dumps(record(9))[:99] + "\0" * 70 + "1.0}"])
def test_what_a_crash_leaves_within_a_file_is_not_its_end(file, hole):
    run = read(file(HEADER, record(1), hole, record(2), "\0\0" + json.dumps(record(3)), record(4)))
    assert [step.step for step in run.steps] == [1, 2, 3, 4]
    assert run.notes == ["2 lines (3, 5) are blank or cut by zero bytes, as after a crash: left out"]


def test_every_cut_through_a_file_leaves_what_was_whole(file):
    whole = file(HEADER, *(record(step) for step in (1, 2, 3))).read_bytes()
    ends = [at + 1 for at, byte in enumerate(whole) if byte == ord("\n")]
    near_ends = {end + off for end in ends[1:] for off in (-2, -1, 0, 1, 2)}
    for cut in sorted(near_ends | set(range(ends[1], len(whole), 50))):
        if cut < ends[1]:  # no step is whole
            continue
        path = file("")
        path.write_bytes(whole[:cut])  # a cut beyond the end leaves all
        run = read(path)
        complete = sum(end - 1 <= cut for end in ends[1:])  # the line break itself may be what is missing
        assert [step.step for step in run.steps] == [1, 2, 3][:complete]
        is_torn = cut < len(whole) - 1 and cut not in ends and cut + 1 not in ends
        assert [note[:14] for note in run.notes] == [f"line {complete + 2} is torn"] * is_torn


def test_the_settings_of_the_steps_that_were_asked_for_count(file):
    lossless = HEADER | {"config": {"quantizer": {"kind": "lossless"}}, "ranks": 8}
    run = read(file(HEADER, record(1), record(2), lossless, record(3), record(4)))
    before, after, both = run.between(None, 2), run.between(3, None), run.between(2, 3)
    assert before.header.ranks == 4 and list(before.starts) == [1] and not before.notes
    assert after.header.ranks == 8 and list(after.starts) == [3] and not after.notes
    assert both.header.ranks == 8 and summarize(both).runs == 2
    [note] = both.notes
    assert (
        note.startswith("settings changed at step 3 (ranks 4, now 8; ") and "the verdict goes by the last ones" in note
    )
    assert 'quantizer.kind not named, now "lossless"' in note


def test_a_run_that_goes_back_without_a_header(file):
    """As one that loads an earlier state, before the first step of the file."""
    run = read(file(HEADER, record(5), record(6), record(2), record(3))).between(None, None)
    assert [step.step for step in run.steps] == [2, 3] and list(run.starts) == [2]
    assert run.notes == ["steps 5 to 6 were made again from line 4 on: the later run counts"]


def test_several_torn_lines_before_a_header(file):
    """A run that was killed, and the next one within its header."""
    run = read(file(HEADER, record(1), '{"step": 2, "ca', '{"ncz_pl', HEADER, record(2), '{"st', "{"))
    assert [step.step for step in run.steps] == [1, 2]
    assert run.notes == ["4 lines (3, 4, 7, 8) are torn, as a run was killed: left out"]
    with pytest.raises(ConfigError, match=":3: is not a JSON object"):
        read(file(HEADER, record(1), '{"step": 2, "ca', '{"ncz_pl', record(2)))


def test_a_torn_line_before_a_header_is_noted(file):
    run = read(file(HEADER, record(1), '{"step": 2, "ca', HEADER, record(2), record(3)))
    assert [step.step for step in run.steps] == [1, 2, 3] and list(run.starts) == [1, 2]
    assert run.notes == ["line 3 is torn, as a run was killed: left out"]


@pytest.mark.parametrize(
    "line, words",
    [
        ("not JSON", "is not a JSON object: 'not JSON'"),
        ("[1]", "is not a JSON object: '[1]'"),
        ('{"step": 2}', "calls"),
        (json.dumps(record(0)), "step: 0"),
        (json.dumps(record(2) | {"seconds": -1.0}), "seconds: -1.0"),
        (json.dumps(record(2) | {"calls": "9"}), "calls: '9'"),
        (json.dumps(record(2) | {"bypasses": {"policy": None}}), "bypasses.policy: None"),
        (json.dumps(record(2) | {"seconds": math.nan}), "seconds: nan"),
        (json.dumps(record(2) | {"seconds": math.inf}), "seconds: inf"),
        (json.dumps(record(2) | {"plain_bytes": 10**400}), "plain_bytes: 1000"),
        ("[" * 100_000, "is not a JSON object: '[[["),
        ('{"ncz_plugins": "1.2", "ranks": 0}', "ranks: 0"),
        ('{"ncz_plugins": "1.2", "config": {"guard": 7}}', "config.guard: 7"),
    ],
)
def test_a_damaged_line_is_named_by_its_number(file, line, words):
    path = file(HEADER, record(1), line, record(3))
    with pytest.raises(ConfigError) as error:
        read(path)
    assert str(error.value).startswith(f"{path}:3: ") and words in str(error.value)


@given(st.lists(st.one_of(st.binary(max_size=40), st.just(json.dumps(record(1)).encode())), max_size=5))
@settings(max_examples=200, deadline=None)
def test_no_bytes_at_all_do_worse_than_a_typed_error(tmp_path_factory, lines):
    path = tmp_path_factory.getbasetemp() / "bytes.jsonl"
    path.write_bytes(b"\n".join(lines))
    try:
        assert read(path).steps
    except ConfigError as error:
        assert str(path) in str(error)


def test_what_is_no_file_of_records_says_so(file, tmp_path):
    with pytest.raises(ConfigError, match="run.jsonl: holds no step; statistics.jsonl"):
        read(file(HEADER))
    with pytest.raises(ConfigError, match="No such file"):
        read(tmp_path / "none.jsonl")


def test_other_versions_may_know_less_or_more(file):
    old = {key: record()[key] for key in ("step", "calls", "compressed_calls", "plain_bytes", "wire_bytes", "seconds")}
    assert summarize(read(file(old | {"new": [1, 2]}))).ratio == 10


# ------------------------------------------------------------------ figures


def test_the_figures_are_sums_and_medians(file):
    lengths = [None, 0.1, 0.2, 0.1, 0.9]
    steps = [record(step, length, coders={"rans": step}) for step, length in enumerate(lengths, 1)]
    bypassed = {"calls": 3, "bypasses": {"policy": 2}, "bypassed_bytes": {"policy": 2_000_000}}
    steps[2] = record(3, 0.2, wire_bytes=10_000_000, plain_bytes=82_000_000, **bypassed)
    summary = summarize(read(file(HEADER, *steps)))
    assert (summary.steps, summary.first, summary.last, summary.calls, summary.compressed_calls) == (5, 1, 5, 7, 5)
    assert summary.ratio == 402 / 42 and summary.compressed_ratio == 10 and summary.call_bytes == 80e6
    assert summary.coders == {"rans": 12, "huffman": 80}
    assert summary.bypasses["policy"].calls == 2 and summary.bypassed_bytes == 2_000_000
    times = summary.times
    assert (times.steps, times.step, times.collectives) == (4, pytest.approx(0.15), 0.04)
    assert times.share == pytest.approx((0.4 + 0.2) / 2)
    assert times.slow_steps == 1 and times.slow_share == pytest.approx(0.9 / 1.3)
    assert (times.slowest, times.slowest_seconds) == (5, 0.9)
    parts = [times.agreeing, times.measuring, times.encoding, times.waiting, times.decoding, times.rest]
    assert parts == pytest.approx([0.05, 0.05, 0.25, 0.6, 0.2, 0.05])
    assert times.megabits_per_second == pytest.approx(8 * 8 / 0.04)  # 8 MB, also in the step that sent 2 more plain


def test_the_worst_that_the_guard_found_may_be_not_finite(file):
    found = [Finding("a", 0.25, 0.9, False), Finding("b", 0.75, 0.3, True), Finding("c", 0.1, 0.99, False)]
    guard = summarize(read(file(record(1, guard=found[:2]), record(2, guard=found[2:])))).guard
    assert (guard.verified, guard.alarms) == (3, 1)
    assert (guard.relative_error, guard.error_step, guard.error_name) == (0.75, 1, "b")
    assert (guard.cosine, guard.cosine_step, guard.cosine_name) == (0.3, 1, "b")
    infinite = Finding(None, None, 0.0, True)
    guard = summarize(read(file(record(1, guard=found), record(2, guard=[infinite])))).guard
    assert (guard.relative_error, guard.error_step, guard.cosine) == (None, 2, 0.0)


def test_numbers_are_in_the_unit_that_suits_them():
    assert [size(n) for n in (0, 999, 1_234, 12_345_678, 5e9)] == ["0 B", "999 B", "1.23 kB", "12.3 MB", "5 GB"]
    assert [size(n) for n in (2.5e12, 5e16)] == ["2.5 TB", "50000 TB"]
    assert [duration(s) for s in (0, 2e-5, 0.0123, 12)] == ["0 us", "20 us", "12.3 ms", "12 s"]
    assert [duration(s) for s in (1e-12, 2e-9, 59.99, 90, 9000, 1e8)] == [
        "0 us", "0.002 us", "1 min", "1.5 min", "2.5 h", "27800 h",
    ]  # fmt: skip


# ------------------------------------------------------------------ the verdict

PLAIN = {"compressed_calls": 0, "wire_bytes": 80_000_000, "coders": {}}
SMALL = {"calls": 100, "compressed_calls": 100, "plain_bytes": 1_600_000, "wire_bytes": 160_000}


def bypassed(reason: str, nbytes: int = 80_000_000) -> dict:
    return {"bypasses": {reason: 1}, "bypassed_bytes": {reason: nbytes}}


TIMES = {
    "little of a step": ("elsewhere", {"step_seconds": 0.5}),
    "waiting for frames": ("link", {}),
    "a link that is known to be slow": ("link", {"wait_seconds": 0.002, "link_gbps": 2.0}),
    "a link that is known to be fast": ("mixed", {"wait_seconds": 0.014, "decode_seconds": 0.005, "link_gbps": 100.0}),
    "coding": ("coding", {"encode_seconds": 0.02, "wait_seconds": 0.004}),
    "decoding on the same thread": ("coding", {"decode_seconds": 0.024, "wait_seconds": 0.006}),
    "agreeing, large calls": ("late ranks", {"agree_seconds": 0.03}),
    "agreeing, small calls": ("latency", {"agree_seconds": 0.014, **SMALL}),
    "inside nodes": ("inside nodes", {"agree_seconds": 0.034, "local_seconds": 0.03, "wait_seconds": 0.002}),
    "plain after all": ("plain", PLAIN | {"plain_seconds": 0.036} | bypassed("code overflow")),
    "plain at once": ("unknown", PLAIN | {"seconds": 0.0} | bypassed("too small")),
    "cores that others have": ("busy machine", {"wait_seconds": 0.002, "encode_seconds": 0.004}),
    "no calls": ("unknown", {name: type(value)() for name, value in asdict(CALL).items()}),
    "no times": ("unknown", {"step_seconds": None}),
}


@pytest.mark.parametrize("case", TIMES)
def test_what_limited_the_time(file, case):
    limit, changes = TIMES[case]
    step = {"step_seconds": 0.1, **changes}
    header = HEADER | {"link_gbps": step.pop("link_gbps", None)}
    run = read(file(header, record(1, None), *(record(number, **step) for number in (2, 3, 4))))
    finding = verdict(summarize(run.between(2, None)), run.header)[0]
    assert (finding.about, finding.limit) == ("time", limit), finding.words


RATIOS = {
    "a coarse bound": ("none", {}),
    "a fine bound": ("bound", {"wire_bytes": 40_000_000}),
    "tiny calls": ("small calls", {"calls": 100, "compressed_calls": 100, "plain_bytes": 8_000, "wire_bytes": 15_000}),
    "plain": ("plain: too small", PLAIN | bypassed("too small")),
    "most bytes plain": ("plain: policy", {"wire_bytes": 16_000_000} | bypassed("policy", 9_000_000)),
    "few bytes plain": ("none", {"wire_bytes": 10_000_000} | bypassed("policy", 2_000_000)),
    "nothing sent": ("nothing", {"plain_bytes": 0, "wire_bytes": 0}),
    "a fixed rate": ("bits", {"wire_bytes": 40_000_000, "quantizer": {"mode": "bits", "value": 8}}),
}


@pytest.mark.parametrize("case", RATIOS)
def test_what_limited_the_ratio(file, case):
    limit, changes = RATIOS[case]
    step = {**changes}
    header = HEADER | {"config": {"quantizer": step.pop("quantizer", {})}}
    run = read(file(header, record(1, **step)))
    finding = verdict(summarize(run), run.header)[1]
    assert (finding.about, finding.limit) == ("ratio", limit), finding.words


def test_calls_that_somebody_left_plain_are_not_said_to_be_measured(file):
    run = read(file(HEADER, record(1, **PLAIN | bypassed("link too fast"))))
    assert "ransport.min_bytes is never, or compression was measured" in verdict(summarize(run), run.header)[1].words


def test_one_rank_is_told_that_it_has_nothing_to_send(file, ncz):
    alone = PLAIN | {"plain_bytes": 0, "wire_bytes": 0, "seconds": 0.0} | bypassed("one rank", 0)
    path = file(HEADER | {"ranks": 1}, *(record(step, **alone) for step in (1, 2, 3)))
    _, out, _ = ncz("report", path)
    assert "3, 1 rank, ncz_plugins" in out
    assert "Something else: nothing was sent, so compression can't gain anything." in out
    assert "Nothing was sent. A group of one rank has nothing to send" in out


def test_a_lossless_run_is_not_told_to_change_its_bound(file):
    header = HEADER | {"config": {"quantizer": {"kind": "lossless"}}}
    run = read(file(header, record(1, wire_bytes=60_000_000)))
    finding = verdict(summarize(run), run.header)[1]
    assert finding.limit == "lossless" and "1.33 times" in finding.words


def loss_of(file, quantizer: dict, error: float | None = None):
    """What is said of the loss of a run in which the guard found this relative error, or verified nothing."""
    guard = [] if error is None else [Finding("fc.weight", error, 0.9, False)]
    run = read(file(HEADER | {"config": {"quantizer": quantizer}}, record(1, guard=guard)))
    return next(each for each in verdict(summarize(run), run.header) if each.about == "loss")


def test_what_the_loss_is_known_to_suffer(file):
    assert "AdamW: " in loss_of(file, {"mode": "rms", "value": 0.375}).words
    assert loss_of(file, {"kind": "error_bound", "value": 0.25, "block": 4096}).limit in ("visible", "harmful")
    unknown = loss_of(file, {"mode": "rel", "value": 0.01})
    assert unknown.limit == "unknown" and unknown.words.count("rel:0.01") == 1
    assert loss_of(file, {"kind": "lossless"}).limit == "harmless"
    assert "another version" in loss_of(file, {"kind": "wavelets"}).words


def test_an_error_outside_of_what_was_harmless_is_told(file):
    assert "outside" not in loss_of(file, {"value": 0.375}, error=0.1).words
    found = loss_of(file, {"value": 0.375}, error=0.6)
    assert found.limit in ("outside", "harmful") and "0.6, is outside of what was shown to be harmless" in found.words
    run = read(file(HEADER, record(1, guard=[Finding("fc.weight", None, 0.0, True)])))
    assert "error, not finite, is outside" in verdict(summarize(run), run.header)[2].words


@pytest.mark.parametrize("alarm", [False, True])
def test_what_the_guard_found(file, alarm):
    run = read(file(HEADER, record(1, guard=[Finding("fc.weight", 0.75, 0.5, alarm), Finding("b", 0.1, 0.9, False)])))
    *_, finding = verdict(summarize(run), run.header)
    assert finding.about == "guard" and finding.limit == ("alarms" if alarm else "none")
    for words in ("2 verified calls", "0.75", "step 1, fc.weight", "cosine 0.5"):
        assert words in finding.words
    assert ("allowed: a relative error of at most 0.5" in finding.words) == alarm


def test_the_figures_that_a_verdict_rests_on_stand_in_it(file):
    run = read(file(HEADER, record(1, None), record(2), record(3)))
    words = " ".join(finding.words for finding in verdict(summarize(run), run.header))
    for figure in ("60% of the time in collectives", "1.6 Gbit/s", "40% of a step (40 ms)", "10.00 times"):
        assert figure in words


def test_what_else_must_be_known_about_the_times_is_said(file):
    some = {"wire_bytes": 10_000_000} | bypassed("role not enabled", 2_000_000)
    steps = [record(step, **some) for step in (2, 3, 4)]
    verified = [Finding("a", 0.2, 0.9, False)]
    run = read(file(HEADER, record(1, None), *steps, record(5, 3.0, guard=verified)))
    words = verdict(summarize(run), run.header)[0].words
    assert "What went plain at once, 13% of the bytes, is not in these times" in words
    assert "91% of the time went into 1 of 4 steps" in words and "step 5, 3 s" in words
    assert "In that step the guard verified a call" in words


@pytest.mark.parametrize("reason", Bypass, ids=lambda reason: reason.name)
def test_the_report_gives_the_advice_that_was_given_at_the_start(file, reason):
    run = read(file(HEADER, *(record(step, **PLAIN | bypassed(reason.value)) for step in (1, 2, 3))))
    said = " ".join(each.words for each in verdict(summarize(run), run.header)).lower()
    assert REMEDIES[reason].lower() in said


def test_nobody_is_told_to_move_a_setting_both_ways(file):
    """Some calls are too small to be compressed, and those that are compressed spend their time on agreeing."""
    some = {**SMALL, "calls": 200, "agree_seconds": 0.014} | bypassed("too small", 70_000)
    run = read(file(HEADER, *(record(step, **some) for step in (1, 2, 3))))
    at_the_end = verdict(summarize(run), run.header)[0].words
    start = CompressionReport(Config.load(None))
    done = Counters(calls=200, compressed_calls=100, plain_bytes=1_670_000, **bypassed("too small", 70_000))
    *_, at_the_start = (start.end_step(step, done) for step in (1, 2, 3))
    assert "Latency: " in at_the_end and "as too small: " in at_the_start
    for said in (at_the_start, at_the_end):
        assert REMEDIES[Bypass.TOO_SMALL].lower() in said.lower()
        assert not re.search(r"(?i)(raise|lower|smaller|larger) (a )?(transport[.])?min_bytes", said)


def test_a_bound_that_raised_alarms_is_not_to_be_raised(file):
    """Neither where the link is what limits, nor where the ratio is low."""
    found = [Finding("a", 0.75, 0.5, True)]
    for fine in ({}, {"wire_bytes": 40_000_000}):
        run = read(file(HEADER, *(record(step, guard=found, **fine) for step in (1, 2, 3))))
        words = " ".join(each.words for each in verdict(summarize(run), run.header))
        assert "Set a smaller quantizer.value" in words and "larger bound" not in words and "doubling" not in words


@pytest.mark.parametrize(
    "calls, expected, not_so",
    [
        (1, "small: 262 kB each, 1 a step. Fewer steps", "many"),
        (40, "small and many: 262 kB each, 40 a step.", "Fewer"),
    ],
)
def test_small_calls_are_called_many_if_they_are(file, calls, expected, not_so):
    small = {"calls": calls, "compressed_calls": calls, "plain_bytes": calls * 262_000, "agree_seconds": 0.02}
    run = read(file(HEADER, record(1), *(record(step, **small, wire_bytes=calls * 26_000) for step in (2, 3))))
    words = verdict(summarize(run.between(2, None)), run.header)[0].words
    assert expected in words and not_so not in words


def test_one_is_not_written_as_several(file, ncz):
    _, out, _ = ncz("report", file(HEADER, record(7, guard=[Finding("a", 0.75, 0.5, True)])))
    assert "run.jsonl: step 7, 4 ranks" in out and "1 call verified, 1 alarm\n" in out
    assert "1 alarm in 1 verified call: " in out


def test_reasons_that_are_found_late_are_known():
    assert set(LATE) == {reason.value for reason in (Bypass.NON_FINITE, Bypass.CODE_OVERFLOW, Bypass.NOT_WORTH)}


def test_the_documentation_explains_every_limit_and_every_key():
    text = (ROOT / "docs" / "guides" / "metrics.md").read_text()
    limits = {limit.partition(":")[0] for limit, _ in (*TIMES.values(), *RATIOS.values())} | {"lossless", "alarms"}
    missing = [name for name in (*limits, *record(guard=[Finding("a", 0.1, 0.9, False)])) if f"`{name}" not in text]
    assert not missing


# ------------------------------------------------------------------ the command


def test_gradients_and_weights_are_told_apart(file, ncz):
    by_role = {
        "plain_bytes_by_role": {"gradient": 50_000_000, "parameter": 30_000_000},
        "wire_bytes_by_role": {"gradient": 5_000_000, "parameter": 6_000_000},
    }
    path = file(HEADER, record(1, sent_whole={"first call": 1}, **by_role), record(2, **by_role))
    _, out, _ = ncz("report", path)
    lines = {line.split("  ")[0]: line.strip() for line in out.splitlines()}
    assert lines["gradients"].endswith("50 MB -> 5 MB, ratio 10.00")
    assert lines["weights"].endswith("30 MB -> 6 MB, ratio 5.00")
    assert lines["weights sent whole"].endswith("1 x first call")
    _, out, _ = ncz("report", "--json", path)
    assert json.loads(out)["roles"]["parameter"] == {"plain_bytes": 60_000_000, "wire_bytes": 12_000_000}


def test_the_command_shows_figures_bypasses_and_the_verdict(file, ncz):
    some = {"wire_bytes": 10_000_000, "plain_bytes": 82_000_000} | bypassed("policy", 2_000_000)
    path = file(HEADER, record(1, None), record(2, **some), record(3, **some))
    code, out, err = ncz("report", path)
    assert (code, err) == (0, "")
    for words in (
        f"{path}: steps 1 to 3, 4 ranks, ncz_plugins 1.2",
        "8.71, 10.00 for what was compressed",
        "81.3 MB -> 9.33 MB",
        "40 ms per step, 40.0% of it",
        "agreeing 5%, measuring 5%, encoding 25%, waiting 60%, rest 5%",
        "nothing was verified (guard.every)",
        "What limited the time",
        "The link, or ranks that code more slowly: 60%",
        "What limited the ratio",
    ):
        assert words in out, out
    [row] = [line.split() for line in out.splitlines() if line.startswith("policy")]
    assert row == ["policy", "2", "1.33", "MB", "14%"]


def test_json_holds_the_same_and_a_range_of_steps_can_be_chosen(file, ncz):
    path = file(HEADER, *(record(step, wire_bytes=step * 1_000_000) for step in range(1, 9)), '{"torn')
    code, out, _ = ncz("report", path, "--json", "--from", "3", "--to", "4")
    found = json.loads(out)
    assert code == 0 and (found["steps"], found["first"], found["last"]) == (2, 3, 4)
    assert found["wire_bytes"] == 7_000_000 and found["header"]["ranks"] == 4
    assert [each["about"] for each in found["verdict"]] == ["time", "ratio", "loss"]
    assert found["notes"] == ["line 10 is torn, as a run was killed: left out"]


def test_steps_that_are_not_there_are_a_mistake_of_the_user(file, ncz):
    code, out, err = ncz("report", file(HEADER, record(1), record(2)), "--from", "3")
    assert code == 2 and not out and "no steps from 3 to the end; the file has 1 to 2" in err


def test_the_picture_is_one(file, ncz, tmp_path):
    picture = tmp_path / "run.png"
    found = [Finding("a", 0.2, 0.9, False), Finding("b", None, 0.0, True), Finding("c", 0.7, 0.6, True)]
    path = file(HEADER, record(1, None, guard=found), record(2), HEADER, record(3, None))
    assert ncz("report", path, "--plot", picture)[0] == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    code, _, err = ncz("report", path, "--plot", tmp_path / "run.doc")
    assert code == 2 and "--plot" in err and ".png" in err
