"""The sizes of a benchmark, and what they cost at least: operations, and bytes kept for backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from isozyme.core.errors import ConfigError, did_you_mean


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One mixture-of-experts layer of SwiGLU experts, all of them on one device."""

    name: str
    hidden: int
    ffn: int
    num_experts: int
    topk: int
    tokens: int
    """T, the tokens that pass the layer in one step."""

    @property
    def rows(self) -> int:
        """Rows of the grouped GEMMs: every token is sent to topk experts."""
        return self.tokens * self.topk

    @property
    def flops(self) -> int:
        """Operations of forward and backward: `18 * T * K * H * F`.

        Three products of H x F a row (gate, up, down), 2 operations a multiply-add, and backward costs twice
        the forward. The router, activations and moving rows are not counted.

        >>> shape("mixtral-8x7b", tokens=1).flops == 18 * 2 * 4096 * 14336
        True
        """
        return 18 * self.rows * self.hidden * self.ffn

    def saved_bound(self, itemsize: int = 2) -> int:
        """Least bytes a token kept for backward if no GEMM is repeated: in bf16, `2 H + 4 K F + 12 K`.

        The token's row, the pre-activation of each of its slots, and a slot's expert, row and weight.

        Args:
            itemsize: bytes of an element of rows and pre-activations.

        >>> shape("mixtral-8x7b").saved_bound()
        122904
        """
        return itemsize * (self.hidden + 2 * self.topk * self.ffn) + 12 * self.topk


SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        each.name: each
        for each in (
            Shape(name="mixtral-8x7b", hidden=4096, ffn=14_336, num_experts=8, topk=2, tokens=8192),
            Shape(name="qwen3-30b-a3b", hidden=2048, ffn=768, num_experts=128, topk=8, tokens=16_384),
            Shape(name="genomic-1b", hidden=1024, ffn=2816, num_experts=16, topk=2, tokens=32_768),
        )
    }
)
"""Layers of published models, and of the preset `genomic_1b`."""

_LETTERS: Mapping[str, str] = MappingProxyType({"h": "hidden", "f": "ffn", "E": "num_experts", "k": "topk"})


def shape(text: str, *, tokens: int | None = None) -> Shape:
    """A shape by name, or written out.

    Args:
        text: a name of `SHAPES`, or `h=…,f=…,E=…,k=…`.
        tokens: T; the named shape's own, or 8192, if None.

    Raises:
        ConfigError: if the text cannot be read, or the sizes contradict each other.

    >>> shape("h=64,f=96,E=4,k=2", tokens=10).rows
    20
    """
    if "=" not in text:
        if text not in SHAPES:
            hint = did_you_mean(text, SHAPES)
            raise ConfigError(f"unknown shape: --shape={text}. {hint} Or write it out: h=64,f=96,E=4,k=2.")
        known = SHAPES[text]
        return known if tokens is None else replace(known, tokens=_positive("--tokens", tokens))
    sizes: dict[str, int] = {}
    for part in text.split(","):
        letter, _, value = part.strip().partition("=")
        if letter not in _LETTERS or not value.isdigit():
            raise ConfigError(
                f"a shape is written with whole numbers h, f, E and k: --shape={text}; {part!r} is none "
                "of them. For instance h=64,f=96,E=4,k=2."
            )
        sizes[_LETTERS[letter]] = _positive(letter, int(value))
    missing = [letter for letter, name in _LETTERS.items() if name not in sizes]
    if missing:
        raise ConfigError(f"a shape needs h, f, E and k: --shape={text} lacks {', '.join(missing)}.")
    if sizes["topk"] > sizes["num_experts"]:
        raise ConfigError(f"a token cannot choose more experts than there are: --shape={text}. Lower k.")
    return Shape(name=text, tokens=_positive("--tokens", 8192 if tokens is None else tokens), **sizes)


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise ConfigError(f"a size must be at least 1: {name}={value}.")
    return value
