"""The codec's results page: the selector is judged rightly, and every figure finds its place."""

import json

import numpy as np
import pytest

from benchmarks import codec_table, data
from benchmarks.compressors import LIBRARIES, missing
from ncz_plugins.cli.codec import speed
from ncz_plugins.cli.codec.round_trip import codes_of, round_trip
from ncz_plugins.core.config import Config
from ncz_plugins.kernels.format import SelectorCosts
from ncz_plugins.kernels.reference.symbols import predict


@pytest.fixture(autouse=True)
def fewest_repetitions(monkeypatch):
    monkeypatch.setattr(speed, "SECONDS", 0)


def run(x, coder="auto", predictor="auto", link=1):
    entropy = {"coder": coder, "predictor": predictor}
    return round_trip(x, Config(entropy=entropy, transport={"link_gbps": link, "frame_bytes": "256KiB"}))


@pytest.fixture(scope="module")
def walk():
    return np.random.default_rng(0).standard_normal(100_000).cumsum().astype(np.float32)


def test_every_data_set_has_bounds():
    assert list(codec_table.BOUNDS) == list(data.SETS)
    for bounds in codec_table.BOUNDS.values():
        for bound in bounds:
            Config(quantizer=codec_table.QUANTIZERS[bound])


@pytest.mark.parametrize("coder", codec_table.CODERS)
@pytest.mark.parametrize("predictor", codec_table.PREDICTORS)
def test_costs_are_those_of_the_frames(walk, coder, predictor):
    costs = SelectorCosts(link=7, raw=1, fixed=2, huffman=3, rans=5, rans_rest=11)
    made = run(walk, coder, predictor)
    found = codec_table.frame_costs(made, costs)
    codes = [codes_of(made.codec, i).numpy() for i in range(len(made.frames))]
    for cost, frame, of_frame in zip(found, made.frames, codes):
        expected = 7 * frame.numel() + {"raw": 1, "fixed": 2, "huffman": 3, "rans": 5}[coder] * of_frame.size
        if coder == "rans":
            symbols = predict(of_frame, int(predictor == "delta"))
            mode = int(frame[24])
            expected += 11 * int((symbols != mode).sum())
        assert cost == expected
    assert len(found) == len(made.frames) == 2


def test_the_best_is_over_itself_by_nothing_and_others_by_what_they_cost_more(walk):
    forced = [run(walk, c, p) for c in codec_table.CODERS for p in codec_table.PREDICTORS]
    totals = [sum(codec_table.frame_costs(each, each.codec.coding.costs)) for each in forced]
    judged = [codec_table.judge(each, forced) for each in forced]
    for total, of_it in zip(totals, judged):
        assert of_it["over_best"] == pytest.approx(total / min(totals) - 1)
        assert of_it["over_best_per_frame"] >= of_it["over_best"] - 1e-12
    assert min(of_it["over_best"] for of_it in judged) == 0
    assert max(of_it["over_best"] for of_it in judged) > 0.1


def test_a_row_holds_what_the_page_shows(monkeypatch, walk):
    monkeypatch.setattr(data, "load", lambda name: walk[:50_000])
    rows = [codec_table.measure("ramps", bound) for bound in ("range 0.001", "default", "lossless")]
    row = rows[0]
    outcome = round_trip(walk[:50_000], Config(quantizer={"mode": "range", "value": 1e-3, "block": 0}))
    assert row["auto"]["ratio"] == outcome.ratio and row["entropy_bits"] == outcome.entropy_bits
    assert set(row["forced"]) == {f"{c} {p}" for c in codec_table.CODERS for p in codec_table.PREDICTORS}
    assert row["best"]["ratio"] == max(row["forced"].values()) == row["forced"][row["best"]["coder"]]
    assert [judged["link_gbps"] for judged in row["selector"]] == list(codec_table.LINKS)
    assert set(row["peers"]) == {library.name for library in LIBRARIES} - {library.name for library in missing()}
    assert "best" not in rows[2] and rows[2]["entropy_bits"] is None

    text = codec_table.page(rows, {"where": "Somewhere"}, json.loads(codec_table.KERNELS.read_text()))
    for cell in ("Somewhere", "| ramps | range 0.001 |", "| ramps | default |", "| ramps | lossless |"):
        assert cell in text
    assert f"{row['entropy_bits']:.2f}" in text and f"| {row['auto']['ratio']:.2f} |" in text
    worst = max(0, *(judged["over_best"] for r in rows[:2] for judged in r["selector"]))
    assert f"Selector: at most {100 * worst:.1f} % over the best." in text
    tables = [part.splitlines() for part in text.split("\n\n") if part.startswith("|")]
    *tables, kernels = tables
    assert [len(table) for table in tables] == [2 + 3, 2 + 3, 2 + 2] and len(kernels) > 2
    for table in (*tables, kernels):
        assert len({line.count("|") for line in table}) == 1
