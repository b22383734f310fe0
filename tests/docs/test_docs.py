"""The documentation is true: its links lead somewhere, its names exist, its snippets, examples and commands run.

The Python blocks of a page are one program, which runs on as many ranks as the page says. YAML and JSON blocks are
valid configurations, and a diff block is what its new side is. Commands are checked against the real command line, and
those marked `run` are executed. Comments in a page say what differs; a reader of the site does not see them:

    <!-- test: ranks 2 -->          for the page: its program runs in 2 processes, as under torchrun
    <!-- test: code
    assert total > 0                Python that belongs to the program
    -->
    <!-- test: file ds.json -->     before a block: programs and commands of the page find it as this file
    <!-- test: run -->              before a block of commands: they are executed
    <!-- test: compile, WHY -->     before a block: it is Python, but does not run here
    <!-- test: skip, WHY -->        before a block: nothing is checked
"""

import ast
import configparser
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import forking
import numpy as np
import pytest
import yaml
from repository import FORKED_RANKS, ROOT
from scenarios import DEEPSPEED, HOROVOD, OF_ALL

from ncz_plugins import Config
from ncz_plugins.cli import main as cli
from ncz_plugins.cli.perf.launch import free_port
from ncz_plugins.core.config import find_in_deepspeed, is_deepspeed
from ncz_plugins.core.reasons import REMEDIES, Bypass

