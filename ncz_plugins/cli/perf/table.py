"""Printed table of the records of `ncz perf`."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from ..output import shares, significant, table

# Heading -> text of a cell. The first columns are those of nccl-tests.
_COLUMNS = {
    "size\n(B)": lambda r: f"{r['size']}",
    "count\n(elements)": lambda r: f"{r['count']}",
    "type": lambda r: r["type"],
    "redop": lambda r: r["op"],
    "time\n(us)": lambda r: significant(r["time_us"]),
    "algbw\n(GB/s)": lambda r: significant(r["algbw"]),
    "busbw\n(GB/s)": lambda r: significant(r["busbw"]),
    "error": lambda r: f"{r['error']:.2g}" if r["error"] else "0",
    "speed-\nup": lambda r: f"{r['speedup']:.2f}",
    "ratio": lambda r: f"{r['ratio']:.2f}" if r["ratio"] else "",
    "sent\n(B)": lambda r: "" if r["network_bytes"] is None else f"{r['network_bytes']:.0f}",
    "coder": lambda r: shares(r["coders"]),
    "bypass": lambda r: ", ".join(r["bypasses"] or ()),
}


def records_table(records: list[dict[str, Any]]) -> Table:
    """Table of records, with a line for each contender at each size."""
    words = ("", "type", "redop", "coder", "bypass")
    numbers = [heading for heading in _COLUMNS if heading not in words]
    found = table("", *_COLUMNS, numbers=numbers, gap=2, no_wrap=True, vertical="bottom")
    sizes = [record["size"] for record in records] + [None]
    for record, next_size in zip(records, sizes[1:]):
        cells = [column(record) for column in _COLUMNS.values()]
        found.add_row(record["peer"], *cells, end_section=record["size"] != next_size)
    return found
