"""A turbulent flow: a disturbed Taylor-Green vortex, by a pseudo-spectral solver of the Navier-Stokes equations.

The equations are those of an incompressible fluid in a periodic box of side 2 pi, in the rotational form

    du/dt = u x w - grad(p + u.u / 2) + nu laplace(u),    div u = 0,    w = curl u,

without units: the vortex starts with velocity 1 and length 1, so nu = 1 / Reynolds number. The vortex (Taylor and
Green, Proc. R. Soc. A 158, 1937) is smooth at first, stretches itself into ever smaller eddies, and loses energy
fastest around the time that is saved here (Brachet et al., J. Fluid Mech. 130, 1983). Left to itself it keeps its
mirror symmetries, and a box of eight mirrored octants would flatter compressors that look back far; so it starts
disturbed.

Method (Canuto et al., Spectral Methods in Fluid Dynamics, 1988): derivatives and the pressure's
projection in Fourier space, products on the grid, wave numbers from n / 3 on cut away (the 2/3 rule, which leaves
no aliasing), the classical Runge-Kutta method of fourth order in time.
"""

import math

import numpy as np
import torch

from .threads import one_thread

VERSION = 2
DESCRIPTIONS = {
    "navier-stokes-velocity": "x component of the velocity of a turbulent flow, Reynolds number 400, time 7",
    "navier-stokes-vorticity": "magnitude of the vorticity of the same flow at the same time",
}

POINTS = 96  # per side; the highest wave number kept, 31, is about the inverse of the Kolmogorov length, 0.035
REYNOLDS_NUMBER = 400
TIME = 7.0
STEPS = 140  # 200 in float64 give the same velocity within 0.3 % of its root mean square


def taylor_green(n: int, dtype=torch.float32) -> torch.Tensor:
    """The velocity at the start, (3, n, n, n): component, x, y, z."""
    angle = 2 * math.pi * torch.arange(n, dtype=torch.float64) / n
    x, y, z = torch.meshgrid(angle, angle, angle, indexing="ij")
    u = torch.sin(x) * torch.cos(y) * torch.cos(z)
    v = -torch.cos(x) * torch.sin(y) * torch.cos(z)
    return torch.stack([u, v, torch.zeros_like(u)]).to(dtype)


def disturbance(n: int, dtype=torch.float32) -> torch.Tensor:
    """Shear waves of velocity 0.1 askew to the box, (3, n, n, n). None moves along its own axis: no divergence."""
    angle = 2 * math.pi * torch.arange(n, dtype=torch.float64) / n
    x, y, z = torch.meshgrid(angle, angle, angle, indexing="ij")
    waves = torch.sin(2 * y + z + 0.3), torch.sin(z - 2 * x + 1.1), torch.sin(x + 3 * y + 2.3)
    return (0.1 * torch.stack(waves)).to(dtype)


class Solver:
    """Moves velocity fields on n x n x n points forward in time.

    A field on the grid is real, (3, n, n, n). Its spectrum is complex of the same precision and holds the wave numbers
    -m..m, m the last below n / 3, in the order of the FFT, and of the last axis, z, only 0..m: (3, 2m+1, 2m+1, m+1).
    """

    def __init__(self, n: int, viscosity: float, dtype=torch.float32):
        self.n = n
        self.viscosity = viscosity
        m = (n - 1) // 3
        full = torch.fft.fftfreq(2 * m + 1, 1 / (2 * m + 1), dtype=dtype)
        self.k = full[:, None, None], full[None, :, None], full[None, None, : m + 1]
        self.k_squared = sum(k**2 for k in self.k)
        ends = slice(0, m + 1), slice(-m, None)  # the two ends of an axis, in the FFT of the grid and in ours
        self.corners = [(slice(None), x, y, slice(0, m + 1)) for x in ends for y in ends]

    def to_spectrum(self, field: torch.Tensor) -> torch.Tensor:
        full = torch.fft.rfftn(field, dim=(1, 2, 3))
        spectrum = full.new_empty(3, *self.k_squared.shape)
        for corner in self.corners:
            spectrum[corner] = full[corner]
        return spectrum

    def to_grid(self, spectrum: torch.Tensor) -> torch.Tensor:
        full = spectrum.new_zeros(3, self.n, self.n, self.n // 2 + 1)
        for corner in self.corners:
            full[corner] = spectrum[corner]
        return torch.fft.irfftn(full, s=(self.n,) * 3, dim=(1, 2, 3))

    def curl(self, spectrum: torch.Tensor) -> torch.Tensor:
        return 1j * cross(self.k, spectrum)

    def divergence(self, spectrum: torch.Tensor) -> torch.Tensor:
        """The divergence's spectrum, (n, n, n // 2 + 1)."""
        return 1j * dot(self.k, spectrum)

    def derivative(self, spectrum: torch.Tensor) -> torch.Tensor:
        """The right hand side of the equation: the spectrum of du/dt."""
        change = self.to_spectrum(cross(self.to_grid(spectrum), self.to_grid(self.curl(spectrum))))
        # The pressure's gradient is whatever would make the velocity diverge: the part along k.
        along = dot(self.k, change) / self.k_squared.clamp(min=1)
        change -= torch.stack([k * along for k in self.k])
        return change - self.viscosity * self.k_squared * spectrum

    def step(self, spectrum: torch.Tensor, dt: float) -> torch.Tensor:
        """The spectrum a time dt later."""
        a = self.derivative(spectrum)
        b = self.derivative(spectrum + dt / 2 * a)
        c = self.derivative(spectrum + dt / 2 * b)
        d = self.derivative(spectrum + dt * c)
        return spectrum + dt / 6 * (a + 2 * b + 2 * c + d)

    def energy(self, spectrum: torch.Tensor) -> float:
        """Kinetic energy per volume: the mean of u.u / 2."""
        return mean_square(self.to_grid(spectrum)) / 2

    def enstrophy(self, spectrum: torch.Tensor) -> float:
        """The mean of w.w / 2; the energy decays at 2 nu times this rate."""
        return mean_square(self.to_grid(self.curl(spectrum))) / 2


def cross(a, b) -> torch.Tensor:
    return torch.stack([a[i] * b[j] - a[j] * b[i] for i, j in ((1, 2), (2, 0), (0, 1))])


def dot(a, b) -> torch.Tensor:
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]


def mean_square(field: torch.Tensor) -> float:
    return field.square().sum(0).mean().item()


def make() -> dict[str, np.ndarray]:
    """Both sets, float32, (96, 96, 96): x, y, z."""
    with one_thread():
        solver = Solver(POINTS, 1 / REYNOLDS_NUMBER)
        spectrum = solver.to_spectrum(taylor_green(POINTS) + disturbance(POINTS))
        for _ in range(STEPS):
            spectrum = solver.step(spectrum, TIME / STEPS)
        velocity = solver.to_grid(spectrum)[0]
        vorticity = solver.to_grid(solver.curl(spectrum)).square().sum(0).sqrt()
    return {
        "navier-stokes-velocity": velocity.contiguous().numpy(),
        "navier-stokes-vorticity": vorticity.contiguous().numpy(),
    }
