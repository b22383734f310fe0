"""What all pictures share, and what a reader finds written in those of each command."""

import json
import re

import pytest

pytest.importorskip("matplotlib")

from ncz_plugins.cli import picture
from ncz_plugins.cli.main import main
from ncz_plugins.cli.perf.plot import draw


def written(file) -> list[str]:
    """The texts of an SVG picture: matplotlib writes each one into a comment."""
    return re.findall(r"<!-- (.*?) -->", file.read_text())


def test_a_steady_curve_is_not_on_the_edge_of_its_frame():
    _, [axes] = picture.new_figure(1)
    axes.plot([1, 2, 3], [10, 10, 10])
    picture.from_zero(axes)
    assert axes.get_ylim() == (0, 11.5)


@pytest.mark.parametrize("labels", [1, 3, 7])
def test_a_legend_hides_no_curve(labels):
    figure, [axes] = picture.new_figure(1)
    for label in range(labels):
        axes.plot([1, 2], [1, 2], label=f"label {label}")
    picture.finish(axes, "title")
    figure.draw_without_rendering()
    legend = axes.get_legend().get_window_extent()
    assert axes.get_window_extent().y1 <= legend.y0 and legend.y1 <= axes.title.get_window_extent().y0 + 1e3
    assert legend.y1 <= axes._left_title.get_window_extent().y1


def test_without_curves_that_is_said():
    _, [axes] = picture.new_figure(1)
    picture.finish(axes, "title", empty="nothing was sent")
    assert [text.get_text() for text in axes.texts] == ["nothing was sent"]


@pytest.mark.parametrize("low, high, ticks", [(0.03, 0.9, ["0.05", "0.1", "0.2", "0.5"]), (1e-4, 1e4, ["0.01", "1"])])
def test_ticks_of_a_logarithmic_axis_are_plain_numbers(low, high, ticks):
    figure, [axes] = picture.new_figure(1)
    axes.plot([1, 2], [low, high])
    picture.logarithmic(axes.yaxis)
    figure.draw_without_rendering()
    found = [each.get_text() for each in axes.get_yticklabels(which="both")]
    assert set(ticks) <= set(found) and not any("10^" in each or "e" in each for each in found)


def test_a_single_step_has_one_tick():
    figure, [axes] = picture.new_figure(1)
    axes.plot([7], [1], ".")
    picture.whole_numbers(axes.xaxis)
    figure.draw_without_rendering()
    found = [each.get_text() for each in axes.get_xticklabels()]
    assert "7" in found and len(found) == len(set(found))


# ------------------------------------------------------------------ what is written


def test_a_plan_says_sizes_in_units_and_marks_its_ranks(tmp_path, capsys):
    file = tmp_path / "plan.svg"
    # Large nodes make few machines to simulate of the 1,024 ranks that are drawn.
    where = ["--link-gbps", "100", "--nodes", "6", "--ranks-per-node", "128"]
    options = ["--parameters", "250M", "--compute-seconds", "1", *where]
    assert main(["plan", *options, "--strategy", "zero-2", "--plot", str(file)]) == 0
    texts = written(file)
    assert "planned: 768 ranks" in texts and any(text.endswith("of 1 GB") for text in texts), texts
    assert not any("e+" in text or "times" in text for text in texts), texts


def test_ours_is_not_said_to_be_bound_by_its_ratio(tmp_path):
    """Plain may not fill its link, so that fewer bytes are not all that ours gains."""
    one = {"ratio": None, "speedup": 1.0, "peer": "plain"}
    ours = {"ratio": 9.2, "speedup": 9.5, "peer": "ncz"}
    records = [record | {"size": size} for size in (1 << 20, 1 << 24) for record in (one, ours)]
    draw(tmp_path / "perf.svg", records, "all_reduce")
    texts = written(tmp_path / "perf.svg")
    assert "times fewer bytes, ncz" in texts and "16 MiB" in texts
    assert not any("bound" in text for text in texts)


def test_one_size_is_drawn_as_bars_with_names(tmp_path):
    records = [
        {"ratio": None, "speedup": speedup, "peer": peer, "size": 1 << 20}
        for peer, speedup in (("plain", 1.0), ("ncz", 0.32))
    ]
    draw(tmp_path / "perf.svg", records, "all_reduce")
    assert {"plain", "ncz", "0.32", "speed-up over plain, 1 MiB"} <= set(written(tmp_path / "perf.svg"))


def test_the_picture_of_a_codec_names_what_the_entropy_is_of(tmp_path, capsys):
    import numpy as np

    ramp = np.add.outer(np.linspace(0, 1, 200), np.linspace(0, 1, 200)).astype(np.float32)
    np.save(tmp_path / "smooth.npy", ramp)
    file = tmp_path / "codec.svg"
    assert main(["codec", str(tmp_path / "smooth.npy"), "--bound", "range:1e-3", "--plot", str(file)]) == 0
    assert {"entropy of single codes", "asked for", "ratio of 40,000 values"} <= set(written(file))
    assert not any("limit" in text for text in written(file))
    assert "of single codes (order 0), which a predictor went below" in capsys.readouterr().out


def test_the_picture_of_a_run_names_units(tmp_path, capsys):
    counts = {"calls": 1, "compressed_calls": 1, "plain_bytes": 80_000_000, "wire_bytes": 8_000_000, "seconds": 0.05}
    steps = [{"step": step, "step_seconds": 0.1, **counts} for step in (1, 2, 3)]
    run, file = tmp_path / "run.jsonl", tmp_path / "run.svg"
    run.write_text("\n".join(map(json.dumps, steps)))
    assert main(["report", str(run), "--plot", str(file)]) == 0
    assert {"80 MB", "100 ms", "plain", "sent", "step", "collectives"} <= set(written(file))
    assert "decoding" not in written(file)  # nothing was decoded
