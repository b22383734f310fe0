"""Heat spreads over a plate that ranks share, and their halos travel compressed within an error budget.

    cd examples
    torchrun --nproc_per_node 2 halo_exchange.py [--budget 1e-3] [--picture halo.png]

The plate is solved twice in the same processes, plain and compressed. If the two fields differ by more than the budget,
the program says so and fails. docs/guides/science.md says why they can't, and what such halos gain on which link.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ncz_plugins import Communicator

SHARE_OF_NEIGHBORS = 0.8  # of a cell's next temperature; with at most 1 the step is a mean, and stable
MOST_KEPT = 128  # cells along each edge of what is written as JSON
SPOTS = 40  # hot discs at the beginning, of temperatures from 0 to 1


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1024, help="cells along each edge of the plate")
    parser.add_argument("--steps", type=int, default=2048)
    parser.add_argument("--depth", type=int, default=64, help="rows of a halo, and steps between two exchanges")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float64")
    parser.add_argument("--budget", type=float, default=1e-3, help="largest error of a temperature at the end")
    parser.add_argument("--bound", type=float, help="of one exchange; by default what the budget allows")
    parser.add_argument("--min-bytes", type=int, help="smaller messages go plain; by default what gains on the link")
    parser.add_argument("--picture", metavar="FILE", help="draw the field and its error (needs matplotlib)")
    parser.add_argument("--json", metavar="FILE", help=f"write what the picture shows, at most {MOST_KEPT} cells wide")
    arguments, ranks = parser.parse_args(), int(os.environ.get("WORLD_SIZE", "1"))  # as torchrun says
    if min(arguments.steps, arguments.depth) < 1 or arguments.size < ranks:
        parser.error("--steps and --depth must be at least 1, and --size at least the number of ranks")
    return arguments


# ------------------------------------------------------------------ who has which cells


class Region(NamedTuple):
    """A rectangle of cells, in rows and columns of the whole plate. `bottom` and `right` are not part of it."""

    top: int
    bottom: int
    left: int
    right: int

    def widened(self, depth: int, size: int) -> "Region":
        """With `depth` more cells on each side, as far as the plate goes."""
        top, left = max(self.top - depth, 0), max(self.left - depth, 0)
        return Region(top, min(self.bottom + depth, size), left, min(self.right + depth, size))

    def overlap(self, other: "Region") -> "Region | None":
        """The cells that are in both."""
        top, left = max(self.top, other.top), max(self.left, other.left)
        bottom, right = min(self.bottom, other.bottom), min(self.right, other.right)
        return Region(top, bottom, left, right) if top < bottom and left < right else None

    def within(self, outer: "Region") -> tuple[slice, slice]:
        """Where these cells are in a tensor that holds the cells of `outer`."""
        rows = slice(self.top - outer.top, self.bottom - outer.top)
        return rows, slice(self.left - outer.left, self.right - outer.left)


def regions_of(ranks: int, size: int) -> list[Region]:
    """The cells that each rank computes. Ranks form a grid as square as can be: 6 are 2 x 3, 5 are 1 x 5."""
    rows = next(number for number in range(math.isqrt(ranks), 0, -1) if ranks % number == 0)
    return [
        Region(*borders(row, rows, size), *borders(column, ranks // rows, size))
        for row in range(rows)
        for column in range(ranks // rows)
    ]


def borders(number: int, parts: int, size: int) -> tuple[int, int]:
    """Where one of some nearly equal parts of an edge begins and ends."""
    return size * number // parts, size * (number + 1) // parts


# ------------------------------------------------------------------ the solver


class Part:
    """What one rank holds of the plate: its own cells, and a halo of copies of the cells around them.

    Attributes:
        own: cells that this rank computes.
        field: their temperatures and those of the halo, [rows, columns].
    """

    def __init__(self, rank: int, ranks: int, size: int, depth: int, dtype: torch.dtype):
        regions = regions_of(ranks, size)
        self.own = regions[rank]
        self._all = self.own.widened(depth, size)
        self.field = hot_spots(self._all, size).to(dtype)

        # For each rank nearby: which of the own cells are in its halo, and which of its cells are in this halo.
        self._shared = []
        for peer, theirs in enumerate(regions):
            wanted = self._all.overlap(theirs)
            if peer != rank and wanted:
                given = self.own.overlap(theirs.widened(depth, size))
                self._shared.append((peer, given.within(self._all), wanted.within(self._all)))

    @property
    def own_field(self) -> Tensor:
        """The temperatures of the own cells, in `field`."""
        return self.field[self.own.within(self._all)]

    def exchange(self, messages) -> None:
        """Fill the halo. `messages` is torch.distributed or a Communicator."""
        operations, halos = [], []
        for peer, given, wanted in self._shared:
            halos.append(torch.empty_like(self.field[wanted], memory_format=torch.contiguous_format))
            operations.append(dist.P2POp(dist.isend, self.field[given].contiguous(), peer))
            operations.append(dist.P2POp(dist.irecv, halos[-1], peer))
        for handle in messages.batch_isend_irecv(operations) if operations else []:
            handle.wait()
        for (_, _, wanted), halo in zip(self._shared, halos):
            self.field[wanted] = halo

    def step(self) -> None:
        """Each cell becomes a mean of itself and its four neighbors. The edge of the plate stays as it is.

        Of the halo, the outermost cells lack neighbors. So one more row of it becomes wrong in each step.
        """
        inner = self.field[1:-1, 1:-1]
        neighbors = self.field[:-2, 1:-1] + self.field[2:, 1:-1]
        neighbors += self.field[1:-1, :-2]
        neighbors += self.field[1:-1, 2:]
        inner.mul_(1 - SHARE_OF_NEIGHBORS).add_(neighbors, alpha=SHARE_OF_NEIGHBORS / 4)


def hot_spots(cells: Region, size: int) -> Tensor:
    """The temperatures at the beginning, float64: discs at random places, the same for any number of ranks."""
    generator = torch.Generator().manual_seed(1)
    row = torch.arange(cells.top, cells.bottom, dtype=torch.float64)[:, None] / size
    column = torch.arange(cells.left, cells.right, dtype=torch.float64) / size
    field = torch.zeros(len(row), len(column), dtype=torch.float64)
    for y, x, radius, heat in torch.rand(SPOTS, 4, generator=generator, dtype=torch.float64).tolist():
        is_hot = (row - y) ** 2 + (column - x) ** 2 < (0.02 + 0.1 * radius) ** 2
        field.masked_fill_(is_hot, heat)
    return field


class Course(NamedTuple):
    """How a run went.

    Attributes:
        heat: the global sum of the temperatures after each exchange and its steps.
        seconds: what each exchange took.
    """

    heat: list[float]
    seconds: list[float]


def solve(part: Part, messages, steps: int, depth: int) -> Course:
    """Let heat spread for some steps.

    Args:
        messages: torch.distributed or a Communicator.
        depth: rows of a halo. One exchange is enough for as many steps.
    """
    course = Course([], [])
    for first in range(0, steps, depth):
        begin = time.perf_counter()
        part.exchange(messages)
        course.seconds.append(time.perf_counter() - begin)
        for _ in range(min(depth, steps - first)):
            part.step()

        # One number is too small to be compressed: the sum of what ranks have is exact.
        heat = part.own_field.sum(dtype=torch.float64).reshape(1)
        messages.all_reduce(heat)
        course.heat.append(heat.item())
    return course


# ------------------------------------------------------------------ the budget


def bound_of(budget: float, steps: int, depth: int) -> float:
    """The error bound of one exchange that keeps the error of every cell within the budget.

    Let no cell be off by more than e before an exchange. The halo is then off by at most e + bound. Every step takes
    means, whose weights are positive and add up to 1, so no cell is off by more after it. Each exchange therefore adds
    at most one bound.
    """
    return budget / math.ceil(steps / depth)


def over_ranks(value: float, op) -> float:
    """The sum or maximum of a number over all ranks."""
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor, op)
    return tensor.item()


def largest_error(plain: Part, compressed: Part) -> float:
    """The largest difference between the two fields on any rank; infinity if one is not a number."""
    error = (compressed.own_field - plain.own_field).abs().max()
    return over_ranks(error.nan_to_num(math.inf, posinf=math.inf).item(), dist.ReduceOp.MAX)


def whole(part: Part, field: Tensor, size: int) -> Tensor:
    """A field of which every rank has its own cells, put together on rank 0: [size, size], float64."""
    plate = torch.zeros(size, size, dtype=torch.float64)
    plate[part.own.top : part.own.bottom, part.own.left : part.own.right] = field
    dist.reduce(plate, 0)
    return plate


def keep(arguments, field: Tensor, error: Tensor) -> None:
    """Draw the two, and write them as JSON, as asked for."""
    about = {"steps": arguments.steps, "budget": arguments.budget, "ranks": dist.get_world_size()}
    if arguments.picture:
        from ncz_plugins.cli.picture import save_figure  # imports matplotlib

        save_figure("--picture", arguments.picture, lambda: draw(about | {"field": field, "error": error}))
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(about | {"field": coarse(field), "error": coarse(error)}, file)
            file.write("\n")


def coarse(field: Tensor) -> list[list[float]]:
    """Means over squares of cells, each of three digits."""
    cells = min(MOST_KEPT, len(field))
    means = torch.nn.functional.adaptive_avg_pool2d(field[None], cells)[0]
    return [[float(f"{value:.3g}") for value in row] for row in means.tolist()]


def draw(document: dict):
    """A figure of both below each other, with the borders between ranks."""
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.patches import Rectangle

    from ncz_plugins.cli.picture import BLUE, RED, new_figure, paper

    figure, panels = new_figure(2, height=4.8)
    field, error = (torch.as_tensor(document[key]) for key in ("field", "error"))
    largest = 1e6 * error.abs().max().item() or 1.0
    signed = LinearSegmentedColormap.from_list("signed", (BLUE, paper(), RED))
    shown = (field, {"cmap": "inferno"}), (1e6 * error, {"cmap": signed, "vmin": -largest, "vmax": largest})
    titles = f"temperature after {document['steps']:,} steps", "compressed minus plain, in millionths"
    for axes, (values, style), title, color in zip(panels, shown, titles, ("white", "gray")):
        figure.colorbar(axes.imshow(values, **style), ax=axes, shrink=0.9).outline.set_visible(False)
        axes.set_title(title, loc="left")
        axes.set(xticks=[], yticks=[])
        for region in regions_of(document["ranks"], len(field)):
            corner = region.left - 0.5, region.top - 0.5
            sizes = region.right - region.left, region.bottom - region.top
            axes.add_patch(Rectangle(corner, *sizes, fill=False, color=color, linewidth=0.8, linestyle=":"))
    return figure


def report(arguments, bound: float, error: float, plain: Course, compressed: Course, total) -> None:
    """Print what was found, on rank 0. Every rank must call it."""
    sent, fewer = (over_ranks(each, dist.ReduceOp.SUM) for each in (total.plain_bytes, total.wire_bytes))
    times = [over_ranks(statistics.median(each.seconds), dist.ReduceOp.MAX) for each in (plain, compressed)]
    ratio = sent / fewer if fewer else 1.0
    means = [each.heat[-1] / arguments.size**2 for each in (plain, compressed)]
    if dist.get_rank():
        return
    plate, ranks = f"{arguments.size} x {arguments.size} cells of {arguments.dtype}", dist.get_world_size()
    print(f"{plate} on {ranks} ranks, {arguments.steps:,} steps, {len(plain.heat)} exchanges")
    print(f"bound of an exchange  {bound:.3g}")
    print(f"largest error         {error:.3g}, of a budget of {arguments.budget:g}")
    print(f"mean temperature      {means[0]:.9f} plain, {means[1]:.9f} compressed")
    print(f"sent by all ranks     {sent / 1e6:.2f} MB plain, {fewer / 1e6:.2f} MB compressed, ratio {ratio:.1f}")
    print(f"time of an exchange   {1e3 * times[0]:.2f} ms plain, {1e3 * times[1]:.2f} ms compressed (median)")
    print(f"calls of rank 0       {total.compressed_calls} compressed, plain: {total.bypasses or 'none'}")


def main() -> int:
    """Run the program. Returns the exit status."""
    arguments = parse_arguments()
    dist.init_process_group("gloo")
    size, steps, depth = arguments.size, arguments.steps, arguments.depth
    bound = bound_of(arguments.budget, steps, depth) if arguments.bound is None else arguments.bound
    settings = {
        "quantizer": {"mode": "abs", "value": bound},  # in units of the temperature
        "transport": {"min_bytes": arguments.min_bytes},
    }
    place = dist.get_rank(), dist.get_world_size(), size, depth, getattr(torch, arguments.dtype)
    plain, compressed = Part(*place), Part(*place)
    with Communicator(settings) as communicator:
        courses = solve(plain, dist, steps, depth), solve(compressed, communicator, steps, depth)
        total = communicator.stats.total

    error = largest_error(plain, compressed)
    report(arguments, bound, error, *courses, total)
    if arguments.picture or arguments.json:
        field = whole(compressed, compressed.own_field, size)
        difference = whole(compressed, compressed.own_field - plain.own_field, size)
        if dist.get_rank() == 0:
            keep(arguments, field, difference)
    is_within = error <= arguments.budget
    if not is_within and dist.get_rank() == 0:
        print(f"The field is off by {error:.3g}, more than the budget of {arguments.budget:g}.", file=sys.stderr)
    dist.barrier()
    dist.destroy_process_group()
    return 0 if is_within else 1


if __name__ == "__main__":
    sys.exit(main())
