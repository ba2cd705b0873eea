"""A checkpoint loads at any layout or is refused on all ranks alike; a resumed run goes on bit for bit."""

from __future__ import annotations

import contextlib
import json
import resource
import shutil
from collections import namedtuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from isozyme.core.config import OptimConfig
from isozyme.core.errors import CheckpointError
from isozyme.core.initialisation import Init
from isozyme.core.topology import Layout, Topology
from isozyme.parallel.agreement import together
from isozyme.parallel.checkpoint import load_checkpoint, save_checkpoint
from isozyme.parallel.checkpoint_files import DTYPE_CODES
from isozyme.parallel.grad_buffer import GradientBuffer
from isozyme.parallel.optimizer import Optimizer
from isozyme.parallel.process_groups import ProcessGroups, SingleWorld
from isozyme.parallel.shard_spec import ShardSpec, attach, dense_spec, named_shards
from isozyme.parallel.simulated import simulate
from tests.parallel.sharded_model import UNCHECKED, backward, build, layouts


def tag(model, groups) -> None:
    """Give every element of the global model a value of its own: number of the tensor and place in it."""
    names = sorted(
        {name for of_rank in groups.world.all_gather_object(list(model.by_name())) for name in of_rank}
    )
    with torch.no_grad():
        for name, parameter in model.by_name().items():
            spec = parameter.shard_spec
            places = torch.arange(torch.Size(spec.global_shape).numel(), dtype=torch.float64)
            whole = names.index(name) * 1000 + places.view(spec.global_shape)
            parameter.copy_(whole[spec.slices(groups.topology, groups.rank)])


def on_ranks(layout: Layout, program):
    return simulate(Topology(layout).world_size, lambda world: program(*build(world, layout)))


def save(layout: Layout, root, step: int = 100, **options):
    def program(groups, model):
        tag(model, groups)
        return save_checkpoint(root, step, named_shards(model), groups, **options)

    paths = on_ranks(layout, program)
    assert len(set(paths)) == 1
    return paths[0]


def load_and_compare(layout: Layout, path) -> None:
    def program(groups, model):
        load_checkpoint(path, named_shards(model), groups)
        loaded = {name: parameter.detach().clone() for name, parameter in model.by_name().items()}
        tag(model, groups)
        for name, parameter in model.by_name().items():
            assert torch.equal(parameter, loaded[name]), name

    on_ranks(layout, program)


@UNCHECKED
@settings(max_examples=10)
@given(layouts(most=4), layouts(most=8))
def test_values_saved_at_one_layout_load_at_any_other(tmp_path_factory, one, other):
    load_and_compare(other, save(one, tmp_path_factory.mktemp("checkpoints")))


@UNCHECKED
@pytest.mark.parametrize("saved", [1, 2, 4])
def test_every_expert_comes_back_as_itself_at_every_ep(tmp_path, saved):
    path = save(Layout(dp=4, ep=saved), tmp_path)
    for loaded in (1, 2, 4, 8):
        load_and_compare(Layout(dp=max(loaded, 2), ep=loaded), path)


def test_a_loader_of_the_wrong_rank_s_experts_would_be_caught(tmp_path):
    layout = Layout(dp=2, ep=2)
    path = save(layout, tmp_path)

    def program(groups, model):
        # As if all ranks numbered their own experts from 0: rank 1 takes those of rank 0.
        def renumbered(name: str) -> str:
            parts = name.split(".")
            if "experts" in parts:
                parts[3] = str(int(parts[3]) % 4)
            return ".".join(parts)

        shards = [(renumbered(name), parameter, spec) for name, parameter, spec in named_shards(model)]
        load_checkpoint(path, shards, groups, allow_extra=True)
        loaded = {name: p.detach().clone() for name, p in model.by_name().items()}
        tag(model, groups)
        return all(torch.equal(p, loaded[name]) for name, p in model.by_name().items())

    assert on_ranks(layout, program) == [True, False]


def test_each_unique_shard_is_written_once(tmp_path):
    path = save(Layout(tp=2, dp=2, ep=2), tmp_path)
    index = json.loads((path / "index.json").read_text())
    for stored in index["tensors"].values():
        elements = sum(torch.Size(shard["shape"]).numel() for shard in stored["shards"])
        assert elements == torch.Size(stored["shape"]).numel()
    assert not list(tmp_path.glob(".*"))


def training(world, layout, root, *, steps: range, resume=None, save_at=None):
    """Losses, weights and moments of some steps; optionally from a checkpoint."""
    groups, model = build(world, layout)
    buffer = GradientBuffer(model.parameters(), groups)
    optimizer = Optimizer(buffer, OptimConfig(implementation="torch"))
    everything = [*named_shards(model), *optimizer.state()]
    if resume is not None:
        state = load_checkpoint(resume, everything, groups)
        optimizer.loaded(state["updates"])
    for step in steps:
        buffer.zero()
        backward(model, groups, step)
        buffer.reduce()
        optimizer.step(0.01)
        if step == save_at:
            save_checkpoint(root, step, everything, groups, state={"updates": optimizer.updates})
    return {name: tensor.detach().clone() for name, tensor, _ in everything}


