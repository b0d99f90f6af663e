"""A tokenizer for text with one token per character."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class CharacterTokenizer:
    """A tokenizer with one token per character: token t is the character ``vocabulary[t]``.

    A character is a Unicode code point. Text is not normalised, so decoding returns exactly the
    text that was encoded.

    Args:
        vocabulary: the characters, each once. :meth:`from_text` sorts them by code point. Save this
            string with the weights of a model, so that its tokens can be decoded later.

    Raises:
        ValueError: if `vocabulary` is empty, or contains a character twice, or a lone surrogate
            (which is half of a character and cannot be written to a file).

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
        if half is not None:  # Two of them would be read back as one character.
            raise ValueError(
                f"vocabulary must have whole characters, got the lone surrogate {half!a}"
            )
        object.__setattr__(self, "_token_of", token_of)

    @classmethod
    def from_text(cls, text: str) -> "CharacterTokenizer":
        """Make a tokenizer of the distinct characters of `text`, sorted by code point."""
        return cls("".join(sorted(set(text))))

    @property
    def vocab_size(self) -> int:
        """The number of tokens."""
        return len(self.vocabulary)

    def encode(self, text: str) -> Tensor:
        """Return the tokens of `text`, a LongTensor [N] with N = ``len(text)``.

        Raises:
            ValueError: if a character of `text` is not in the vocabulary.
        """
        try:
            return torch.tensor([self._token_of[char] for char in text], dtype=torch.long)
        except KeyError as error:
            char = error.args[0]
            raise ValueError(
                f"text must have only the {self.vocab_size} characters of the vocabulary, got "
                f"{char!a} (U+{ord(char):04X}) at position {text.index(char)}"
            ) from None

    def decode(self, tokens: Tensor | Sequence[int]) -> str:
        """Return the text of `tokens`, which are integers [N] in ``0..vocab_size - 1``.

        Raises:
            ValueError: if `tokens` has another number of dimensions, is not of an integer dtype, or
                has a token that is out of range.
        """
        return "".join(self.vocabulary[token] for token in as_tokens(tokens, self.vocab_size))


def as_tokens(tokens: Tensor | Sequence[int], vocab_size: int) -> list[int]:
    """Convert `tokens` to a list, after checking that they are integers below `vocab_size`."""
    if isinstance(tokens, Tensor):
        if tokens.dim() != 1:
            raise ValueError(f"tokens must have shape [N], got {list(tokens.shape)}")
        tokens = tokens.tolist()
    numbers: list[int] = list(tokens)
    for token in numbers:
        # Without this check, an index of -1 and True would be accepted as tokens.
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ValueError(f"tokens must be integers from 0 to {vocab_size - 1}, got {token!r}")
    return numbers
