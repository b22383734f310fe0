"""Matrices coded in the basis of the singular vectors of their sums' momentum.

Noise that is equal in all elements of a gradient drowns its small singular values, and an optimizer such as Muon makes
all singular values equal. In this basis each direction belongs to one singular value, and gets a quantization step in
proportion to its square root. SOAP (arXiv 2409.11321) finds its basis in the same way.

The sum of a matrix is a linear map of its coded sum, so the ranks add up codes as ever. The law that all ranks get the
same bits holds on any hardware, because the map back is computed in integers: a basis has 16 bits, coded sums are
rounded to as many bits as leave every partial sum of their products below 2^53, and float64 adds up such numbers
without rounding, in whatever order. All else is done element by element.

A matrix belongs to one rank, which keeps the momentum, finds new bases and sends them to all: more often at first,
then after each 50 sums of the matrix.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..codec.layout import Window
from ..config import Config
from ..errors import UnsupportedError
from .policy import ParameterSlice

MOMENTUM = 0.95  # of the sums, Muon's own by default
LEAST_WORTH = 0.02  # a singular value counts as at least this times the root mean square of all
FIRST, EVERY = (1, 4, 16), 50  # sums after which there are new bases; then after each so many
_BASIS_BITS, _EXACT_BITS = 15, 53  # of an entry of a basis without its sign, and of a float64
_TINY = 1e-30


class Basis(NamedTuple):
    """Basis of the shorter side of a matrix.

    Attributes:
        entries: int16, [side, directions], times 2 to the power of -exponent: orthonormal but for this rounding.
        exponent: of that.
        worth: squares of what quantization steps of the directions are in proportion to, float32, [directions].
    """

    entries: Tensor
    exponent: int
    worth: Tensor

    def exact(self) -> Tensor:
        """The basis in float64, which holds it exactly."""
        return self.entries.double() * 2.0**-self.exponent

    def tilt(self) -> Tensor:
        """What quantization steps are in proportion to, float64, [directions]."""
        return self.worth.double().sqrt()

    def to(self, device: torch.device) -> Basis:
        """The same in memory of a device."""
        return Basis(self.entries.to(device), self.exponent, self.worth.to(device))


class Matrix:
    """What a rank knows of a matrix.

    Attributes:
        shape: [rows, columns].
        owner: the rank that finds its bases.
        sums: compressed sums so far.
        basis: of its shorter side; None before the first one, and for vectors.
        momentum: of the sums, on the owner alone, float32, [rows * columns].
        checksum: of the basis.
    """

    def __init__(self, shape: tuple[int, int], owner: int):
        self.shape = shape
        self.owner = owner
        self.sums = 0
        self.basis: Basis | None = None
        self.momentum: Tensor | None = None
        self.checksum = 0

    def use(self, basis: Basis) -> None:
        """Code in a basis from now on."""
        self.basis = basis
        told = basis.entries.flatten(), basis.worth.view(torch.int16)
        self.checksum = zlib.crc32(torch.cat(told).cpu().numpy().tobytes(), basis.exponent)

    @property
    def side(self) -> int:
        """Length of the shorter side."""
        return min(self.shape)

    @property
    def is_due(self) -> bool:
        """Whether a new basis is due after this many sums."""
        return self.side > 1 and (self.sums in FIRST or self.sums % EVERY == 0)

    def tall(self, flat: Tensor) -> Tensor:
        """A view of [rows * columns] elements with the longer side first, so that one block has all directions."""
        matrix = flat.view(self.shape)
        return matrix.T if self.shape[0] <= self.shape[1] else matrix

    def flat(self, tall: Tensor) -> Tensor:
        """The elements in the matrix's own order."""
        return (tall.T if self.shape[0] <= self.shape[1] else tall).reshape(-1)

    def into(self, tall: Tensor) -> Tensor:
        """Values in the basis, divided by what their steps are to be in proportion to."""
        if self.basis is None:
            return tall
        self.basis = self.basis.to(tall.device)  # it may come from a checkpoint
        return tall @ self.basis.exact().to(tall.dtype) / self.basis.tilt().to(tall.dtype)

    def back(self, tall: Tensor) -> Tensor:
        """What values in the basis stand for, float64; from the same values the same bits on any machine."""
        tall = tall.double()
        if self.basis is None:
            return tall
        return _summable(tall * self.basis.tilt(), self.side) @ self.basis.exact().T

    def follow(self, total: Tensor) -> None:
        """On the owner: learn from a sum, [rows * columns]."""
        if self.momentum is None:
            self.momentum = torch.zeros(total.numel(), dtype=torch.float32, device=total.device)
        self.momentum = self.momentum.to(total.device).lerp_(total.float().nan_to_num(0, 0, 0), 1 - MOMENTUM)

    def state_dict(self) -> dict:
        """For a checkpoint, of tuples, numbers and tensors."""
        basis = self.basis and tuple(self.basis)
        return {"shape": self.shape, "owner": self.owner, "sums": self.sums, "basis": basis, "momentum": self.momentum}


