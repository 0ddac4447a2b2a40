"""Devices by three figures: memory, read bandwidth and multiply-add rate, and what share of a data sheet is reached.

The table holds data-sheet peaks. A figure that a person gives, or that `ops.plan_measure` took on this machine, is
taken as it is. Knows nothing of models.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shared.errors import ConfigError

GB = 10**9
TERA = 10**12


@dataclass(frozen=True)
class CallCosts:
    """Seconds that a call costs beyond its bytes and arithmetic; zeros where launches are recorded once (graphs)."""

    linear: float = 0.0  # a matrix product: threads or a grid are woken
    op: float = 0.0  # any other call that computes
    view: float = 0.0  # a call that only makes another view of a tensor

    @property
    def any(self) -> bool:
        return bool(self.linear or self.op or self.view)


@dataclass(frozen=True)
class Device:
    """Bytes, bytes a second and FLOP/s (dense, a multiply-add is two) that are really reached."""

    name: str
    memory: float
    bandwidth: float
    flops: float
    on_cpu: bool = False
    calls: CallCosts = CallCosts()
    origin: str = ""  # where the figures come from, as shown
    count: int = 1  # devices that act as one; this release serves from one

    @property
    def ridge(self) -> float:
        """Multiply-adds for each byte read, above which arithmetic is what takes the time."""
        return self.flops / 2 / self.bandwidth

    def times(self, count: int) -> Device:
        """So many of them as if they were one: nothing is charged for talking to each other."""
        return replace(
            self,
            memory=self.memory * count,
            bandwidth=self.bandwidth * count,
            flops=self.flops * count,
            count=self.count * count,
        )


# Data-sheet peaks: memory GB, read bandwidth GB/s, dense 16-bit matrix TFLOP/s with 32-bit sums (no sparsity).
# Sources: the vendors' data sheets of A100 80GB SXM, H100 SXM, H200 SXM, DGX B200 (an eighth of the machine), L4, L40S,
# RTX 4090 (Ada architecture paper), Instinct MI300X.
TABLE: dict[str, tuple[float, float, float]] = {
    "a100-80gb": (80, 2039, 312),
    "h100": (80, 3350, 989),
    "h200": (141, 4800, 989),
    "b200": (180, 8000, 2250),
    "l4": (24, 300, 121),
    "l40s": (48, 864, 362),
    "rtx4090": (24, 1008, 165),
    "mi300x": (192, 5300, 1307),
}
# What well-written kernels reach of a data sheet's peak; `--reached` sets others.
REACHED_BANDWIDTH, REACHED_FLOPS = 0.8, 0.6


_FIGURES = (("memory", "GB"), ("bandwidth", "GB/s"), ("FLOP/s", "TFLOP/s"))


@dataclass(frozen=True)
class Given:
    """The figures that a person gives."""

    memory_gb: float | None = None
    bandwidth_gbs: float | None = None
    tflops: float | None = None

    @property
    def figures(self) -> tuple[float | None, ...]:
        return self.memory_gb, self.bandwidth_gbs, self.tflops

    @property
    def complete(self) -> bool:
        return None not in self.figures


def device_of(name: str, given: Given = Given(), *, reached: tuple[float, float] | None = None) -> Device:
    """The device called `name`, with any figure replaced. Raises ConfigError for one without all three figures."""
    peak = TABLE.get(name)
    if peak is None and not given.complete:
        raise ConfigError(
            "--device",
            f"{name!r} is not in the table",
            f"Choose from {', '.join(TABLE)}, or give --memory, --bandwidth and --flops",
        )
    shares = reached or (REACHED_BANDWIDTH, REACHED_FLOPS)
    figures: list[float] = []
    words: list[str] = []
    for index, ((what, unit), own) in enumerate(zip(_FIGURES, given.figures, strict=True)):
        if own is not None:
            figures.append(own)
            words.append(f"{what} {own:g} {unit} as given")
            continue
        assert peak is not None, "a device without a table entry has all three figures"
        share = 1.0 if index == 0 else shares[index - 1]
        figures.append(peak[index] * share)
        words.append(f"{what} {peak[index]:g} {unit}" + ("" if index == 0 else f" × {share:g} reached"))
    return Device(
        name=name,
        memory=figures[0] * GB,
        bandwidth=figures[1] * GB,
        flops=figures[2] * TERA,
        on_cpu=name == "cpu",
        origin=", ".join(words),
    )


def with_given(measured: Device, given: Given) -> Device:
    """A measured device with any figure replaced."""
    found = (measured.memory, measured.bandwidth, measured.flops)
    figures = zip(found, given.figures, (GB, GB, TERA), strict=True)
    memory, bandwidth, flops = (value if own is None else own * factor for value, own, factor in figures)
    words = [
        f"{what} {own:g} {unit} as given"
        for (what, unit), own in zip(_FIGURES, given.figures, strict=True)
        if own is not None
    ]
    origin = ", ".join([*words, measured.origin])
    return replace(measured, memory=memory, bandwidth=bandwidth, flops=flops, origin=origin)
