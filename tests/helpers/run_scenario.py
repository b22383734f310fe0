"""Runs one rank of a scenario under any launcher: run_scenario.py FOLDER, where `scenarios` has left scenario.json.

Writes what the scenario returns to FOLDER/rankN.json. A scenario that raises ends this process with a traceback.
"""

import faulthandler
import json
import os
import sys
import warnings
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType


def main() -> None:
    folder = Path(sys.argv[1])
    scenario = json.loads((folder / "scenario.json").read_text())
    # Neither the package nor its tests may use what torch is about to drop. What DeepSpeed and Horovod use is theirs.
    if not {"deepspeed", "horovod"} & set(sys.modules):
        warnings.simplefilter("error", FutureWarning)
    # A rank that hangs prints where, before it is killed.
    faulthandler.dump_traceback_later(0.9 * scenario["seconds"])
    # Before the import below, as `on_rank` and test files read it when they are imported.
    os.environ["NCZ_TEST_DEVICE"] = scenario["device"]
    import on_rank

    os.environ["NCZ_TEST_RESULT"] = str(folder / f"rank{on_rank.rank}.json")
    module = import_file(Path(scenario["file"]))
    if "tests" in scenario:
        start = scenario["start"]
        getattr(module, start)() if start else on_rank.start()
        on_rank.run_tests(module, scenario["tests"])
    else:
        on_rank.leave(getattr(module, scenario["function"])(*scenario["arguments"]))
    on_rank.finish()


def import_file(file: Path) -> ModuleType:
    """The module in a test file, which may import others of its folder."""
    sys.path.insert(0, str(file.parent))
    spec = spec_from_file_location(file.stem, file)
    module = sys.modules[file.stem] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
