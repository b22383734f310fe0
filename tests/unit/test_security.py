"""docs/reference/security.md: nothing foreign is run, or believed unchecked, or kept where others can write."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import play
from repository import ROOT

from ncz_plugins import Config, ConfigError, FrameError, NczError
from ncz_plugins.cli.perf import gather
from ncz_plugins.core.runtime.statistics import Counters
from ncz_plugins.core.transport.handshake import open_store
from ncz_plugins.core.tuning.tuning_file import Tuning
from ncz_plugins.kernels import cache
from ncz_plugins.kernels.format import HEADER, HEADER_BYTES, MAGIC

OURS = sorted(file for folder in ("ncz_plugins", "examples", "tools") for file in (ROOT / folder).rglob("*.py"))

# ------------------------------------------------------------------ nothing foreign is run

MODULES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
# Those of torch.distributed and of Horovod, which unpickle what other ranks send.
OF_OBJECTS = {
    "all_gather_object",
    "allgather_object",
    "broadcast_object",
    "broadcast_object_list",
    "broadcast_optimizer_state",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
}
SAID = {"weights_only", "allow_pickle", "Loader", "shell"}
SAFE_LOADERS = {"SafeLoader", "CSafeLoader", "_YamlLoader"}  # the last is ours: see the test below


def offences(source: str) -> Iterator[str]:
    """What in a file's text runs, or lets others run, what comes from elsewhere."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (f"import {name.name}" for name in node.names if name.name.partition(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in MODULES:
            yield f"from {node.module}"
        elif isinstance(node, ast.Attribute) and node.attr in OF_OBJECTS:
            yield node.attr
        elif isinstance(node, ast.Call):
            yield from _offences_of_call(node)


def _offences_of_call(node: ast.Call) -> Iterator[str]:
    name = ast.unparse(node.func)
    said = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg in SAID}
    if name in ("eval", "exec", "compile", "os.system", "os.popen"):
        yield name
    if name == "torch.load" and said.get("weights_only") != "True":
        yield "torch.load without weights_only=True"
    if name in ("np.load", "numpy.load") and said.get("allow_pickle") != "False":
        yield "np.load without allow_pickle=False"
    if name.startswith("yaml.") and "load" in name and name != "yaml.safe_load":
        loader = said.get("Loader") or (ast.unparse(node.args[1]) if len(node.args) > 1 else "none")
        if loader.rpartition(".")[2] not in SAFE_LOADERS:
            yield f"{name} with loader {loader}"
    if said.get("shell", "False") != "False":
        yield "a shell"


def test_nothing_foreign_is_run():
    found = {str(file.relative_to(ROOT)): list(offences(file.read_text())) for file in OURS}
    assert not {file: each for file, each in found.items() if each}


@pytest.mark.parametrize(
    "bad",
    [
        "import pickle",
        "from cloudpickle import loads",
        "dist.all_gather_object(a, b)",
        "host = partial(hvd.broadcast_object, root_rank=0)",
        "eval(text)",
        "torch.load(file)",
        "torch.load(file, weights_only=False)",
        "np.load(file)",
        "yaml.load(text, yaml.Loader)",
        "yaml.unsafe_load(text)",
        "yaml.load_all(text, Loader=yaml.FullLoader)",
        "subprocess.run(line, shell=True)",
    ],
)
def test_what_would_be_run_is_seen(bad):
    assert list(offences(bad))


@pytest.mark.parametrize(
    "text",
    [
        "quantizer: !!python/object/apply:os.system ['touch {mark}']",
        "quantizer: !!python/object/new:subprocess.Popen [['touch', '{mark}']]",
        "quantizer: !!python/name:os.system",
        "!!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path ['{mark}']]",
    ],
)
def test_yaml_makes_no_objects(text, tmp_path):
    mark = tmp_path / "mark"
    for load in (Config.load, Tuning.read):
        file = tmp_path / "hostile.yaml"
        file.write_text(text.replace("{mark}", str(mark)))
        with pytest.raises(ConfigError, match="hostile.yaml"):
            load(file)
    assert not mark.exists()


# ------------------------------------------------------------------ sizes are checked before they are believed

ABSURD = (1 << 20, (1 << 31) - 1, (1 << 32) - 1)  # bytes of payload that a header states; the last is the most it can


