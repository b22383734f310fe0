"""What follows from measurements, and the file that keeps them; tests/distributed measures."""

import json
import subprocess
import sys
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ncz_plugins.cli.main import main
from ncz_plugins.core.config import CoderCosts, Config, KiB, MiB
from ncz_plugins.core.errors import ConfigError
from ncz_plugins.core.tuning.decisions import WORTH, best, crossover, rans_costs
from ncz_plugins.core.tuning.tuning_file import SpeedComparison, Trial, Tuning, apply_tuning_file

COSTS = CoderCosts(raw=600, fixed=500, huffman=2300, rans=1200, rans_rest=3500)
OPEN = {"frame_bytes": "auto", "min_bytes": "auto"}


def compared(**times: tuple[float, float]) -> list[SpeedComparison]:
    """(plain, compressed) seconds by size, such as k16=(2, 1)."""
    sizes = [int(name[1:]) * {"k": KiB, "m": MiB}[name[0]] for name in times]
    return [
        SpeedComparison(nbytes=nbytes, plain_seconds=plain, compressed_seconds=compressed)
        for nbytes, (plain, compressed) in zip(sizes, times.values())
    ]


def found(**values) -> Tuning:
    return Tuning(
        **{
            "format": 1,
            "world_size": 4,
            "schedule": "direct",
            "frame_bytes": 256 * KiB,
            "min_bytes": 2 * MiB,
            "link_gbps": 0.5,
            "costs": COSTS,
            "latency_seconds": 1e-4,
            "trials": [Trial(schedule="direct", frame_bytes=256 * KiB, nbytes=MiB, seconds=0.5)],
            "comparisons": compared(k16=(1, 2), m16=(8, 2)),
            "quantizer": Config().quantizer.describe(),
            "kernels": "avx2",
            "version": "1.0",
        }
        | values
    )


# ------------------------------------------------------------------ decisions


def test_compression_begins_where_it_gains():
    assert crossover(compared(k16=(1, 2), k64=(2, 1), k256=(4, 1))) == 64 * KiB
    assert crossover(compared(k16=(2, 1), k64=(4, 1))) == 16 * KiB


def test_a_size_that_gains_below_one_that_does_not_is_no_beginning():
    assert crossover(compared(k16=(2, 1), k64=(2, 3), k256=(4, 1))) == 256 * KiB


def test_what_gains_less_than_noise_does_not_gain():
    assert crossover(compared(k64=(1, 0.96), k256=(1, 0.98), m1=(1, 0.97))) == MiB
    assert crossover(compared(k64=(1, 1), m1=(2, 1))) == MiB


def test_never_is_said_only_of_large_sizes():
    assert crossover(compared(k16=(1, 2), m16=(3, 3))) == "never"
    assert crossover(compared(k16=(1, 2), m64=(3, 4))) == "never"
    assert crossover(compared(k16=(1, 2), m4=(3, 4))) == 16 * MiB  # it may still gain where there was no time to look
    assert crossover(compared(k16=(1, 2))) == Config().min_bytes_in_effect()


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=1, max_size=8))
def test_nothing_that_loses_is_compressed(times):
    comparisons = compared(**{f"k{4**i}": pair for i, pair in enumerate(times)})
    least = crossover(comparisons)
    for each in comparisons:
        if least != "never" and each.nbytes >= least:
            assert each.compressed_seconds < each.plain_seconds


def trials(*seconds: float) -> list[Trial]:
    ways = [("ring", MiB), ("direct", MiB), ("ring", 256 * KiB), ("direct", 256 * KiB)]
    return [Trial(schedule=s, frame_bytes=f, nbytes=MiB, seconds=t) for (s, f), t in zip(ways, seconds)]


