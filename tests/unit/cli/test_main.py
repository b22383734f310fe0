"""The `ncz` command, run as a user runs it: its output, its messages and its exit codes."""

import io
import json
import os
import platform
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import safetensors.torch
import torch
from repository import ROOT

from ncz_plugins import __version__, kernels
from ncz_plugins.cli import info, machine
from ncz_plugins.cli.main import main
from ncz_plugins.core.config import Config, json_schema, settings
from ncz_plugins.core.whole_files import write_whole

COMMANDS = ("info", "check", "enable", "disable", "codec", "plan", "perf", "tune", "report", "patch", "schema")
CONFIGS = sorted((ROOT / "configs").glob("*"))


@pytest.fixture
def ncz(capsys, monkeypatch):
    """Run the command in this process: exit code, stdout, stderr."""
    monkeypatch.setenv("COLUMNS", "400")  # no line breaks in tables

    def run(*arguments):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as ended:  # argparse's own: --version, --help, wrong usage
            code = ended.code
        output = capsys.readouterr()
        return code, output.out, output.err

    return run


# ------------------------------------------------------------------ ncz check


@pytest.mark.parametrize("file", [f for f in CONFIGS if f.name != "ncclz.schema.json"], ids=lambda f: f.name)
def test_check_accepts_what_ships(ncz, file):
    code, out, err = ncz("check", file)
    assert (code, err) == (0, "")
    assert out.startswith(str(file))
    for key, *_ in settings():
        assert f"\n{key} " in out