@pytest.mark.parametrize("payload", ABSURD)
def test_a_frame_that_states_an_absurd_size_is_refused(payload):
    capacity = 4096

    def body(transport) -> None:
        (stream,) = transport.streams([(1 - transport.rank,) * 2], [1], capacity, Counters())
        frame = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
        HEADER.pack_into(frame.numpy(), 0, MAGIC, 1, 0, 0, 8, 0, payload, 0, 0)
        stream.send(frame)
        with pytest.raises(FrameError, match=f"a frame of {payload + HEADER_BYTES} bytes"):
            stream.receive()
        stream.finish()

    play(2, body)


@pytest.mark.parametrize("size", [-1, 0, 4097, 1 << 40, (1 << 63) - 1])
def test_an_absurd_size_sent_ahead_is_refused(size):
    """Over NCCL, sizes go before frames."""

    def body(transport) -> None:
        (stream,) = transport.streams([(1 - transport.rank,) * 2], [1], 4096, Counters())
        transport._connections.send(torch.tensor([size]), 1 - transport.rank, 1).wait()
        with pytest.raises(FrameError, match=f"announced a frame of {size} bytes"):
            stream.next_size()

    play(2, body, "rounds")


@pytest.mark.skipif(not importlib.util.find_spec("horovod"), reason="Horovod is not installed")
@pytest.mark.parametrize("words", [[], [0], [-1], [1 << 62], [1, 1 << 62], [2, -8, 24], [1, 4097], [1, 9], [1, 7]])
def test_what_horovod_brings_is_checked(words):
    from ncz_plugins.horovod.transport import _unpacked

    piece = torch.cat([torch.tensor(words, dtype=torch.int64).view(torch.uint8), torch.zeros(8, dtype=torch.uint8)])
    with pytest.raises(FrameError, match="rank 1 sent"):
        _unpacked(piece, 1, 4096)
    good = torch.cat([torch.tensor([1, 8]).view(torch.uint8), torch.arange(8, dtype=torch.uint8)])
    assert [frame.tolist() for frame in _unpacked(good, 1, 4096)] == [list(range(8))]


def test_what_ranks_tell_each_other_is_limited(monkeypatch):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=30))
    try:
        assert gather.gathered({"a": [1, None, "b"]}) == [{"a": [1, None, "b"]}]
        monkeypatch.setattr(gather, "MOST_BYTES", 100)
        with pytest.raises(NczError, match="102"):
            gather.gathered("x" * 100)
    finally:
        dist.destroy_process_group()


HOSTILE = """
import resource, struct, sys, torch
from pathlib import Path
from ncz_plugins import FrameError, compress, decompress, kernels

HEAD = struct.Struct("<IBBBBIQI")
MOST = 16384 * 8 / 20  # no format takes fewer than 20 bytes for 16384 values, which have 8 each at most
data = compress(torch.zeros(400_000), {"quantizer": {"kind": "lossless"}})
decompress(data)
random = torch.Generator().manual_seed(0)
taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
allowed = round(4 * MOST * len(data))  # what it gives, and as much again three times for what codes are held in
resource.setrlimit(resource.RLIMIT_AS, (taken + allowed,) * 2)

def draw(right, *wrong):
    if torch.rand(1, generator=random) < 0.7:
        return right
    return wrong[int(torch.randint(len(wrong), (1,), generator=random))]

given = 0
for _ in range(200):
    kind = draw(2, 0, 1)
    sizes = [draw(400_000, 0, 1, 2, 1 << 22, 1 << 31, 1 << 40, 1 << 61) for _ in range(draw(1, 0, 2, 200))]
    block = draw(0, 4096, 1 << 40) if kind != 2 else 0
    frame = draw(HEAD.unpack(data[: HEAD.size].numpy())[5], 4096, 1 << 20, 1 << 25)
    steps = struct.pack("<f", 1.0) * draw(0, 1, 700)
    head = bytearray(HEAD.pack(0x435A434E, 1, draw(0, 1, 2, 3), kind, len(sizes), frame, block, 0))
    head += struct.pack(f"<{len(sizes)}q", *sizes)
    made = torch.cat([torch.frombuffer(head + steps, dtype=torch.uint8), data[HEAD.size + 8 :]])
    end = len(head) + len(steps)
    made[20:24] = torch.tensor(list(kernels.cpu_backend().checksum(made[:end]).to_bytes(4, "little")))
    try:
        out = decompress(made)
    except FrameError:
        continue
    given += 1
    assert out.nbytes <= MOST * len(made), (out.nbytes, len(made))
print(given)
"""


