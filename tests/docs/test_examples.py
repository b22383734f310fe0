"""The notebook of examples/ runs. Trainings are run by test_docs.py and others."""

import json
import os
import subprocess
import sys

from repository import ROOT

EXAMPLES = ROOT / "examples"
NOTEBOOK = EXAMPLES / "gradients.ipynb"
MOST_BYTES = 300_000  # of the notebook, with its pictures


def cells() -> list[dict]:
    return [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_runs(tmp_path):
    program = "\n".join("".join(cell["source"]) for cell in cells())
    path = os.pathsep.join(map(str, (ROOT, EXAMPLES)))
    environment = os.environ | {"PYTHONPATH": path, "MPLBACKEND": "agg"}
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, check=True, timeout=200)


def test_the_notebook_is_small_and_shows_what_its_cells_made_in_order():
    assert NOTEBOOK.stat().st_size < MOST_BYTES
    assert [cell["execution_count"] for cell in cells()] == [*range(1, len(cells()) + 1)]
    outputs = [output for cell in cells() for output in cell["outputs"]]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 6
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
