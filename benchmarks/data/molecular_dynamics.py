"""A melted Lennard-Jones crystal: positions and velocities of 32,000 particles in a periodic box.

Everything is in reduced units: the particles' mass, the depth of the potential and its radius sigma are 1. Size,
density, potential and time step are those of the benchmark in.lj of LAMMPS (Plimpton, J. Comput. Phys. 117, 1995):
density 0.8442, a face-centred cubic lattice with random velocities at the start,

    U(r) = 4 (r^-12 - r^-6) - U(2.5), cut off at r = 2.5,

time step 0.005, no thermostat. The start is hotter, temperature 3.0 instead of 1.44, so that nothing is left of the
lattice after 250 steps; the temperature is 1.6 then, that of a dense fluid above its critical point. Particles keep
the order of the lattice they started in, and have moved by 0.8 (root mean square).

Method (Allen and Tildesley, Computer Simulation of Liquids, 1987): velocity Verlet, minimum image, and a list of
neighbours that is found by cells and kept until a particle might have come into reach from outside.
"""

import itertools

import numpy as np

VERSION = 1
DESCRIPTIONS = {
    "lennard-jones-positions": "positions of 32,000 particles of a Lennard-Jones fluid, in the order of a lattice",
    "lennard-jones-velocities": "velocities of the same particles",
}

CELLS_PER_SIDE = 20  # of the lattice, with four particles each
DENSITY = 0.8442
TEMPERATURE = 3.0
STEP = 0.005
STEPS = 250
SEED = 0

CUTOFF = 2.5
SKIN = 0.4  # neighbours are listed up to CUTOFF + SKIN
SHIFT = 4 * (CUTOFF**-12 - CUTOFF**-6)


class Fluid:
    """Particles in a periodic cube.

    positions, velocities and forces are float64, (3, n): one row per axis. Positions may lie somewhat outside of
    [0, box) until they are next wrapped.
    """

    def __init__(self, positions: np.ndarray, velocities: np.ndarray, box: float):
        if box < 3 * (CUTOFF + SKIN):
            raise ValueError(f"a box of side {box:.2f} is smaller than three cells of side {CUTOFF + SKIN}")
        self.box = box
        self.positions = positions
        self.velocities = velocities
        self.find_neighbours()
        self.find_forces()

    @classmethod
    def crystal(cls, cells_per_side: int, seed: int) -> "Fluid":
        """A face-centred cubic lattice whose particles have Maxwell's velocities and no common motion."""
        corners = np.stack(np.meshgrid(*3 * [np.arange(cells_per_side)], indexing="ij"), axis=-1).reshape(-1, 1, 3)
        basis = np.array([[0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]])
        constant = (4 / DENSITY) ** (1 / 3)  # the lattice's
        positions = constant * (corners + basis).reshape(-1, 3).T
        velocities = np.random.default_rng(seed).standard_normal(positions.shape)
        velocities -= velocities.mean(axis=1, keepdims=True)
        velocities *= np.sqrt(TEMPERATURE / np.mean(velocities**2))
        return cls(np.ascontiguousarray(positions), velocities, constant * cells_per_side)

    def separation(self, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        """The shortest way from each i to each j, (3, pairs), around the box if need be."""
        d = self.positions.take(j, axis=1)
        d -= self.positions.take(i, axis=1)
        d -= self.box * np.rint(d / self.box)
        return d

    def find_neighbours(self) -> None:
        """Wrap the positions, and list all pairs within CUTOFF + SKIN, each once, from adjacent cells only."""
        self.positions = self.positions % self.box
        side = int(self.box / (CUTOFF + SKIN))
        cell = np.minimum((self.positions / self.box * side).astype(np.int64), side - 1)
        place = np.ravel_multi_index(cell, (side,) * 3)
        order = np.argsort(place, kind="stable")  # the particles, cell by cell
        count = np.bincount(place, minlength=side**3)
        first = np.cumsum(count) - count
        half = [o for o in itertools.product((-1, 0, 1), repeat=3) if o >= (0, 0, 0)]  # of opposite neighbours, one
        pairs = []
        for offset in half:
            other = np.ravel_multi_index((cell + np.reshape(offset, (3, 1))) % side, (side,) * 3)
            candidates = count[other]
            i = np.repeat(np.arange(len(place)), candidates)
            within = np.arange(len(i)) - np.repeat(np.cumsum(candidates) - candidates, candidates)
            j = order[np.repeat(first[other], candidates) + within]
            if offset == (0, 0, 0):
                i, j = i[i < j], j[i < j]
            near = square(self.separation(i, j)) < (CUTOFF + SKIN) ** 2
            pairs.append((i[near], j[near]))
        self.i, self.j = map(np.concatenate, zip(*pairs))
        self.listed_at = self.positions.copy()

    def find_forces(self) -> None:
        """Set the forces and the potential energy that belong to the positions."""
        d = self.separation(self.i, self.j)
        r2 = square(d)
        inside = np.flatnonzero(r2 < CUTOFF**2)
        i, j, d = self.i[inside], self.j[inside], d.take(inside, axis=1)
        inverse = 1 / r2[inside]  # r^-2
        sixth = inverse**3
        self.potential_energy = float(np.sum(4 * sixth * (sixth - 1) - SHIFT))
        pull = 24 * inverse * sixth * (1 - 2 * sixth) * d  # on i, towards j; the opposite on j
        n = self.positions.shape[1]
        self.forces = np.stack([np.bincount(i, p, n) - np.bincount(j, p, n) for p in pull])

    def step(self, dt: float) -> None:
        """Velocity Verlet."""
        self.velocities += dt / 2 * self.forces
        self.positions += dt * self.velocities
        # Two particles outside of each other's lists are SKIN apart from being felt: each may walk half of it.
        if np.max(square(self.positions - self.listed_at)) > (SKIN / 2) ** 2:
            self.find_neighbours()
        self.find_forces()
        self.velocities += dt / 2 * self.forces

    def kinetic_energy(self) -> float:
        return float(np.sum(self.velocities**2) / 2)

    def temperature(self) -> float:
        return float(np.mean(self.velocities**2))


def square(vectors: np.ndarray) -> np.ndarray:
    """The squared length of each column."""
    return np.einsum("ap,ap->p", vectors, vectors)


def make() -> dict[str, np.ndarray]:
    """Both sets, float32, (32000, 3): particle, axis."""
    fluid = Fluid.crystal(CELLS_PER_SIDE, SEED)
    for _ in range(STEPS):
        fluid.step(STEP)
    return {
        "lennard-jones-positions": (fluid.positions % fluid.box).T.astype(np.float32, order="C"),
        "lennard-jones-velocities": fluid.velocities.T.astype(np.float32, order="C"),
    }
