"""StructureTokenizer: the backbone around every residue as one of a few hundred codes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from graphattn.data.structures.structure import Structure
from graphattn.graphs.arguments import as_int

BACKBONE = "N", "CA", "C"
SEEN = 2  # residues on each side that the encoder reads
RECONSTRUCTED = 1  # residues on each side whose atoms the decoder returns
SCALE = 5.0  # Angstrom; coordinates near a residue are of this order
WEIGHTS = "structure_tokenizer.safetensors"


class StructureTokenizer(nn.Module):
    r"""Turn the backbone of a protein into codes, one per residue, and back.

    A code says how the chain runs near a residue. The encoder reads the atoms N, CA and C of the
    residue and of two on each side, in the local frame of the residue, so a code does not change if
    the structure is moved or rotated. Finite scalar quantisation (Mentzer et al., 2023) rounds a
    few bounded numbers to `levels` values each, and every combination is a code: 8 x 8 x 8 = 512.
    There is no codebook to be learned. The decoder reads the codes of the residue and of `reach`
    residues on each side, and returns the atoms of three residues in the local frame.

    The local frame has CA at its origin, C on the positive x axis, and N in the xy plane, with
    y > 0.

    Training has two stages, as the consensus paper has it (Appendix E.1): first encoder and decoder
    together, from single codes; then the decoder alone, from all codes in its reach, with fixed
    codes. Both networks are small: a few hundred steps take half a minute on a CPU.

    Args:
        levels: the number of values of every quantised number, >= 2 each.
        width: width of the hidden layers.
        reach: residues on each side whose codes the decoder reads.

    Attributes:
        vocab_size: number of codes, the product of `levels`.

    Example:
        >>> import torch, graphattn as ga
        >>> _ = torch.manual_seed(0)
        >>> steps = torch.randn(30, 3, 3).cumsum(0)  # of 30 residues, three atoms each
        >>> atoms = dict(zip(("N", "CA", "C"), steps.unbind(1)))
        >>> chain = ga.data.Structure("G" * 30, atoms["CA"], atoms=atoms)
        >>> tokenizer = ga.data.StructureTokenizer().fit([chain], steps=20)
        >>> codes = tokenizer.encode(chain)
        >>> codes.shape, tokenizer.vocab_size
        (torch.Size([30]), 512)
        >>> tokenizer.decode(codes).shape  # N, CA, C of the residue before, itself, the next
        torch.Size([30, 9, 3])
    """

    def __init__(
        self, levels: Sequence[int] = (8, 8, 8), *, width: int = 256, reach: int = 4
    ) -> None:
        super().__init__()
        if not isinstance(levels, Sequence) or len(levels) == 0:
            raise ValueError(f"levels must be a sequence of at least one number, got {levels!r}")
        self.levels = tuple(as_int("levels", level, 2) for level in levels)
        self.width, self.reach = as_int("width", width, 1), as_int("reach", reach, 0)
        seen, numbers = 2 * SEEN + 1, len(self.levels)
        atoms = 3 * (2 * RECONSTRUCTED + 1)
        # The last norm spreads the numbers over all levels, and keeps them there in training.
        self.encoder = _perceptron(seen * (3 * 3 + 1), self.width, numbers)
        self.encoder.append(nn.BatchNorm1d(numbers, affine=False))
        self.decoder = _perceptron((2 * self.reach + 1) * (numbers + 1), self.width, 3 * atoms)
        self.eval()

    @property
    def vocab_size(self) -> int:
        return math.prod(self.levels)

    # Codes.

    @torch.no_grad()
    def encode(self, structure: Structure) -> Tensor:
        """Return the codes of the residues, a LongTensor [N]; -1 if one of its atoms is missing.

        Raises:
            ValueError: if the structure was read without the atoms N, CA and C.
        """
        self.eval()
        with self._full_precision():
            patches = _Patches.of([structure], self._parameter())
            numbers = self._quantised(self.encoder(patches.inputs))
        codes = patches.index.new_full((len(structure),), -1)
        codes[patches.has_frame] = self._code_of(numbers)
        return codes

    @torch.no_grad()
    def decode(self, codes: Tensor, chains: Structure | Tensor | None = None) -> Tensor:
        """Return the atoms around every residue in its local frame, in Angstrom, [N, 9, 3].

        The nine atoms are N, CA and C of the residue before, of the residue, and of the next one.
        Only the codes of residues at most `reach` places away have an effect.

        Args:
            codes: integers [N] in -1 .. vocab_size - 1; -1 stands for an unknown code.
            chains: the structure of these residues, whose chains and gaps separate them; or
                integers [N], the chain of every residue; one chain without gaps if None. Codes of
                other chains, and beyond gaps, have no effect.

        Raises:
            ValueError: if `codes` or `chains` does not fit.
        """
        self._check_codes(codes)
        if chains is None:
            chains = torch.zeros_like(codes)
        if isinstance(chains, Structure):
            chains = _joined(chains)
        if not isinstance(chains, Tensor) or chains.shape != codes.shape:
            got = list(chains.shape) if isinstance(chains, Tensor) else type(chains).__name__
            raise ValueError(
                f"chains must be a Structure of {len(codes)} residues, or integers "
                f"[{len(codes)}], got {got}"
            )
        chains = chains.to(codes.device)
        numbers = self._numbers_of(codes.clamp(min=0))
        near = _near(chains, torch.arange(len(codes), device=codes.device), self.reach)
        near = torch.where(near >= 0, torch.where(codes[near.clamp(min=0)] >= 0, near, -1), -1)
        with self._full_precision():
            return self._decoded(numbers, near)

    def _check_codes(self, codes: Any) -> None:
        whole = isinstance(codes, Tensor) and codes.dtype in (torch.int64, torch.int32)
        if not whole or codes.dim() != 1:
            got = type(codes).__name__
            if isinstance(codes, Tensor):
                got = f"{codes.dtype} of shape {list(codes.shape)}"
            raise ValueError(f"codes must be a tensor of integers [N], got {got}")
        if len(codes) and (int(codes.min()) < -1 or int(codes.max()) >= self.vocab_size):
            raise ValueError(
                f"codes must be -1 .. {self.vocab_size - 1} (vocab_size - 1), got "
                f"{int(codes.min())} .. {int(codes.max())}"
            )

    def _parameter(self) -> Tensor:
        return next(self.parameters())

    def _full_precision(self) -> torch.autocast:
        """Switch autocast off, in which other codes would be nearest."""
        return torch.autocast(self._parameter().device.type, enabled=False)

    def _quantised(self, raw: Tensor) -> Tensor:
        """Round bounded numbers [*, n] to `levels` values in -1 .. 1, with the gradient of raw."""
        levels = raw.new_tensor(self.levels)
        half = (levels - 1) / 2
        bounded = raw.tanh() * half  # -half .. half
        shift = torch.where(levels % 2 == 0, 0.5, 0.0)  # even levels lie between integers
        rounded = ((bounded - shift).round() + shift).clamp(-half, half)
        return (bounded + (rounded - bounded).detach()) / half

    def _code_of(self, numbers: Tensor) -> Tensor:
        """Return codes [*] of quantised numbers [*, n]; the first number counts most."""
        code = torch.zeros(numbers.shape[:-1], dtype=torch.int64, device=numbers.device)
        for level, number in zip(self.levels, numbers.unbind(-1), strict=True):
            digit = ((number + 1) / 2 * (level - 1)).round().long()
            code = code * level + digit
        return code

    def _numbers_of(self, codes: Tensor) -> Tensor:
        digits = []
        for level in reversed(self.levels):
            digits.append((codes % level) / (level - 1) * 2 - 1)
            codes = codes // level
        return torch.stack(digits[::-1], dim=-1).to(self._parameter().dtype)

    def _decoded(self, numbers: Tensor, near: Tensor) -> Tensor:
        """Return atoms [n, 9, 3] from the numbers of all residues [N, n] and indices [n, 2 R + 1];
        -1 stands for no residue."""
        known = (near >= 0)[..., None].to(numbers.dtype)
        inputs = torch.cat([numbers[near.clamp(min=0)] * known, known], dim=-1)
        atoms = self.decoder(inputs.flatten(1)) * SCALE
        return atoms.unflatten(-1, (-1, 3))

    # Training.

    @torch.enable_grad()
    def fit(
        self,
        structures: Structure | Iterable[Structure],
        *,
        steps: int = 2000,
        batch_size: int = 1024,
        lr: float = 2e-3,
        seed: int = 0,
    ) -> Self:
        """Train both stages with AdamW and a cosine schedule; return the tokenizer.

        Args:
            structures: one or several structures with the atoms N, CA and C
                (``read_structure(path, atoms="backbone")``).
            steps: steps of each of the two stages.
            batch_size: residues per step, >= 2.
            lr: learning rate at the start of a stage.
            seed: seed of the order of the residues. Initial weights are those of the constructor.

        Raises:
            ValueError: if no residue has all three atoms, or an argument is out of range.
        """
        steps, batch_size = as_int("steps", steps, 1), as_int("batch_size", batch_size, 2)
        several = [structures] if isinstance(structures, Structure) else list(structures)
        patches = _Patches.of(several, self._parameter())
        if len(patches.inputs) == 0:
            raise ValueError(
                "structures must have residues with the atoms N, CA and C, got none: read them "
                "with read_structure(path, atoms='backbone')"
            )
        generator = torch.Generator().manual_seed(as_int("seed", seed, 0))
        near = patches.near(self.reach)
        self.encoder.train()
        self._train_stage(
            patches, [*self.parameters()], steps, batch_size, lr, generator, near, None
        )
        self.eval()
        with torch.no_grad():
            numbers = self._quantised(self.encoder(patches.inputs))
        self._train_stage(
            patches, [*self.decoder.parameters()], steps, batch_size, lr, generator, near, numbers
        )
        return self

    def _train_stage(
        self,
        patches: _Patches,
        parameters: list[nn.Parameter],
        steps: int,
        batch_size: int,
        lr: float,
        generator: torch.Generator,
        near: Tensor,
        numbers: Tensor | None,
    ) -> None:
        """Train some parameters; codes are `numbers` if given, or else computed."""
        optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(steps):
            some = torch.randint(len(patches.inputs), (batch_size,), generator=generator)
            some = some.to(near.device)
            if numbers is None:  # every code of the batch is that of the residue itself
                of_batch = self._quantised(self.encoder(patches.inputs[some]))
                own = torch.full_like(near[some], -1)
                own[:, self.reach] = torch.arange(len(some), device=near.device)
                atoms = self._decoded(of_batch, own)
            else:
                atoms = self._decoded(numbers, near[some])
            loss = _squared_error(atoms, patches.atoms[some]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()

    @torch.no_grad()
    def errors(self, structure: Structure) -> Tensor:
        """Return the error of every residue after coding and decoding, in Angstrom, [N].

        It is the root-mean-square distance of the reconstructed atoms N, CA and C of the residue
        and of its two neighbours, in the local frame; NaN for a residue without a code.
        """
        with self._full_precision():
            patches = _Patches.of([structure], self._parameter())
        atoms = self.decode(self.encode(structure), patches.chain)
        found = atoms.new_full((len(structure),), torch.nan)
        squared = _squared_error(atoms[patches.has_frame], patches.atoms)
        found[patches.has_frame] = squared.sqrt()
        return found

    # Files.

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the weights and the options into a folder."""
        from safetensors.torch import save_file

        Path(folder).mkdir(parents=True, exist_ok=True)
        options = {"levels": self.levels, "width": self.width, "reach": self.reach}
        metadata = {"options": json.dumps(options)}
        save_file(self.state_dict(), Path(folder, WEIGHTS), metadata=metadata)

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str]) -> Self:
        """Read what :meth:`save_pretrained` has written.

        Raises:
            FileNotFoundError: if the folder has no such file.
        """
        from safetensors import safe_open

        path = Path(folder, WEIGHTS)
        if not path.exists():
            raise FileNotFoundError(f"{os.fspath(folder)} has no {WEIGHTS}")
        with safe_open(path, "pt") as file:
            options = json.loads(file.metadata()["options"])
            tokenizer = cls(**options)
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        tokenizer.to(weights["encoder.0.weight"].dtype).load_state_dict(weights)
        return tokenizer.eval()

    def __repr__(self) -> str:
        return f"StructureTokenizer(levels={self.levels}, width={self.width}, reach={self.reach})"


