"""Data for the pretrained models: published antibodies, and sentences in the public domain."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy
import torch

import graphattn as ga


class Antibody(NamedTuple):
    """The variable domains of an antibody's heavy and light chain, and their published record."""

    name: str
    source: str
    heavy: str
    light: str


# Published sequences. The public records are entries of the PDB and a list of the WHO (INN).
ANTIBODIES = (
    Antibody(
        "adalimumab",
        "PDB 4NYL",
        "EVQLVESGGGLVQPGRSLRLSCAASGFTFDDYAMHWVRQAPGKGLEWVSAITWNSGHIDYADSVEGRFTISRDNAKNSLYLQMNSLRAEDTAVYYC"
        "AKVSYLSTASSLDYWGQGTLVTVSS",
        "DIQMTQSPSSLSASVGDRVTITCRASQGIRNYLAWYQQKPGKAPKLLIYAASTLQSGVPSRFSGSGSGTDFTLTISSLQPEDVATYYCQRYNRAPY"
        "TFGQGTKVEIK",
    ),
    Antibody(
        "bevacizumab",
        "PDB 1BJ1",
        "EVQLVESGGGLVQPGGSLRLSCAASGYTFTNYGMNWVRQAPGKGLEWVGWINTYTGEPTYAADFKRRFTFSLDTSKSTAYLQMNSLRAEDTAVYYC"
        "AKYPHYYGSSHWYFDVWGQGTLVTVSS",
        "DIQMTQSPSSLSASVGDRVTITCSASQDISNYLNWYQQKPGKAPKVLIYFTSSLHSGVPSRFSGSGSGTDFTLTISSLQPEDFATYYCQQYSTVPW"
        "TFGQGTKVEIK",
    ),
    Antibody(
        "cetuximab",
        "PDB 1YY8",
        "QVQLKQSGPGLVQPSQSLSITCTVSGFSLTNYGVHWVRQSPGKGLEWLGVIWSGGNTDYNTPFTSRLSINKDNSKSQVFFKMNSLQSNDTAIYYCA"
        "RALTYYDYEFAYWGQGTLVTVSA",
        "DILLTQSPVILSVSPGERVSFSCRASQSIGTNIHWYQQRTNGSPRLLIKYASESISGIPSRFSGSGSGTDFTLSINSVESEDIADYYCQQNNNWPT"
        "TFGAGTKLELK",
    ),
    Antibody(
        "omalizumab",
        "PDB 2XA8",
        "EVQLVESGGGLVQPGGSLRLSCAVSGYSITSGYSWNWIRQAPGKGLEWVASITYDGSTNYNPSLKGRITISRDDSKNTFYLQMNSLRAEDTAVYYC"
        "ARGSHYFGHWHFAVWGQGTLVTVSS",
        "DIQLTQSPSSLSASVGDRVTITCRASQSVDYDGDSYMNWYQQKPGKAPKLLIYAASYLESGVPSRFSGSGSGTDFTLTISSLQPEDFATYYCQQSH"
        "EDPYTFGQGTKVEIK",
    ),
    Antibody(
        "rituximab",
        "PDB 2OSL",
        "QVQLQQPGAELVKPGASVKMSCKASGYTFTSYNMHWVKQTPGRGLEWIGAIYPGNGDTSYNQKFKGKATLTADKSSSTAYMQLSSLTSEDSAVYYC"
        "ARSTYYGGDWYFNVWGAGTTVTVSA",
        "QIVLSQSPAILSASPGEKVTMTCRASSSVSYIHWFQQKPGSSPKPWIYATSNLASGVPVRFSGSGSGTSYSLTISRVEAEDAATYYCQQWTSNPPT"
        "FGGGTKLEIK",
    ),
    Antibody(
        "trastuzumab",
        "WHO INN, proposed list 103",
        "EVQLVESGGGLVQPGGSLRLSCAASGFNIKDTYIHWVRQAPGKGLEWVARIYPTNGYTRYADSVKGRFTISADTSKNTAYLQMNSLRAEDTAVYYC"
        "SRWGGDGFYAMDYWGQGTLVTVSS",
        "DIQMTQSPSSLSASVGDRVTITCRASQDVNTAVAWYQQKPGKAPKLLIYSASFLYSGVPSRFSGSRSGTDFTLTISSLQPEDFATYYCQQHYTTPP"
        "TFGQGTKVEIK",
    ),
)


