"""Named models: the smallest that shows expert parallelism, two for genomes, and a published one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from isozyme.core.config import ModelConfig, MoEConfig, RouterConfig
from isozyme.core.errors import ConfigError, did_you_mean


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A model with the window it is meant for."""

    about: str
    """One line: what it is for, or where its numbers come from."""
    model: ModelConfig
    window: int
    """S, tokens of a training window."""


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "sanity": Preset(
            about="The smallest that proves expert parallelism: two ranks, on a CPU too.",
            model=ModelConfig(
                hidden=384,
                num_layers=2,
                num_heads=6,
                num_kv_heads=6,
                ffn=1536,
                moe=MoEConfig(ffn=1536, router=RouterConfig(num_experts=4, topk=2)),
            ),
            window=256,
        ),
        "genomic_small": Preset(
            about="57 M parameters, 19 M of them active: for one genome and one GPU.",
            model=ModelConfig(
                hidden=512,
                num_layers=8,
                num_heads=8,
                num_kv_heads=4,
                ffn=1024,
                moe=MoEConfig(ffn=512, router=RouterConfig(num_experts=8, topk=2)),
            ),
            window=1024,
        ),
        "genomic_1b": Preset(
            about="1.1 B parameters, 160 M of them active: for many genomes and a node of GPUs.",
            model=ModelConfig(
                hidden=1024,
                num_layers=8,
                num_heads=16,
                num_kv_heads=4,
                ffn=5632,
                moe=MoEConfig(ffn=2816, router=RouterConfig(num_experts=16, topk=2)),
            ),
            window=8192,
        ),
        "mixtral_8x7b": Preset(
            about="46.7 B parameters, 12.9 B of them active (Jiang et al. 2024, arXiv:2401.04088).",
            model=ModelConfig(
                vocab_size=32_000,
                hidden=4096,
                num_layers=32,
                num_heads=32,
                num_kv_heads=8,
                ffn=14_336,
                rope_theta=1e6,
                embedding_std=0.02,
                moe=MoEConfig(ffn=14_336, router=RouterConfig(num_experts=8, topk=2, aux_loss=0.02)),
            ),
            window=4096,
        ),
    }
)
"""All presets by name."""


def preset(name: str) -> Preset:
    """The preset of that name.

    Raises:
        ConfigError: if there is none; the message names the nearest.

    >>> preset("sanity").model.hidden
    384
    """
    if name not in PRESETS:
        raise ConfigError(f"a preset must exist: preset={name}. {did_you_mean(name, PRESETS)}")
    return PRESETS[name]