class _Patches:
    """The atoms around residues that have a local frame.

    Attributes:
        index: all residues of all structures, 0 .. N - 1, [N].
        has_frame: which of them have all three atoms, [N].
        chain: the chain of every residue, different for different structures, [N].
        inputs: what the encoder reads, [n, 5 * 10], of the n residues with a frame.
        atoms: atoms of three residues in the frame, [n, 9, 3]; NaN if missing.
    """

    def __init__(self, chain: Tensor, backbone: Tensor) -> None:
        self.index, self.chain = torch.arange(len(chain), device=chain.device), chain
        self.has_frame = backbone.isfinite().flatten(1).all(dim=1)
        rows = self.has_frame.nonzero()[:, 0]
        origin, axes = _frames(backbone[rows])
        near = _near(chain, rows, SEEN)
        atoms = backbone[near.clamp(min=0)].masked_fill((near < 0)[..., None, None], torch.nan)
        local = (atoms - origin[:, None, None]) @ axes[:, None]  # [n, 5, 3 atoms, 3]
        known = local.isfinite().flatten(2).all(dim=-1, keepdim=True)
        numbers = torch.where(known[..., None], local / SCALE, 0.0).flatten(2)
        self.inputs = torch.cat([numbers, known.to(numbers)], dim=-1).flatten(1)
        self.atoms = local[:, SEEN - RECONSTRUCTED : SEEN + RECONSTRUCTED + 1].flatten(1, 2)

    @classmethod
    def of(cls, structures: list[Structure], like: Tensor) -> _Patches:
        chains, backbones, count = [], [], 0
        for structure in structures:
            missing = [name for name in BACKBONE if name not in structure.atoms]
            if missing:
                raise ValueError(
                    f"structure must have the atoms N, CA and C, got one without {missing[0]}: "
                    "read it with read_structure(path, atoms='backbone')"
                )
            parts = _joined(structure)
            chains.append(parts + count)
            count += int(parts[-1]) + 1 if len(structure) else 0
            backbones.append(torch.stack([structure.atoms[name] for name in BACKBONE], dim=1))
        if not chains:
            none = torch.zeros(0, dtype=torch.int64, device=like.device)
            return cls(none, like.new_zeros(0, 3, 3))
        return cls(torch.cat(chains).to(like.device), torch.cat(backbones).to(like))

    def near(self, reach: int) -> Tensor:
        """Return places among the residues with a frame, [n, 2 reach + 1]; -1 for none."""
        rows = self.has_frame.nonzero()[:, 0]
        place = torch.full_like(self.index, -1)
        place[rows] = torch.arange(len(rows), device=rows.device)
        near = _near(self.chain, rows, reach)
        return torch.where(near >= 0, place[near.clamp(min=0)], -1)