def test_the_fastest_is_chosen_and_the_ordinary_one_if_it_is_as_good():
    assert best(four := trials(4.0, 3.0, 2.0, 3.0)) is four[2]
    assert best(four := trials(2.01, 3.0, 2.0, 3.0)) is four[0]
    assert best(four := trials(2.0, 2.0, 2.0, 2.0)) is four[0]
    assert best(four := trials(2.5, 2.05, 2.04, 2.0)) is four[1]


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=4))
def test_what_is_chosen_is_hardly_slower_than_the_fastest(seconds):
    assert best(trials(*seconds)).seconds * WORTH <= min(seconds)


@given(st.floats(0, 1e4), st.floats(0, 1e4), st.floats(0, 0.4), st.floats(0.5, 1))
def test_costs_of_rans_are_found_in_two_sums(per_value, per_rest, few, many):
    costs = per_value + per_rest * many, per_value + per_rest * few
    assert rans_costs(costs, (many, few)) == pytest.approx((per_value, per_rest), abs=1e-6)


def test_costs_of_rans_are_not_negative():
    assert rans_costs((1.0, 2.0), (0.7, 0.05)) == (1.0, 0.0)
    assert rans_costs((100.0, 1.0), (0.7, 0.05))[0] == 0.0


# ------------------------------------------------------------------ the file


def test_a_file_holds_all_of_it(tmp_path):
    file = tmp_path / "tuned.json"
    found().write(file)
    assert Tuning.read(file) == found()
    found(min_bytes="never").write(file)
    assert Tuning.read(file).min_bytes == "never"
    assert [each.name for each in tmp_path.iterdir()] == ["tuned.json"]


def written(tmp_path, **changes):
    file = tmp_path / "tuned.json"
    file.write_text(json.dumps(found().model_dump(mode="json") | changes))
    return file


