"""Embeddings and scores of a protein model, for sequences of letters and structures.

Scores are of substitutions, which are written as text: "A42G" is residue A at number 42 that
becomes G.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor, nn

from graphattn.data import ProteinTokenizer, Structure
from graphattn.graphs import TokenGraph, batch
from graphattn.graphs.arguments import as_choice, as_int
from graphattn.models.token_model import TokenModel

Protein = str | Structure
Proteins = list[Protein] | tuple[Protein, ...]
Context = Mapping[str, Any] | None
AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY"
NUMBERINGS = ("sequence", "structure")
_SUBSTITUTION = re.compile(
    r"(?:(?P<chain>[^/:]+)/)?(?P<wild>[A-Za-z])(?P<number>-?\d+)(?P<code>[A-Za-z]?)(?P<to>[A-Za-z])"
)
_EXAMPLE = "a substitution such as 'A42G', or several such as 'A42G:L50P'"


class ProteinScores(TokenModel):
    """Embeddings, logits and scores of mutations, without gradients and without dropout.

    Subclasses need ``encode(tokens, graph, *, structure, valid, context)``, which returns the
    features before the head, and an attribute `structure`: whether they read structures.
    """

    tokenizer: ProteinTokenizer
    mask_token: int
    structure: bool

    @overload
    def embed(
        self, proteins: Protein, *, context: Context = None, batch_size: int = 8
    ) -> Tensor: ...

    @overload
    def embed(
        self, proteins: Proteins, *, context: Context = None, batch_size: int = 8
    ) -> list[Tensor]: ...

    def embed(
        self, proteins: Protein | Proteins, *, context: Context = None, batch_size: int = 8
    ) -> Tensor | list[Tensor]:
        """Return the features of every residue before the head, [N, dim], or a list of these.

        Args:
            proteins: a sequence of letters, a Structure, or a list of these. Gaps ``-`` in a
                sequence are removed. A model made with ``structure=False`` reads the chains of a
                Structure as separate sequences.
            context: the tracks of one protein, as in the call of the model.
            batch_size: how many proteins of a list are computed together.

        Raises:
            ValueError: if an argument is not allowed; the message names it and says what is
                allowed.

        Example:
            >>> import graphattn as ga
            >>> model = ga.models.ProteinModel(16, depth=1, heads=2)
            >>> model.embed("MKVL").shape
            torch.Size([4, 16])
            >>> [found.shape[0] for found in model.embed(["MKVL", "GW"])]
            [4, 2]
        """
        run: Any = self.encode
        return self._of_proteins(run, proteins, context, batch_size)

    @overload
    def logits(
        self, proteins: Protein, *, context: Context = None, batch_size: int = 8
    ) -> Tensor: ...

    @overload
    def logits(
        self, proteins: Proteins, *, context: Context = None, batch_size: int = 8
    ) -> list[Tensor]: ...

    def logits(
        self, proteins: Protein | Proteins, *, context: Context = None, batch_size: int = 8
    ) -> Tensor | list[Tensor]:
        """Return the logits of the letters at every residue, without masking, [N, 21].

        Column t belongs to the letter ``model.tokenizer.vocabulary[t]``.

        Args:
            proteins, context, batch_size: as in :meth:`embed`.
        """
        run: Any = self
        return self._of_proteins(run, proteins, context, batch_size)

    def score_mutations(
        self,
        protein: Protein,
        mutations: Sequence[str],
        *,
        numbering: str = "sequence",
        context: Context = None,
        batch_size: int = 8,
    ) -> Tensor:
        r"""Return log-odds of substitutions: above 0 if the model finds the mutant more likely.

        .. math::
            s = \sum_{i \in M} \log p(x_i = \text{mutant}_i \mid x_{\setminus i})
                - \log p(x_i = \text{wild type}_i \mid x_{\setminus i})

        These are the masked marginals of ESM-1v (Meier et al., 2021). Each changed residue is
        masked alone, and all others are as in the wild type; the scores of several substitutions
        are added.

        Args:
            protein: a sequence of letters, or a Structure.
            mutations: list of mutants: each is a substitution, "A42G" (A at residue 42 becomes G),
                or several, "A42G:L50P".
            numbering: "sequence" counts the residues from 1; "structure" uses the residue numbers
                of the Structure, with insertion codes ("A52AG" is residue 52A), and with the chain
                if several chains have the number ("B/A42G").
            context: the tracks of the protein, as in the call of the model.
            batch_size: how many masked copies are computed together.

        Returns:
            The scores, [mutants], on the CPU.

        Raises:
            ValueError: if a text is not a substitution, a letter is not an amino acid or not the
                one in the protein, a number does not exist, or a mutant changes a residue twice.

        Example:
            >>> import graphattn as ga
            >>> model = ga.models.ProteinModel(16, depth=1, heads=2)
            >>> model.score_mutations("MKVLA", ["K2R", "K2R:L4I"]).shape
            torch.Size([2])
        """
        batch_size = as_int("batch_size", batch_size, 1)
        if isinstance(mutations, str) or not isinstance(mutations, Sequence):
            raise ValueError(
                "mutations must be a list of strings such as ['A42G'], got "
                f"{mutations if isinstance(mutations, str) else type(mutations).__name__!r}"
            )
        tokens, call = self._as_call(protein)
        sequence = self.tokenizer.decode(tokens)
        structure = protein if isinstance(protein, Structure) else None
        mutants = [parsed(text, sequence, structure, numbering) for text in mutations]
        places = sorted({mutation.residue for mutant in mutants for mutation in mutant})
        logits: dict[int, Tensor] = {}
        with evaluating(self):
            for start in range(0, len(places), batch_size):
                some = torch.tensor(places[start : start + batch_size])
                row = torch.arange(len(some))
                masked = tokens.repeat(len(some), 1)
                masked[row, some] = self.mask_token
                out = self(self._here(masked), **call, **_given(context)).float().cpu()
                logits.update(zip(some.tolist(), out[row, some], strict=True))
        token_of = {letter: token for token, letter in enumerate(self.tokenizer.vocabulary)}

        def log_odds(mutation: Mutation) -> Tensor:
            of_letters = logits[mutation.residue]
            return of_letters[token_of[mutation.mutant]] - of_letters[token_of[mutation.wild]]

        scores = [sum(map(log_odds, mutant), torch.zeros(())) for mutant in mutants]
        return torch.stack(scores) if scores else torch.zeros(0)

    def _check_steps(self) -> None:
        """Raise an error: a model of proteins cannot generate token by token."""
        raise ValueError(
            f"a {type(self).__name__} cannot generate token by token, because residues also see "
            "later residues and neighbors in space: call the model itself"
        )

    # From proteins to the arguments of a call.

    def _here(self, tokens: Tensor) -> Tensor:
        return tokens.to(self.embedding.weight.device)

    def _as_call(self, protein: Any) -> tuple[Tensor, dict[str, Any]]:
        """Return the tokens of a protein, [N], and the other arguments of its call."""
        if isinstance(protein, Structure):
            tokens = self.tokenizer.encode(protein.sequence)
            if len(tokens) != len(protein.sequence):
                raise ValueError(
                    "proteins must not contain a gap '-' in the sequence of a Structure"
                )
            if self.structure:
                return tokens, {"structure": protein}
            sizes = [size for size in protein.chain_index.bincount().tolist() if size]
            return tokens, {"graph": self._one_by_one(sizes)}
        if not isinstance(protein, str):
            raise ValueError(
                f"proteins must be sequences of letters or Structures, got {type(protein).__name__}"
            )
        tokens = self.tokenizer.encode(protein)
        if not len(tokens):
            raise ValueError(f"proteins must have at least one residue, got {protein!r}")
        return tokens, {}

    def _one_by_one(self, sizes: list[int]) -> list[TokenGraph]:
        """Return the graphs of every block for packed sequences, without edges between them."""
        return [batch(of_block) for of_block in zip(*map(self.graphs, sizes), strict=True)]

    def _of_proteins(
        self, run: Callable[..., Tensor], proteins: Any, context: Any, batch_size: int
    ) -> Tensor | list[Tensor]:
        """Return the result of `run` for every residue of one protein, or of each of a list."""
        batch_size = as_int("batch_size", batch_size, 1)
        if isinstance(proteins, Protein):
            tokens, call = self._as_call(proteins)
            with evaluating(self):
                return run(self._here(tokens), **call, **_given(context))
        if not isinstance(proteins, list | tuple):
            raise ValueError(
                "proteins must be a sequence of letters, a Structure, or a list of them, got "
                f"{type(proteins).__name__}"
            )
        if context is not None:
            raise ValueError(
                f"context must be None for a list of proteins, got {type(context).__name__}: pass "
                "each protein with its context in a separate call"
            )
        calls = [self._as_call(protein) for protein in proteins]
        results: dict[int, Tensor] = {}
        with evaluating(self):
            for some in _batches(calls, batch_size):
                tokens, call, sizes = self._together([calls[n] for n in some])
                out = run(tokens, **call)
                rows = out.split(sizes) if out.dim() == 2 else out  # packed, or padded
                for n, row, size in zip(some, rows, sizes, strict=True):
                    results[n] = row[:size]
        return [results[n] for n in range(len(calls))]

    def _together(
        self, calls: list[tuple[Tensor, dict[str, Any]]]
    ) -> tuple[Tensor, dict[str, Any], list[int]]:
        """Join several proteins into one call; also return the number of residues of each."""
        tokens = [of_one for of_one, _ in calls]
        sizes = [len(of_one) for of_one in tokens]
        first = calls[0][1]
        if not first:  # only letters: padded, so that all use one graph
            padded = nn.utils.rnn.pad_sequence(tokens, batch_first=True)
            valid = torch.arange(padded.shape[1]) < torch.tensor(sizes)[:, None]
            return self._here(padded), {"valid": self._here(valid)}, sizes
        packed = self._here(torch.cat(tokens))
        if "structure" in first:
            return packed, {"structure": [call["structure"] for _, call in calls]}, sizes
        graphs = zip(*(call["graph"] for _, call in calls), strict=True)
        return packed, {"graph": [batch(of_block) for of_block in graphs]}, sizes


def _given(context: Any) -> dict[str, Any]:
    return {} if context is None else {"context": context}


def _batches(calls: list[tuple[Tensor, dict[str, Any]]], batch_size: int) -> Iterator[list[int]]:
    """Yield indices of proteins for one call: of one kind and of similar length."""
    order = sorted(range(len(calls)), key=lambda n: ([*calls[n][1]], len(calls[n][0])))
    some: list[int] = []
    for n in order:
        if some and (len(some) == batch_size or [*calls[n][1]] != [*calls[some[0]][1]]):
            yield some
            some = []
        some.append(n)
    if some:
        yield some


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run without gradients and in evaluation mode, and restore the mode of every module."""
    training = [part for part in model.modules() if part.training]
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for part in training:
            part.training = True