@pytest.mark.processes
def test_hostile_heads_take_no_memory_out_of_proportion():
    """`decompress` within a limit of the operating system's; an allocation above it would not be a FrameError."""
    done = subprocess.run([sys.executable, "-c", HOSTILE], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0  # some heads are right


# ------------------------------------------------------------------ nothing is left for others to change


@pytest.fixture
def careless(monkeypatch, tmp_path):
    """A process whose umask lets everybody write what it makes, and with a cache that is not there yet."""
    monkeypatch.setenv(cache.ENVIRONMENT, str(tmp_path / "above" / "cache"))
    before = os.umask(0)
    yield tmp_path / "above" / "cache"
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    """Permissions of all that is in a folder, and of itself."""
    return {str(file): file.stat().st_mode & 0o777 for file in (folder, *folder.rglob("*"))}


def test_the_cache_is_private_whatever_the_umask(careless):
    folder = cache.private_folder("cuda")
    cache.write_private(folder / "kernel", b"code")
    assert cache.read_private(folder / "kernel") == b"code"
    assert len(modes(careless.parent)) == 4 and not [mode for mode in modes(careless.parent).values() if mode & 0o077]


def test_what_others_could_have_written_is_not_read(careless):
    file = cache.private_folder("cuda") / "kernel"
    cache.write_private(file, b"code")
    for mode in (0o620, 0o602, 0o666):
        file.chmod(mode)
        assert cache.read_private(file) is None
    cache.write_private(file, b"new code")  # replaces it
    assert cache.read_private(file) == b"new code" and file.stat().st_mode & 0o777 == 0o600
    assert cache.read_private(file.with_name("none")) is None


def test_a_cache_in_which_others_could_put_another_folder_is_not_used(careless):
    cache.private_folder("cuda")
    for mode, usable in ((0o777, False), (0o770, False), (0o1777, True), (0o755, True)):
        careless.chmod(mode)
        if usable:
            cache.private_folder("cuda")
        else:
            with pytest.raises(OSError, match="others can write"):
                cache.private_folder("cuda")


def test_the_cache_is_in_the_folder_that_its_variable_means(careless, monkeypatch):
    monkeypatch.setenv("WHERE", str(careless))
    for named in ("$WHERE/a", "${WHERE}/a"):
        monkeypatch.setenv(cache.ENVIRONMENT, named)
        assert cache.private_folder("cuda") == careless / "a" / "cuda"
    for unknown in ("$NO_SUCH/a", "~no-such-user/a"):
        monkeypatch.setenv(cache.ENVIRONMENT, unknown)
        with pytest.raises(OSError, match=f"NCZ_CACHE: .*{unknown[1:-2]} is not known here"):
            cache.private_folder("cuda")


def test_the_weights_of_the_laboratory_are_kept_there(careless, monkeypatch):
    from ncz_plugins.cli.perf import data

    monkeypatch.setattr(data, "_STEPS", 0)
    weights = data.trained()
    assert len(modes(careless)) == 3 and not [mode for mode in modes(careless).values() if mode & 0o077]
    assert torch.equal(data.trained(), weights)


def test_the_cache_of_horovods_wheel_is_private(careless, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import horovod_wheel

    folder = careless / "horovod" / "key"
    horovod_wheel.make_private(folder)
    (folder / "horovod.whl").touch(mode=0o644)
    horovod_wheel.make_private(folder)
    assert not [mode for mode in modes(careless).values() if mode & 0o022]
    for open_to_others in (folder / "horovod.whl", folder, folder.parent, careless):
        open_to_others.chmod(0o777)
        with pytest.raises(SystemExit, match="Others can write to"):
            horovod_wheel.make_private(folder)
        open_to_others.chmod(0o755)
    folder.chmod(0o775)  # as a group's own folders are where each user has a group
    horovod_wheel.make_private(folder)
    assert not folder.stat().st_mode & 0o022 and not list(folder.glob("*.whl"))


# ------------------------------------------------------------------ ranks meet without pickle


def test_ranks_meet_at_the_store_of_the_first_one():
    def body(transport) -> tuple[dist.Store, bytes]:
        def broadcast(address: torch.Tensor) -> torch.Tensor:
            transport.plain.broadcast(address, 0).wait()
            return address

        store = open_store(transport.rank, 3, timedelta(seconds=30), "localhost", broadcast)
        store.set(f"rank {transport.rank}", "here")
        # The first rank's must outlive what the others do.
        return store, b" ".join(store.get(f"rank {rank}") for rank in range(3))

    assert [received for _, received in play(3, body)] == [b"here here here"] * 3
