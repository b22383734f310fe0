"""Files that hold what no configuration is are refused by name, at once and in words that any terminal shows."""

import time

import pytest

from ncz_plugins.core.config import Config
from ncz_plugins.core.config.documents import read_document
from ncz_plugins.core.errors import ConfigError

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9)
)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.yaml", "quantizer: &q {value: *q}\n", "a.yaml:1: this value refers to itself"),
        ("a.yaml", "quantizer: &q\n  value: [1, *q]\n", "a.yaml:1: this value refers to itself"),
        ("a.yaml", BOMB, "more than 10,000 values"),
        ("a.yaml", '"\\ud800": 1\n', "surrogate"),
        ("a.json", '{"\\ud800": 1}', "surrogate"),
        ("a.json", '{"quantizer": {"mode": "\\udfff"}}', "surrogate"),
        ("a.json", "[" * 100_000, "nested too deeply"),
        ("a.yaml", "[" * 100_000, "a.yaml"),
    ],
)
def test_what_is_no_configuration_is_refused(tmp_path, name, text, words):
    (file := tmp_path / name).write_text(text)
    started = time.process_time()
    with pytest.raises(ConfigError) as refused:
        Config.load(file)
    assert time.process_time() - started < 20
    assert words in str(refused.value) and str(refused.value).encode()


def test_aliases_may_be_used(tmp_path):
    (file := tmp_path / "a.yaml").write_text("quantizer: &q {value: 0.1}\npolicies:\n  - quantizer: *q\n")
    assert read_document(file) == {"quantizer": {"value": 0.1}, "policies": [{"quantizer": {"value": 0.1}}]}
    assert Config.load(file).policies[0].quantizer.value == 0.1


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("quantizer", "block", 4096 * 10**30),
        ("transport", "timeout_seconds", 1e300),
        ("transport", "timeout_seconds", 1e-300),
        ("transport", "min_bytes", 10**40),
        ("transport", "min_bytes", "9" * 5000 + "B"),
        ("transport", "hierarchy", 10**30),
        ("statistics", "report_every", 10**21),
        ("statistics", "report_every", 10**21),
        ("steps", "warmup", 10**30),
        ("guard", "every", 10**30),
    ],
)
def test_numbers_that_nothing_can_use_are_refused(section, key, value):
    with pytest.raises(ConfigError, match=f"{section}.{key}: .* is not allowed"):
        Config.load({section: {key: value}})
