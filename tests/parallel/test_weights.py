"""One file of whole tensors, from any layout, for any layout and for other readers."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import load_file, save_file

from isozyme.core.errors import CheckpointError
from isozyme.core.topology import Layout
from isozyme.parallel.shard_spec import named_shards
from isozyme.parallel.weights import load_weights, save_weights
from tests.parallel.sharded_model import UNCHECKED, global_specs, layouts
from tests.parallel.test_checkpoint import files_limited_to, on_ranks, tag


def save(layout: Layout, path) -> None:
    def program(groups, model):
        tag(model, groups)
        save_weights(path, model, groups, metadata={"config": {"hidden": 3}})

    on_ranks(layout, program)


def compare(layout: Layout, path) -> None:
    def program(groups, model):
        assert load_weights(path, model, groups) == {"config": {"hidden": 3}}
        loaded = {name: parameter.detach().clone() for name, parameter in model.by_name().items()}
        tag(model, groups)
        assert all(torch.equal(parameter, loaded[name]) for name, parameter in model.by_name().items())

    on_ranks(layout, program)


@UNCHECKED
@settings(max_examples=8)
@given(layouts(most=8), layouts(most=4))
def test_weights_of_any_layout_load_at_any_other(tmp_path_factory, one, other):
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    save(one, path)
    compare(other, path)


def test_the_file_is_the_same_at_every_layout(tmp_path):
    digests = set()
    for number, layout in enumerate([Layout(), Layout(tp=2, dp=2, ep=4), Layout(dp=2, pp=2, ep=2)]):
        save(layout, tmp_path / f"{number}.safetensors")
        digests.add(hashlib.sha256((tmp_path / f"{number}.safetensors").read_bytes()).hexdigest())
    assert len(digests) == 1


def test_other_readers_find_whole_tensors_under_canonical_names(tmp_path):
    save(Layout(tp=2, dp=2, ep=2), tmp_path / "w.safetensors")
    tensors = load_file(tmp_path / "w.safetensors")
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {
        spec.name: spec.global_shape for spec, _, _ in global_specs()
    }


def test_the_checksum_is_what_sha256sum_expects(tmp_path):
    save(Layout(), tmp_path / "w.safetensors")
    digest = hashlib.sha256((tmp_path / "w.safetensors").read_bytes()).hexdigest()
    assert (tmp_path / "w.safetensors.sha256").read_text() == f"{digest}  w.safetensors\n"


def fails_alike(layout, action) -> str:
    def program(groups, model):
        with pytest.raises(CheckpointError) as caught:
            action(groups, model)
        return str(caught.value)

    messages = set(on_ranks(layout, program))
    assert len(messages) == 1
    return messages.pop()


def test_a_damaged_file_is_refused_on_all_ranks(tmp_path):
    path = tmp_path / "w.safetensors"
    save(Layout(), path)
    content = bytearray(path.read_bytes())
    content[-3] ^= 16
    path.write_bytes(content)
    layout = Layout(dp=2, ep=2)
    assert "damaged" in fails_alike(layout, lambda groups, model: load_weights(path, model, groups))


def test_a_file_of_another_model_is_refused_with_every_difference(tmp_path):
    path = tmp_path / "w.safetensors"
    save_file({"embedding": torch.zeros(7, 3), "strange": torch.zeros(1)}, path)
    message = fails_alike(Layout(dp=2), lambda groups, model: load_weights(path, model, groups))
    for part in (str(path), "misshapen: embedding", "unexpected: strange", "missing: layers.0.norm"):
        assert part in message


def test_a_disk_that_fills_up_is_an_error_on_all_ranks_and_leaves_the_old_file(tmp_path):
    path = tmp_path / "w.safetensors"
    save(Layout(), path)
    before = path.read_bytes()
    with files_limited_to(5000):
        message = fails_alike(
            Layout(dp=2, ep=2), lambda groups, model: save_weights(path, named_shards(model), groups)
        )
    assert "File too large" in message
    assert path.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["w.safetensors", "w.safetensors.sha256"]
