"""Starts what tests wait for: forked_ranks.py in a fork of a process that has imported what it needs, once for many.

Such a process is kept for as long as tests run, with all that the modules leave in it: so what differs between two
launches in an environment variable, which a module may have read, differs in a process too.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path

from repository import FORK_SERVER, FORKED_RANKS

# No module reads these when it is imported; forks have them from their launch.
OF_A_LAUNCH = {
    "GLOO_SOCKET_IFNAME",
    "HOROVOD_CYCLE_TIME",
    "HOROVOD_DYNAMIC_PROCESS_SETS",
    "HOROVOD_GLOO_TIMEOUT_SECONDS",
    "NCZ_CONFIG",
    "NCZ_TEST_RESULTS",
    "PYTEST_CURRENT_TEST",
}
KEPT = 3  # of the processes that have imported something, each of which has some 200 MB


class Fork:
    """A fork of forked_ranks.py that runs, with what tests need of `subprocess.Popen`."""

    def __init__(self, server: "_Server", arguments: list[str], cwd: Path, env: dict[str, str], log: Path):
        self._server = server
        self.args = arguments
        self.returncode: int | None = None
        of_this = {name: value for name, value in env.items() if name in OF_A_LAUNCH}
        with suppress(ConnectionError):  # then the answer says why
            server.connection.send((arguments, str(cwd), of_this, str(log)))
        self.pid: int = server.answer()

    def wait(self, timeout: float | None = None) -> int:
        """The exit status. Raises `subprocess.TimeoutExpired` if there is none after `timeout` seconds."""
        if self.returncode is None:
            if not self._server.connection.poll(timeout):
                raise subprocess.TimeoutExpired(self.args, timeout)
            self.returncode = self._server.answer()
        return self.returncode


class _Server:
    """A process that has imported `modules`."""

    def __init__(self, modules: str, env: dict[str, str]):
        self.connection, other = Pipe()
        self._log = tempfile.TemporaryFile()
        with other:
            self._process = subprocess.Popen(
                [sys.executable, str(FORK_SERVER), str(other.fileno()), modules],
                env=env,
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,
            )

    def answer(self) -> int:
        try:
            return self.connection.recv()
        except (EOFError, ConnectionError):
            self._process.wait()
            self._log.seek(0)
            raise AssertionError(f"{self._process.args}:\n{self._log.read().decode(errors='replace')}") from None

    def close(self) -> None:
        """End the process, which runs nothing."""
        self.connection.close()
        self._process.wait()
        self._log.close()


_servers: OrderedDict[tuple, _Server] = OrderedDict()  # the last one was used last


def start(command: Sequence[str], *, cwd: Path, env: dict[str, str], log: Path) -> Fork | subprocess.Popen:
    """Start a command in a session of its own, its output in `log`: in a fork if it begins as `forked` has it."""
    beginning = [sys.executable, str(FORKED_RANKS)]
    if list(command[:2]) == beginning:
        modules, arguments = command[2], list(command[2:])
        return Fork(_server(modules, env), arguments, cwd, env, log)
    with open(log, "w") as output:
        return subprocess.Popen(
            command,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def end(process: Fork | subprocess.Popen) -> None:
    """Kill all that is left of its session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _server(modules: str, env: dict[str, str]) -> _Server:
    env = {name: value for name, value in env.items() if name not in OF_A_LAUNCH}
    key = (modules, frozenset(env.items()))
    if key not in _servers:
        _servers[key] = _Server(modules, env)
    _servers.move_to_end(key)
    if len(_servers) > KEPT:
        _servers.popitem(last=False)[1].close()
    return _servers[key]


def close() -> None:
    """End all processes that are kept."""
    while _servers:
        _servers.popitem()[1].close()
