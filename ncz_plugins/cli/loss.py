"""Effect of a bound on the training loss, by optimizer, as measured in docs/results/convergence.md."""

from __future__ import annotations

from typing import NamedTuple

from ..core.config import QuantizerConfig

HARMLESS, VISIBLE = 0.0015, 0.01  # largest share of the loss that is called so; more is "harmful"
SOURCE = "docs/results/convergence.md"
LIMITS = f"small models, short runs: {SOURCE}"


class Measured(NamedTuple):
    """Measurement of one setting.

    Attributes:
        optimizer: name of the optimizer.
        kind, block, value, mode: settings of `quantizer`.
        added: increase of the training loss, as a share of that of a plain run; mean over seeds.
        gradient_error: relative L2 error of averaged gradients.
        error_feedback, rotation: settings of `quantizer`. Rotation is measured as `ncclz:muon-ddp` uses it.
    """

    optimizer: str
    kind: str
    block: int
    value: float
    added: float
    gradient_error: float
    mode: str = "rms"
    error_feedback: bool = False
    rotation: bool = False

    @property
    def loss_class(self) -> str:
        """ "harmless", "visible" or "harmful"."""
        return "harmless" if self.added <= HARMLESS else "visible" if self.added <= VISIBLE else "harmful"


# With 2 ranks: a GPT of 0.6 M parameters with AdamW, Lion and Muon, a CNN with SGD. A test compares this with
# benchmarks/results/convergence.json, and frontier.json for Lion.
MEASURED = (
    Measured("AdamW", "error_bound", 4096, 0.25, 0.0076, 0.135),
    Measured("AdamW", "stochastic", 128, 0.25, 0.0004, 0.092),
    Measured("AdamW", "stochastic", 128, 0.375, 0.0008, 0.139),
    Measured("AdamW", "stochastic", 128, 0.85, 0.0047, 0.311),
    Measured("AdamW", "stochastic", 128, 1, 0.0061, 0.369),
    Measured("AdamW", "stochastic", 256, 0.25, 0.0005, 0.089),
    Measured("AdamW", "stochastic", 256, 0.375, 0.0013, 0.13),
    Measured("AdamW", "stochastic", 256, 1, 0.0065, 0.341),
    Measured("Lion", "stochastic", 128, 0.25, 0.0005, 0.087),
    Measured("Lion", "stochastic", 128, 0.375, 0.0006, 0.132),
    Measured("Lion", "stochastic", 128, 0.85, 0.0024, 0.293),
    Measured("Muon", "error_bound", 256, 0.1875, 0.0099, 0.112),
    Measured("Muon", "stochastic", 128, 0.25, 0.0066, 0.097),
    Measured("Muon", "stochastic", 128, 0.375, 0.0091, 0.144),
    Measured("Muon", "stochastic", 128, 0.85, 0.0169, 0.325),
    Measured("Muon", "stochastic", 128, 1, 0.0194, 0.381),
    Measured("Muon", "stochastic", 256, 0.1, 0.0023, 0.038),
    Measured("Muon", "stochastic", 256, 0.25, 0.0067, 0.093),
    Measured("Muon", "stochastic", 256, 0.375, 0.0095, 0.14),
    Measured("Muon", "stochastic", 256, 1, 0.0208, 0.359),
    Measured("SGD", "error_bound", 4096, 0.25, 0.0105, 0.11),
    Measured("SGD", "stochastic", 128, 0.25, -0.0026, 0.089),
    Measured("SGD", "stochastic", 128, 0.375, -0.0085, 0.131),
    Measured("SGD", "stochastic", 128, 0.85, -0.0114, 0.288),
    Measured("SGD", "stochastic", 128, 1, -0.0227, 0.335),
    Measured("SGD", "stochastic", 256, 0.25, -0.0057, 0.086),
    Measured("SGD", "stochastic", 256, 0.375, -0.0018, 0.127),
    Measured("SGD", "stochastic", 256, 1, -0.0138, 0.325),
    Measured("AdamW", "error_bound", 256, 3, 0.0094, 0.317, "bits"),
    Measured("AdamW", "error_bound", 256, 4, 0.0028, 0.144, "bits"),
    Measured("AdamW", "error_bound", 256, 5, 0.0014, 0.069, "bits"),
    Measured("AdamW", "error_bound", 256, 6, 0.0001, 0.035, "bits"),
    Measured("AdamW", "error_bound", 256, 7, 0.0002, 0.018, "bits"),
    Measured("AdamW", "error_bound", 256, 8, 0.0001, 0.009, "bits"),
    Measured("AdamW", "stochastic", 256, 3, 0.0086, 0.397, "bits"),
    Measured("AdamW", "stochastic", 256, 4, 0.0021, 0.178, "bits"),
    Measured("AdamW", "stochastic", 256, 5, 0.0004, 0.086, "bits"),
    Measured("AdamW", "stochastic", 256, 6, 0.0002, 0.042, "bits"),
    Measured("AdamW", "stochastic", 256, 7, 0.0001, 0.021, "bits"),
    Measured("AdamW", "stochastic", 256, 8, 0.0001, 0.01, "bits"),
    Measured("Muon", "error_bound", 256, 3, 0.0252, 0.338, "bits"),
    Measured("Muon", "error_bound", 256, 4, 0.0128, 0.154, "bits"),
    Measured("Muon", "error_bound", 256, 5, 0.0064, 0.073, "bits"),
    Measured("Muon", "error_bound", 256, 6, 0.0027, 0.037, "bits"),
    Measured("Muon", "error_bound", 256, 7, 0.0009, 0.018, "bits"),
    Measured("Muon", "error_bound", 256, 8, 0.0003, 0.009, "bits"),
    Measured("SGD", "error_bound", 256, 3, 0.085, 0.324, "bits"),
    Measured("SGD", "error_bound", 256, 4, 0.0227, 0.154, "bits"),
    Measured("SGD", "error_bound", 256, 5, 0.0038, 0.077, "bits"),
    Measured("SGD", "error_bound", 256, 6, -0.0038, 0.038, "bits"),
    Measured("SGD", "error_bound", 256, 7, -0.0047, 0.019, "bits"),
    Measured("SGD", "error_bound", 256, 8, -0.0019, 0.01, "bits"),
    Measured("SGD", "stochastic", 256, 3, -0.0444, 0.443, "bits"),
    Measured("SGD", "stochastic", 256, 4, -0.0041, 0.201, "bits"),
    Measured("SGD", "stochastic", 256, 5, -0.0021, 0.097, "bits"),
    Measured("SGD", "stochastic", 256, 6, -0.0042, 0.048, "bits"),
    Measured("SGD", "stochastic", 256, 7, -0.001, 0.024, "bits"),
    Measured("SGD", "stochastic", 256, 8, -0.0016, 0.012, "bits"),
    Measured("AdamW", "error_bound", 256, 0.25, 0.0032, 0.204, error_feedback=True),
    Measured("Muon", "error_bound", 128, 0.025, 0.0004, 0.023, error_feedback=True),
    Measured("Muon", "error_bound", 32768, 0.06, 0.0007, 0.04, error_feedback=True, rotation=True),
    Measured("SGD", "error_bound", 256, 1, 0.0032, 0.787, error_feedback=True),
)


