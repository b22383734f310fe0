"""The address that other ranks are told is the one that gloo would choose."""

import socket

import pytest

from ncz_plugins.core.transport import addresses


def test_the_interface_of_the_setting_decides(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,nothing0")
    assert addresses.gloo_interface() == "lo"
    assert addresses.own_address() == "127.0.0.1"


def test_an_interface_that_is_not_there_has_none(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothing0")
    assert addresses.own_address() is None


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ([(socket.AF_INET, "127.0.0.1")], "127.0.0.1"),
        ([(socket.AF_INET, "203.0.113.7"), (socket.AF_INET, "127.0.0.2")], "127.0.0.2"),  # the first is not ours
        ([(socket.AF_INET, "203.0.113.7")], "127.0.0.1"),
        ([], "127.0.0.1"),
    ],
)
def test_else_it_is_what_the_hosts_name_stands_for_if_it_can_be_used(monkeypatch, names, found):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    answer = [(family, socket.SOCK_STREAM, 6, "", (address, 0)) for family, address in names]
    monkeypatch.setattr(addresses.socket, "getaddrinfo", lambda *_, **__: answer)
    assert addresses.own_address() == found


def test_a_host_without_a_known_name_uses_the_loopback(monkeypatch):
    def unknown(*_, **__):
        raise OSError("Name or service not known")

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.setattr(addresses.socket, "getaddrinfo", unknown)
    assert addresses.own_address() == "127.0.0.1"


def test_an_interface_with_ipv6_only(monkeypatch, tmp_path):
    listed = tmp_path / "if_inet6"
    listed.write_text(
        "fe80000000000000000000000000000a 02 40 20 80     six0\n20010db8000000000000000000000001 02 40 00 80     six0\n"
    )
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "six0")
    monkeypatch.setattr(addresses, "Path", lambda _: listed)
    assert addresses.own_address() == "2001:db8::1"
