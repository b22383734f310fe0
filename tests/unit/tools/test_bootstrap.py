"""What each profile of the set-up runs, and when it has to run again. Nothing is installed here."""

import sys
import time

import pytest
from repository import ROOT


@pytest.fixture
def bootstrap(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import bootstrap

    monkeypatch.setattr(bootstrap, "VENV", tmp_path)
    monkeypatch.setattr(bootstrap, "NATIVE", tmp_path / "native")
    (tmp_path / "native").mkdir()
    return bootstrap


class Recorded:
    """The commands of every stage instead of what they do, which "build" the library."""

    def __init__(self, native):
        self.native, self.commands = native, []

    def run(self, title, *commands, meanwhile=None):
        self.commands += [" ".join(map(str, command)) for command in (*commands, *([meanwhile] if meanwhile else []))]
        (self.native / "libncz_cpu.so").touch()


@pytest.mark.parametrize("profile", ["demo", "tools", "all"])
def test_a_profile_installs_what_it_names(bootstrap, profile, tmp_path):
    stages = Recorded(tmp_path / "native")
    bootstrap.install(stages, profile)
    assert any(command.endswith(f".[{bootstrap.PROFILES[profile]}]") for command in stages.commands)
    assert any("horovod_wheel.py" in command for command in stages.commands) == (profile == "all")
    assert ("dev" in bootstrap.PROFILES[profile].split(",")) == (profile != "demo")


def test_the_demo_installs_no_tools_for_developers_and_nothing_for_gpus(bootstrap):
    assert set(bootstrap.PROFILES["demo"].split(",")) == {"deepspeed", "plot"}
    assert "horovod" not in bootstrap.PROFILES["all"].split(",")  # pip can't build it: horovod_wheel.py does


@pytest.mark.parametrize(
    ("installed", "ready"),
    [("demo", ["demo"]), ("tools", ["demo", "tools"]), ("all", ["demo", "tools", "all"])],
)
def test_a_profile_is_ready_with_those_that_it_includes(bootstrap, installed, ready):
    assert not any(map(bootstrap.is_ready, bootstrap.PROFILES))
    bootstrap.mark_ready(installed)
    assert [profile for profile in bootstrap.PROFILES if bootstrap.is_ready(profile)] == ready
    assert bootstrap.main(ready[0]) == 0  # at once: there is nothing to install


def test_a_change_of_the_sources_makes_all_of_them_stale(bootstrap, tmp_path):
    bootstrap.mark_ready("all")
    (tmp_path / "native" / "new.h").touch()
    assert not any(map(bootstrap.is_ready, bootstrap.PROFILES))


def test_whoever_installs_again_does_it_for_all_profiles(bootstrap, tmp_path):
    """A smaller profile may change what a larger one has installed, and leave it incomplete."""
    bootstrap.mark_ready("all")
    bootstrap.install(Recorded(tmp_path / "native"), "demo")
    assert not any(map(bootstrap.is_ready, bootstrap.PROFILES))


def test_an_unknown_profile_is_refused_with_those_that_exist(bootstrap, capsys):
    assert bootstrap.main("everything") == 2
    assert "'everything' is not a profile; there are demo, tools, all" in capsys.readouterr().err


@pytest.fixture
def stages(bootstrap, monkeypatch, tmp_path):
    monkeypatch.setattr(bootstrap, "LOG", tmp_path / "logs" / "setup.log")
    return bootstrap.Stages(2)


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def test_a_command_runs_beside_the_others_and_is_waited_for(stages, bootstrap, tmp_path, capsys):
    """The one beside them ends only once another has run."""
    there = tmp_path / "there"
    waits = f"import pathlib, time\nwhile not pathlib.Path({str(there)!r}).exists(): time.sleep(0.01)\nprint('seen')"
    stages.run("two at a time", python(f"open({str(there)!r}, 'w')"), meanwhile=python(waits))
    assert "seen" in bootstrap.LOG.read_text() and "[1/2] two at a time:" in capsys.readouterr().out


def test_whichever_command_fails_the_stage_does_and_nothing_goes_on(stages, bootstrap, tmp_path, capsys):
    fails, ends = python("raise SystemExit('for this test')"), python("pass")
    done = tmp_path / "done"
    for commands, meanwhile in [([fails, ends], ends), ([ends], fails)]:
        with pytest.raises(bootstrap.SetupError, match="setup.log"):
            stages.run("one fails", *commands, meanwhile=meanwhile)
        assert "for this test" in capsys.readouterr().out
    go_on = tmp_path / "go on"
    waits = f"import pathlib, time\nwhile not pathlib.Path({str(go_on)!r}).exists(): time.sleep(0.01)"
    with pytest.raises(bootstrap.SetupError):
        stages.run("one fails", fails, meanwhile=python(f"{waits}\nopen({str(done)!r}, 'w')"))
    go_on.touch()
    time.sleep(0.5)
    assert not done.exists()