def _joined(structure: Structure) -> Tensor:
    """Return a number for every run of joined residues: a gap begins another, as a chain does."""
    index = structure.chain_index
    return (structure.gaps | (index.diff(prepend=index[:1]) != 0)).cumsum(0)


def _perceptron(inputs: int, width: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, width), nn.GELU(), nn.Linear(width, width), nn.GELU(),
        nn.Linear(width, outputs),
    )  # fmt: skip


def _near(chain: Tensor, rows: Tensor, reach: int) -> Tensor:
    """Return the residues around `rows` [n] in their chain, [n, 2 reach + 1]; -1 for none."""
    places = rows[:, None] + torch.arange(-reach, reach + 1, device=rows.device)
    inside = (places >= 0) & (places < len(chain))
    places = places.clamp(0, max(len(chain) - 1, 0))
    same = chain[places] == chain[rows][:, None] if len(chain) else inside
    return torch.where(inside & same, places, -1)


def _frames(backbone: Tensor) -> tuple[Tensor, Tensor]:
    """Return origins [n, 3] and axes [n, 3, 3], whose columns are x, y and z, from N, CA and C."""
    n, ca, c = backbone.unbind(dim=1)
    x = functional.normalize(c - ca, dim=-1)
    v = n - ca
    y = functional.normalize(v - (v * x).sum(-1, keepdim=True) * x, dim=-1)
    return ca, torch.stack([x, y, torch.linalg.cross(x, y)], dim=-1)


def _squared_error(atoms: Tensor, truth: Tensor) -> Tensor:
    """Return the mean squared distance of known atoms, [n]."""
    known = truth.isfinite().all(dim=-1)
    squared = (atoms - truth.nan_to_num(0.0)).square().sum(-1) * known
    return squared.sum(-1) / known.sum(-1).clamp(min=1)
