"""The end of a program: calls first, then threads."""

import subprocess
import sys

PROGRAM = """
import queue
from ncz_plugins.core.runtime import process

class Calls:
    def __init__(self, name):
        self.name = name

    def end(self, seconds):
        print(self.name, 0 < seconds <= 10, flush=True)

def run(jobs):
    print("thread", jobs.get(), flush=True)

process.start_thread(run, queue.SimpleQueue(), "test")
calls, closed, freed = Calls("open"), Calls("closed"), Calls("freed")
for each in (calls, closed, freed):
    process.end_with_program(each)
process.leave_to_itself(closed)
del freed, each
"""


def test_open_calls_end_before_threads():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["open True", "thread None"]