def expected(quantizer: QuantizerConfig) -> list[Measured]:
    """For each optimizer, the finest measured setting that is at least as coarse as `quantizer`, if there is one."""
    coarser = [
        each
        for each in MEASURED
        if (each.mode, each.kind) == (quantizer.mode, quantizer.kind_in_effect)
        and (each.error_feedback, each.rotation) == (quantizer.feeds_back, quantizer.rotates)
        and _is_as_coarse(each, quantizer)
    ]
    found: dict[str, Measured] = {}
    for each in sorted(coarser, key=lambda each: -each.value if each.mode == "bits" else each.value):
        found.setdefault(each.optimizer, each)
    return sorted(found.values(), key=lambda each: each.optimizer)


def _is_as_coarse(measured: Measured, quantizer: QuantizerConfig) -> bool:
    if measured.mode == "bits":
        return measured.value <= quantizer.value
    return measured.value >= quantizer.value and measured.block >= (quantizer.block_in_effect or measured.block + 1)


def worst_class(quantizer: QuantizerConfig) -> str:
    """The worst class over all optimizers: "harmful", "visible" or "harmless"; "unknown" if nothing was measured."""
    if quantizer.kind == "lossless":
        return "harmless"
    classes = {each.loss_class for each in expected(quantizer)}
    return next((each for each in ("harmful", "visible", "harmless") if each in classes), "unknown")


def describe(quantizer: QuantizerConfig) -> str:
    """One line about the loss."""
    if quantizer.kind == "lossless":
        return "harmless: nothing is lost"
    found = expected(quantizer)
    if not found:
        return "not measured for such settings: compare with a plain run of a few hundred steps"
    words = []
    for each in found:
        added = f"{each.added:+.2%}" if each.added > 0 else "none"
        suffers = each.optimizer == "Muon" and each.loss_class != "harmless"
        remedy = " (take ncclz:muon, under DDP ncclz:muon-ddp)" if suffers else ""
        words.append(f"{each.optimizer}: {each.loss_class}, {added} at {each.mode}:{each.value:g}{remedy}")
    return f"{'; '.join(words)} ({LIMITS})"


def largest_harmless_error(quantizer: QuantizerConfig) -> float | None:
    """Largest gradient error that was harmless under AdamW with this kind of quantizer; None if none was."""
    errors = [
        each.gradient_error
        for each in MEASURED
        if (each.optimizer, each.kind, each.loss_class) == ("AdamW", quantizer.kind_in_effect, "harmless")
        and not each.error_feedback
    ]
    return max(errors, default=None)
