"""The benchmark's data: the physics is right, the statistics are what they are called, and the cache holds."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from repository import ROOT

import benchmarks.data as data
from benchmarks.data import __main__ as command
from benchmarks.data import gradients, molecular_dynamics, navier_stokes, synthetic
from benchmarks.data.threads import one_thread
from examples.data import Corpus
from examples.gpt import GPT, GPTConfig

SMALL = GPTConfig(context=16, layers=2, heads=2, width=32)


@pytest.fixture(autouse=True)
def faster_for_small_tensors():
    with one_thread():
        yield


def assert_complete(made, module):
    """The sets that the module promises, in the form in which all are kept."""
    assert list(made) == list(module.DESCRIPTIONS)
    for x in made.values():
        assert x.dtype == np.float32 and x.flags.c_contiguous
        assert np.isfinite(x).all()


@pytest.fixture(scope="module")
def corpus():
    return Corpus(max_bytes=1_000_000)


class TestGradients:
    def untrained(self, corpus, step):
        """The untrained model's gradients of the step's batch, parameter by parameter."""
        torch.manual_seed(gradients.SEED)
        model = GPT(SMALL)
        tokens, targets = corpus.batch(gradients.BATCH, SMALL.context, seed=gradients.SEED, step=step, rank=0)
        model(tokens, targets).backward()
        return np.concatenate([parameter.grad.numpy().ravel() for parameter in model.parameters()])

    def test_gradients_are_unclipped_and_in_the_order_of_the_parameters(self, corpus):
        captured = gradients.capture((0, 1, 3), SMALL, corpus)
        for step in (0, 1):  # the warm-up begins with a learning rate of zero: the second batch meets the same model
            np.testing.assert_array_equal(captured[step], self.untrained(corpus, step))
            assert np.linalg.norm(captured[step]) > 1.1  # clipping would have shown
        assert not np.array_equal(captured[2], self.untrained(corpus, 3))

    def test_the_same_every_time(self, corpus):
        first, again = (gradients.capture((0, 3), SMALL, corpus) for _ in range(2))
        assert np.array_equal(first, again)

    def test_make(self, monkeypatch, corpus):
        monkeypatch.setattr(gradients, "CAPTURED", (0, 1, 2))
        monkeypatch.setattr(gradients, "GPTConfig", lambda: SMALL)
        monkeypatch.setattr(gradients, "Corpus", lambda: corpus)
        torch.manual_seed(5)
        state = torch.get_rng_state()
        made = gradients.make()
        assert torch.equal(torch.get_rng_state(), state)
        assert_complete(made, gradients)
        assert all(x.shape == (GPT(SMALL).parameter_count(),) for x in made.values())


class TestNavierStokes:
    N = 16
    VISCOSITY = 0.005

    def setup_method(self):
        self.solver = navier_stokes.Solver(self.N, self.VISCOSITY, torch.float64)

    def test_the_vortex_starts_with_the_known_energy_and_enstrophy(self):
        spectrum = self.solver.to_spectrum(navier_stokes.taylor_green(self.N, torch.float64))
        assert self.solver.energy(spectrum) == pytest.approx(1 / 8, rel=1e-12)
        assert self.solver.enstrophy(spectrum) == pytest.approx(3 / 8, rel=1e-12)

    def test_the_disturbance_has_no_divergence_and_breaks_the_mirror(self):
        disturbance = navier_stokes.disturbance(self.N, torch.float64)
        spectrum = self.solver.to_spectrum(disturbance)
        assert self.solver.divergence(spectrum).abs().max() < 1e-12 * spectrum.abs().max()
        for axis in (1, 2, 3):
            mirrored = disturbance.flip(axis).roll(1, axis)
            assert not torch.allclose(mirrored.abs(), disturbance.abs(), atol=0.05)

    def test_no_divergence_and_energy_decays_as_viscosity_and_enstrophy_say(self):
        spectrum, dt = self.solver.to_spectrum(navier_stokes.taylor_green(self.N, torch.float64)), 0.1
        energies, enstrophies = [], []
        for _ in range(41):
            energies.append(self.solver.energy(spectrum))
            enstrophies.append(self.solver.enstrophy(spectrum))
            assert self.solver.divergence(spectrum).abs().max() < 1e-12 * spectrum.abs().max()
            spectrum = self.solver.step(spectrum, dt)
        simpson = np.array([1, *[4, 2] * 19, 4, 1]) * dt / 3
        dissipated = 2 * self.VISCOSITY * np.dot(simpson, enstrophies)
        assert energies[0] - energies[-1] == pytest.approx(dissipated, rel=1e-5)
        assert max(enstrophies) > 1.5 * enstrophies[0]  # the eddies did become smaller

    @pytest.mark.parametrize("axis", range(3))
    def test_a_flat_vortex_in_a_wind_follows_its_exact_solution(self, axis):
        """Taylor and Green's two-dimensional vortex decays by exp(-2 nu t), and a uniform flow carries it along.

        axis: the one that the vortex turns around.
        """
        angle = 2 * torch.pi * torch.arange(self.N, dtype=torch.float64) / self.N
        places = torch.stack(torch.meshgrid(angle, angle, angle, indexing="ij"))
        wind = torch.tensor([0.5, 0.3, -0.4], dtype=torch.float64).reshape(3, 1, 1, 1)
        a, b = (axis + 1) % 3, (axis + 2) % 3

        def exact(time):
            x = places - wind * time
            decay = np.exp(-2 * self.VISCOSITY * time)
            field = wind.expand(3, *(self.N,) * 3).clone()
            field[a] += decay * torch.sin(x[a]) * torch.cos(x[b])
            field[b] -= decay * torch.cos(x[a]) * torch.sin(x[b])
            return field

        spectrum = self.solver.to_spectrum(exact(0))
        for _ in range(20):
            spectrum = self.solver.step(spectrum, 0.05)
        torch.testing.assert_close(self.solver.to_grid(spectrum), exact(1.0), rtol=0, atol=1e-7)

    def test_make(self, monkeypatch):
        monkeypatch.setattr(navier_stokes, "POINTS", self.N)
        monkeypatch.setattr(navier_stokes, "TIME", 0.1)  # with steps as short as stability asks for
        monkeypatch.setattr(navier_stokes, "STEPS", 2)
        made = navier_stokes.make()
        assert_complete(made, navier_stokes)
        assert all(x.shape == (self.N,) * 3 for x in made.values())


def crystal():
    return molecular_dynamics.Fluid.crystal(8, seed=1)


@pytest.fixture(scope="module")
def history():
    """A crystal of 2048 particles that melts: the fluid at the end, and the energies per particle at each step."""
    fluid = crystal()
    energies = []
    for _ in range(100):
        energies.append((fluid.kinetic_energy(), fluid.potential_energy))
        fluid.step(molecular_dynamics.STEP)
    return fluid, np.array(energies) / fluid.positions.shape[1]


class TestMolecularDynamics:
    def test_energy_is_conserved_while_it_changes_its_kind(self, history):
        _, energies = history
        kinetic, total = energies[:, 0], energies.sum(axis=1)
        assert np.ptp(kinetic) > 2
        assert np.ptp(total) < 1e-2

    def test_momentum_stays_zero(self, history):
        fluid, _ = history
        np.testing.assert_allclose(fluid.velocities.mean(axis=1), 0, atol=1e-12)

    def test_the_crystal_has_melted(self, history):
        fluid, _ = history
        shortest = 2 * np.pi * 8 / fluid.box * np.array([1, 1, 1])  # a vector of the reciprocal lattice
        before, after = (np.abs(np.exp(1j * shortest @ x.positions).mean()) for x in (crystal(), fluid))
        assert before == pytest.approx(1)
        assert after < 0.4

    def test_forces_and_energy_are_those_of_all_pairs(self, history):
        fluid, _ = history
        d = fluid.positions[:, None, :] - fluid.positions[:, :, None]  # from the first particle to the second
        d = (d + fluid.box / 2) % fluid.box - fluid.box / 2
        r = np.sqrt(np.sum(d**2, axis=0))
        np.fill_diagonal(r, np.inf)
        r[r >= 2.5] = np.inf
        energy = np.sum((4 * (r**-12 - r**-6) - 4 * (2.5**-12 - 2.5**-6))[r < np.inf]) / 2
        forces = np.sum((24 * r**-7 - 48 * r**-13) / r * d, axis=2)
        assert fluid.potential_energy == pytest.approx(energy, rel=1e-10)
        np.testing.assert_allclose(fluid.forces, forces, atol=1e-9 * np.abs(forces).max())

    def test_the_box_has_no_edges(self, history):
        fluid, _ = history
        moved = molecular_dynamics.Fluid(fluid.positions - 0.7 * fluid.box, fluid.velocities, fluid.box)
        assert moved.potential_energy == pytest.approx(fluid.potential_energy, rel=1e-10)
        np.testing.assert_allclose(moved.forces, fluid.forces, atol=1e-9 * np.abs(fluid.forces).max())

    def test_a_box_too_small_for_its_cells_is_refused(self):
        with pytest.raises(ValueError, match="smaller than three cells"):
            molecular_dynamics.Fluid.crystal(4, seed=0)

    def test_make(self, monkeypatch):
        monkeypatch.setattr(molecular_dynamics, "CELLS_PER_SIDE", 6)
        monkeypatch.setattr(molecular_dynamics, "STEPS", 2)
        made = molecular_dynamics.make()
        assert_complete(made, molecular_dynamics)
        assert all(x.shape == (864, 3) for x in made.values())
        positions = made["lennard-jones-positions"]
        assert 0 <= positions.min() < 1 and 9 < positions.max() < 10.1


COUNT = 1 << 18


@pytest.fixture(scope="module")
def made():
    return synthetic.make(COUNT)


class TestSynthetic:
    def test_make(self, made):
        assert_complete(made, synthetic)
        assert {name: x.shape for name, x in made.items()} == {
            name: (COUNT // 4 if name == "random-bits" else COUNT,) for name in made
        }

    def test_the_same_every_time(self, made):
        again = synthetic.make(COUNT)
        assert all(np.array_equal(made[name], again[name]) for name in made)

    def test_noise_is_white_and_gaussian(self, made):
        x = made["noise"].astype(np.float64)
        assert x.mean() == pytest.approx(0, abs=0.01)
        assert x.var() == pytest.approx(1, abs=0.02)
        assert np.mean(x**4) == pytest.approx(3, abs=0.1)
        assert np.mean(x[1:] * x[:-1]) == pytest.approx(0, abs=0.01)

    def test_constant_is_one_value(self, made):
        assert np.unique(made["constant"]).tolist() == [np.float32(0.1)]

    def test_sparse_has_one_percent_anywhere(self, made):
        places = np.flatnonzero(made["sparse"])
        assert len(places) == pytest.approx(COUNT // 100, abs=2)
        assert np.diff(places).max() > 3 * np.diff(places).mean()  # not at regular places

    def test_ramps_are_straight_and_start_at_zero(self, made):
        x = made["ramps"].astype(np.float64)
        starts = np.flatnonzero(x == 0)
        assert starts[0] == 0
        assert 100 <= np.diff(starts).min() and np.diff(starts).max() <= 10_000
        for begin, end in zip(starts, starts[1:]):
            np.testing.assert_allclose(x[begin:end], x[begin + 1] * np.arange(end - begin), rtol=1e-6)

    def test_mixed_scales_span_their_range_and_change_anywhere(self, made):
        x = made["mixed-scales"]
        rms = np.sqrt(np.mean(x.reshape(-1, 512).astype(np.float64) ** 2, axis=1))
        assert rms.min() < 1e-4 and rms.max() > 1e1
        jumps = np.abs(np.diff(np.log(rms)))
        boundary = np.arange(1, len(rms)) % 8 == 0  # of 4,096 elements
        assert np.median(jumps[boundary]) < 1 < jumps[~boundary].max()

    def test_random_bits_are_uniform_over_finite_floats(self, made):
        bits = made["random-bits"].view(np.uint32)
        ones = [np.mean(bits >> place & 1) for place in range(32)]
        np.testing.assert_allclose(ones, 0.5, atol=0.02)
        assert len(np.unique(bits >> 23 & 0xFF)) == 255
        assert len(np.unique(bits)) > 0.999 * len(bits)

    def test_heavy_tailed_has_no_variance(self, made):
        x = np.abs(made["heavy-tailed"])
        assert np.median(x) == pytest.approx(0.8165, abs=0.01)  # sqrt(2 / 3), the quartile of t with 2 degrees
        assert np.mean(x > 10) == pytest.approx(0.00985, rel=0.1)

    def test_pieces_add_up(self):
        for count in (1, 99, 12_345):
            lengths = synthetic.pieces(np.random.default_rng(0), count, 10, 100)
            assert lengths.sum() == count
            assert lengths[:-1].min(initial=10) >= 10 and lengths.max() <= 100


class TestCache:
    @pytest.fixture(autouse=True)
    def sets(self, monkeypatch, tmp_path):
        """Two sets that one run makes, and how often it ran."""
        self.runs = 0

        def make():
            self.runs += 1
            return {"one": np.ones((2, 3), np.float32), "two": np.full(5, self.runs, np.float32)}

        monkeypatch.setattr(data, "CACHE", tmp_path / "cache")
        self.sets = {name: data.DataSet(name, "some numbers", make, 1) for name in ("one", "two")}
        for module in (data, command):
            monkeypatch.setattr(module, "SETS", self.sets)

    def test_one_run_makes_and_keeps_both(self):
        np.testing.assert_array_equal(data.load("one"), np.ones((2, 3)))
        for _ in range(2):
            np.testing.assert_array_equal(data.load("two"), np.ones(5))
        assert self.runs == 1
        assert sorted(f.name for f in data.CACHE.iterdir()) == ["one-v1.npy", "two-v1.npy"]

    def test_a_new_version_is_made_anew(self):
        data.load("two")
        for name, old in self.sets.items():
            self.sets[name] = data.DataSet(name, old.description, old.make, 2)
        np.testing.assert_array_equal(data.load("two"), np.full(5, 2))

    def test_an_interrupted_write_leaves_nothing(self, monkeypatch):
        def interrupted(stream, array):
            stream.write(b"half")
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(np, "save", interrupted)
            data.load("one")
        assert not list(data.CACHE.iterdir())
        np.testing.assert_array_equal(data.load("one"), np.ones((2, 3)))

    def test_an_unknown_name_is_an_error(self):
        with pytest.raises(KeyError, match="three"):
            data.load("three")

    def test_the_command_makes_what_it_is_asked_for(self, monkeypatch, capsys):
        monkeypatch.setattr(sys, "argv", ["benchmarks.data", "one"])
        command.main()
        printed = capsys.readouterr().out
        assert "2 x 3" in printed and "float32" in printed
        assert "two" not in printed

    def test_the_command_refuses_an_unknown_name(self, monkeypatch, capsys):
        monkeypatch.setattr(sys, "argv", ["benchmarks.data", "three"])
        with pytest.raises(SystemExit):
            command.main()
        assert "no set is called three; there are one, two" in capsys.readouterr().err


def test_one_thread_gives_the_others_back():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.processes
def test_the_command_lists_all_sets_from_the_repositorys_root():
    run = subprocess.run([sys.executable, "-m", "benchmarks.data", "--list"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert all(name in run.stdout for name in data.SETS)
    assert len(data.SETS) == 14
