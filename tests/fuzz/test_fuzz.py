"""What the fuzz targets must find in seconds: a check that was taken out of the kernels.

A short run of `make fuzz` on the kernels as they are is in tests/integration/test_make.py.
"""

from __future__ import annotations

import shutil

import pytest
import run

CXX = run.compiler()
SECONDS = 60  # at the most: it ends with what it finds

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CXX or not run.has_sanitizers(CXX), reason="no C++ compiler with sanitizers on the PATH"),
]


PLANTED = {  # file: a check, and what it becomes
    "differences.h": ("needed > count) return false;", "needed > count + 1) return false;"),
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
    run.build(tmp_path, CXX, False, kernels, ("decode",), quickly=True)
    failed = run.fuzz(tmp_path, SECONDS, False, ("decode",))
    assert "ERROR: AddressSanitizer" in failed["decode"]
    assert (tmp_path / "decode-crash").exists()
