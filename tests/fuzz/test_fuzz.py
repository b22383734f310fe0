"""A short run of the fuzz targets, and what it must find: kernels that had a check taken out of them."""

from __future__ import annotations

import shutil

import pytest
import run

CXX = run.compiler()
SECONDS = 5
KEPT = run.ROOT / "build" / "fuzz"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CXX or not run.has_sanitizers(CXX), reason="no C++ compiler with sanitizers on the PATH"),
]


def test_a_short_run_finds_nothing(tmp_path):
    run.build(tmp_path, CXX, libfuzzer=False)
    failed = run.fuzz(tmp_path, SECONDS, libfuzzer=False)
    for target in failed:  # to where pytest does not remove it
        KEPT.mkdir(parents=True, exist_ok=True)
        shutil.copy(tmp_path / f"{target}-crash", KEPT)
    assert not failed, "\n".join([*failed.values(), f"The inputs are kept in {KEPT}."])


PLANTED = {  # file: a check, and what it becomes
    "codec.h": ("if (end_ - in_ >= int64_t(OCTETS * width + SLACK))", "if (end_ - in_ >= int64_t(OCTETS * width))"),
    "rans.h": ("if (left >= 8) return load64(payload_ + at);", "if (left >= 7) return load64(payload_ + at);"),
}


@pytest.mark.parametrize("file", PLANTED)
def test_a_missing_check_is_found(file, tmp_path):
    check, planted = PLANTED[file]
    kernels = tmp_path / "kernels"
    for folder in ("common", "cpu"):
        shutil.copytree(run.KERNELS / folder, kernels / folder, ignore=shutil.ignore_patterns("*.so"))
    source = (kernels / "cpu" / file).read_text()
    assert source.count(check) == 1, f"{file} has changed: plant something else"
    (kernels / "cpu" / file).write_text(source.replace(check, planted))
    run.build(tmp_path, CXX, False, kernels, ("decode",), portable_only=True)
    failed = run.fuzz(tmp_path, SECONDS, False, ("decode",))
    assert "ERROR: AddressSanitizer" in failed["decode"]
    assert (tmp_path / "decode-crash").exists()