class Rotations:
    """Matrices of this rank.

    Attributes:
        by_name: by the ranks that add them up and the parameter's name, such as "0 1/fc.weight". Those of a group
            come in the same order on all its ranks.
    """

    def __init__(self):
        self.by_name: dict[str, Matrix] = {}

    def of(self, part: ParameterSlice, group: Sequence[int]) -> Matrix:
        """The matrix of a parameter: its first dimension by all others. A new one is owned by each rank in turn."""
        rows = part.shape[0] if len(part.shape) > 1 else 1
        shape = rows, part.length // max(rows, 1)
        prefix = " ".join(map(str, group)) + "/"
        found = self.by_name.get(prefix + part.name)
        if found is None or found.shape != shape:
            before = sum(name.startswith(prefix) and each.side > 1 for name, each in self.by_name.items())
            found = self.by_name[prefix + part.name] = Matrix(shape, before % len(group))
        return found

    def state_dict(self) -> dict[str, dict]:
        """For a checkpoint. Tensors are not copied."""
        return {name: matrix.state_dict() for name, matrix in self.by_name.items()}

    def load_state_dict(self, state: dict[str, dict], is_own: bool) -> None:
        """Restore what `state_dict` returned, in copies.

        Args:
            is_own: whether this rank saved it. What others saved has the momentum of theirs.
        """
        for name, saved in state.items():
            matrix = self.by_name[name] = Matrix(tuple(saved["shape"]), saved["owner"])
            matrix.sums = saved["sums"]
            if saved["basis"] is not None:
                entries, exponent, worth = saved["basis"]
                matrix.use(Basis(entries.clone(), exponent, worth.clone()))
            if is_own and saved["momentum"] is not None:
                matrix.momentum = saved["momentum"].clone()


class Rotation:
    """The matrices of one call, one behind the other.

    Args:
        rotations: of this rank.
        parts: whole parameters with their shapes, which make up the tensor of the call.
        rank: this rank's number among them.
        group: the ranks that add up, by their numbers in the program.
    """

    def __init__(self, rotations: Rotations, parts: Sequence[ParameterSlice], rank: int, group: Sequence[int]):
        self._matrices = [rotations.of(part, group) for part in parts if part.length]
        self._rank = rank

    def checksum(self) -> int:
        """A number by which ranks tell whether they code in the same bases."""
        return zlib.crc32(
            repr([(each.shape, each.owner, each.sums, each.checksum) for each in self._matrices]).encode()
        )

    def memory(self, source: Window) -> Window:
        """Memory for values in the bases, float32 or float64."""
        dtype = torch.promote_types(source.data.dtype, torch.float32)
        return Window(torch.empty(source.data.numel(), dtype=dtype, device=source.data.device))

    def into(self, source: Window) -> Window:
        """`source` in the bases of its matrices, in memory of its own."""
        turned = self.memory(source)
        with _without_autocast(source.data):
            for matrix, given, found in self._each(source.data, turned.data):
                tall = matrix.tall(given.to(found.dtype))
                found.view(tall.shape).copy_(matrix.into(tall))
        return turned

    def back(self, turned: Tensor, output: Tensor) -> None:
        """Put what values in the bases stand for into `output`, [elements]; may be the memory of `turned`."""
        with _without_autocast(turned):
            for matrix, given, found in self._each(turned, output):
                rows, columns = matrix.shape
                tall = given.view(max(rows, columns), min(rows, columns))
                found.copy_(matrix.flat(matrix.back(tall)))

    def follow(self, total: Tensor) -> None:
        """Learn from the sum of a call, [elements]."""
        for matrix, own, _ in self._each(total, total):
            matrix.sums += 1
            if matrix.owner == self._rank and matrix.side > 1:
                matrix.follow(own)

    def new_bases(self, device: torch.device) -> Tensor | None:
        """What ranks have to add up to get the bases that are due, uint8 on `device`; None: no basis is due."""
        numbers = [
            _numbers_of(each, device)
            if each.owner == self._rank
            else torch.zeros(_size_of(each.side), dtype=torch.int16, device=device)
            for each in self._due()
        ]
        return torch.cat(numbers).view(torch.uint8) if numbers else None

    def take(self, summed: Tensor) -> None:
        """Use the bases that are due from now on."""
        due = self._due()
        for matrix, own in zip(due, summed.view(torch.int16).split([_size_of(each.side) for each in due])):
            entries, worth, exponent = own.split([matrix.side**2, 2 * matrix.side, 1])
            entries, worth = entries.clone().view(matrix.side, -1), worth.clone().view(torch.float32)
            matrix.use(Basis(entries, int(exponent), worth))

    def _due(self) -> list[Matrix]:
        return [each for each in self._matrices if each.is_due]

    def _each(self, one: Tensor, other: Tensor) -> Iterator[tuple[Matrix, Tensor, Tensor]]:
        """Each matrix with its elements of both tensors."""
        sizes = [math.prod(matrix.shape) for matrix in self._matrices]
        return zip(self._matrices, one.split(sizes), other.split(sizes))


