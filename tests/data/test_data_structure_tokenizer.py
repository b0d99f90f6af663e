"""Codes of backbones: frames, quantisation, reach, training, files and errors."""

import copy
import itertools
import re

import pytest
import torch

import graphattn as ga
from graphattn.data.structures.tokenizer import _frames, _Patches

NAMES = "N", "CA", "C"


def helix(
    num_residues: int, *, turn: float = 100.0, rise: float = 1.5, width: float = 1.0
) -> torch.Tensor:
    """N, CA, C of an ideal helix, [N, 3, 3]; each kind of atom is on a cylinder of its own."""
    angle = torch.deg2rad(turn * torch.arange(num_residues))[:, None] + torch.tensor(
        [-0.48, 0.0, 0.44]
    )
    radius = width * torch.tensor([1.55, 2.28, 1.66])
    height = rise * torch.arange(num_residues)[:, None] + torch.tensor([-0.9, 0.0, 1.1])
    return torch.stack([radius * angle.cos(), radius * angle.sin(), height], dim=-1)


def chain_of(backbone: torch.Tensor, **more) -> ga.data.Structure:
    atoms = dict(zip(NAMES, backbone.unbind(1), strict=True))
    return ga.data.Structure("G" * len(backbone), atoms["CA"], atoms=atoms, **more)