def test_a_resumed_run_equals_one_that_went_on_bit_for_bit(tmp_path):
    layout = Layout(tp=2, dp=2, ep=2)
    straight = simulate(4, lambda w: training(w, layout, tmp_path, steps=range(6), save_at=2))
    path = tmp_path / "step_00000002"
    resumed = simulate(4, lambda w: training(w, layout, tmp_path, steps=range(3, 6), resume=path))
    for one, other in zip(straight, resumed, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_moments_load_at_another_layout(tmp_path):
    def moments(world, layout, resume):
        groups, model = build(world, layout)
        optimizer = Optimizer(GradientBuffer(model.parameters(), groups), OptimConfig(implementation="torch"))
        load_checkpoint(resume, [*named_shards(model), *optimizer.state()], groups)
        save_checkpoint(tmp_path / "again", 1, [*named_shards(model), *optimizer.state()], groups)
        return {n: t.clone() for n, t, s in optimizer.state()} if world.size == 1 else None

    simulate(4, lambda w: training(w, Layout(tp=2, dp=2, ep=4), tmp_path, steps=range(2), save_at=1))
    first = simulate(1, lambda w: moments(w, Layout(), tmp_path / "step_00000001"))[0]
    simulate(4, lambda w: moments(w, Layout(dp=4, ep=2), tmp_path / "step_00000001"))
    second = simulate(1, lambda w: moments(w, Layout(), tmp_path / "again" / "step_00000001"))[0]
    assert max(float(t.abs().max()) for t in first.values()) > 0
    assert all(torch.equal(first[name], second[name]) for name in first)


Alone = namedtuple("Alone", "groups shards")


def alone(**tensors: torch.Tensor) -> Alone:
    groups = ProcessGroups(Topology(Layout()), SingleWorld())
    specs = {name: dense_spec(name, tuple(t.shape), Init.constant(0.0)) for name, t in tensors.items()}
    return Alone(groups, [(name, tensor, specs[name]) for name, tensor in tensors.items()])


@pytest.mark.parametrize("dtype", DTYPE_CODES)
def test_every_dtype_comes_back_bitwise(tmp_path, dtype):
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (6 * dtype.itemsize,), dtype=torch.uint8)
    tensor = raw.view(dtype).view(2, 3)
    groups, shards = alone(w=tensor)
    path = save_checkpoint(tmp_path, 1, shards, groups)
    other = torch.zeros_like(tensor)
    load_checkpoint(path, alone(w=other).shards, groups)
    assert torch.equal(other.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1, 1, 1)])
def test_scalars_and_empty_tensors_are_kept(tmp_path, shape):
    tensor = torch.full(shape, 7.0)
    groups, shards = alone(w=tensor)
    path = save_checkpoint(tmp_path, 1, shards, groups)
    other = torch.zeros(shape)
    load_checkpoint(path, alone(w=other).shards, groups)
    assert torch.equal(other, tensor)


def test_buffers_with_a_spec_are_saved_and_loaded(tmp_path):
    groups = ProcessGroups(Topology(Layout()), SingleWorld())
    module = nn.Module()
    module.register_buffer("bias", torch.arange(4.0))
    module.register_buffer("cache", torch.zeros(2))  # without a spec: not part of the model
    attach(
        module.bias, ShardSpec(name="expert_bias", global_shape=(4,), init=Init.constant(0), kind="buffer")
    )
    path = save_checkpoint(tmp_path, 1, named_shards(module), groups)
    storage = module.bias.data_ptr()
    module.bias.zero_()
    load_checkpoint(path, named_shards(module), groups)
    assert module.bias.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert module.bias.data_ptr() == storage


def test_the_state_comes_back(tmp_path):
    groups, shards = alone(w=torch.ones(2))
    state = {"step": 3, "data": {"seed": 0, "epoch": 1, "sample": 77}, "rates": [0.1, 1e-300]}
    path = save_checkpoint(tmp_path, 3, shards, groups, state=state)
    assert load_checkpoint(path, shards, groups) == state


def test_everything_that_does_not_fit_is_listed_at_once(tmp_path):
    groups, saved = alone(a=torch.ones(2), b=torch.ones(3), c=torch.ones(4), d=torch.ones(1))
    path = save_checkpoint(tmp_path, 1, saved, groups)
    wanted = alone(a=torch.zeros(2), b=torch.zeros(5), d=torch.zeros(1).double(), e=torch.zeros(1))
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path, wanted.shards, groups)
    message = str(caught.value)
    assert "in 4 places" in message
    for part in ("misshapen: b is (3,)", "unexpected: c", "another dtype: d", "missing: e (1,)"):
        assert part in message
    assert all(not tensor.any() for _, tensor, _ in wanted.shards)  # nothing was half loaded


