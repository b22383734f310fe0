"""Other compressors beside ours: all give the same guarantee, and what is missing is said."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks import compressors
from ncz_plugins.cli.codec import speed
from ncz_plugins.cli.codec.round_trip import round_trip
from ncz_plugins.core.config import Config


@pytest.fixture(autouse=True)
def fewest_repetitions(monkeypatch):
    monkeypatch.setattr(speed, "SECONDS", 0)


def gaussian(*shape: int, dtype=np.float32) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("library", compressors.LIBRARIES, ids=lambda library: library.name)
@pytest.mark.parametrize("shape", [(1,), (7919,), (20, 21, 22), (2, 3, 4, 5, 6)], ids=str)
def test_libraries_keep_what_they_promise(library, shape):
    pytest.importorskip(library.module)
    if library.lossy:
        for dtype in (np.float32, np.float64):
            x = gaussian(*shape, dtype=dtype)
            for bound in (0.1, 0):
                compress, decompress = library.start(x, bound)
                decoded = decompress(compress()).reshape(shape)
                assert decoded.dtype == dtype and np.abs(decoded - x).max() <= bound
    else:
        codes = (100 * gaussian(*shape)).astype(np.int32)
        compress, decompress = library.start(codes)
        assert np.array_equal(decompress(compress()), codes)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("quantizer", [{}, {"mode": "abs", "value": 0.1}, {"kind": "lossless"}], ids=str)
def test_compare_gives_all_the_same_guarantee(dtype, quantizer):
    x = gaussian(3, 4096, dtype=dtype) * np.array([[1], [100], [1e-2]], dtype)
    outcome = round_trip(x, Config(quantizer=quantizer))
    ours, results = compressors.compare(outcome)
    missing = compressors.missing()
    assert [r.library for r in results] == [library for library in compressors.LIBRARIES if library not in missing]
    for r in results:
        assert r.of_bound <= 1 + 1e-5
        assert r.max_abs_error <= outcome.bound_abs * (1 + 1e-5)
        assert r.ratio == pytest.approx(8 * x.itemsize / r.bits_per_value)
        assert r.encode > 0 and r.decode > 0
        if not r.library.lossy:
            assert r.max_abs_error == outcome.max_abs_error
    assert ours.encode > 0


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run the program on an array: what it prints."""

    def on(x: np.ndarray, *arguments: str) -> str:
        np.save(tmp_path / "x.npy", x)
        monkeypatch.setattr("sys.argv", ["compressors", str(tmp_path / "x.npy"), *arguments])
        monkeypatch.setenv("COLUMNS", "120")
        compressors.main()
        return capsys.readouterr().out

    return on


def test_the_table_shows_what_is_there_and_says_what_is_missing(run, monkeypatch):
    some = compressors.LIBRARIES[0]
    pytest.importorskip(some.module)
    absent = replace(compressors.LIBRARIES[1], name="dodo", module="surely_not_installed")
    monkeypatch.setattr(compressors, "LIBRARIES", (some, absent))
    out = run(gaussian(5000), "--bound", "range:1e-3")
    rows = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert "GB/s" in rows[some.name] and "GB/s" in rows["ncz"]
    assert "dodo is not installed: pip install 'ncz_plugins[compare]'" in out


@pytest.mark.parametrize("x", [gaussian(1), np.array([1, np.nan] * 5000, np.float32)], ids=["one", "nan"])
def test_any_array_but_an_empty_one_is_compared(run, x):
    assert "ncz" in run(x)


def test_an_empty_array_is_refused(run, capsys):
    with pytest.raises(SystemExit):
        run(gaussian(0))
    assert "holds no values" in capsys.readouterr().err