def require_whole(collective: str, parts: Sequence[ParameterSlice], dtype: torch.dtype) -> None:
    """Raise UnsupportedError, saying what to do, unless a call can code its matrices in bases of their own."""
    problems = [_problem(part) for part in parts if part.length]
    if dtype == torch.float16:  # a sum in the basis may be below its largest number where an element is not
        problems.append("float16 may overflow")
    if collective != "all_reduce":
        problems.append(f"got {collective}")
    if found := next(filter(None, problems), None):
        raise UnsupportedError(
            "quantizer.rotation is on and needs all-reduces of whole parameters with names and shapes, as of DDP, not "
            f"in float16; {found}: set quantizer.rotation to false, or take ncclz:muon"
        )


def _problem(part: ParameterSlice) -> str | None:
    if part.name is None or part.shape is None:
        return f"the shape of {part.name} is not known" if part.name else "a tensor has no name"
    return None if math.prod(part.shape) == part.length else f"of {part.name} there is a part"


def refuse(config: Config, where: str) -> None:
    """Raise UnsupportedError if matrices are to be coded in bases of their own where there are none."""
    if config.rotates:
        raise UnsupportedError(
            f"quantizer.rotation is on, and {where} gives parts of parameters to be added up, or joins them: set "
            "quantizer.rotation to false, in policies as well, or take ncclz:muon"
        )


def _without_autocast(tensor: Tensor) -> torch.autocast:
    """Context in which products have the dtype of their factors, whatever the caller's thread is set to."""
    return torch.autocast(tensor.device.type, enabled=False)


def _summable(values: Tensor, terms: int) -> Tensor:
    """Float64 rounded so that sums of so many products with entries of a basis are exact."""
    bits = _EXACT_BITS - _BASIS_BITS - (terms - 1).bit_length()
    _, exponent = torch.frexp(values.abs().amax())  # the largest is below 2 to this power
    # A power of two by its bits: functions that compute one may be off by the last bit on a GPU.
    step = ((exponent.long() - bits + 1023).clamp_min(1) << 52).view(torch.float64)
    return (values / step).round_() * step


def _size_of(side: int) -> int:
    """Numbers of 16 bits that say what a `Basis` is."""
    return side * side + 2 * side + 1


def _numbers_of(matrix: Matrix, device: torch.device) -> Tensor:
    """A new `Basis` as int16: the singular vectors of the momentum."""
    if matrix.momentum is None:  # that of a rank whose state was lost
        matrix.momentum = torch.zeros(math.prod(matrix.shape), dtype=torch.float32, device=device)
    tall = matrix.tall(matrix.momentum.to(device))
    tall = tall / tall.abs().amax().clamp_min(_TINY)  # whose squares don't overflow
    with _without_autocast(tall):
        squares, basis = _eigen(tall.T @ tall)
    worth = squares.clamp_min(0).sqrt() / squares.clamp_min(0).mean().sqrt().clamp_min(_TINY) + LEAST_WORTH

    # Directions of all kinds stand beside each other, so that blocks of values, which share a scale, are alike.
    side = matrix.side
    stride = next(each for each in range(int(0.618 * side), side) if math.gcd(each, side) == 1)
    order = torch.arange(side, dtype=torch.int64, device=device) * stride % side
    basis, worth = basis[:, order], worth[order]

    # As many bits of the basis as fit.
    exponent = _BASIS_BITS - math.frexp(basis.abs().amax().item())[1]
    most = 2**_BASIS_BITS - 1
    entries = (basis * 2.0**exponent).round().clamp(-most, most).to(torch.int16)
    told = torch.tensor([exponent], dtype=torch.int16, device=device)
    return torch.cat([entries.flatten(), worth.contiguous().view(torch.int16), told])


def _eigen(squares: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors; where they can't be found, directions as they are, all of the same worth."""
    try:
        return torch.linalg.eigh(squares)
    except torch.linalg.LinAlgError:
        return torch.ones_like(squares[0]), torch.eye(len(squares), dtype=squares.dtype, device=squares.device)
