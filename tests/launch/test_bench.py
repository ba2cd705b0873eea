"""`isozyme bench` from its arguments to its files: ablation, training steps, reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from isozyme.core.errors import ConfigError, DataError
from isozyme.launch.bench import main
from isozyme.launch.bench_document import read_document, write_document
from isozyme.launch.bench_measured import measured_table
from isozyme.launch.bench_rank import Order, measure
from isozyme.launch.bench_report import markdown
from isozyme.launch.bench_train import TrainContender, bench_train, ladder, train_contenders
from isozyme.launch.bench_workload import Workload, peak_flops, workload
from isozyme.launch.cli import main as isozyme
from isozyme.launch.environment import ALONE
from isozyme.models.count import training_flops_per_token

TINY = (
    "model.hidden=32",
    "model.num_heads=2",
    "model.num_kv_heads=2",
    "model.moe.ffn=48",
    "data.window=16",
    "device=cpu",
)


def tiny(world_size: int = 1, **settings: Any) -> Workload:
    return workload("L0_sanity", world_size=world_size, overrides=TINY, **settings)


def measured(tmp_path: Path, contender: TrainContender) -> dict[str, Any]:
    chosen = tiny(tokens_per_gpu=32)
    order = Order(
        recipe=chosen.recipe,
        overrides=[*chosen.overrides, *contender.overrides()],
        contender=contender.name,
        warm_up=1,
        steps=2,
        result=str(tmp_path / "result"),
    )
    return measure(order, ALONE)


def test_a_layer_is_measured_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = "bench layer --shape h=32,f=48,E=4,k=2 --tokens 24 --routing balanced hot:0.5 --device cpu"
    more = "--backends loop,te --peers liger --rounds 1 --repeats 1 --name small"
    assert isozyme([*arguments.split(), *more.split(), "--out", str(tmp_path)]) == 0
    document = read_document(tmp_path / "small.json")
    assert document["kind"] == "layer"
    assert document["command"].startswith("isozyme bench layer --shape h=32")
    assert document["versions"]["torch"] == torch.__version__
    assert document["ceilings"]["gemm_tflops"] > 0
    assert [(row["routing"], row["name"], row["status"]) for row in document["rows"]] == [
        ("balanced", "loop", "ok"),
        ("balanced", "te", "unavailable"),
        ("balanced", "liger", "unavailable"),
        ("hot:0.5", "loop", "ok"),
        ("hot:0.5", "te", "unavailable"),
        ("hot:0.5", "liger", "unavailable"),
    ]
    assert "unavailable: not installed: liger-kernel" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("name", ["auto", "loop", "hf-eager-fsdp2", "hf-grouped_mm-fsdp2"])
def test_ours_and_the_peer_train_on_the_same_number_of_tokens(tmp_path: Path, name: str) -> None:
    row = measured(tmp_path, TrainContender(name=name, precision="fp32"))
    assert row["status"] == "ok"
    assert row["tokens_per_gpu"] == 32
    assert row["steps"] == 2
    assert 4.5 < row["first_loss"] < 6.5  # ln 256 = 5.5
    assert row["tokens_per_s_per_gpu"] == pytest.approx(32 / (row["step_ms"] / 1000))
    flops = training_flops_per_token(tiny(tokens_per_gpu=32).config().model, 16)
    assert row["tflops_per_gpu"] == pytest.approx(row["tokens_per_s_per_gpu"] * flops / 1e12)
    assert row["mfu"] is None


@pytest.mark.slow
def test_contenders_run_in_processes_of_their_own_and_a_failure_is_a_row() -> None:
    contenders = train_contenders(["loop", "te"], ["fp32"], ["hf-grouped_mm-fsdp2"])
    chosen = tiny(world_size=2)
    rows = list(
        bench_train(chosen, contenders, warm_up=1, steps=1, place=None, limit_s=60, say=lambda _text: None)
    )
    assert [row["status"] for row in rows] == ["ok", "unavailable", "ok"]
    assert "ep=2" in rows[0]["layout"]
    assert "transformer_engine" in rows[1]["reason"]


def test_a_workload_is_cut_to_whole_windows_of_one_micro_batch() -> None:
    config = workload("genomic-8L", world_size=2).config()
    assert (config.model.hidden, config.model.moe.ffn, config.model.num_layers) == (1024, 2816, 8)
    assert (config.data.window, config.train.micro_batch, config.train.global_batch) == (8192, 2, 4)
    assert (config.layout.dp, config.layout.ep) == (2, 2)
    assert config.optim.implementation == "torch"
    mixtral = workload("mixtral8x7b-4L", world_size=1, layers=2).config("precision=bf16")
    assert (mixtral.model.num_layers, mixtral.model.moe.router.num_experts) == (2, 8)
    assert (mixtral.data.window, mixtral.train.micro_batch) == (4096, 1)
    assert workload("sanity", world_size=2, layout="dp=2 ep=1").config().layout.ep == 1


def test_overrides_have_the_last_word_and_a_layout_shares_its_windows() -> None:
    chosen = tiny(world_size=4, tokens_per_gpu=32, layout="dp=2 tp=2 ep=2").config()
    assert (chosen.train.micro_batch, chosen.train.global_batch) == (4, 8)  # 8 windows of 16 on 4 GPUs
    accumulating = workload(
        "L0_sanity",
        world_size=2,
        tokens_per_gpu=64,
        overrides=[*TINY, "train.micro_batch=1", "optim.implementation=auto"],
    ).config()
    assert (accumulating.train.micro_batch, accumulating.train.global_batch) == (1, 8)
    assert accumulating.optim.implementation == "auto"


def test_contenders_may_have_settings_of_their_own_and_a_ladder_adds_them_up() -> None:
    plain, sharded = train_contenders(["auto", "loop@fp32+optim.sharded=true"], ["bf16"], [])
    assert sharded == TrainContender(name="loop", precision="fp32", settings=("optim.sharded=true",))
    assert sharded.overrides()[-1] == "optim.sharded=true"
    rungs = ladder(plain, ["optim.sharded=true", "optim.overlap_reduce=true"])
    assert [len(each.settings) for each in rungs] == [0, 1, 2]
    with pytest.raises(ConfigError, match=r"optim\.shard"):
        main(["train", "L0_sanity", *TINY, "--gpus", "1", "--backends", "auto+optim.shard=true"])


def test_settings_of_the_optimiser_are_measured_and_shown(tmp_path: Path) -> None:
    own = ("optim.sharded=true", "optim.overlap_reduce=true", "train.micro_batch=1")
    contender = TrainContender(name="loop", precision="fp32", settings=own)
    row = measured(tmp_path, contender)
    assert row["tokens_per_gpu"] == 32
    plain = measured(tmp_path, TrainContender(name="loop", precision="fp32"))
    assert row["first_loss"] == pytest.approx(plain["first_loss"], rel=1e-5)
    rows = [{"name": "loop", "kind": "isozyme", "contender_settings": own, **row}]
    text = markdown([document(kind="train", settings={"workload": "w", "gpus": 1}, rows=rows)])
    assert "| loop + optim.sharded=true + optim.overlap_reduce=true + train.micro_batch=1 | fp32 |" in text
    assert "torch (torch.optim.AdamW(fused=True))" in text


def test_tokens_that_are_no_whole_windows_are_refused() -> None:
    with pytest.raises(ConfigError, match="40 % 16 = 8"):
        tiny(tokens_per_gpu=40)


@pytest.mark.parametrize(
    ("setting", "instead"), [("precision=fp32", "--precisions"), ("model.moe.experts=te", "--backends")]
)
def test_a_setting_that_every_contender_has_of_its_own_is_refused(setting: str, instead: str) -> None:
    with pytest.raises(ConfigError, match=rf"by itself: {setting}\. Use {instead}"):
        workload("L0_sanity", world_size=1, overrides=[*TINY, setting])


def test_an_unknown_workload_contender_or_benchmark_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown workload: mixtrl"):
        workload("mixtrl", world_size=1)
    with pytest.raises(ConfigError, match="--peers=hf"):
        train_contenders([], ["bf16"], ["hf"])
    with pytest.raises(ConfigError, match="--backends=tee"):
        train_contenders(["tee"], ["bf16"], [])
    with pytest.raises(ConfigError, match="unknown benchmark"):
        main(["layers"])


def test_the_peak_of_a_known_gpu_is_that_of_its_data_sheet() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3") == pytest.approx(989.4e12)
    assert peak_flops("a GPU of tomorrow") is None
    assert peak_flops(None) is None


def document(**more: Any) -> dict[str, Any]:
    row = {"kind": "isozyme", "precision": "bf16", "shape": "s", "tokens": 8, "routing": "random"}
    return {
        "schema": "isozyme.bench/1",
        "kind": "layer",
        "date": "2030-01-01",
        "command": "isozyme bench layer",
        "hardware": {"gpu": "NVIDIA H200", "gpus": 1, "driver": "580"},
        "versions": {"torch": "2.11", "triton": None},
        "settings": {},
        "ceilings": {"gemm_tflops": 760.0, "copy_tbytes": 4.1},
        "cases": [{"shape": {"name": "s"}, "routing": "random", "grouped_gemm_tflops": 660.0}],
        "rows": [
            {
                **row,
                "name": "good",
                "status": "ok",
                "ms": 2.5,
                "ms_low": 2.4,
                "ms_high": 2.6,
                "tflops": 500.0,
            },
            {**row, "name": "bad", "status": "FAILED", "reason": "disagrees"},
        ],
    } | more


def test_reports_merge_files_and_name_the_machine_and_what_failed(tmp_path: Path) -> None:
    for number in range(2):
        write_document(document(date=f"2030-01-0{number + 1}"), tmp_path / f"{number}.json")
    out = tmp_path / "report.md"
    assert main(["report", *map(str, sorted(tmp_path.glob("*.json"))), "--out", str(out)]) == 0
    text = out.read_text()
    assert text.count("## layer: 1 × NVIDIA H200, driver 580") == 2
    assert "| good | bf16 | 2.50 | 2.40–2.60 | 500.0 |" in text
    assert "- bad bf16: FAILED: disagrees" in text
    assert "| bad" not in text
    assert "grouped GEMMs alone 660.0 TFLOP/s" in text
    assert "triton" not in text
    assert markdown([document()]) in text


def test_the_table_of_auto_is_made_from_the_published_results(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    published = sorted((root / "docs/benchmarks/results").glob("*.json"))
    made = tmp_path / "table.json"
    assert main(["report", *map(str, published), "--auto-table", str(made)]) == 0
    assert made.read_text() == (root / "moe/experts/measured_on/nvidia-h200.json").read_text()


def test_only_balanced_rows_of_ours_that_agreed_enter_the_table_and_one_run_counts() -> None:
    def layer(date: str, gpu: str | None, *rows: tuple[str, str, str, str, float]) -> dict[str, Any]:
        return document(
            date=date,
            hardware={"gpu": gpu},
            cases=[{"shape": {"name": "s", "topk": 2, "hidden": 4, "ffn": 6, "num_experts": 3}}],
            rows=[
                dict(zip(("name", "kind", "status", "routing", "ms"), row, strict=True))
                | {"precision": "bf16", "shape": "s", "tokens": 8}
                for row in rows
            ],
        )

    new = layer(
        "2030-01-02",
        "G",
        ("te", "isozyme", "ok", "balanced", 3.0),
        ("loop", "isozyme", "ok", "hot:0.5", 1.0),
        ("hf-eager", "peer", "ok", "balanced", 1.0),
        ("te_ops", "isozyme", "FAILED", "balanced", 1.0),
    )
    old = layer("2030-01-01", "G", ("te", "isozyme", "ok", "balanced", 9.0))
    (found,) = measured_table([new, old, document(kind="train")])["measurements"]
    assert (found["ms"], found["rows"], found["num_local_experts"]) == ({"te": 3.0}, 16, 3)
    both = layer("2029-01-01", "G", *[(x, "isozyme", "ok", "balanced", 5.0) for x in ("te", "loop")])
    (found,) = measured_table([new, old, both])["measurements"]
    assert found["ms"] == {"te": 5.0, "loop": 5.0}  # not 3.0 for one of them
    with pytest.raises(DataError, match="GPUs=G, H"):
        measured_table([new, layer("2030-01-01", "H")])
    with pytest.raises(DataError, match="GPUs=None"):
        measured_table([layer("2030-01-01", None)])


def test_a_file_that_is_no_benchmark_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps({"schema": "other"}))
    with pytest.raises(DataError, match="schema="):
        read_document(path)


def test_numbers_that_json_lacks_are_written_as_null(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "d.json"
    write_document(document(settings={"x": float("inf"), "y": (1.0, float("nan"))}), path)
    assert read_document(path)["settings"] == {"x": None, "y": [1.0, None]}
