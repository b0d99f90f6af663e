"""Generation of text: prompts, stop tokens, and the order in which a model reads tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from graphattn.distributed.agreement import agree
from graphattn.distributed.exchange import of_first_rank
from graphattn.distributed.sharded_graph import ShardedGraph
from graphattn.graphs.arguments import as_int
from graphattn.models.language.sampling import Sampling, draw
from graphattn.models.token_model import TokenModel
from graphattn.nn.caches.divided_cache import newest_rows
from graphattn.ops.inputs import check_valid

Stop = int | Sequence[int | Sequence[int]] | None
Progress = Callable[[int, Tensor], Any]


class GrowingText:
    """Prompts and the tokens that are written after them.

    Args:
        prompts: integers [*, N].
        count: maximal number of new tokens.
        stops: sequences of tokens; each ends a text.
        progress: called after every token; if it returns True, generation ends.

    Attributes:
        tokens: [*, N + count]; the contents after `length` have no meaning (they may be guesses).
        length: number of tokens so far.
        is_over: whether the generation has ended.
    """

    def __init__(
        self,
        prompts: Tensor,
        count: int,
        stops: list[tuple[int, ...]],
        progress: Progress | None,
    ) -> None:
        self.batch, self.start = prompts.shape[:-1], prompts.shape[-1]
        self.length, self.most = self.start, self.start + count
        self.tokens = prompts.new_zeros(*self.batch, self.most)
        self.tokens[..., : self.start] = prompts
        self.stops = [prompts.new_tensor(stop) for stop in stops]
        self.ended = torch.zeros(self.batch, dtype=torch.bool, device=prompts.device)
        self.progress = progress
        self.is_over = count == 0

    @property
    def written(self) -> Tensor:
        return self.tokens[..., : self.length]

    def append(self, newest: Tensor) -> None:
        """Append one token [*] to every text; texts that have ended repeat their last token."""
        if self.stops:
            newest = torch.where(self.ended, self.tokens[..., self.length - 1], newest)
        self.tokens[..., self.length] = newest
        self.length += 1
        for stop in self.stops:
            first = self.length - len(stop)
            if first >= self.start:
                self.ended |= (self.tokens[..., first : self.length] == stop).all(-1)
        self.is_over = self.length == self.most or bool(self.stops and self.ended.all())
        if self.progress is not None and self.progress(self.length - self.start, self.written):
            self.is_over = True


class Reader:
    """A model that reads a growing text through a cache.

    Args:
        model: the model that reads.
        text: the text that it reads.
        valid: bool [*, N], where the prompts are real.
        rollback: how many of the newest tokens can be removed again.
        shard: this rank's part of a graph over the prompts, if ranks divide them.
    """

    def __init__(
        self,
        model: TokenModel,
        text: GrowingText,
        valid: Tensor | None,
        rollback: int = 0,
        shard: ShardedGraph | None = None,
    ) -> None:
        self.model, self.text, self.valid, self.positions = model, text, None, None
        self.cache = model.init_cache(tuple(text.batch), rollback=rollback, shard=shard)
        self.shard = shard
        # Steps without checks; but `progress` may change the model between two steps.
        is_plain = valid is None and text.progress is None
        self.runs = model._runs(self.cache) if is_plain else None
        if valid is not None:
            more = valid.new_ones(*valid.shape[:-1], text.most - text.start)
            self.valid = torch.cat([valid, more], dim=-1)
            # Positions start at 0 in every text, because some mechanisms depend on more than
            # distances.
            padding = (~valid).sum(-1, keepdim=True)
            self.positions = torch.arange(text.most, device=valid.device) - padding

    def read(self, until: int, keep: int = 1) -> Tensor:
        """Read up to the token before `until`; return logits of the last `keep` tokens, [*, keep,
        V]."""
        here = slice(self.cache.position, until)
        if self.runs is not None and here.start == until - 1:
            x = self.model.embed_tokens(self.text.tokens[..., here], start=here.start).squeeze(-2)
            for run in self.runs:
                x = run(x)
            return self.model._apply_head(self.model.norm(x)).unsqueeze(-2)
        given = {}
        if self.valid is not None and self.positions is not None:
            given["positions"] = self.positions[..., here]
            if here.start < self.text.start:
                given["valid"] = self.valid[..., here]
        tokens = self.text.tokens[..., here]
        if self.shard is not None and here.start == 0:  # the prompt, of which one token counts
            part = self.shard
            given = {name: part.split(x, dim=-1) for name, x in given.items()}
            x = self.model.encode_step(part.split(tokens), self.cache, **given)
            x = newest_rows(part, x, 1, -2)
            if self.valid is None and self.text.progress is None:
                self.runs = self.model._runs(self.cache)
        else:
            x = self.model.encode_step(tokens, self.cache, **given)
        return self.model._apply_head(x[..., -keep:, :])

    def forget(self, length: int) -> None:
        """Remove the tokens from position `length` on from the cache."""
        if length < self.cache.position:
            self.cache.truncate(length)


@torch.no_grad()
def generate(
    model: TokenModel,
    tokens: Tensor,
    max_new_tokens: int,
    *,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    stop: Stop,
    generator: torch.Generator | None,
    valid: Tensor | None,
    progress: Progress | None,
    draft: TokenModel | None,
    draft_tokens: int,
    shard: ShardedGraph | None,
) -> Tensor:
    """Generate text; see :meth:`CausalLM.generate`."""
    sampling = Sampling.checked(temperature, top_k, top_p)
    count = as_int("max_new_tokens", max_new_tokens, 0)
    ahead = as_int("draft_tokens", draft_tokens, 1)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ValueError(
            f"generator must be a torch.Generator or None, got {type(generator).__name__}"
        )
    if progress is not None and not callable(progress):
        raise ValueError(f"progress must be callable or None, got {progress!r}")
    model._readable(tokens, valid)
    if tokens.shape[-1] == 0:
        raise ValueError(
            "tokens must contain at least one token per text, got none: give a prompt or a start "
            "token"
        )
    valid = _left_padding(valid, tokens)
    padding = 0 if valid is None else int((~valid).sum(-1).min())
    for reader_of_text in (model, draft):
        if reader_of_text is not None and count:
            # The last token is written and not read.
            reader_of_text.check_length(tokens.shape[-1] - padding + count - 1)
    stops = _stops(stop, model.vocab_size)
    text = GrowingText(tokens, count, stops, progress)
    if shard is not None:
        _check_shard(shard, tokens, draft)
        if isinstance(shard, ShardedGraph) and shard.group is not None:
            given = {"tokens": tokens, "valid": valid, "max_new_tokens": count, "stop": stops}
            agree(shard.group, {name: _digest(value) for name, value in given.items()})
    if draft is not None:
        _check_draft(draft, model)
        if not text.is_over:
            _write_with_draft(model, draft, text, sampling, generator, valid, ahead)
    elif not text.is_over:
        reader = Reader(model, text, valid, shard=shard)
        while not text.is_over:
            logits = reader.read(text.length)[..., -1, :]
            newest = sampling.choose(logits, generator)
            text.append(newest if shard is None else of_first_rank(newest, shard.group))
    return text.written.clone()


def _write_with_draft(
    model: TokenModel,
    draft: TokenModel,
    text: GrowingText,
    sampling: Sampling,
    generator: torch.Generator | None,
    valid: Tensor | None,
    ahead: int,
) -> None:
    """Let the draft guess tokens; the model reads them in one step and accepts some of them."""
    reader = Reader(model, text, valid, rollback=ahead)
    drafter = Reader(draft, text, valid, rollback=ahead)
    while not text.is_over:
        first = text.length
        guesses = min(ahead, text.most - first - 1)  # the model itself writes one more token
        of_draft = []
        for i in range(guesses):
            logits = drafter.read(first + i)[..., -1, :]
            of_draft.append(None if sampling.is_greedy else sampling.probabilities(logits))
            q = of_draft[-1]
            guess = logits.argmax(-1) if q is None else draw(q, generator)
            text.tokens[..., first + i] = guess
        logits = reader.read(first + guesses, keep=guesses + 1)
        for i in range(guesses + 1):
            guess = text.tokens[..., first + i].clone()
            if i == guesses:
                text.append(sampling.choose(logits[..., i, :], generator))
                break
            ended = text.ended.clone()
            newest, agrees = verify(logits[..., i, :], of_draft[i], guess, sampling, generator)
            text.append(newest)
            if text.is_over or not bool((agrees | ended).all()):
                break
        reader.forget(text.length - 1)  # the newest token has not been read yet
        drafter.forget(text.length - 1)


def verify(
    logits: Tensor,
    of_draft: Tensor | None,
    guess: Tensor,
    sampling: Sampling,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor]:
    """Return the next token, [*], and whether it is the guess.

    A guess x with probability q(x) is accepted with probability min(1, p(x) / q(x)). Otherwise the
    token is drawn from max(p - q, 0), normalised. The result then has the distribution p.
    """
    if of_draft is None:
        best = logits.argmax(-1)
        return best, best == guess
    p = sampling.probabilities(logits)
    q = of_draft.to(p.dtype)
    place = guess.long().unsqueeze(-1)
    u = torch.rand(guess.shape, generator=generator, device=p.device, dtype=p.dtype)
    keep = u * q.gather(-1, place).squeeze(-1) < p.gather(-1, place).squeeze(-1)
    rest = (p - q).clamp_min(0)
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)  # p and q are equal up to rounding
    return torch.where(keep, guess, draw(rest, generator).to(guess.dtype)), keep


# Checks of arguments.


def _left_padding(valid: Any, tokens: Tensor) -> Tensor | None:
    """Return `valid` as [*, N], or None if all tokens are real; padding must be on the left."""
    if valid is None:
        return None
    N = tokens.shape[-1]
    check_valid(valid, tokens.shape[:-1], tokens.device, N, N)
    valid = valid.expand(tokens.shape)
    if not bool((valid[..., -1]).all()) or bool((valid[..., :-1] & ~valid[..., 1:]).any()):
        raise ValueError(
            "valid must be False only at the start of a text, and True for its last token, "
            "because generation continues after it: pad the prompts on the left"
        )
    return None if bool(valid.all()) else valid


def _stops(stop: Any, vocab_size: int) -> list[tuple[int, ...]]:
    """Return the stops as sequences of tokens."""
    if stop is None:
        return []
    sequences = []
    for entry in stop if _is_sequence(stop) else [stop]:
        tokens = tuple(
            as_int("stop", token, 0) for token in (entry if _is_sequence(entry) else [entry])
        )
        if not tokens or max(tokens) >= vocab_size:
            raise ValueError(
                f"stop must contain tokens 0 .. {vocab_size - 1} (vocab_size - 1) or sequences of "
                f"at least one token, got {entry!r}"
            )
        sequences.append(tokens)
    return sequences


def _is_sequence(value: Any) -> bool:
    if isinstance(value, Sequence | Set):
        return not isinstance(value, str)
    return getattr(value, "ndim", 0) > 0  # a tensor or a numpy array


def _check_draft(draft: TokenModel, model: TokenModel) -> None:
    if draft.vocab_size != model.vocab_size:
        raise ValueError(
            f"draft must have the vocabulary of the model, {model.vocab_size} tokens, "
            f"got {draft.vocab_size}"
        )
    if draft.embedding.weight.device != model.embedding.weight.device:
        raise ValueError(
            f"draft must be on the device of the model, {model.embedding.weight.device}, got "
            f"{draft.embedding.weight.device}"
        )


def _digest(value: Any) -> str:
    """Return a text for a value, equal ones for equal values."""
    if not isinstance(value, Tensor):
        return str(value)
    digest = hashlib.blake2b(value.cpu().numpy().tobytes(), digest_size=8).hexdigest()
    return f"{list(value.shape)} {digest}"


def _check_shard(shard: Any, tokens: Tensor, draft: Any) -> None:
    if draft is not None:
        raise ValueError(
            "draft must be None with shard, because ranks would have to agree on every guess, got "
            f"{draft!r:.80}"
        )
    N = tokens.shape[-1]
    if isinstance(shard, ShardedGraph) and shard.whole.num_targets != N:
        raise ValueError(
            f"shard must be of a graph over the {N} tokens of the prompts, got one over "
            f"{shard.whole.num_targets}: every rank gives all tokens"
        )
