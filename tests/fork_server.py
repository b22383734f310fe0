"""Imports what takes long, once, and then runs forked_ranks.py in a fork of itself whenever tests ask it to.

tests/helpers/forking.py is the other end: it says what a request is. A fork has a session of its own, as a process
that tests start has, and is answered for twice: with its number once it has that session, with its exit status.
"""

import atexit
import os
import sys
from multiprocessing.connection import Connection

import forked_ranks


def enter(folder: str, environment: dict[str, str], log: str) -> None:
    """Have this fork be what a process would be that was started so."""
    os.chdir(folder)
    os.environ |= environment
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for descriptor, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, target)
    os.close(nothing)
    os.close(output)


def main() -> int:
    descriptor, modules = sys.argv[1:]
    atexit.register(forked_ranks.end_soon)  # before any module is imported that registers something
    forked_ranks.import_modules(modules)
    sys.stdout.flush()
    tests = Connection(int(descriptor))
    while True:
        try:
            arguments, *surroundings = tests.recv()
        except EOFError:  # the tests have ended
            return 0
        process = os.fork()
        if process == 0:
            os.setsid()
            tests.send(os.getpid())
            tests.close()
            enter(*surroundings)
            return forked_ranks.main(arguments)
        _, status = os.waitpid(process, 0)
        tests.send(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    sys.exit(main())