def test_weights_alone_load_from_a_checkpoint_that_has_more(tmp_path):
    groups, saved = alone(a=torch.ones(2), more=torch.ones(3))
    path = save_checkpoint(tmp_path, 1, saved, groups)
    wanted = alone(a=torch.zeros(2).double())
    load_checkpoint(path, wanted.shards, groups, allow_extra=True, cast=True)
    assert wanted.shards[0][1].tolist() == [1.0, 1.0]


@settings(max_examples=40)
@given(st.data())
def test_a_flipped_bit_anywhere_is_found(tmp_path_factory, data):
    groups, shards = alone(a=torch.randn(8), b=torch.randn(3))
    path = save_checkpoint(tmp_path_factory.mktemp("c"), 1, shards, groups, state={"step": 1})
    file = path / data.draw(st.sampled_from(sorted(p.name for p in path.iterdir())))
    content = bytearray(file.read_bytes())
    place = data.draw(st.integers(0, len(content) * 8 - 1))
    content[place // 8] ^= 1 << place % 8
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"damaged|COMPLETE"):
        load_checkpoint(path, alone(a=torch.zeros(8), b=torch.zeros(3)).shards, groups)


@pytest.mark.parametrize("name", ["rank_00001.safetensors", "state.json", "index.json", "COMPLETE"])
@pytest.mark.parametrize("fault", ["deleted", "truncated"])
def test_a_lost_or_short_file_is_named_on_all_ranks(tmp_path, name, fault):
    layout = Layout(dp=2, ep=2)
    path = save(layout, tmp_path)
    if fault == "deleted":
        (path / name).unlink()
    else:
        (path / name).write_bytes((path / name).read_bytes()[:-1])

    def program(groups, model):
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(path, named_shards(model), groups)
        return str(caught.value)

    messages = set(on_ranks(layout, program))
    assert len(messages) == 1
    assert name.partition(".")[0] in messages.pop()


def test_a_missing_checkpoint_is_an_error(tmp_path):
    groups, shards = alone(a=torch.ones(1))
    with pytest.raises(CheckpointError, match="there is no checkpoint at"):
        load_checkpoint(tmp_path / "step_00000001", shards, groups)


def test_an_older_checkpoint_of_the_same_step_is_replaced(tmp_path):
    groups, shards = alone(a=torch.ones(1))
    save_checkpoint(tmp_path, 1, shards, groups)
    shards[0][1].fill_(2.0)
    path = save_checkpoint(tmp_path, 1, shards, groups)
    shards[0][1].fill_(3.0)
    load_checkpoint(path, shards, groups)
    assert shards[0][1].item() == 2.0
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]


def test_what_an_interrupted_save_left_is_no_obstacle(tmp_path):
    left = tmp_path / ".step_00000001.partial"
    left.mkdir()
    (left / "rank_00000.safetensors").write_bytes(b"half")
    groups, shards = alone(a=torch.ones(1))
    load_checkpoint(save_checkpoint(tmp_path, 1, shards, groups), shards, groups)
    assert not left.exists()


@contextlib.contextmanager
def files_limited_to(size: int):
    """The operating system refuses to let a file grow beyond `size`, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def fails_alike(layout: Layout, root) -> str:
    def program(groups, model):
        with pytest.raises(CheckpointError) as caught:
            save_checkpoint(root, 100, named_shards(model), groups)
        return str(caught.value)

    messages = set(on_ranks(layout, program))
    assert len(messages) == 1
    return messages.pop()


def test_a_disk_that_fills_up_is_an_error_on_all_ranks_and_keeps_the_old_checkpoint(tmp_path):
    layout = Layout(dp=2, ep=2)
    save(layout, tmp_path, step=50)
    with files_limited_to(2000):
        message = fails_alike(layout, tmp_path)
    assert "File too large" in message
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000050"]


def test_a_full_disk_is_refused_with_its_arithmetic(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("Usage", "free")(10))
    assert "has 10 free" in fails_alike(Layout(dp=2, ep=2), tmp_path)


def test_an_unusable_folder_is_an_error_on_all_ranks(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    message = fails_alike(Layout(dp=2), tmp_path / "file")
    assert "rank 0" in message
    assert str(tmp_path / "file") in message


def test_an_error_of_one_rank_reaches_all():
    def program(groups, model):
        with pytest.raises(CheckpointError, match="rank 1: ZeroDivisionError"):
            together(groups.world, "dividing", lambda: 1 // (1 - groups.rank))
        return True

    assert on_ranks(Layout(dp=2), program) == [True, True]


def test_state_that_is_not_json_is_an_error_and_publishes_nothing(tmp_path):
    groups, shards = alone(a=torch.ones(1))
    with pytest.raises(CheckpointError, match="not JSON serializable"):
        save_checkpoint(tmp_path, 1, shards, groups, state={"bad": object()})
    assert not list(tmp_path.iterdir())
