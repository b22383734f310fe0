"""What is read from Linux's /proc is done without where there is none."""

import os
import socket
from pathlib import Path

import pytest

from ncz_plugins.cli import machine
from ncz_plugins.cli.perf import network
from ncz_plugins.cli.perf.launch import free_port
from ncz_plugins.core.transport import addresses, topology


@pytest.fixture
def no_proc(monkeypatch):
    """Files and links below /proc and /sys can't be read."""
    read_text, readlink = Path.read_text, os.readlink

    def unless_below(path, then):
        if str(path).startswith(("/proc", "/sys")):
            raise FileNotFoundError(path)
        return then()

    monkeypatch.setattr(Path, "read_text", lambda self, *a, **k: unless_below(self, lambda: read_text(self, *a, **k)))
    monkeypatch.setattr(os, "readlink", lambda path, *a, **k: unless_below(path, lambda: readlink(path, *a, **k)))


def test_the_processor_is_known_by_what_python_knows(no_proc):
    assert machine.cpu()["cores"] == os.cpu_count()


def test_bytes_are_not_counted(no_proc):
    assert network.sent_bytes() is None
    assert network.namespace() == socket.gethostname()


def test_hosts_are_told_apart_by_their_names(no_proc):
    assert topology._this_host() == {"name": socket.gethostname(), "machine": socket.gethostname(), "network": ""}


def test_a_port_is_found(no_proc):
    assert 1024 < free_port() < 65536


def test_interfaces_without_addresses(no_proc):
    assert addresses._ipv6("lo") is None
    assert addresses._ipv4("surely-not-there") is None


def test_a_compiler_that_does_not_run_is_said(monkeypatch, tmp_path):
    (tmp_path / "nvcc").write_text("no program\0")
    (tmp_path / "nvcc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "does not run" in machine.compiler("nvcc")["version"]
