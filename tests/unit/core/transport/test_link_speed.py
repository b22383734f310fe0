"""How fast the network interface is, as far as Linux states it."""

import pytest

from ncz_plugins.core.transport import link_speed


@pytest.fixture
def interfaces(tmp_path, monkeypatch):
    """Makes up what Linux states: interface -> content of its file."""
    monkeypatch.setattr(link_speed, "Path", lambda path: tmp_path / path.removeprefix("/"))
    link_speed.gloo_link_gbps.cache_clear()

    def write(**speeds):
        for name, speed in speeds.items():
            (tmp_path / "sys/class/net" / name).mkdir(parents=True)
            (tmp_path / "sys/class/net" / name / "speed").write_text(speed)

    yield write
    link_speed.gloo_link_gbps.cache_clear()


@pytest.mark.parametrize(
    "stated, gbps",
    [("10000\n", 10), ("100\n", 0.1), ("-1\n", None), ("4294967295\n", None), ("", None), ("0\n", None), (None, None)],
)
def test_the_speed_of_the_interface_that_gloo_uses(interfaces, monkeypatch, stated, gbps):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "fast0,slow0")
    interfaces(slow0="10\n", **({} if stated is None else {"fast0": stated}))
    assert link_speed.gloo_link_gbps() == gbps


def test_without_a_setting_it_is_the_interface_of_the_hosts_name(interfaces, monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(link_speed, "own_address", lambda: "127.0.0.1")
    interfaces(lo="7000\n")
    assert link_speed.gloo_link_gbps() == 7


def test_an_address_of_no_interface_has_no_speed(interfaces, monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(link_speed, "own_address", lambda: "203.0.113.7")  # for documentation, nobody has it
    assert link_speed.gloo_link_gbps() is None
