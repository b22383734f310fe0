"""`ncz codec`, run as a user runs it: what it reports agrees with `compress`, and it explains every mistake."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from repository import ROOT

from ncz_plugins import compress, decompress, kernels
from ncz_plugins.cli.codec import plot, show, speed
from ncz_plugins.cli.codec.array_file import read_array
from ncz_plugins.cli.codec.entropy import Occurrences
from ncz_plugins.cli.codec.round_trip import round_trip
from ncz_plugins.cli.main import main
from ncz_plugins.core.config import Config

KEYS = [
    "ratio",
    "bits_per_value",
    "entropy_bits",
    "max_abs_error",
    "bound_abs",
    "bound_ok",
    "encode_gbps",
    "decode_gbps",
    "memcpy_gbps",
    "coders",
    "backend",
]


@pytest.fixture(autouse=True)
def fewest_repetitions(monkeypatch):
    monkeypatch.setattr(speed, "SECONDS", 0)


@pytest.fixture
def ncz(capsys, monkeypatch):
    """Run `ncz codec` in this process: exit code, stdout, stderr."""
    monkeypatch.setenv("COLUMNS", "120")

    def run(*arguments):
        code = main(["codec", *map(str, arguments)])
        output = capsys.readouterr()
        return code, output.out, output.err

    return run


@pytest.fixture
def report(ncz):
    """What --json prints, as strict JSON."""

    def no_number(name):
        raise AssertionError(f"{name} is not JSON")

    def run(*arguments):
        code, out, err = ncz(*arguments, "--json")
        assert (code, err) == (0, "")
        found = json.loads(out, parse_constant=no_number)
        assert list(found) == KEYS
        return found

    return run


@pytest.fixture
def saved(tmp_path):
    def save(array, name="x.npy"):
        np.save(tmp_path / name, array)
        return tmp_path / name

    return save


def gaussian(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


# ------------------------------------------------------------------ what it reports


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize(
    "arguments, quantizer",
    [
        ([], {}),
        (["--bound", "abs:0.1"], {"mode": "abs", "value": 0.1}),
        (["--bound", "rel:1e-2", "--block", "8192"], {"mode": "rel", "value": 1e-2, "block": 8192}),
        (["--bound", "range:0.01", "--block", 0], {"mode": "range", "value": 0.01, "block": 0}),
        (["--quantizer", "stochastic"], {"kind": "stochastic"}),
        (["--quantizer", "lossless"], {"kind": "lossless"}),
    ],
    ids=lambda case: " ".join(map(str, case)) if isinstance(case, list) else "",
)
def test_the_report_agrees_with_compress(report, saved, dtype, arguments, quantizer):
    x = gaussian(3, 7919, dtype=dtype) * np.array([[1], [100], [1e-3]], dtype)
    found = report(saved(x), *arguments)
    data = compress(torch.from_numpy(x), {"quantizer": quantizer, "transport": {"link_gbps": 1}})
    assert found["ratio"] == x.nbytes / data.numel()
    assert found["bits_per_value"] == 8 * data.numel() / x.size
    errors = np.abs(x.astype(np.float64) - decompress(data).numpy().astype(np.float64)).reshape(-1)
    assert found["max_abs_error"] == errors.max()
    assert found["bound_ok"] is True
    assert found["backend"] == kernels.cpu_backend().name
    assert all(found[f"{name}_gbps"] > 0 for name in ("encode", "decode", "memcpy"))

    flat = x.astype(np.float64).reshape(-1)
    block = {"abs": 0, None: 128, "rel": 8192, "range": 0}[quantizer.get("mode")] or flat.size
    blocks = [flat[i : i + block] for i in range(0, flat.size, block)]
    bounds = {
        "abs": lambda b: 0.1,
        "rel": lambda b: 1e-2 * np.abs(b).max(),
        "range": lambda b: 0.01 * np.ptp(b),
        None: lambda b: 0.375 * np.sqrt(np.mean(b**2)),
    }[quantizer.get("mode")]
    if quantizer.get("kind") == "lossless":
        assert found["bound_abs"] == found["max_abs_error"] == 0
        assert found["entropy_bits"] is None and set(found["coders"]) == {"split"}
    else:
        assert found["bound_abs"] == pytest.approx(max(map(bounds, blocks)), rel=1e-12)
        assert 0 < found["entropy_bits"] and "split" not in found["coders"]


def test_entropy_is_that_of_the_whole_array(report, saved):
    x = gaussian(70_001)
    y = decompress(compress(torch.from_numpy(x), {"quantizer": {"mode": "abs", "value": 0.1}})).numpy()
    _, counts = np.unique(y, return_counts=True)
    shares = counts / x.size
    found = report(saved(x), "--bound", "abs:0.1", "--frame", "64KiB")
    assert found["entropy_bits"] == pytest.approx(-(shares * np.log2(shares)).sum(), rel=1e-12)
    assert sum(found["coders"].values()) == 5  # frames of 16,384


def test_occurrences_in_pieces_are_those_of_the_whole(monkeypatch):
    codes = np.random.default_rng(0).integers(-(2**31), 2**31, 3 << 20).astype(np.int32)
    codes[::3] = 5
    occurrences = Occurrences()
    for piece in np.array_split(codes, 9):  # enough for one that is joined on the way
        occurrences.add(piece)
    _, counts = np.unique(codes, return_counts=True)
    shares = counts / codes.size
    assert occurrences.entropy() == pytest.approx(-(shares * np.log2(shares)).sum(), rel=1e-12)


@pytest.mark.parametrize("count", [0, 1, 7919])
@pytest.mark.parametrize("arguments", [[], ["--quantizer", "lossless"], ["--bound", "range:1e-3"]])
def test_any_number_of_elements(ncz, saved, count, arguments):
    code, out, err = ncz(saved(gaussian(count)), *arguments)
    assert (code, err) == (0, "")
    assert f"{count:,} float32" in out
    assert "nan" not in out


def test_an_empty_array_has_no_bits_per_value(report, saved):
    found = report(saved(np.zeros((0, 3), np.float32)))
    assert (found["ratio"], found["bits_per_value"], found["entropy_bits"]) == (0, None, None)


def test_the_table_says_what_the_json_says(ncz, report, saved):
    file = saved(gaussian(100_003))
    settings = ("--coder", "huffman", "--frame", "256KiB")
    found = report(file, *settings)
    code, out, err = ncz(file, *settings)
    assert (code, err) == (0, "")
    assert f"{found['ratio']:.4g}" in out and f"{found['bits_per_value']:.4g}" in out
    assert f"{found['entropy_bits']:.4g} bits per code" in out
    assert f"{found['max_abs_error']:.4g}, within the bound in each of 782 blocks" in out
    assert "huffman      2 of 2 frames" in out and "none         2 of 2 frames" in out
    assert Config(entropy={"coder": "huffman"}, transport={"frame_bytes": "256KiB"}).describe() in out
    assert kernels.cpu_backend().name in out


@pytest.mark.parametrize("quantizer", [[], ["--quantizer", "stochastic"]])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_held_without_loss_and_said_to_be(ncz, report, saved, bad, quantizer):
    x = gaussian(10_000)
    x[7000] = bad
    file = saved(x)
    found = report(file, *quantizer)
    assert (found["max_abs_error"], found["bound_ok"], found["coders"]) == (0, True, {"split": 1})
    assert found["entropy_bits"] is found["bound_abs"] is None
    _, out, _ = ncz(file, *quantizer)
    assert "not quantized, as it contains NaN or infinity" in out


def test_what_would_not_pay_is_held_without_loss_and_said_to_be(ncz, report, saved):
    file = saved(gaussian(10_000, dtype=np.float16))
    arguments = "--bound", "abs:1e-4"
    found = report(file, *arguments)
    assert found["coders"] == {"split": 1} and found["entropy_bits"] is None
    assert (found["max_abs_error"], found["bound_abs"], found["bound_ok"]) == (0, 1e-4, True)
    assert "not quantized, as at this bound codes would take about as many bits" in ncz(file, *arguments)[1]


def test_a_block_outside_its_own_bound_is_found():
    x = gaussian(3 * 4096)
    x[:4096] *= 100
    outcome = round_trip(x, Config(quantizer={"block": 4096}))
    assert outcome.blocks_over == 0 and outcome.of_bound <= 1
    errors = outcome.errors.copy()
    errors[1] = outcome.bounds[1] * (1 + 1e-9)  # far below the largest bound
    worse = replace(outcome, errors=errors)
    assert worse.blocks_over == 1 and worse.of_bound > 1
    assert errors.max() < outcome.bound_abs
    speeds = speed.Speeds(1, 1, 1, 1)
    assert show.document(worse, speeds)["bound_ok"] is False
    assert "outside the bound in 1 of 3 blocks" in dict(show.rows(worse, speeds))["maximum error"]


def test_other_layouts_of_a_file_count_as_the_same_array(report, saved):
    x = gaussian(100, 97)
    expected = report(saved(x))
    for other in (np.asfortranarray(x), x.astype(">f4")):
        found = report(saved(other))
        assert [found[key] for key in KEYS[:6]] == [expected[key] for key in KEYS[:6]]


def test_a_file_is_memory_mapped_and_never_written(saved):
    file = saved(gaussian(5000))
    before = file.read_bytes()
    array = read_array(file)
    mapped = array
    while not isinstance(mapped, np.memmap):
        mapped = mapped.base
    assert np.shares_memory(array, mapped)
    array[:] = 0
    assert file.read_bytes() == before


# ------------------------------------------------------------------ settings


def test_coder_predictor_and_frames_are_those_asked_for(ncz, saved):
    file = saved(np.cumsum(gaussian(200_000)).astype(np.float32))
    for coder in ("raw", "fixed", "huffman", "rans"):
        _, out, _ = ncz(file, "--coder", coder, "--predictor", "delta", "--bound", "abs:0.5", "--frame", "256KiB")
        assert f"{coder:8}     4 of 4 frames" in out and "delta        4 of 4 frames" in out


def test_a_slow_link_makes_auto_take_more_trouble(report, saved):
    file = saved(gaussian(100_000))
    slow, fast = report(file, "--link", "0.01"), report(file, "--link", 1000)
    assert slow["ratio"] > fast["ratio"]
    assert set(slow["coders"]) <= {"huffman", "rans"} and set(fast["coders"]) <= {"fixed", "raw"}


def test_options_go_before_the_file(report, saved, tmp_path):
    x = saved(gaussian(10_000))
    file = tmp_path / "c.yaml"
    file.write_text("quantizer: {mode: abs, value: 0.5}\nentropy: {coder: raw}")
    found = report(x, "--config", file)
    assert (found["bound_abs"], found["coders"]) == (0.5, {"raw": 1})
    found = report(x, "--config", file, "--bound", "abs:0.25")
    assert (found["bound_abs"], found["coders"]) == (0.25, {"raw": 1})
    found = report(x, "--config", file, "--coder", "rans")
    assert (found["bound_abs"], found["coders"]) == (0.5, {"rans": 1})
    deepspeed = tmp_path / "ds.json"
    deepspeed.write_text('{"communication_compression": {"quantizer": {"mode": "abs", "value": 2}}}')
    assert report(x, "--config", deepspeed)["bound_abs"] == 2


def test_a_preset_is_as_good_as_a_file(ncz, report, saved):
    x = saved(gaussian(10_000))
    small, own = report(x, "--config", "ncclz:small"), report(x, "--bound", "rms:0.85")
    assert (small["ratio"], small["bound_abs"]) == (own["ratio"], own["bound_abs"])
    assert small["ratio"] > report(x)["ratio"]
    code, _, said = ncz(x, "--config", "ncclz:smal")
    assert code == 2 and "did you mean 'ncclz:small'?" in said


# ------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    "content, says",
    [
        (np.arange(3), "holds int64; allowed: float16, float32, float64"),
        (np.array(["a"]), "holds <U1; allowed"),
        (np.zeros(2, "f4,f4"), "allowed: float16"),
        (np.zeros(2, np.complex64), "holds complex64; allowed"),
        (np.array([None]), "is not a whole .npy file of numbers"),
        (b"", "is not an .npy file"),
        (b"hello, I am text", "is not an .npy file"),
        (b"PK\x03\x04 an archive", "is not an .npy file"),
        (b"\x93NUMPY", "is not a whole .npy file of numbers"),
        (b"\x93NUMPY\x01\x00\x10\x00{'descr': '<f4'}", "is not a whole .npy file of numbers"),
    ],
    ids=str,
)
def test_a_file_of_something_else(ncz, tmp_path, content, says):
    file = tmp_path / "x.npy"
    file.write_bytes(content) if isinstance(content, bytes) else np.save(file, content, allow_pickle=True)
    code, out, err = ncz(file)
    assert (code, out) == (2, "")
    assert err.startswith(f"ncz: error: {file}: ") and says in err
    assert err.count("\n") == 1


def test_a_file_that_is_cut_off_or_missing(ncz, saved):
    file = saved(gaussian(1000))
    file.write_bytes(file.read_bytes()[:-1])
    code, out, err = ncz(file)
    assert (code, out, err.count("\n")) == (2, "", 1) and "is not a whole .npy file" in err
    assert ncz("nowhere.npy") == (2, "", "ncz: error: nowhere.npy: cannot be read: No such file or directory\n")
    assert ncz(file.parent)[2] == f"ncz: error: {file.parent}: cannot be read: Is a directory\n"


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--bound", "0.25"], "--bound: '0.25' is not MODE:VALUE, such as rms:0.25 or range:1e-3"),
        (["--bound", "rms:"], "--bound: 'rms:' is not MODE:VALUE"),
        (["--bound", ""], "--bound: '' is not MODE:VALUE"),
        (["--bound", "max:1"], "quantizer.mode: 'max' is not allowed; allowed: abs, rel, rms, range"),
        (["--bound", "rms:a"], "quantizer.value: 'a' is not allowed"),
        (["--bound", "rms:0"], "quantizer.value: 0 is not allowed"),
        (["--bound", "abs:nan"], "quantizer.value: nan is not allowed"),
        (["--bound", "rel:1e-12"], "is too fine a bound for 32-bit codes"),
        (["--block", "5"], "quantizer.block: 5 is not allowed"),
        (["--coder", "zip"], "entropy.coder: 'zip' is not allowed; allowed: auto, raw"),
        (["--predictor", "linear"], "entropy.predictor: 'linear' is not allowed"),
        (["--quantizer", "topk"], "quantizer.kind: 'topk' is not allowed"),
        (["--link", "fast"], "transport.link_gbps: 'fast' is not allowed"),
        (["--frame", "1"], "transport.frame_bytes: 1 is not allowed"),
        (["--config", "nowhere.yaml"], "nowhere.yaml: cannot be read"),
        (["--quantizer", "lossless", "--bound", "rms:1"], "--bound and --block have no effect with"),
        (["--plot", "x.text"], "--plot x.text: the name must end in one of "),
        (["--plot", "nowhere/x.png"], "--plot nowhere/x.png: no file can be made there"),
        (["--plot", "x.png", "--quantizer", "lossless"], "--plot draws codes, and there are none"),
    ],
    ids=lambda case: " ".join(case) if isinstance(case, list) else "",
)
def test_mistakes_are_explained_in_one_line(ncz, saved, monkeypatch, tmp_path, arguments, says):
    file = saved(gaussian(1000))
    monkeypatch.chdir(tmp_path)
    code, out, err = ncz(file, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"ncz: error: {says}") or says in err
    assert err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.npy"]


# ------------------------------------------------------------------ --plot


def test_plot_draws_a_picture(ncz, saved, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "x.png"
    code, _, err = ncz(saved(gaussian(5000)), "--bound", "rel:1e-6", "--block", "0", "--plot", picture)
    assert (code, err) == (0, "")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_sample_is_of_whole_frames_from_everywhere(monkeypatch):
    monkeypatch.setattr(plot, "_SAMPLE_BYTES", 64 << 10)
    monkeypatch.setattr(plot, "_SLOW_SAMPLE_BYTES", 64 << 10)
    x = np.arange(100_000, dtype=np.float32)
    part = plot._sample(x, Config(transport={"frame_bytes": "16KiB"}))
    assert part.size == 16_384 and part[0] == 0 and part[-1] == 99_999
    assert np.count_nonzero(np.diff(part) != 1) == 3


def test_ratios_at_a_bound_are_those_of_each_coder():
    x = gaussian(20_000)
    config = Config()
    ratios = plot._at_bound(x, config, 0.5)
    limit = ratios.pop("entropy")
    for coder, ratio in ratios.items():
        of_coder = {"quantizer": {"value": 0.5}, "entropy": {"coder": coder}}
        assert ratio == x.nbytes / compress(torch.from_numpy(x), of_coder).numel()
    assert set(ratios) == {"raw", "fixed", "huffman", "rans", "auto"}
    assert limit > max(ratios.values())
    assert plot._at_bound(x, config, 1e-9) == {}


def test_plot_without_matplotlib_says_what_to_install(ncz, saved, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    code, out, err = ncz(saved(gaussian(10)), "--plot", "x.png")
    assert (code, out) == (2, "")
    assert err == "ncz: error: --plot needs matplotlib: pip install 'ncz_plugins[plot]'\n"


@pytest.mark.processes
def test_no_other_compressor_is_imported(saved):
    code = (
        "import sys; from ncz_plugins.cli.main import main\n"
        "from ncz_plugins.cli.codec import speed\nspeed.SECONDS = 0\n"
        f"assert main(['codec', {str(saved(gaussian(10)))!r}]) == 0\n"
        "assert not {'zstandard', 'lz4', 'blosc2', 'zfpy', 'pysz', 'matplotlib'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------ speed


def test_repetitions_are_interleaved(monkeypatch):
    order = []
    seconds = speed.interleaved({name: lambda name=name: order.append(name) for name in "abc"})
    assert order == ["a", "b", "c"] * 6  # one to warm up
    assert set(seconds) == set("abc") and all(s >= 0 for s in seconds.values())
    monkeypatch.setattr(speed, "SECONDS", 1e9)
    order.clear()
    speed.interleaved({"a": lambda: order.append("a")})
    assert len(order) == 101


def test_measuring_leaves_threads_and_cores_as_they_were():
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    with pytest.raises(ZeroDivisionError):
        speed.interleaved({"a": lambda: 1 / 0})
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == (cores, threads)


def test_speed_is_measured_on_frames_from_everywhere(monkeypatch):
    monkeypatch.setattr(speed, "_INPUT_BYTES", 64 << 10)
    monkeypatch.setattr(speed, "_SLOW_INPUT_BYTES", 64 << 10)
    outcome = round_trip(gaussian(200_000), Config(transport={"frame_bytes": "16KiB"}))
    encoded = []
    monkeypatch.setattr(outcome.codec, "encode", lambda segment, index: encoded.append(index), raising=False)
    runs, nbytes = speed.runs(outcome)
    runs["encode"]()
    assert encoded == [0, 12, 24, 36] and len(outcome.frames) == 49
    assert nbytes == 64 << 10
