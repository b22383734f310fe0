"""What `ncz perf` sends: the same again for the same rank, different for others, and of the kind that is promised."""

import numpy as np
import pytest
import torch

from ncz_plugins.cli.perf import DATA, data
from ncz_plugins.core.errors import UnsupportedError


@pytest.fixture(scope="module")
def gradients():
    return data.Gradients(data.train(0))


@pytest.fixture
def sources(gradients):
    untrained = data.train(0)
    others = {"weights": data.weights(untrained), "activation": data.Activations(untrained)}
    return {"gradient": gradients, "field": data.field, "noise": data.noise, **others}


@pytest.mark.parametrize("name", DATA)
def test_values_follow_from_rank_and_place(sources, name):
    source = sources[name]
    count = source(0, 0).numel() + 1000  # more than one piece
    dtype = torch.bfloat16 if name == "weights" else torch.float32
    x = data.values(source, 0, count, dtype)
    assert x.dtype == dtype and x.shape == (count,) and x.isfinite().all()
    assert torch.equal(data.values(source, 0, count, dtype), x)
    assert torch.equal(data.values(source, 0, 777, dtype), x[:777])
    for other in (data.values(source, 1, count, dtype), data.values(source, 0, 2000 + count, dtype)[2000:]):
        assert torch.corrcoef(torch.stack([other, x]).float())[0, 1].abs() < 0.98
        assert not torch.equal(other, x)


def test_noise_is_gaussian():
    x = data.values(data.noise, 3, 1 << 20)
    assert abs(x.mean()) < 0.01 and abs(x.var() - 1) < 0.01
    assert abs((x.abs() < 1).float().mean() - 0.6827) < 0.01


def test_a_field_has_the_spectrum_of_turbulence():
    side = round(data.field(0, 0).numel() ** (1 / 3))
    x = data.field(0, 0).view(side, side, side)
    assert abs(x.var() - 1) < 1e-3
    energy = torch.fft.fftn(x).abs() ** 2
    k = torch.fft.fftfreq(side, 1 / side)
    k = (k[:, None, None] ** 2 + k[:, None] ** 2 + k**2).sqrt().round()
    shells = torch.stack([energy[k == wave].sum() for wave in (4, 8, 16, 32)])
    falls = (shells[1:] / shells[:-1]).log2()
    assert falls.tolist() == pytest.approx([-5 / 3] * 3, abs=0.25)


def test_gradients_are_those_of_the_model():
    weights = data.train(0)
    model = data.GPT()
    torch.nn.utils.vector_to_parameters(weights, model.parameters())
    tokens, targets = data._batch(data._text(), "gradient", 2, 5)
    with data._one_thread():
        expected = torch.autograd.grad(model(tokens, targets), list(model.parameters()))
    found = data.Gradients(weights)(2, 5)
    assert found.numel() == data.parameter_count() == weights.numel()
    assert torch.equal(found, torch.cat([g.flatten() for g in reversed(expected)]))
    assert torch.equal(tokens[:, 1:], targets[:, :-1])


@pytest.mark.slow
def test_training_learns_the_text():
    tokens, targets = data._batch(data._text(), "unseen")

    def loss(weights):
        model = data.GPT()
        torch.nn.utils.vector_to_parameters(weights, model.parameters())
        return model(tokens, targets).item()

    assert loss(data.train(0)) == pytest.approx(np.log(256), rel=0.05)
    assert loss(data.train(6)) < 0.9 * np.log(256)


def test_weights_are_kept_privately_and_made_again_where_damaged(tmp_path, monkeypatch):
    monkeypatch.setenv("NCZ_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(data, "_STEPS", 0)
    weights = data.trained()
    (file,) = (tmp_path / "cache" / "perf").iterdir()
    assert file.parent.stat().st_mode & 0o777 == 0o700 and file.stat().st_mode & 0o077 == 0
    np.save(file, weights.numpy() + 1)
    assert torch.equal(data.trained(), weights + 1)  # taken from there
    for damaged in (b"", file.read_bytes()[:-5], b"no array"):
        file.write_bytes(damaged)
        assert torch.equal(data.trained(), weights)
        assert torch.equal(torch.from_numpy(np.load(file)), weights)
    np.save(file, weights.numpy()[:-1])  # of another model
    assert torch.equal(data.trained(), weights)


def test_weights_are_made_where_nothing_can_be_kept(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("NCZ_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(data, "_STEPS", 0)
    assert data.trained().numel() == data.parameter_count()


def test_training_leaves_the_random_numbers_of_others_alone():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    data.train(0)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_file_is_taken_from_another_place_by_every_rank_and_again(tmp_path, dtype):
    array = np.arange(1200).reshape(30, 40).astype(dtype)
    np.save(tmp_path / "x.npy", array)
    source = data.from_file(str(tmp_path / "x.npy"))
    found = [data.values(source, rank, 3000) for rank in range(3)]
    for x in found:
        steps = x.diff()
        assert set(steps.tolist()) <= {1.0, -1199.0} | {s for s in steps.tolist() if abs(s) < 1200}
        assert sorted(x[:1200].tolist()) == list(range(1200))
    assert len({x[0].item() for x in found} | {x[1200].item() for x in found}) == 6


def test_a_file_that_holds_nothing_is_refused(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros(0, np.float32))
    with pytest.raises(UnsupportedError, match="x.npy: holds no values"):
        data.from_file(str(tmp_path / "x.npy"))