def test_check_shows_values_and_marks_defaults(ncz, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("quantizer:\n  value: 0.125\nroles: [gradient, activation]\n")
    code, out, _ = ncz("check", file)
    rows = dict(line.strip().split(maxsplit=1) for line in out.splitlines() if " " in line)
    assert code == 0
    assert rows["quantizer.value"].split(maxsplit=1) == ["0.125", "default: 0.375"]
    assert rows["quantizer.mode"].split() == ["rms", "default"]
    assert rows["transport.timeout_seconds"].split() == ["null", "default"]
    assert out.splitlines()[1] == Config.load(file).describe()
    assert rows["roles"].split() == ["[gradient,", "activation]", "default:", "[gradient]"]


@pytest.mark.parametrize(
    "name, text, says",
    [
        ("c.yaml", "quantizer: {bound_mode: rms}", "c.yaml: quantizer.bound_mode: unknown key (value 'rms'); did you"),
        ("c.yaml", "quantizer: [", "c.yaml:1: invalid YAML"),
        ("c.json", "{", "c.json:1: invalid JSON"),
        ("c.txt", "", "c.txt: unknown type of file"),
        (
            "ds.json",
            '{"train_batch_size": 8}',
            "ds.json: 'communication_compression' is missing: training would be unc",
        ),
        ("ds.json", '{"communication_compression": false}', "ds.json: 'communication_compression' is switched off"),
        ("ds.json", '{"communication_compression": true}', "ds.json: True (bool) is not a configuration"),
        ("ds.json", '{"communication_compression": "nclz"}', "ds.json: 'nclz' is not a configuration; did you mean"),
        ("ds.json", '{"comunication_compression": "ncclz"}', "ds.json: comunication_compression: unknown key; did you"),
        (
            "ds.json",
            '{"bf16": {"communication_compression": 1}}',
            "ds.json: 'communication_compression' stands at bf16.",
        ),
        ("ds.json", '{"communication_compression": {"roles": []}}', "ds.json: roles: [] is not allowed"),
    ],
)
def test_check_explains_what_is_wrong(ncz, tmp_path, name, text, says):
    file = tmp_path / name
    file.write_text(text)
    code, out, err = ncz("check", file)
    assert (code, out) == (2, "")
    assert err.startswith(f"ncz: error: {tmp_path}/{says}")


def test_check_of_a_missing_file(ncz):
    code, out, err = ncz("check", "nowhere.yaml")
    assert (code, out, err) == (2, "", "ncz: error: nowhere.yaml: cannot be read: No such file or directory\n")


def test_check_follows_the_path_in_a_deepspeed_file(ncz, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("ours.yaml").write_text("quantizer: {value: 0.125}")
    Path("ds.json").write_text('{"train_batch_size": 8, "communication_compression": "ours.yaml"}')
    code, out, _ = ncz("check", "ds.json")
    assert code == 0 and "rms:0.125" in out
    Path("ours.yaml").write_text("quantizer: {value: -1}")
    code, _, err = ncz("check", "ds.json")
    assert code == 2 and err.startswith("ncz: error: ds.json: ours.yaml: quantizer.value: -1 is not allowed")


# ------------------------------------------------------------------ ncz schema


def test_schema_goes_to_the_terminal_or_a_file(ncz, tmp_path):
    code, out, _ = ncz("schema")
    assert code == 0 and json.loads(out) == json_schema()
    file = tmp_path / "schema.json"
    code, silent, _ = ncz("schema", "--output", file)
    assert (code, silent) == (0, "") and file.read_text() == out


def test_schema_to_a_place_that_cannot_be_written(ncz, tmp_path):
    code, _, err = ncz("schema", "--output", tmp_path / "missing" / "schema.json")
    assert code == 2 and err.startswith("ncz: error: ") and "missing/schema.json" in err


# ------------------------------------------------------------------ ncz info


def test_info_as_json_tells_what_is_here(ncz):
    code, out, _ = ncz("info", "--json")
    report = json.loads(out)
    assert code == 0
    assert report["ncz_plugins"] == __version__
    assert report["python"]["version"] == platform.python_version()
    assert (report["torch"], report["numpy"]) == (torch.__version__, numpy.__version__)
    assert report["kernels"]["status"] == kernels.statuses()
    assert report["cuda_kernels"] == kernels.cuda_status()
    assert report["kernels"]["status"][report["kernels"]["in_use"]] == "ok"
    assert report["distributed"]["gloo"] == torch.distributed.is_gloo_available()
    assert len(report["gpus"]) == torch.cuda.device_count()
    assert 1 <= report["cpu"]["usable_cores"] <= report["cpu"]["cores"]
    assert set(report["packages"]) == {"deepspeed", "horovod", "cupy"}
    assert set(report["compilers"]) == {"g++", "nvcc"}


def test_info_for_people_says_the_same(ncz):
    code, out, _ = ncz("info")
    assert code == 0
    for name, status in kernels.statuses().items():
        assert f"kernels: {name}" in out and status.splitlines()[0] in out
    assert f"kernels: {kernels.cpu_backend().name}" in out.split("(in use)")[0].splitlines()[-1]
    assert torch.__version__ in out and __version__ in out and machine.cpu()["model"] in out


def test_info_lists_every_gpu():
    gpus = [{"name": f"card {i}", "compute_capability": "9.0", "memory_bytes": (80 + i) * 2**30} for i in range(2)]
    rows = dict(info.rows(machine.report() | {"gpus": gpus}))
    assert rows["GPU 0"] == "card 0, compute capability 9.0, 80 GiB"
    assert rows["GPU 1"] == "card 1, compute capability 9.0, 81 GiB"
    assert "GPU" not in rows


def test_info_reports_a_kernel_choice_that_cannot_be_met(ncz, monkeypatch):
    monkeypatch.setenv(kernels.ENVIRONMENT, "warp")
    kernels.cpu_backend.cache_clear()
    try:
        code, out, _ = ncz("info")
        report = json.loads(ncz("info", "--json")[1])
    finally:
        kernels.cpu_backend.cache_clear()
    assert code == 0
    assert report["kernels"]["in_use"] is None and "'warp' is unknown" in report["kernels"]["error"]
    assert "'warp' is unknown" in out and "(in use)" not in out


def test_versions_come_from_what_is_installed():
    assert machine.installed_version("surely-not-installed", "numpy") == numpy.__version__
    assert machine.installed_version("surely-not-installed") is None


def test_compilers_are_found_and_missing_ones_are_none(tmp_path, monkeypatch):
    assert machine.compiler("surely-not-installed") is None
    fake = tmp_path / "nvcc"
    fake.write_text("#!/bin/sh\necho 'nvcc: NVIDIA'\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert machine.compiler("nvcc") == {"path": str(fake), "version": "Cuda compilation tools, release 13.0, V13.0.88"}


# ------------------------------------------------------------------ the command itself


def test_version_and_usage(ncz):
    assert ncz("--version") == (0, f"ncz_plugins {__version__}\n", "")
    for group, members in ((), COMMANDS), (("patch",), ("make", "apply", "show")):
        code, out, err = ncz(*group)
        assert (code, out) == (2, "") and all(f"\n    {each} " in err for each in members), err
    code, _, err = ncz("chek")
    assert code == 2 and "chek" in err
    code, out, _ = ncz("--help")
    assert code == 0 and all(command in out for command in ("info", "check", "schema"))


def start(*arguments, **options):
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


@pytest.mark.parametrize(
    ("command", "package", "remedy"),
    [
        ("info", "torch", "`pip install ncz_plugins` brings it"),
        ("perf all_reduce", "torch", "`pip install ncz_plugins` brings it"),
        ("tune --output tuned.json", "horovod", "`python tools/horovod_wheel.py` in the repository compiles it"),
    ],
)
def test_a_package_that_is_missing_is_named_in_one_line(command, package, remedy, tmp_path):
    hidden = f"import sys; sys.modules['{package}'] = None; "
    program = f"{hidden}from ncz_plugins.cli.main import main; sys.exit(main({command.split()}))"
    rank = {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_SIZE": "2"} if package == "horovod" else {}
    started = {"cwd": tmp_path, "env": os.environ | rank, "capture_output": True, "text": True, "timeout": 60}
    done = subprocess.run([sys.executable, "-c", program], **started)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"ncz: error: {package} is not installed: {remedy}\n"


def test_nothing_is_cut_off_in_a_pipe(ncz, tmp_path, monkeypatch):
    step = {"calls": 1, "compressed_calls": 1, "plain_bytes": 100, "wire_bytes": 10, "seconds": 0.1}
    (tmp_path / "run.jsonl").write_text("".join(f"{json.dumps(step | {'step': at})}\n" for at in (1, 2)))
    numpy.save(tmp_path / "x.npy", numpy.random.default_rng(0).standard_normal(5000, dtype=numpy.float32))
    planned = ["--parameters", "1M", "--compute-seconds", "0.1", "--link-gbps", "1"]
    for command in (
        ["info"],
        ["check", ROOT / "configs" / "ncclz.yaml"],
        ["codec", tmp_path / "x.npy"],
        ["report", tmp_path / "run.jsonl"],
        ["plan", *planned],
    ):
        lines = []
        for columns in ("400", "20"):
            monkeypatch.setenv("COLUMNS", columns)
            code, out, _ = ncz(*command)
            assert code == 0 and "\N{HORIZONTAL ELLIPSIS}" not in out
            lines.append(len(out.splitlines()))
        assert lines[0] == lines[1], command


def test_a_tuning_file_that_cannot_be_written_is_named_with_its_option(ncz, tmp_path, monkeypatch):
    def write(file):
        raise OSError(28, "No space left on device")

    code, _, err = ncz("tune", "--output", tmp_path)
    assert code == 2 and f"--output {tmp_path}: is a folder" in err  # before anything is measured
    monkeypatch.setattr("ncz_plugins.cli.tune.run_job.run_job", lambda *_: SimpleNamespace(write=write))
    code, _, err = ncz("tune", "--output", tmp_path / "x.json")
    assert code == 2 and f"--output {tmp_path}/x.json: cannot be written: No space left on device" in err


def test_a_tuning_file_has_a_name_that_a_configuration_can_read(ncz, tmp_path, monkeypatch):
    monkeypatch.setattr("ncz_plugins.cli.tune.run_job.run_job", lambda *_: pytest.fail("measured for nothing"))
    for name in ("tuned", "tuned.txt", "tuned.json.bak", "tuned.yaml"):
        code, _, err = ncz("tune", "--output", tmp_path / name)
        assert code == 2 and err == (
            f"ncz: error: --output {tmp_path}/{name}: transport.tuning needs the ending .json: name it FILE.json\n"
        )


# ------------------------------------------------------------------ files of all commands


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A working directory; makes the files that commands read, with names of one form, such as "x.%s"."""
    monkeypatch.chdir(tmp_path)

    def make(form: str) -> None:
        step = {"calls": 1, "compressed_calls": 1, "plain_bytes": 100, "wire_bytes": 10, "seconds": 0.1}
        Path(form % "jsonl").write_text("".join(f"{json.dumps(step | {'step': at})}\n" for at in (1, 2)))
        Path(form % "yaml").write_text("policies: [{name: '\u6f22*', action: skip}]", "utf-8")
        Path(form % "bad.yaml").write_text("quantizer: {kind: '\u6f22', '\u5b57': 1}", "utf-8")
        Path(form % "safetensors").write_bytes(safetensors.torch.save({"\u6f22": torch.arange(500.0)}))
        with open(form % "npy", "wb") as file:
            numpy.save(file, numpy.arange(500, dtype=numpy.float32))

    return make


# What writes a file that is named last. Left out is what takes seconds and writes by the same functions: the plots of
# `ncz plan` and `ncz perf`, and `ncz perf --trace`.
WRITERS = {
    "schema": ["schema", "--output"],
    "codec": ["codec", "x.npy", "--plot"],
    "report": ["report", "x.jsonl", "--plot"],
    "make": ["patch", "make", "x.safetensors"],
    "apply": ["patch", "apply", "x.patch"],
    "tune": ["tune", "--output"],
}


@pytest.fixture
def writer(files, monkeypatch):
    """Makes what WRITERS read; `ncz tune` measures nothing."""
    files("x.%s")
    assert main(["patch", "make", "x.safetensors", "x.patch"]) == 0
    tuning = SimpleNamespace(write=lambda file: write_whole(file, '{"measured": 1}'))
    monkeypatch.setattr("ncz_plugins.cli.tune.run_job.run_job", lambda *_: tuning)
    monkeypatch.setattr("ncz_plugins.cli.tune.show.show", lambda tuning, file, notes: print(f"{file}: measured"))


def is_same(one: bytes, other: bytes) -> bool:
    """Pictures may show what was measured."""
    return one == other or one[:8] == other[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("command", WRITERS.values(), ids=WRITERS)
def test_all_that_is_written_goes_where_it_is_to_go(writer, capfdbinary, command):
    ending = {"--plot": ".png", "--output": ".json"}.get(command[-1], "")
    plain, linked = Path(f"plain{ending}"), Path(f"linked{ending}")
    plain.touch(0o600)
    linked.symlink_to(plain)
    assert main([*command, str(linked)]) == 0
    data = plain.read_bytes()
    assert data and linked.is_symlink() and plain.stat().st_mode & 0o777 == 0o600

    os.mkfifo("fifo")
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(Path("fifo").read_bytes)
        assert main([*command, "fifo"]) == 0
        assert is_same(got.result(60), data) and Path("fifo").is_fifo()

    has_messages = bool(capfdbinary.readouterr().out)
    os.symlink("/proc/self/fd/1", "stdout")  # as /dev/stdout, which root could lose
    for name in ("-", "stdout"):
        assert main([*command, name]) == 0
        out, err = capfdbinary.readouterr()
        assert is_same(out, data) and bool(err) == has_messages and not Path("-").exists()


@pytest.mark.parametrize("command", WRITERS.values(), ids=WRITERS)
def test_a_full_disk_is_named_in_one_line(writer, full_device, capfd, command):
    capfd.readouterr()
    assert main([*command, full_device]) == 2
    err = capfd.readouterr().err
    assert err.startswith("ncz: error: ") and err.endswith(
        f"{full_device}: cannot be written: No space left on device\n"
    )
    assert err.count("\n") == 1


@pytest.mark.parametrize("options", [["--json", "--plot", "-"], ["--plot", "-", "--trace", "/dev/stdout"]])
def test_two_things_do_not_go_to_standard_output(ncz, options):
    code, out, err = ncz("perf", "all_reduce", *options)
    assert (code, out) == (2, "") and "would all go to standard output: give files for all but one" in err


def test_what_is_read_may_be_a_fifo(ncz, files):
    files("x.%s")
    assert ncz("patch", "make", "x.safetensors", "x.patch")[0] == 0
    for command in (
        ["check", "x.yaml"],
        ["codec", "x.npy", "--config", "x.yaml", "--json"],
        ["report", "x.jsonl"],
        ["patch", "make", "x.safetensors", "y.patch", "--base", "x.safetensors"],
        ["patch", "show", "x.patch"],
    ):
        for kind in ("yaml", "npy", "jsonl", "safetensors", "patch"):
            os.mkfifo(f"fifo.{kind}")
        with ThreadPoolExecutor(2) as pool:
            for name in command:
                if name.startswith("x."):
                    pool.submit(Path(name.replace("x.", "fifo.")).write_bytes, Path(name).read_bytes())
                    command[command.index(name)] = name.replace("x.", "fifo.")
                    if command[1] == "make":
                        break  # a FIFO is read once
            code, _, err = ncz(*command)
        assert code == 0, (command, err)
        for fifo in Path().glob("fifo.*"):
            fifo.unlink()
    os.mkfifo("fifo.npy")
    code, _, err = ncz("perf", "all_reduce", "--data", "fifo.npy")
    assert code == 2 and "--data fifo.npy: every rank reads it, so it must be a plain file" in err


@pytest.mark.filterwarnings("ignore:Glyph .* missing from font")
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize("form", ["\u6f22.%s", os.fsdecode(b"raw\xff.%s"), "a$b_{$.%s"])
def test_names_need_not_fit_the_terminal(files, monkeypatch, form, encoding):
    files(form)
    for command, code in (
        (["check", form % "yaml"], 0),
        (["check", form % "bad.yaml"], 2),
        (["check", form % "none"], 2),
        (["codec", form % "npy", "--plot", form % "png"], 0),
        (["report", form % "jsonl", "--plot", form % "png"], 0),
        (["report", form % "jsonl", "--json"], 0),
        (["patch", "make", form % "safetensors", form % "patch"], 0),
        (["patch", "show", form % "patch"], 0),
        (["schema", "--output", form % "none/x"], 2),
    ):
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, io.TextIOWrapper(io.BytesIO(), encoding=encoding))
        assert main(command) == code
        sys.stderr.flush()
        printed = (sys.stderr if code else sys.stdout).buffer.getvalue().decode(encoding)
        name = command[1] if command[0] == "check" else command[-1]
        assert not code or name.encode(encoding, "backslashreplace").decode(encoding) in printed


@pytest.mark.processes
def test_python_m_is_the_same_command():
    process = start("-m", "ncz_plugins", "check", "nowhere.yaml")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert (out, err) == ("", "ncz: error: nowhere.yaml: cannot be read: No such file or directory\n")


@pytest.mark.processes
def test_check_imports_no_torch_nor_any_framework():
    code = (
        "import sys; from ncz_plugins.cli.main import main\n"
        "assert main(['check', 'configs/ncclz.yaml']) == 0\n"
        "assert not {'torch', 'deepspeed', 'horovod', 'cupy'} & set(sys.modules)"
    )
    process = start("-c", code)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err


@pytest.mark.processes
def test_ctrl_c_and_a_closed_pipe_leave_no_traceback(tmp_path):
    pipe = tmp_path / "c.yaml"
    os.mkfifo(pipe)
    # Shells let what they start in the background ignore Ctrl-C.
    heeding = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    process = start("-m", "ncz_plugins", "check", str(pipe), **heeding)
    with open(pipe, "w"):  # opens when the command has begun to read, and it reads until this end is closed
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")

    for command in (["schema"], ["check", "configs/ncclz.yaml"]):
        process = start("-m", "ncz_plugins", *command)
        process.stdout.close()
        process.stdout = None
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, "")

    process = start("-m", "ncz_plugins", "schema", preexec_fn=lambda: os.close(1))
    assert process.communicate(timeout=60)[1] == "" and process.returncode == 0
