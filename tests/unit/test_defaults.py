"""No tensor of ours depends on what a program has made the default of torch: each names its dtype and device.

What that protects is played by tests/distributed/test_defaults.py.
"""

import ast

from repository import ROOT
from torch.utils._device import _device_constructors

# Functions whose result is on the default device or has the default dtype, as `torch.NAME`: what each must be told.
BOTH = frozenset({"dtype", "device"})
TOLD = {f.__name__.replace("fft_", "fft.", 1): BOTH for f in _device_constructors()}
TOLD |= {name: frozenset({"device"}) for name in ("tril_indices", "triu_indices")}
TOLD |= {name: BOTH | {"generator"} for name in ("rand", "randn", "randint", "randperm", "normal")}
TOLD |= {name: frozenset({"generator"}) for name in ("bernoulli", "multinomial", "poisson")}  # like their input
KINDS = ("", "Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool")
UNTOLD = {f"{kind}Tensor" for kind in KINDS}


def offences(source: str, file: str) -> list[str]:
    """Where `source` asks torch for tensors that depend on its defaults, in the order of lines."""
    tree, found = ast.parse(source), {}
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in ("torch", "torch.fft"):
            names = {alias.name for alias in node.names} & (TOLD.keys() | UNTOLD - {"Tensor"})
            found |= {(node.lineno, name): f"torch.{name} is imported by itself" for name in names}
        name = ast.unparse(node).removeprefix("torch.") if isinstance(node, (ast.Attribute, ast.Name)) else ""
        call = calls.get(id(node))
        if name in UNTOLD and call:
            found[node.lineno, name] = f"torch.{name}(...) can't be told a dtype and a device"
        if name in TOLD and isinstance(node, ast.Attribute):
            missing = TOLD[name] - {keyword.arg for keyword in (call.keywords if call else ())}
            if missing:
                found[node.lineno, name] = f"torch.{name} without {', '.join(f'{each}=' for each in sorted(missing))}"
    return [f"{file}:{line}: {text}" for (line, _), text in sorted(found.items())]


def test_every_tensor_of_the_package_names_its_dtype_and_device():
    files = sorted((ROOT / "ncz_plugins").rglob("*.py"))
    assert len(files) > 100
    found = [each for file in files for each in offences(file.read_text(), str(file.relative_to(ROOT)))]
    assert not found, "\n" + "\n".join(found)


SOURCE = """\
from torch import Tensor, zeros
x: Tensor = torch.empty(3, dtype=torch.float32)
make = partial(torch.ones, 3)
y = Tensor(3)
z = torch.randn(3, dtype=x.dtype, device=x.device)
t = torch.fft.fftfreq(3)
good = torch.full((3,), 1.0, dtype=x.dtype, device="cpu"), x.new_zeros(3), torch.empty_like(x), isinstance(x, Tensor)
"""


def test_each_offence_is_named_with_its_file_and_line():
    assert offences(SOURCE, "a.py") == [
        "a.py:1: torch.zeros is imported by itself",
        "a.py:2: torch.empty without device=",
        "a.py:3: torch.ones without device=, dtype=",
        "a.py:4: torch.Tensor(...) can't be told a dtype and a device",
        "a.py:5: torch.randn without generator=",
        "a.py:6: torch.fft.fftfreq without device=, dtype=",
    ]
