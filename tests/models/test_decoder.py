"""The decoder as a whole: what a token may depend on, chunks, names, precision and refusals."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from torch.nn import functional as F

from isozyme.core.config import RunConfig
from isozyme.core.context import AttentionConfig
from isozyme.core.errors import BackendError, ConfigError
from isozyme.models.decoder import Decoder, build_model
from isozyme.models.types import Chunk, Model
from isozyme.parallel.shard_spec import named_shards, spec_of
from tests.models.common import CPU, random_batch, single_groups, tiny, whole


def _gradients(model: Decoder, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    names = [name for name, tensor, _ in named_shards(model) if tensor.requires_grad]
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return {n: torch.zeros(()) if g is None else g for n, g in zip(names, grads, strict=True)}


@pytest.mark.parametrize("pattern", ["D", "M", "DMM"])
def test_loss_is_the_cross_entropy_of_the_logits_over_valid_labels(pattern: str) -> None:
    model = whole(tiny(pattern=pattern))
    valid = torch.rand(2, 16) < 0.7
    batch = random_batch(label_valid=valid)
    target = batch.labels.masked_fill(~valid, -100).flatten()
    expected = F.cross_entropy(model.logits(batch).flatten(0, 1), target, reduction="sum")
    output = model(batch)
    torch.testing.assert_close(output.loss_sum, expected)
    assert output.hidden is None
    assert len(output.stats) == len(output.routings) == 3 - (pattern * 3)[:3].count("D")
    assert isinstance(model, Model)


@pytest.mark.parametrize("packed", [False, True])
def test_a_later_token_changes_no_earlier_logits(packed: bool) -> None:
    model = whole(tiny())
    batch = random_batch(packed=packed)
    changed = batch.tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 37
    before, after = model.logits(batch), model.logits(dataclasses.replace(batch, tokens=changed))
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=1e-12, atol=1e-12)
    assert ((before - after)[:, 9:].abs().amax(-1) > 1e-6).all()


def test_packed_documents_equal_documents_alone() -> None:
    model = whole(tiny())
    cuts = [(0, 5), (5, 6), (6, 16)]
    batch = random_batch(
        windows=1,
        positions=torch.cat([torch.arange(stop - start) for start, stop in cuts])[None],
        documents=torch.cat([torch.full((b - a,), i) for i, (a, b) in enumerate(cuts)])[None],
        packed=True,
    )
    together = model.logits(batch)
    for start, stop in cuts:
        alone = random_batch(windows=1, length=stop - start, tokens=batch.tokens[:, start:stop])
        torch.testing.assert_close(together[:, start:stop], model.logits(alone))


def test_padding_changes_neither_loss_nor_gradients() -> None:
    model = whole(tiny())
    short = random_batch(length=11)
    real = torch.arange(16).expand(2, 16) < 11
    filled = {
        name: F.pad(getattr(short, name), (0, 5), value=value)
        for name, value in (("tokens", 1), ("labels", -7), ("label_valid", False))
    }
    padded = random_batch(length=16, token_valid=real, **filled)
    ours, theirs = model(short), model(padded)
    torch.testing.assert_close(ours.loss_sum, theirs.loss_sum, rtol=1e-12, atol=0)
    expected = _gradients(model, ours.loss_sum)
    for name, grad in _gradients(model, theirs.loss_sum).items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-9, atol=1e-9, msg=name)
    for one, other in zip(ours.stats, theirs.stats, strict=True):
        assert torch.equal(one.routed, other.routed)


@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_receives_a_gradient(tied: bool) -> None:
    model = whole(tiny(tied=tied))
    for name, grad in _gradients(model, model(random_batch(windows=4)).loss_sum).items():
        assert torch.isfinite(grad).all(), name
        assert grad.abs().max() > 0, name


def test_without_valid_labels_the_loss_and_every_gradient_are_exactly_zero() -> None:
    model = whole(tiny())
    loss = model(random_batch(label_valid=torch.zeros(2, 16, dtype=torch.bool))).loss_sum
    assert loss.item() == 0.0
    assert all(not grad.any() for grad in _gradients(model, loss).values())


@pytest.mark.parametrize("tied", [False, True])
def test_chunks_hold_the_weights_of_the_whole_and_compose_to_it(tied: bool) -> None:
    config = tiny(tied=tied)
    reference = whole(config)
    expected = {name: tensor for name, tensor, _ in named_shards(reference)}
    chunks = [
        Chunk(layers=range(0, 1), has_head=False),
        Chunk(layers=range(1, 2), has_embedding=False, has_head=False),
        Chunk(layers=range(2, 3), has_embedding=False),
    ]
    stages = [build_model(config, single_groups(), chunk, CPU, torch.float64) for chunk in chunks]
    held = [{name: tensor for name, tensor, _ in named_shards(stage)} for stage in stages]
    assert set().union(*held) == set(expected)
    for part in held:
        for name, tensor in part.items():
            assert torch.equal(tensor, expected[name]), name
    batch, hidden = random_batch(), None
    for stage in stages:
        output = stage(batch, hidden)
        hidden = output.hidden
    torch.testing.assert_close(output.loss_sum, reference(batch).loss_sum, rtol=1e-13, atol=0)


def test_parameters_carry_their_canonical_names() -> None:
    model = whole(tiny())
    names = [name for name, _, _ in named_shards(model)]
    assert len(names) == len(set(names))
    assert {name for name in names if ".moe." not in name} == {
        "embedding.weight",
        "final_norm.weight",
        "head.weight",
        "layers.0.mlp.gate_up",
        "layers.0.mlp.down",
        *(f"layers.{i}.{norm}_norm.weight" for i in range(3) for norm in ("attention", "mlp")),
        *(f"layers.{i}.attention.{part}.weight" for i in range(3) for part in ("q", "k", "v", "output")),
    }
    assert {f"layers.2.moe.experts.3.{part}" for part in ("gate_up", "down")} <= set(names)


def test_norms_and_embedding_are_the_dense_weights_without_decay() -> None:
    specs = [spec for name, _, spec in named_shards(whole(tiny())) if ".moe." not in name]
    without = {spec.name for spec in specs if not spec.decay}
    assert without == {spec.name for spec in specs if "norm" in spec.name} | {"embedding.weight"}


def test_output_projections_start_smaller_by_the_depth() -> None:
    model = whole(tiny(hidden=128, num_layers=2, pattern="DM", init_std=0.3))
    std = {name: tensor.std().item() for name, tensor, _ in named_shards(model)}
    for name in ("layers.0.attention.output.weight", "layers.0.mlp.down", "layers.1.moe.experts.0.down"):
        assert std[name] == pytest.approx(0.3 / 2, rel=0.05), name
    for name in ("layers.0.attention.q.weight", "layers.0.mlp.gate_up", "layers.1.moe.experts.0.gate_up"):
        assert std[name] == pytest.approx(0.3, rel=0.05), name
    assert std["embedding.weight"] == pytest.approx(1.0, rel=0.05)


def test_a_tied_model_has_one_vocabulary_weight_with_the_gradients_of_both_uses() -> None:
    tied, apart = whole(tiny(tied=True, embedding_std=1.0)), whole(tiny())
    assert tied.head is not None
    assert tied.embedding is not None
    assert tied.head.weight is tied.embedding.weight
    assert spec_of(tied.head.weight).replicas == {"cp": "partial", "dp": "partial", "embedding": "partial"}
    assert apart.head is not None
    assert apart.embedding is not None
    with torch.no_grad():
        apart.head.weight.copy_(apart.embedding.weight)
    batch = random_batch()
    one, two = _gradients(tied, tied(batch).loss_sum), _gradients(apart, apart(batch).loss_sum)
    torch.testing.assert_close(one["embedding.weight"], two["embedding.weight"] + two["head.weight"])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_lower_precision_stays_near_fp64(dtype: torch.dtype, tolerance: float) -> None:
    config = tiny(init_std=0.1)
    exact = whole(config)
    with torch.no_grad():
        for tensor in exact.parameters():
            tensor.copy_(tensor.to(dtype))
    batch = random_batch()
    expected, found = exact(batch), whole(config, dtype)(batch, routing_override=exact(batch).routings)
    assert found.loss_sum.dtype == torch.float32
    assert found.loss_sum.item() == pytest.approx(expected.loss_sum.item(), rel=tolerance)


def test_a_model_cast_after_it_was_built_equals_one_built_so() -> None:
    config = tiny(pattern="D")  # fp32 initial values are exact in fp64
    batch = random_batch()
    built, cast = whole(config), whole(config, torch.float32).double()
    assert torch.equal(built(batch).loss_sum, cast(batch).loss_sum)


def test_the_choices_of_each_layer_are_told() -> None:
    choices = whole(tiny()).choices
    of_experts = {f"layers.{i}.moe.{part}" for i in (1, 2) for part in ("dispatcher", "experts")}
    of_all = {f"layers.{i}.{part}" for i in (0, 1, 2) for part in ("attention", "norm")}
    assert set(choices) == of_experts | of_all
    assert "loop" in choices["layers.1.moe.experts"]
    assert choices["layers.0.attention"].startswith("torch (")
    assert choices["layers.0.norm"].startswith("torch (")


def test_a_named_attention_kernel_or_norm_that_cannot_run_is_refused() -> None:
    for changes in ({"attention": AttentionConfig(kernel="flash")}, {"norm": "te"}):
        with pytest.raises(BackendError, match=r"float64 on cpu|device=cpu"):
            whole(tiny(**changes))


def test_a_precision_that_no_backend_has_is_refused() -> None:
    config = dataclasses.replace(tiny(), precision="fp8_block")
    with pytest.raises(BackendError, match="fp8_block"):
        whole(config, torch.bfloat16)


def test_replaying_the_own_routing_changes_nothing() -> None:
    model, batch = whole(tiny()), random_batch()
    first = model(batch)
    again = model(batch, routing_override=first.routings)
    assert torch.equal(first.loss_sum, again.loss_sum)


def test_a_replayed_routing_reaches_its_own_layer() -> None:
    model, batch = whole(tiny()), random_batch()
    wanted = [
        dataclasses.replace(routing, topk_ids=(routing.topk_ids + shift) % 4)
        for shift, routing in zip((1, 2), model(batch).routings, strict=True)
    ]
    used = model(batch, routing_override=wanted).routings
    assert all(torch.equal(a.topk_ids, b.topk_ids) for a, b in zip(wanted, used, strict=True))


def test_the_seed_decides_the_weights() -> None:
    one, two, other = whole(tiny()), whole(tiny()), whole(dataclasses.replace(tiny(), seed=4))
    for a, b, c in zip(one.parameters(), two.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert "norm" in spec_of(a).name or not torch.equal(a, c)


@pytest.mark.parametrize(
    ("config", "chunk", "message"),
    [
        (tiny(), Chunk(layers=range(2, 4)), "chunk.layers=range(2, 4), model.num_layers=3"),
        (tiny(num_kv_heads=3), Chunk.whole(3), "num_kv_heads must divide num_heads"),
    ],
)
def test_an_impossible_model_is_refused(config: RunConfig, chunk: Chunk, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        build_model(config, single_groups(), chunk, CPU, torch.float32)


def test_a_call_that_does_not_fit_the_chunk_is_refused() -> None:
    first = build_model(tiny(), single_groups(), Chunk(layers=range(1), has_head=False), CPU, torch.float32)
    last = build_model(
        tiny(), single_groups(), Chunk(layers=range(1, 3), has_embedding=False), CPU, torch.float32
    )
    batch = random_batch()
    with pytest.raises(ConfigError, match="hidden is missing"):
        last(batch)
    with pytest.raises(ConfigError, match="hidden is given"):
        first(batch, torch.zeros(2, 16, 32))
    with pytest.raises(ConfigError, match="logits need the head"):
        first.logits(batch)
    routings = last(batch, torch.randn(2, 16, 32)).routings
    with pytest.raises(ConfigError, match="hold 2"):
        last(batch, torch.zeros(2, 16, 32), routings[:1])