def read_antibodies(path: Path) -> list[Antibody]:
    """Read antibodies from a FASTA file with headers ``name|VH|heavy|source``, ``name|VL|...``.

    Raises:
        ValueError: if a header has another form, or a domain of an antibody occurs twice or never.
    """
    domains: dict[str, dict[str, tuple[str, str]]] = {}
    for record in ga.data.read_fasta(path):
        parts = record.header.split("|")
        if len(parts) != 4 or parts[1] not in ("VH", "VL"):
            raise ValueError(
                f"headers of {path} must have the form name|VH or VL|kind|source, got "
                f"{record.header!r}"
            )
        name, domain, _, source = parts
        found = domains.setdefault(name, {})
        if domain in found:
            raise ValueError(f"{path} must contain {domain} of {name} only once, got it twice")
        found[domain] = (record.sequence, source)
    for name, found in domains.items():
        if len(found) < 2:
            raise ValueError(f"{path} must contain VH and VL of {name}, got {list(found)}")
    return [
        Antibody(name, found["VH"][1], found["VH"][0], found["VL"][0])
        for name, found in domains.items()
    ]


def identities(sequences: Sequence[str]) -> numpy.ndarray:
    """Compute 1 - (edit distance) / (length of the longer sequence) for every pair: [S, S].

    The code computes Levenshtein's table row by row, for all pairs at once. Within a row, an
    insertion costs one more than the cell to its left. If the number of the column is subtracted
    from every cell, all insertions of a row are a running minimum.
    """
    lengths = numpy.array([len(s) for s in sequences])
    letters = numpy.zeros((len(sequences), lengths.max()), dtype=numpy.int16)
    for i, sequence in enumerate(sequences):
        letters[i, : len(sequence)] = [ord(letter) for letter in sequence]
    first, second = numpy.triu_indices(len(sequences), 1)
    column = numpy.arange(lengths.max() + 1, dtype=numpy.int16)
    row = numpy.tile(column, (len(first), 1))
    distance = numpy.zeros(len(first), dtype=numpy.int16)
    for i in range(lengths.max()):
        differs = letters[first, i, None] != letters[second]
        from_above = numpy.minimum(row[:, 1:] + 1, row[:, :-1] + differs)
        start = numpy.full((len(first), 1), i + 1, dtype=numpy.int16)
        row = numpy.concatenate([start, from_above], axis=1) - column
        row = numpy.minimum.accumulate(row, axis=1) + column
        ends = lengths[first] == i + 1
        distance[ends] = row[ends, lengths[second[ends]]]
    found = numpy.eye(len(sequences))
    found[first, second] = found[second, first] = 1 - distance / numpy.maximum(
        lengths[first], lengths[second]
    )
    return found


def families(antibodies: Sequence[Antibody], identity: float) -> numpy.ndarray:
    """Give each antibody the number of its family; a chain of near-duplicates is one family.

    Two antibodies are near-duplicates if the identity of their heavy or of their light domains is
    at least `identity`.
    """
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    joined = identities([a.heavy for a in antibodies]) >= identity
    joined |= identities([a.light for a in antibodies]) >= identity
    return connected_components(csr_array(joined), directed=False)[1]


def split(
    antibodies: Sequence[Antibody], *, identity: float, seed: int
) -> tuple[list[Antibody], list[Antibody]]:
    """Split antibodies into at most half of them for training, and the others for measurement.

    Whole families are assigned in random order. A family goes to training if the training set then
    has at most half of the antibodies. No antibody of the measurement therefore has a
    near-duplicate in training, and the two domains of an antibody are never separated.
    """
    family = families(antibodies, identity)
    order = torch.randperm(family.max() + 1, generator=torch.Generator().manual_seed(seed))
    train: list[Antibody] = []
    test: list[Antibody] = []
    for number in order.tolist():
        members = [a for a, f in zip(antibodies, family, strict=True) if f == number]
        (train if 2 * (len(train) + len(members)) <= len(antibodies) else test).extend(members)
    return train, test


