"""The records of `ncz perf` as people read them."""

from __future__ import annotations

from typing import Any

from rich.table import Table

# Heading, and what stands there. The first of them are those of nccl-tests.
_COLUMNS = {
    "size": lambda r: f"{r['size']}",
    "count": lambda r: f"{r['count']}",
    "type": lambda r: r["type"],
    "op": lambda r: r["op"],
    "time\n(us)": lambda r: _significant(r["time_us"]),
    "algbw\n(GB/s)": lambda r: _significant(r["algbw"]),
    "busbw\n(GB/s)": lambda r: _significant(r["busbw"]),
    "error": lambda r: f"{r['error']:.2g}" if r["error"] else "0",
    "speed-\nup": lambda r: f"{r['speedup']:.2f}",
    "ratio": lambda r: f"{r['ratio']:.2f}" if r["ratio"] else "",
    "wire\nbytes": lambda r: "" if r["wire_bytes"] is None else f"{r['wire_bytes']}",
    "network\nbytes": lambda r: "" if r["network_bytes"] is None else f"{r['network_bytes']:.0f}",
    "coder": lambda r: shares(r["coders"]),
    "bypass": lambda r: ", ".join(r["bypasses"] or ()),
}


def table(records: list[dict[str, Any]]) -> Table:
    """All records of one link: a line for each peer at each size."""
    found = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("", *_COLUMNS):
        text = heading in ("", "type", "op", "coder", "bypass")
        found.add_column(heading, justify="left" if text else "right", no_wrap=True, vertical="bottom")
    sizes = [record["size"] for record in records] + [None]
    for record, next_size in zip(records, sizes[1:]):
        # The lines of one size stand together.
        cells = [column(record) for column in _COLUMNS.values()]
        found.add_row(record["peer"], *cells, end_section=record["size"] != next_size)
    return found


def shares(counts: dict[str, int] | None) -> str:
    """Which names make up how much: "rans", or "rans 75% fixed 25%"."""
    if not counts:
        return ""
    if len(counts) == 1:
        return next(iter(counts))
    total = sum(counts.values())
    return " ".join(f"{name} {100 * count / total:.0f}%" for name, count in counts.items())


def _significant(number: float) -> str:
    """With at least three digits that count, and never as a power of ten."""
    return f"{number:.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.3g}"