@pytest.mark.parametrize(
    "key, value, says",
    [
        ("format", 2, "format: 2 is not allowed; allowed: 1"),
        ("world_size", 1, "world_size: 1 is not allowed; allowed: an integer, 2 or more"),
        ("schedule", "auto", "schedule: 'auto' is not allowed; allowed: ring, direct, halving"),
        ("frame_bytes", 1, "frame_bytes: 1 is not allowed; allowed: "),
        ("frame_bytes", "auto", "frame_bytes: 'auto' is not allowed; allowed: "),
        ("min_bytes", "auto", "min_bytes: 'auto' is not allowed; allowed: "),
        ("link_gbps", 0, "link_gbps: 0 is not allowed; allowed: a number from 0.001 to 10000"),
        ("costs", {"raw": 1}, "costs.fixed: is missing; allowed: an integer from 0 to 999999999"),
        ("trials", [], "trials: [] is not allowed; allowed: a list of trials"),
        ("comparisons", [{"nbytes": 0}], "comparisons: "),
        ("latency_seconds", -1, "latency_seconds: -1 is not allowed; allowed: a finite number above 0"),
        ("surprise", 1, "surprise: unknown key (value 1)"),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong_and_the_remedy(tmp_path, key, value, says):
    file = written(tmp_path, **{key: value})
    with pytest.raises(ConfigError) as caught:
        Tuning.read(file)
    text = str(caught.value)
    assert text.startswith(f"transport.tuning: {file}: ") and says in text
    assert text.endswith(f"`ncz tune --output {file}` writes it")


@pytest.mark.parametrize("text, says", [("{", "invalid JSON"), ("[]", "not a mapping"), ("{}", "format: is missing")])
def test_a_file_that_is_none_is_refused(tmp_path, text, says):
    file = tmp_path / "tuned.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"(?s)tuned.json.*{says}"):
        Tuning.read(file)


def test_a_missing_file_is_named_with_the_remedy(tmp_path):
    with pytest.raises(ConfigError, match="transport.tuning: .*none.json: cannot be read: No such file.* `ncz tune"):
        Tuning.read(tmp_path / "none.json")


# ------------------------------------------------------------------ from the file to a configuration


def test_a_configuration_takes_from_its_file_what_it_leaves_open(tmp_path):
    config = Config(transport={"tuning": str(written(tmp_path)), **OPEN})
    resolved = apply_tuning_file(config, world_size=4)
    assert resolved == found().fill_in(config)
    own = resolved.transport
    assert (own.schedule, own.frame_bytes, own.min_bytes, own.link_gbps) == ("direct", 256 * KiB, 2 * MiB, 0.5)
    assert resolved.entropy.costs == COSTS
    assert own.tuning is None and not resolved.needs_measuring


def test_what_is_named_stays(tmp_path):
    named = {"schedule": "ring", "frame_bytes": 4 * MiB, "min_bytes": 0, "link_gbps": 7.0}
    resolved = apply_tuning_file(Config(transport={"tuning": str(written(tmp_path)), **named}), world_size=4)
    assert resolved.transport == Config(transport=named).transport


def test_a_file_of_other_ranks_is_used_with_a_warning_but_for_the_schedule(tmp_path):
    config = Config(transport={"tuning": str(written(tmp_path)), **OPEN})
    with pytest.warns(RuntimeWarning, match="was measured with 4 ranks, not 2: .* `ncz tune` measures anew"):
        resolved = apply_tuning_file(config, world_size=2)
    assert resolved.transport.schedule == "auto" and resolved.transport.frame_bytes == 256 * KiB


def test_a_file_of_another_quantizer_is_used_with_a_warning(tmp_path):
    config = Config(transport={"tuning": str(written(tmp_path)), **OPEN}, quantizer={"value": 0.1})
    with pytest.warns(RuntimeWarning, match="with quantizer stochastic rms:0.375 .*, not stochastic rms:0.1 "):
        assert apply_tuning_file(config, world_size=4).transport.schedule == "direct"


def test_without_a_file_nothing_changes_and_nothing_is_said():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for config in (Config(), Config(transport=OPEN)):
            assert apply_tuning_file(config, world_size=4) is config


@pytest.mark.parametrize("left_open", [{"frame_bytes": "auto"}, {"min_bytes": "auto"}, OPEN])
def test_sizes_may_be_open(left_open):
    assert Config(transport=left_open).needs_measuring
    assert not Config(transport=left_open).resolved().needs_measuring


def test_it_says_what_was_chosen_and_why():
    line = found().describe()
    assert line == (
        "4 ranks, 0.5 Gbit/s, 100 us to agree: direct, frames of 256 KiB, compressed from 2 MiB, "
        "4.00 times as fast at 16 MiB"
    )
    unknown = found(comparisons=compared(k16=(1, 4), k256=(1, 1.6)), min_bytes=MiB).describe()
    assert unknown.endswith("from 1 MiB, which there was no time to try: 256 KiB would take 1.60 times as long")
    never = found(min_bytes="never", comparisons=compared(m16=(1, 1.5))).describe()
    assert never.endswith("nothing is compressed, as the link is too fast: 16 MiB would take 1.50 times as long")


def test_the_file_is_checked_with_the_configuration_that_names_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    file = tmp_path / "c.yaml"
    file.write_text("transport:\n  tuning: tuned.json\n")
    assert main(["check", str(file)]) == 2
    assert f"transport.tuning: {tmp_path}/tuned.json: cannot be read" in capsys.readouterr().err
    written(tmp_path)
    assert main(["check", str(file)]) == 0
    assert found().describe() in capsys.readouterr().out


@pytest.mark.processes
def test_checking_a_file_does_not_take_torch():
    code = "import sys; from ncz_plugins.core.tuning import decisions; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"


def test_a_tuning_file_is_read_from_a_folder_of_the_user(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    found().write(tmp_path / "home" / "tuned.json")
    for path in ("~/tuned.json", "$HOME/tuned.json"):
        config = Config.load({"transport": {"tuning": path, **OPEN}})
        assert apply_tuning_file(config, 4).transport.min_bytes == found().min_bytes
        (tmp_path / "c.yaml").write_text(f"transport: {{tuning: {path}}}")
        assert main(["check", "c.yaml"]) == 0 and found().describe() in capsys.readouterr().out
