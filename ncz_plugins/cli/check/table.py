"""Printed output of `ncz check --model`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...core.config import Config, format_size
from ...core.reasons import REMEDIES, Bypass
from .. import loss
from ..output import add_row, table
from .treatments import ROLE, Match, Row

_UNCOMPRESSED = "uncompressed"
_TOTALS = ("parameters", "elements", "MB")


def show(console: Console, rows: Sequence[Row], matches: Sequence[Match], config: Config) -> None:
    """Print a line for each parameter, totals, what each policy does, and warnings about likely mistakes."""
    console.print(_parameters(rows))
    console.print()
    console.print(_totals(rows))
    if matches:
        console.print()
        console.print(_policies(matches))
    console.print()
    compressed = [row.treatment for row in rows if row.treatment and not row.treatment.bypass]
    for quantizer in dict.fromkeys(treatment.quantizer for treatment in compressed):
        console.print(Text(f"{quantizer.describe()}: {loss.describe(quantizer)}"))
    if notes := list(_notes(rows, matches, config)):
        console.print()
        console.print(Text("\n".join(notes)))


def _parameters(rows: Sequence[Row]) -> Table:
    found = table("parameter", "shape", "dtype", "elements", "treatment", "because", numbers=["elements"], gap=2)
    for row in rows:
        shape = "x".join(map(str, row.shape)) or "scalar"
        treatment, because = "no gradient", "requires_grad is false"
        if row.treatment:
            treatment = _UNCOMPRESSED if row.treatment.bypass else row.treatment.quantizer.describe()
            because = row.treatment.because
        dtype = str(row.dtype).removeprefix("torch.")
        add_row(found, row.name, shape, dtype, f"{row.numel:,}", treatment, because)
    return found


def _totals(rows: Sequence[Row]) -> Table:
    found = table("gradients", *_TOTALS, numbers=_TOTALS, gap=2)
    compressed = [row for row in rows if row.treatment and not row.treatment.bypass]
    uncompressed = [row for row in rows if row.treatment and row.treatment.bypass]
    for what, those in (("compressed", compressed), (_UNCOMPRESSED, uncompressed)):
        _add_total(found, what, those, sum(row.nbytes for row in those))
    if kept := [row for row in rows if row.residual_bytes]:
        _add_total(found, "error feedback keeps on every rank", kept, sum(row.residual_bytes for row in kept))
    return found


def _policies(matches: Sequence[Match]) -> Table:
    found = table("policy", "what it says", "fits", "decides", numbers=["fits", "decides"], gap=2)
    for at, match in enumerate(matches):
        add_row(found, f"policies[{at}]", match.policy.describe(), f"{match.fits:,}", f"{match.decides:,}")
    return found


def _notes(rows: Sequence[Row], matches: Sequence[Match], config: Config) -> Iterator[str]:
    for at, (policy, fits, decides) in enumerate(matches):
        if policy.role not in (None, ROLE):
            yield f"policies[{at}] is for role {policy.role}, and this table shows gradients only."
        elif not fits:
            yield f"Warning: policies[{at}] fits no parameter. Is something in it misspelt?"
        elif not decides:
            yield f"Warning: policies[{at}] decides nothing: earlier policies take all parameters that it fits."
    bypasses = {row.treatment.bypass for row in rows if row.treatment}
    if Bypass.TOO_SMALL in bypasses:
        least, of_two = (format_size(config.min_bytes_in_effect(ranks=ranks)) for ranks in (None, 2))
        yield (
            "Too small: parameters with the same treatment are reduced together, and these have less than "
            f"transport.min_bytes in all, {least}" + (f" (two ranks: {of_two})." if of_two != least else ".")
        )
    if Bypass.FAST_LINK in bypasses:
        yield f"Link too fast: {REMEDIES[Bypass.FAST_LINK]}."


def _add_total(found: Table, what: str, rows: Sequence[Row], nbytes: int) -> None:
    elements = sum(row.numel for row in rows)
    add_row(found, what, f"{len(rows):,}", f"{elements:,}", f"{nbytes / 1e6:,.2f}")
