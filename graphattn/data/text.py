"""Text as tokens: one token per character."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class CharacterTokenizer:
    """One token per character; token t stands for ``vocabulary[t]``.

    A character is a Unicode code point: nothing is normalised, so decoding gives back exactly the
    text that was encoded.

    Args:
        vocabulary: the characters, each once. :meth:`from_text` sorts them by code point; keep this
            string beside a model's weights to read its tokens later.

    Raises:
        ValueError: `vocabulary` is empty, or holds a character twice or half of one (a lone
            surrogate, which no file can keep).

    Example:
        >>> import graphattn as ga
        >>> tokenizer = ga.data.CharacterTokenizer.from_text("hello world")
        >>> tokenizer.vocabulary, tokenizer.vocab_size
        (' dehlorw', 8)
        >>> tokenizer.encode("hole")
        tensor([3, 5, 4, 2])
        >>> tokenizer.decode([3, 5, 4, 2])
        'hole'
    """

    vocabulary: str
    _token_of: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        token_of = {char: token for token, char in enumerate(self.vocabulary)}
        if not token_of:
            raise ValueError("vocabulary must hold at least one character, got ''")
        if len(token_of) < len(self.vocabulary):
            twice = next(c for c in self.vocabulary if self.vocabulary.count(c) > 1)
            raise ValueError(f"vocabulary must hold every character once, got {twice!a} twice")
        half = next((c for c in self.vocabulary if "\ud800" <= c <= "\udfff"), None)
        if half is not None:  # two of them would be read again as one character
            raise ValueError(f"vocabulary must hold characters, got {half!a}, half of one")
        object.__setattr__(self, "_token_of", token_of)

    @classmethod
    def from_text(cls, text: str) -> "CharacterTokenizer":
        """The tokenizer of the distinct characters of `text`, sorted by code point."""
        return cls("".join(sorted(set(text))))

    @property
    def vocab_size(self) -> int:
        """The number of tokens."""
        return len(self.vocabulary)

    def encode(self, text: str) -> Tensor:
        """The tokens of `text`: a LongTensor [N], N = ``len(text)``.

        Raises:
            ValueError: a character of `text` is not in the vocabulary.
        """
        try:
            return torch.tensor([self._token_of[char] for char in text], dtype=torch.long)
        except KeyError as error:
            char = error.args[0]
            raise ValueError(
                f"text must keep to the vocabulary of {self.vocab_size} characters, got "
                f"{char!a} (U+{ord(char):04X}) at position {text.index(char)}"
            ) from None

    def decode(self, tokens: Tensor | Sequence[int]) -> str:
        """The text of `tokens`: integers [N] in ``0..vocab_size - 1``.

        Raises:
            ValueError: `tokens` has another number of dimensions, is not of an integer type, or
                holds a token out of range.
        """
        if isinstance(tokens, Tensor):
            if tokens.dim() != 1:
                raise ValueError(f"tokens must have shape [N], got {list(tokens.shape)}")
            tokens = tokens.tolist()
        for token in tokens:
            # `vocabulary[token]` by itself takes -1 for the last character and True for the second.
            if type(token) is not int or not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"tokens must be integers from 0 to {self.vocab_size - 1}, got {token!r}"
                )
        return "".join([self.vocabulary[token] for token in tokens])