# The keys name author and year. All passages are in the public domain everywhere.
SENTENCES = {
    "Austen 1813": (
        "It is a truth universally acknowledged, that a single man in possession of a good "
        "fortune, must be in want of a wife."
    ),
    "Melville 1851": (
        "Call me Ishmael. Some years ago, never mind how long precisely, having little or no "
        "money in my purse, and nothing particular to interest me on shore, I thought I would "
        "sail about a little and see the watery part of the world."
    ),
    "Dickens 1859": (
        "It was the best of times, it was the worst of times, it was the age of wisdom, it was "
        "the age of foolishness, it was the epoch of belief, it was the epoch of incredulity, "
        "it was the season of Light, it was the season of Darkness."
    ),
    "Carroll 1865": (
        "Alice was beginning to get very tired of sitting by her sister on the bank, and of "
        "having nothing to do: once or twice she had peeped into the book her sister was "
        "reading, but it had no pictures or conversations in it."
    ),
    "Lincoln 1863": (
        "Four score and seven years ago our fathers brought forth on this continent, a new "
        "nation, conceived in Liberty, and dedicated to the proposition that all men are "
        "created equal."
    ),
    "Jefferson 1776": (
        "We hold these truths to be self-evident, that all men are created equal, that they are"
        " endowed by their Creator with certain unalienable Rights, that among these are Life, "
        "Liberty and the pursuit of Happiness."
    ),
    "Tolstoy, translated by Garnett 1901": (
        "Happy families are all alike; every unhappy family is unhappy in its own way."
    ),
    "Shakespeare 1603": (
        "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer "
        "the slings and arrows of outrageous fortune, or to take arms against a sea of "
        "troubles, and by opposing end them."
    ),
    "Darwin 1859": (
        "There is grandeur in this view of life, with its several powers, having been "
        "originally breathed into a few forms or into one; and that, whilst this planet has "
        "gone cycling on according to the fixed law of gravity, from so simple a beginning "
        "endless forms most beautiful and most wonderful have been, and are being, evolved."
    ),
    "Shelley 1818": (
        "You will rejoice to hear that no disaster has accompanied the commencement of an "
        "enterprise which you have regarded with such evil forebodings."
    ),
    "Wells 1898": (
        "No one would have believed in the last years of the nineteenth century that this world"
        " was being watched keenly and closely by intelligences greater than man's and yet as "
        "mortal as his own."
    ),
    "Thoreau 1854": (
        "I went to the woods because I wished to live deliberately, to front only the essential"
        " facts of life, and see if I could not learn what it had to teach, and not, when I "
        "came to die, discover that I had not lived."
    ),
    "Poe 1845": (
        "Once upon a midnight dreary, while I pondered, weak and weary, over many a quaint and "
        "curious volume of forgotten lore, while I nodded, nearly napping, suddenly there came "
        "a tapping, as of some one gently rapping, rapping at my chamber door."
    ),
    "Doyle 1891": (
        "To Sherlock Holmes she is always the woman. I have seldom heard him mention her under "
        "any other name. In his eyes she eclipses and predominates the whole of her sex."
    ),
    "King James Bible 1611": (
        "In the beginning God created the heaven and the earth. And the earth was without form,"
        " and void; and darkness was upon the face of the deep."
    ),
    "Wilde 1891": (
        "The studio was filled with the rich odour of roses, and when the light summer wind "
        "stirred amidst the trees of the garden, there came through the open door the heavy "
        "scent of the lilac, or the more delicate perfume of the pink-flowering thorn."
    ),
    "Twain 1884": (
        "You don't know about me without you have read a book by the name of The Adventures of "
        "Tom Sawyer; but that ain't no matter. That book was made by Mr. Mark Twain, and he "
        "told the truth, mainly."
    ),
    "Stoker 1897": (
        "Left Munich at 8:35 P.M., on 1st May, arriving at Vienna early next morning; should "
        "have arrived at 6:46, but train was an hour late."
    ),
    "Smith 1776": (
        "It is not from the benevolence of the butcher, the brewer, or the baker that we expect"
        " our dinner, but from their regard to their own interest."
    ),
    "Constitution of the United States 1787": (
        "We the People of the United States, in Order to form a more perfect Union, establish "
        "Justice, insure domestic Tranquility, provide for the common defence, promote the "
        "general Welfare, and secure the Blessings of Liberty to ourselves and our Posterity, "
        "do ordain and establish this Constitution for the United States of America."
    ),
    "Dickens 1843": (
        "Marley was dead: to begin with. There is no doubt whatever about that. The register of"
        " his burial was signed by the clergyman, the clerk, the undertaker, and the chief "
        "mourner."
    ),
}