# Substitutions as text.


class Mutation(NamedTuple):
    """One substitution."""

    residue: int  # index, from 0
    wild: str
    mutant: str


def parsed(text: Any, sequence: str, structure: Any, numbering: str) -> list[Mutation]:
    """Parse the substitutions of a mutant, "A42G" or "A42G:L50P".

    `numbering` "sequence" counts residues from 1. "structure" uses the numbers of the structure,
    with an insertion code ("A52AG": 52A) and, if several chains have a number, the chain
    ("B/A42G").
    """
    as_choice("numbering", numbering, NUMBERINGS)
    if numbering == "structure" and structure is None:
        raise ValueError(
            "numbering must be 'sequence' for a sequence of letters, got 'structure': give a "
            "Structure to use its residue numbers"
        )
    if not isinstance(text, str) or not text:
        raise ValueError(f"mutations must contain strings, {_EXAMPLE}, got {text!r}")
    mutations: dict[int, Mutation] = {}
    for part in text.split(":"):
        mutation = _one(part, text, sequence, structure, numbering)
        if mutation.residue in mutations:
            raise ValueError(
                f"mutations must change a residue only once, got {text!r}, where {part!r} changes "
                "a residue again"
            )
        mutations[mutation.residue] = mutation
    return list(mutations.values())


