"""JSON has no NaN and no infinity."""

import json

from ncz_plugins.core.json_numbers import finite


def test_json_has_no_nan():
    values = {"a": [float("nan"), 1.5, {"b": float("inf")}], "c": "text", "d": None, "e": 3, "f": (1, -float("inf"))}
    found = finite(values)
    assert found == {"a": [None, 1.5, {"b": None}], "c": "text", "d": None, "e": 3, "f": [1, None]}
    json.dumps(found, allow_nan=False)