README = ROOT / "README.md"
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
OF_EXAMPLES = ROOT / "examples" / "README.md"
PAGES = [README, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", OF_EXAMPLES, *sorted((ROOT / "docs").rglob("*.md"))]
FRAMEWORKS = "deepspeed", "horovod"
# What takes long to import is imported once for the programs of all pages that have the same here.
WITH_TORCH = "ncz_plugins.torch.ddp,ncz_plugins.torch.fsdp,torch._dynamo,torch.distributed.checkpoint"
WITH_TORCH += ",torch.distributed.pipelining"
WITH_TRANSFORMERS = "ncz_plugins.torch.ddp,accelerate,transformers.trainer,transformers.models.bert.modeling_bert"
IMPORTS = {
    "deepspeed": DEEPSPEED["imports"],
    "weights": DEEPSPEED["imports"],
    "horovod": HOROVOD["imports"],
    "diloco": "ncz_plugins.torch.torchft,torchft.local_sgd",
    "lightning": "ncz_plugins.torch.ddp,lightning,torch._dynamo",
    "hugging-face": WITH_TRANSFORMERS,
    "rl": WITH_TRANSFORMERS,
    "megatron": "ncz_plugins.torch.backend,torch._dynamo",
}
REQUIRED = {name: name for name in FRAMEWORKS} | {  # packages, by page
    "diloco": "torchft",
    "lightning": "lightning",
    "hugging-face": "transformers",
    "megatron": "megatron",
    "rl": "transformers",
}
PROGRAM_SECONDS = 200  # they take seconds on an idle machine
# Examples that no other test runs: the page whose imports they share, options that make them short, and what they say.
EXAMPLES = {
    "train_diloco.py": ("diloco", "--steps 2 --sync-every 2 --batch 2", r"identical': True.*'ratio': ([5-9]|1\d)\."),
    "train_fsdp.py": ("fsdp", "--steps 3 --layers 1 --batch 2", "'replicas_identical': True"),
    "train_hugging_face.py": ("hugging-face", "--steps 3", r"steps 1 to 3: 100% .* ratio [5-9]"),
    "train_lightning.py": ("lightning", "--steps 3", r"steps 1 to 3: 100% .* ratio [5-9]"),
    "sync_weights.py": ("fsdp", "--warm-up 1 --versions 2", r"\n *2 .* MB .* MB +([2-9]|\d\d+)\.\d +\d\.\d{4}"),
}

FENCE = re.compile(
    r"<!-- test: (?P<word>\w+),?(?P<rest>.*?)-->\n?|^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)


class Block(NamedTuple):
    """A block of code, or a hidden piece of the page's program."""

    page: Path
    line: int
    language: str
    text: str
    word: str  # of the comment before it, "" without one
    rest: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def name_of(value: object) -> str:
    return str(value.relative_to(ROOT)) if isinstance(value, Path) else str(value)


@cache
def blocks(page: Path) -> list[Block]:
    """All blocks of a page, in order."""
    source = page.read_text()
    found, word, rest = [], "", ""
    for match in FENCE.finditer(source):
        line = source.count("\n", 0, match.start()) + 1
        if match["word"] == "code":
            found.append(Block(page, line, "python", match["rest"], "code", ""))
        elif match["word"]:
            word, rest = match["word"], match["rest"].strip()
            if word == "ranks":
                found.append(Block(page, line, "", "", word, rest))
                word, rest = "", ""
        else:
            language, text = match["language"], textwrap.dedent(match["text"])  # in a tab it is indented
            if language == "diff":
                language, text = new_side(text)
            found.append(Block(page, line, language, text, word, rest))
            word, rest = "", ""
    assert not word, f"{page}: a comment '{word}' stands before no block"
    return found


def new_side(diff: str) -> tuple[str, str]:
    """The language of a diff, and what it leaves, each line where it was."""
    text = "".join("\n" if line[0] == "-" else line[1:] or "\n" for line in diff.splitlines(keepends=True))
    return "json" if text.lstrip().startswith("{") else "python", text


def of_language(pages: list[Path], *languages: str) -> list[Block]:
    return [block for page in pages for block in blocks(page) if block.language in languages and block.word != "skip"]


def test_every_comment_is_known_and_every_exception_has_a_reason():
    for page in PAGES:
        for block in blocks(page):
            assert block.word in ("", "ranks", "code", "file", "run", "compile", "skip"), block
            assert block.rest or block.word not in ("compile", "skip", "file", "ranks"), block


# ------------------------------------------------------------------ links


def prose(page: Path) -> str:
    """The text of a page without its blocks of code."""
    return re.sub(r"^( *)```.*?^\1```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """What a link to a heading of the page may name, as MkDocs and GitHub make it."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE):
        given = re.search(r"\{ *#([\w-]+) *\}", heading)
        text = re.sub(r"[`*]|\]\([^)]*\)|\[", "", heading).lower()
        found.add(given[1] if given else re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip()))
    if ":::" in prose(page):
        found |= {"errors"}
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_and_pictures_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.is_file(), f"{target}: no such file"
        if ROOT / "docs" in page.parents:
            assert not path or (ROOT / "docs") in file.parents, f"{target} leads out of docs, where the site ends"
        if re.fullmatch("gh-(light|dark)-mode-only", anchor):  # a picture for one of the schemes
            assert file.stem.endswith("-dark") == ("dark" in anchor), target
            continue
        assert not anchor or anchor in anchors(file), f"{target}: {file.name} has no such heading"


def test_every_page_is_in_the_navigation_of_the_site():
    class Loader(yaml.SafeLoader):
        """Which takes the tags of MkDocs for nothing."""

    Loader.add_multi_constructor("!", lambda loader, tag, node: None)
    site = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)
    listed = set(re.findall(r"[\w/-]+\.md", json.dumps(site["nav"])))
    assert listed == {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    linked = set(re.findall(r"\]\(([\w/-]+\.md)\)", (ROOT / "docs" / "index.md").read_text()))
    assert linked == listed - {"index.md"}


def test_every_page_that_is_named_elsewhere_exists():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git repository")
    for name in listed.stdout.splitlines():
        file = ROOT / name
        if not file.is_file() or file.suffix in {".png", ".npz", ".npy", ".bin"}:
            continue
        for path in re.findall(r"\bdocs/[\w./-]+\.(?:md|png)\b", file.read_text(errors="replace")):
            assert (ROOT / path).is_file() or "/" + path in name, f"{name} names {path}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_a_page_names_exist(page):
    folders = "tests|ncz_plugins|benchmarks|configs|examples|tools|docs"
    for path in re.findall(rf"`((?:{folders})/[\w./-]*)`", prose(page)):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"`((?:core|kernels|deepspeed|horovod|cli)/[\w./-]*)`", prose(page)):
        assert (ROOT / "ncz_plugins" / path).exists(), path
    if page.parent.name in ("results", "notebook"):
        for name in re.findall(r"`([\w-]+\.json)`", prose(page)):
            assert (ROOT / "benchmarks" / "results" / name).is_file(), name


def test_tests_that_a_page_names_exist():
    there = {file.name for file in (ROOT / "tests").rglob("*.py")}
    for page in PAGES:
        assert {*re.findall(r"\btest_\w+\.py\b", prose(page))} <= there, page


def test_each_package_says_what_its_files_hold():
    for package in (ROOT / "ncz_plugins").rglob("__init__.py"):
        files = {path for path in package.parent.iterdir() if path.suffix in (".py", ".h", ".cuh", ".cpp")} - {package}
        folders = {path.parent for path in package.parent.glob("*/__init__.py")}
        words = re.findall(r"\w+", ast.get_docstring(ast.parse(package.read_text())))
        assert {path.stem for path in files | folders} <= {*words}, package


def test_the_tests_of_each_law_exist():
    laws = (ROOT / "CONTRIBUTING.md").read_text().partition("## Which law is tested where")[2].partition("\n## ")[0]
    tests = [line.split("|")[2] for line in laws.splitlines() if re.match(r"\| [A-Z]", line)]
    assert len(tests) > 30
    for place, functions in re.findall(r"`([\w./]+)`(?:: ((?:`\w+`(?:, )?)+))?", " ; ".join(tests)):
        path = ROOT / "tests" / place
        assert path.exists(), place
        source = "".join(file.read_text() for file in ([path] if path.is_file() else path.rglob("*.py")))
        missing = [name for name in re.findall(r"\w+", functions) if f"def {name}(" not in source]
        assert not missing, f"{place}: {missing}"


def test_reasons_to_go_plain_have_the_remedies_that_messages_print():
    rows = "\n".join(f"| `{bypass.value}` | {REMEDIES[bypass]} |" for bypass in Bypass)
    assert rows in (ROOT / "docs" / "guides" / "metrics.md").read_text(), f"the table is to have the rows\n{rows}"


@pytest.mark.parametrize("page", [page for page in PAGES if ROOT / "docs" in page.parents], ids=name_of)
def test_a_page_begins_with_a_sentence(page):
    """So that somebody whom a search has brought knows what the page is about."""
    _, _, text = re.sub(r"\A---\n.*?\n---\n", "", page.read_text(), flags=re.DOTALL).lstrip().partition("\n")
    first, _, _ = text.lstrip().partition("\n\n")
    assert re.match(r"[\w\[*`]", first) and not first.startswith("```"), first
    assert len(first.split()) >= 8, first


def test_the_readme_is_short():
    assert len(README.read_text().splitlines()) <= 120


# ------------------------------------------------------------------ names


def imported_names() -> set[tuple[str, str]]:
    """(module, name) of all that Python blocks import from this package, and (module, "") of modules."""
    found = set()
    for block in of_language(PAGES, "python"):
        for node in ast.walk(ast.parse(block.text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ncz_plugins":
                found |= {(node.module, alias.name) for alias in node.names}
            elif isinstance(node, ast.Import):
                found |= {(alias.name, "") for alias in node.names if alias.name.split(".")[0] == "ncz_plugins"}
    return found


def test_names_that_the_documentation_imports_are_public():
    names = imported_names()
    # Identifiers of the API page, and what prose calls by its full name.
    for page in PAGES:
        for module, name in re.findall(r"(?:^::: |`)(ncz_plugins(?:\.\w+)*)\.(\w+)\(?", page.read_text(), re.MULTILINE):
            names.add((module, name))
    assert {("ncz_plugins", name) for name in ("Communicator", "ParameterSlice", "Training", "recording")} <= names
    absent = [f"ncz_plugins.{name}" for name in FRAMEWORKS if find_spec(name) is None]
    absent += ["ncz_plugins.torch.torchft"] if find_spec("torchft") is None else []
    names = {each for each in names if each[0] not in absent and ".".join(each) not in absent}
    program = f"""
import importlib
for module, name in {sorted(names)!r}:
    if name:
        try:
            found = importlib.import_module(module)
            getattr(found, name)
        except AttributeError:
            importlib.import_module(module + "." + name)  # a module
        else:
            public = module == "ncz_plugins.core.runtime.statistics" or name in getattr(found, "__all__", [name])
            assert public, f"{{module}}.{{name}} is not in __all__"
    else:
        importlib.import_module(module)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PROGRAM_SECONDS)
    allowed = {"ncz_plugins", "ncz_plugins.torch", "ncz_plugins.torch.torchft", "ncz_plugins.torch.backend"}
    allowed |= {f"ncz_plugins.{name}" for name in FRAMEWORKS}
    assert {module for module, _ in imported_names()} <= allowed, "what users import is exported at the top"


# ------------------------------------------------------------------ programs


def files_of(page: Path, folder: Path) -> None:
    """Write what the page's blocks marked `file` hold."""
    for block in blocks(page):
        if block.word == "file":
            (folder / block.rest).write_text(block.text)


@pytest.mark.parametrize("page", [page for page in PAGES if of_language([page], "python")], ids=name_of)
def test_python_compiles(page):
    for block in of_language([page], "python"):
        compile(block.text, str(block), "exec")


def page_of(program: Path) -> str:
    """Whose packages and imports the program of a page, or an example, needs."""
    return EXAMPLES[program.name][0] if program.suffix == ".py" else program.stem


def imports_of(program: Path) -> str:
    return IMPORTS.get(page_of(program), WITH_TORCH)


WITH_PROGRAMS = [page for page in PAGES if any(block.word == "ranks" for block in blocks(page))]
PROGRAMS = sorted([*WITH_PROGRAMS, *(ROOT / "examples" / name for name in EXAMPLES)], key=imports_of)


def written(page: Path, folder: Path) -> Path:
    """The program of a page, in a file."""
    files_of(page, folder)
    program = folder / "program.py"
    lines: list[str] = []
    for block in of_language([page], "python"):
        if block.word in ("", "code"):
            lines += [""] * (block.line - len(lines))  # so that errors name lines of the page
            lines += block.text.strip("\n").splitlines()
    program.write_text("\n".join(lines) + "\n")
    return program


@pytest.mark.parametrize("program", PROGRAMS, ids=name_of)
def test_programs_run(program, tmp_path):
    if (package := REQUIRED.get(page_of(program))) and find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    if program.suffix == ".py":
        _, options, expected = EXAMPLES[program.name]
        ranks, script = 2, [program, *options.split()]
    else:
        (ranks,) = (int(block.rest) for block in blocks(program) if block.word == "ranks")
        script, expected = [written(program, tmp_path)], ""
    forks = [FORKED_RANKS, imports_of(program), "torch", ranks, free_port(), *script]
    log = tmp_path / "output.log"
    process = forking.start([sys.executable, *map(str, forks)], cwd=tmp_path, env=os.environ | OF_ALL, log=log)
    try:
        status = process.wait(PROGRAM_SECONDS)
    finally:
        forking.end(process)
    said = log.read_text(errors="replace")
    assert status == 0 and re.search(expected, said), said


def test_every_python_block_of_the_guides_runs_or_says_why_not():
    for page in GUIDES:
        for block in of_language([page], "python"):
            assert page in WITH_PROGRAMS or block.word == "compile", block


def test_the_snippets_of_the_readme_stand_in_a_guide():
    guides = "\n".join(page.read_text() for page in GUIDES)
    for block in of_language([README, ROOT / "docs" / "index.md"], "python"):
        for paragraph in block.text.strip().split("\n\n"):
            assert paragraph in guides, block


def test_the_guide_of_torchtitan_shows_the_example():
    _, code = (ROOT / "examples" / "train_torchtitan.py").read_text().split('"""\n\n', maxsplit=1)
    assert f"```python\n{code}```" in (ROOT / "docs" / "guides" / "torchtitan.md").read_text()


# ------------------------------------------------------------------ configurations


@pytest.mark.parametrize("block", of_language(PAGES, "yaml", "json"), ids=str)
def test_configurations_are_valid(block):
    document = yaml.safe_load(block.text) if block.language == "yaml" else json.loads(block.text)
    if is_deepspeed(document):
        document = find_in_deepspeed(document)
        assert document is not None
    Config.load(document)


# ------------------------------------------------------------------ commands


def commands() -> list[tuple[Block, list[str]]]:
    """The words of every command, without `$`, sudo, variables and comments."""
    found = []
    for block in of_language(PAGES, "sh"):
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            while words and (words[0] == "sudo" or re.fullmatch(r"[A-Z_]+=.*", words[0])):
                del words[0]
            if words:
                found.append((block, words))
    return found


def of_ncz(words: list[str]) -> list[str] | None:
    """The arguments of `ncz` in a command, also behind a launcher; None for another program."""
    if "ncz" in words:
        return words[words.index("ncz") + 1 :]
    for at, word in enumerate(words):
        if word == "-m" and words[at + 1 : at + 2] == ["ncz_plugins"]:
            return words[at + 2 :]
    return None


def check(words: list[str]) -> None:
    """Whether a command that is not ours has what it names."""
    program, *rest = words
    if program == "make":
        targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        assert {word for word in rest if "=" not in word} <= targets
        for variable in (word.partition("=")[0] for word in rest if "=" in word):
            assert re.search(rf"^{variable} \?=", (ROOT / "Makefile").read_text(), re.MULTILINE), variable
    elif program == "pip":
        settings = configparser.ConfigParser()
        settings.read(ROOT / "setup.cfg")
        for extra in re.findall(r"\[(\w+)\]", " ".join(rest)):
            assert extra in settings["options.extras_require"]
    elif program.endswith("python"):
        name = rest[1].replace(".", "/") + ".py" if rest[0] == "-m" else rest[0]
        assert (ROOT / name).is_file()
    elif program == "deepspeed":
        assert rest[:2] == ["--module", "ncz_plugins.deepspeed.launch"]
        assert (ROOT / "ncz_plugins" / "deepspeed" / "launch.py").is_file()
    else:
        assert program == "horovodrun", f"how is {program} to be tested?"


@pytest.mark.parametrize("block,words", commands(), ids=lambda value: " ".join(value) if type(value) is list else None)
def test_commands_exist(block, words, capsys):
    arguments = of_ncz(words)
    if arguments is None:
        check(words)
        return
    try:
        cli.build_parser().parse_args(arguments)
    except SystemExit:
        pytest.fail(f"{block}: {capsys.readouterr().err}")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where commands find the files that the pages name: some gradients, records of a training, configurations."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    generator = np.random.default_rng(0)
    np.save("gradients.npy", generator.standard_normal(50_000, dtype=np.float32))
    from ncz_plugins import Training
    from ncz_plugins.core.runtime.statistics import Counters

    training = Training({"statistics": {"jsonl": "run.jsonl"}})
    training.begin(ranks=2, backend="gloo", link_gbps=1)
    for _ in range(4):
        training.stats.record(Counters(1, 1, 1000, 1000, 100, seconds=0.1, wait_seconds=0.08, coders={"fixed": 1}))
        training.end_step()
    training.metrics.close()
    return tmp_path


RUN = [(block, words) for block, words in commands() if block.word == "run"]


@pytest.mark.parametrize("block,words", RUN, ids=lambda value: " ".join(value) if type(value) is list else None)
def test_commands_run(block, words, folder, capsys):
    files_of(block.page, folder)
    assert cli.main(of_ncz(words)) == 0, capsys.readouterr().err
    named = words[words.index("--plot") + 1] if "--plot" in words else None
    assert named is None or (folder / named).stat().st_size
    output = capsys.readouterr().out
    padded = [line for line in output.splitlines() if line.endswith(" ")]
    assert not padded, padded
    if "--json" in words:
        json.loads(output)