def _one(part: str, text: str, sequence: str, structure: Any, numbering: str) -> Mutation:
    match = _SUBSTITUTION.fullmatch(part)
    if match is None:
        chain = "" if structure is None else ", or with chain H 'H/A42G'"
        raise ValueError(f"mutations must contain {_EXAMPLE}{chain}; got {part!r} in {text!r}")
    wild, mutant = match["wild"].upper(), match["to"].upper()
    for letter in (wild, mutant):
        if letter not in AMINO_ACIDS:
            raise ValueError(
                f"mutations must name amino acids by one of {AMINO_ACIDS}, got {letter!r} in "
                f"{text!r}"
            )
    number, code = int(match["number"]), match["code"]
    if numbering == "structure":
        index = _in_structure(part, match["chain"], number, code, structure)
    else:
        if match["chain"] is not None or code:
            raise ValueError(
                f"mutations must have no chain and no insertion code, got {part!r}: use "
                "numbering='structure' for these"
            )
        if not 1 <= number <= len(sequence):
            raise ValueError(
                f"mutations must have residue numbers in 1 .. {len(sequence)}, the length of the "
                f"sequence, got {number} in {text!r}"
            )
        index = number - 1
    there = sequence[index]
    if there != wild:
        raise ValueError(
            f"mutations must begin with the residue of the sequence at that number: {part!r} has "
            f"{wild}, but the sequence has {there} at {number}{code}"
        )
    return Mutation(index, wild, mutant)


def _in_structure(part: str, chain: str | None, number: int, code: str, structure: Any) -> int:
    """Return the index of the residue with this number."""
    ids = structure.chain_ids
    if chain is not None and chain not in ids:
        raise ValueError(
            f"mutations must name chains of the structure ({', '.join(map(repr, ids))}), got "
            f"{chain!r} in {part!r}"
        )
    places = [
        index
        for index in (structure.residue_numbers == number).nonzero()[:, 0].tolist()
        if structure.insertion_codes[index].upper() == code.upper()
        and (chain is None or ids[int(structure.chain_index[index])] == chain)
    ]
    as_written = [index for index in places if structure.insertion_codes[index] == code]
    places = as_written or places  # if both 52a and 52A exist
    if not places:
        where = "" if chain is None else f" in chain {chain!r}"
        raise ValueError(
            f"mutations must have residue numbers of the structure, got {number}{code} in "
            f"{part!r}, which does not exist{where}"
        )
    if len(places) > 1:
        owners = ", ".join(repr(ids[int(structure.chain_index[index])]) for index in places)
        raise ValueError(
            "mutations must name the chain if several chains have the residue number: "
            f"{number}{code} is in the chains {owners}. Write for instance {ids[0]}/{part}"
        )
    return places[0]