def moved(backbone: torch.Tensor, seed: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rotation = torch.linalg.qr(torch.randn(3, 3, generator=generator)).Q
    rotation = rotation * torch.linalg.det(rotation)  # no reflection
    return backbone @ rotation.T + 10 * torch.randn(3, generator=generator)


def strand(num_residues: int) -> torch.Tensor:
    return helix(num_residues, turn=-170.0, rise=3.3, width=0.4)


@pytest.fixture(scope="module")
def tokenizer():
    torch.manual_seed(0)
    shapes = [helix(40), strand(40), helix(40, turn=60.0, rise=2.4)]
    return ga.data.StructureTokenizer((5, 4, 3), width=64, reach=2).fit(
        [chain_of(shape) for shape in shapes], steps=300, batch_size=128
    )


def test_frames_are_right_handed_with_the_atoms_where_they_belong():
    backbone = moved(helix(7))
    origin, axes = _frames(backbone)
    torch.testing.assert_close(axes.mT @ axes, torch.eye(3).expand(7, 3, 3), atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.linalg.det(axes), torch.ones(7))
    local = (backbone - origin[:, None]) @ axes
    assert local[:, 1].abs().max() < 1e-5  # CA is the origin
    assert (local[:, 2, 0] > 0).all()  # C is on x
    assert local[:, 2, 1:].abs().max() < 1e-5
    assert (local[:, 0, 1] > 0).all()  # N is in the plane of x and y
    assert local[:, 0, 2].abs().max() < 1e-5


def test_every_code_is_its_numbers_and_back():
    tokenizer = ga.data.StructureTokenizer((5, 4, 3))
    codes = torch.arange(60)
    numbers = tokenizer._numbers_of(codes)
    assert torch.equal(tokenizer._code_of(numbers), codes)
    expected = itertools.product(*(torch.linspace(-1, 1, n).tolist() for n in (5, 4, 3)))
    torch.testing.assert_close(numbers, torch.tensor(list(expected)))


def test_numbers_are_rounded_to_the_nearest_level_with_the_gradient_of_what_they_were():
    tokenizer = ga.data.StructureTokenizer((5, 4))
    raw = torch.linspace(-4, 4, 400).repeat(2, 1).T.contiguous().requires_grad_()
    numbers = tokenizer._quantised(raw)
    for place, level in enumerate((5, 4)):
        levels = torch.linspace(-1, 1, level)
        nearest = (raw[:, place].tanh()[:, None] - levels).abs().argmin(1)
        torch.testing.assert_close(numbers[:, place], levels[nearest], atol=1e-6, rtol=0)
    numbers.sum().backward()
    torch.testing.assert_close(raw.grad, 1 - raw.detach().tanh() ** 2)


def test_codes_do_not_change_if_a_structure_moves_and_do_in_a_mirror(tokenizer):
    backbone = helix(40)
    codes = tokenizer.encode(chain_of(backbone))
    assert codes.shape == (40,)
    assert codes.min() >= 0
    assert torch.equal(tokenizer.encode(chain_of(moved(backbone))), codes)
    assert len(codes[3:-3].unique()) == 1  # of a helix, all inner residues are alike
    mirror = backbone * torch.tensor([1.0, 1.0, -1.0])
    assert (tokenizer.encode(chain_of(mirror))[3:-3] != codes[3:-3]).any()


def test_what_it_was_trained_with_comes_back(tokenizer):
    for shape in (helix(30), strand(30)):
        assert not chain_of(shape).gaps.any()
        errors = tokenizer.errors(chain_of(shape))
        assert errors[3:-3].max() < 0.2
        decoded = tokenizer.decode(tokenizer.encode(chain_of(shape)))
        patches = _Patches.of([chain_of(shape)], torch.zeros(()))
        distance = (decoded - patches.atoms).square().sum(-1)[5].mean().sqrt()
        torch.testing.assert_close(distance, errors[5])


def test_exchanging_two_codes_moves_their_neighbourhood_alone(tokenizer):
    codes = torch.randint(60, (40,), generator=torch.Generator().manual_seed(1))
    assert codes[10] != codes[25]
    other = codes.clone()
    other[[10, 25]] = codes[[25, 10]]
    changed = (tokenizer.decode(codes) != tokenizer.decode(other)).flatten(1).any(dim=1)
    near = (torch.arange(40)[:, None] - torch.tensor([10, 25])).abs().amin(1) <= 2  # reach
    assert torch.equal(changed, near)


def test_chains_and_gaps_do_not_see_each_other(tokenizer):
    whole = helix(40)
    codes = tokenizer.encode(chain_of(whole))
    index = (torch.arange(40) >= 20).long()
    two = chain_of(whole, chain_index=index, chain_ids=("A", "B"))
    apart = [tokenizer.encode(chain_of(half)) for half in whole.split(20)]
    assert torch.equal(tokenizer.encode(two), torch.cat(apart))
    numbers = torch.arange(1, 41) + 30 * index
    shifted = whole + 60.0 * index[:, None, None]
    gap = chain_of(shifted, residue_numbers=numbers)
    assert gap.gaps.sum() == 1
    assert torch.equal(tokenizer.encode(gap), torch.cat(apart))
    torch.testing.assert_close(tokenizer.decode(codes, two), tokenizer.decode(codes, index))
    torch.testing.assert_close(tokenizer.decode(codes, gap), tokenizer.decode(codes, index))
    decoded = tokenizer.decode(codes, index)
    halves = torch.cat([tokenizer.decode(half) for half in codes.split(20)])
    torch.testing.assert_close(decoded, halves)


def test_a_residue_without_an_atom_has_no_code(tokenizer):
    backbone = helix(20)
    backbone[7, 2] = torch.nan
    codes = tokenizer.encode(chain_of(backbone))
    assert codes[7] == -1
    assert (codes[torch.arange(20) != 7] >= 0).all()
    assert tokenizer.errors(chain_of(backbone)).isnan().nonzero().tolist() == [[7]]
    assert tokenizer.decode(codes).isfinite().all()
    empty = chain_of(helix(0))
    assert tokenizer.encode(empty).shape == (0,)
    assert tokenizer.decode(tokenizer.encode(empty)).shape == (0, 9, 3)


def test_autocast_and_no_grad_change_nothing(tokenizer):
    chain = chain_of(helix(30))
    codes = tokenizer.encode(chain)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(tokenizer.encode(chain), codes)
        assert tokenizer.decode(codes).dtype == torch.float32
    with torch.no_grad():
        ga.data.StructureTokenizer(width=8).fit(chain, steps=2)


def test_training_is_repeatable_and_the_second_stage_keeps_codes():
    def trained():
        torch.manual_seed(1)
        return ga.data.StructureTokenizer(width=16).fit([chain_of(helix(30))], steps=5)

    a, b = trained(), trained()
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_a_saved_tokenizer_comes_back(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "new")
    loaded = ga.data.StructureTokenizer.from_pretrained(tmp_path / "new")
    assert repr(loaded) == "StructureTokenizer(levels=(5, 4, 3), width=64, reach=2)"
    chain = chain_of(helix(12))
    assert torch.equal(loaded.encode(chain), tokenizer.encode(chain))
    torch.testing.assert_close(loaded.errors(chain), tokenizer.errors(chain))
    wide = copy.deepcopy(tokenizer).double()
    wide.save_pretrained(tmp_path / "wide")
    loaded = ga.data.StructureTokenizer.from_pretrained(tmp_path / "wide")
    assert torch.equal(loaded.decoder[0].weight, wide.decoder[0].weight)
    with pytest.raises(FileNotFoundError, match="has no structure_tokenizer"):
        ga.data.StructureTokenizer.from_pretrained(tmp_path)


@pytest.mark.long
def test_held_out_chains_come_back_within_half_an_angstrom(real_files):
    files = real_files("structure/*/*")
    chains = [ga.data.read_structure(path, atoms="backbone") for path in files]
    train = [chain for place, chain in enumerate(chains) if place % 5]
    held_out = chains[::5]
    torch.manual_seed(0)
    tokenizer = ga.data.StructureTokenizer().fit(train, steps=200)
    errors = torch.cat([tokenizer.errors(chain) for chain in held_out])
    codes = torch.cat([tokenizer.encode(chain) for chain in held_out])
    assert float(errors.nanmean()) < 0.4  # an average residue in place of each: 0.89
    assert len(codes.unique()) > 100


CHAIN = chain_of(helix(8))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda t: ga.data.StructureTokenizer(()), "levels must be a sequence of at least one"),
        (lambda t: ga.data.StructureTokenizer((1,)), "levels must be"),
        (lambda t: t.decode(torch.tensor([60])), "codes must be -1 .. 59 (vocab_size - 1)"),
        (lambda t: t.decode([1]), "codes must be a tensor of integers [N], got list"),
        (lambda t: t.decode(torch.zeros(2)), "got torch.float32 of shape [2]"),
        (
            lambda t: t.decode(torch.zeros(2).long(), torch.zeros(3)),
            "chains must be a Structure of 2",
        ),
        (lambda t: t.fit([]), "structures must have residues with the atoms N, CA and C"),
        (lambda t: t.fit([CHAIN], steps=0), "steps must be"),
        (lambda t: t.fit(CHAIN, batch_size=1), "batch_size must be"),
        (lambda t: ga.data.StructureTokenizer(8), "levels must be a sequence of at least one"),
        (
            lambda t: t.encode(ga.data.Structure("G", torch.zeros(1, 3))),
            "structure must have the atoms N, CA and C, got one without N",
        ),
    ],
)
def test_bad_input_is_named(tokenizer, call, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        call(tokenizer)
