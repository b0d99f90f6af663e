"""Embeddings and scores of a protein model, for sequences of letters and structures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, overload

import torch
from torch import Tensor, nn

from graphattn.data import ProteinTokenizer, Structure
from graphattn.graphs import TokenGraph, batch
from graphattn.graphs.arguments import as_int
from graphattn.models.proteins.mutations import Mutation, parsed
from graphattn.models.token_model import TokenModel

Protein = str | Structure
Proteins = list[Protein] | tuple[Protein, ...]
Context = Mapping[str, Any] | None
Tracks = Mapping[str, Tensor] | None
Logits = Any  # a tensor [N, 21]; with source tracks, a dict with one tensor per track


class ProteinScores(TokenModel):
    """Embeddings, logits and scores of mutations, without gradients and without dropout.

    Subclasses need ``encode(tokens, graph, *, structure, valid, context, tracks)``, which returns
    the features before the head, and an attribute `structure`: whether they read structures.
    """

    tokenizer: ProteinTokenizer
    mask_token: int
    structure: bool

    @overload
    def embed(
        self,
        proteins: Protein,
        *,
        context: Context = None,
        tracks: Tracks = None,
        batch_size: int = 8,
    ) -> Tensor: ...

    @overload
    def embed(
        self,
        proteins: Proteins,
        *,
        context: Context = None,
        tracks: Tracks = None,
        batch_size: int = 8,
    ) -> list[Tensor]: ...

    def embed(
        self,
        proteins: Protein | Proteins,
        *,
        context: Context = None,
        tracks: Tracks = None,
        batch_size: int = 8,
    ) -> Tensor | list[Tensor]:
        """Return the features of every residue before the head, [N, dim], or a list of these.

        Args:
            proteins: a sequence of letters, a Structure, or a list of these. Gaps ``-`` in a
                sequence are removed. A model made with ``structure=False`` reads the chains of a
                Structure as separate sequences.
            context: the context of one protein, as in the call of the model.
            tracks: codes of the source tracks of one protein, as in the call of the model.
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
        return self._of_proteins(run, proteins, batch_size, context=context, tracks=tracks)

    @overload
    def logits(
        self,
        proteins: Protein,
        *,
        context: Context = None,
        tracks: Tracks = None,
        batch_size: int = 8,
    ) -> Logits: ...

    @overload
    def logits(
        self,
        proteins: Proteins,
        *,
        context: Context = None,
        tracks: Tracks = None,
        batch_size: int = 8,
    ) -> list[Logits]: ...

    def logits(
        self,
        proteins: Protein | Proteins,
        *,
        context: Context = None,
        tracks: Tracks = None,
        batch_size: int = 8,
    ) -> Logits | list[Logits]:
        """Return the logits of the letters at every residue, without masking, [N, 21].

        Column t belongs to the letter ``model.tokenizer.vocabulary[t]``. A model with source tracks
        returns a dict: "sequence" [N, 21], and the logits of every track by its name.

        Args:
            proteins, context, tracks, batch_size: as in :meth:`embed`.
        """
        run: Any = self
        return self._of_proteins(run, proteins, batch_size, context=context, tracks=tracks)

    def score_mutations(
        self,
        protein: Protein,
        mutations: Sequence[str],
        *,
        numbering: str = "sequence",
        context: Context = None,
        tracks: Tracks = None,
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
            context: the context of the protein, as in the call of the model.
            tracks: codes of its source tracks, as in the call of the model. They are read at masked
                residues, too: set a track to -1 there if it tells the letter.
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
                given = _given(context=context, tracks=tracks)
                out = self(self._here(masked), **call, **given)
                out = (out["sequence"] if isinstance(out, dict) else out).float().cpu()
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
        self, run: Callable[..., Any], proteins: Any, batch_size: int, **inputs: Any
    ) -> Any:
        """Return the result of `run` for every residue of one protein, or of each of a list."""
        batch_size = as_int("batch_size", batch_size, 1)
        if isinstance(proteins, Protein):
            tokens, call = self._as_call(proteins)
            with evaluating(self):
                return run(self._here(tokens), **call, **_given(**inputs))
        if not isinstance(proteins, list | tuple):
            raise ValueError(
                "proteins must be a sequence of letters, a Structure, or a list of them, got "
                f"{type(proteins).__name__}"
            )
        for name, value in _given(**inputs).items():
            raise ValueError(
                f"{name} must be None for a list of proteins, got {type(value).__name__}: pass "
                f"each protein with its {name} in a separate call"
            )
        calls = [self._as_call(protein) for protein in proteins]
        results: dict[int, Any] = {}
        with evaluating(self):
            for some in _batches(calls, batch_size):
                tokens, call, sizes = self._together([calls[n] for n in some])
                results.update(zip(some, _of_each(run(tokens, **call), sizes), strict=True))
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


def _given(**inputs: Any) -> dict[str, Any]:
    return {name: value for name, value in inputs.items() if value is not None}


def _of_each(out: Tensor | dict[str, Tensor], sizes: list[int]) -> list[Any]:
    """Split the output of a call into those of its proteins."""
    if isinstance(out, dict):
        parts = zip(*(_of_each(of_track, sizes) for of_track in out.values()), strict=True)
        return [dict(zip(out, of_one, strict=True)) for of_one in parts]
    rows = out.split(sizes) if out.dim() == 2 else out  # packed, or padded
    return [row[:size] for row, size in zip(rows, sizes, strict=True)]


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
