"""Where things are in this repository, so that no test counts the folders above itself."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STARTED = ROOT / "tests" / "started"  # where processes that tests start look first
FORKED_RANKS = ROOT / "tests" / "forked_ranks.py"
FORK_SERVER = ROOT / "tests" / "fork_server.py"
LAUNCHED = ROOT / "tests" / "helpers" / "launched.py"
GOLDEN = ROOT / "tests" / "unit" / "golden"
