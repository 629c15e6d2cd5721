"""The benchmark of attention: its plan, its figures, its peers, and a dry run end to end."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from typer.testing import CliRunner

from benchmarks import attention, attention_measure, attention_render, unified_attention
from benchmarks import attention_rows as rows
from benchmarks.attention_measure import Peers, RowMeasurer, relative_error
from benchmarks.attention_rows import Case, Report, Row, Workload
from benchmarks.measure import ContextLostError, Picks, pick
from benchmarks.unified_attention import STOCK, Constants
from kernel_templates.attention_problem import NO_BLOCK, AttentionInputs
from kernel_templates.base import KernelCall, record_to_dict
from tuned_configs.lookup import TableSet
from tuned_configs.schema import Device, Entry, Run
from tuned_configs.schema import Timing as TimingFields
from tuned_configs.store import make_table, update_table
from tuner.device import attached_gpus, from_data_file
from tuner.model import load_model
from tuner.timing import Comparison, Timing
from tuner.trial import Bench

H200 = from_data_file("h200")

#: Small enough for the interpreter: what the dry run takes for every kind of layer.
SMALL = (Workload("prefill", 2, 5, 0), Workload("decode", 2, 1, 7))


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
    monkeypatch.setenv(attention.flash_attention.CACHE_VARIABLE, "0")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "TINY", SMALL)
    monkeypatch.setattr(rows, "TINY_WINDOW", 3)


def case_of(phase: str, layers: str = "sliding") -> Case:
    """A tiny case of the E2B's layers."""
    found = rows.plan([load_model("e2b")], [phase], [16], tiny=True)
    return next(case for case in found if case.layers == layers)


def picks_of(case: Case, root: Path) -> Picks:
    return pick(case.asked, H200, TableSet.load(root, H200.name))


def test_the_plan_has_every_workload_of_every_kind() -> None:
    models = [load_model(name) for name in attention.MODELS]
    assert len(rows.plan(models, rows.PHASES)) == 2 * 8 * (4 + 12)
    found = rows.plan(models, rows.PHASES, [16])
    assert len(found) == 8 * (4 + 12)
    assert len({case.name for case in found}) == len(found)
    sizes = {case.workload.name for case in found if case.workload.phase == "prefill"}
    assert sizes == {"8 x 1024", "2 x 4096", "1 x 8192", "1 x 2048 on 6144"}
    # Both kinds of a model split by the model's KV heads, not by their own.
    limits = {case.job.models: {} for case in found}  # type: ignore[var-annotated]
    for case in found:
        limits[case.job.models][case.layers] = case.peer.split_up_to
    assert limits == {
        ("e2b",): {"sliding": 128, "full": 128},
        ("e4b",): {"sliding": 64, "full": 64},
        ("26b-a4b",): {"sliding": 16, "full": 16},
        ("31b",): {"sliding": 8, "full": 8},
    }
    assert all(case.job.problem.tokens == case.peer.tokens for case in found)
    # A model that has the same layers adds none.
    assert len(rows.plan([models[0], models[0]], ["decode"], [16])) == 2 * 12
    # A server asks for one batch of a count of tokens, whatever the lengths are.
    asked = {(case.asked.problem.queries, case.asked.problem.context) for case in found}
    assert asked == {(1024, 0), (1, 4096)}
    assert all(case.asked.problem.tokens == case.peer.tokens for case in found)


def test_the_window_is_vllms() -> None:
    sliding, full = case_of("prefill").peer, case_of("prefill", "full").peer
    assert unified_attention.window(sliding) == (rows.TINY_WINDOW - 1, 0)
    assert unified_attention.window(full) == (-1, -1)


@pytest.mark.parametrize("phase", rows.PHASES)
def test_all_constants_hold_a_querys_heads(phase: str) -> None:
    for case in rows.plan([load_model(name) for name in attention.MODELS], [phase]):
        found = unified_attention.candidates(case.peer)
        assert found[0] == STOCK
        assert len(found) >= 4
        for constants in found[1:]:
            assert constants.block_m >= case.peer.group
            stages = constants.num_stages - 1
            tiles = 4 * constants.tile * case.peer.head_dim * stages
            assert tiles + 2 * constants.block_m * case.peer.head_dim <= H200.shared_per_block


def test_launches_are_recorded_and_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a module in the place of vLLM's, which this suite does not need."""

    class Kernel:
        params = ()

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            raise AssertionError("launched")

    class Module:
        kernel_unified_attention = Kernel()
        reduce_segments = Kernel()

        def unified_attention(self, q: torch.Tensor, seqused_k: torch.Tensor, **_: Any) -> None:
            arguments = {"query_ptr": q, "num_queries_per_kv": 8, "num_seqs": len(seqused_k)}
            self.kernel_unified_attention[(7, 1)](**arguments, BLOCK_M=16, BLOCK_Q=2, TILE_SIZE=32)

    module = Module()
    before = module.kernel_unified_attention
    monkeypatch.setattr(unified_attention.importlib, "import_module", lambda name: module)
    case = case_of("prefill")
    inputs = case.job.template.make_inputs(case.job.problem, 0, torch.device("meta"), 0)
    arguments = unified_attention.operands(case.peer, inputs)
    assert arguments["softmax_scale"] == 1.0
    (stock,) = unified_attention.launches(arguments)
    assert (stock.grid, stock.num_warps, stock.num_stages) == ((7, 1), 4, 3)
    (call,) = unified_attention.launches(arguments, Constants(64, 16, 8, 2))
    assert isinstance(call, KernelCall)
    # As vLLM counts: floor(tokens / BLOCK_Q) + sequences.
    assert call.grid == (case.peer.tokens // 8 + case.peer.sequences, 1)
    assert (call.args["BLOCK_M"], call.args["BLOCK_Q"], call.args["TILE_SIZE"]) == (64, 8, 16)
    assert (call.num_warps, call.num_stages) == (8, 2)
    assert module.kernel_unified_attention is before


def test_peers_that_cannot_be_imported_are_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise OSError(f"lib of {name} is missing\nmore")

    monkeypatch.setattr(attention_measure.importlib, "import_module", broken)
    found = Peers(["vllm", "fa4"])
    assert found.absent["vllm_best"] == "not asked for"
    assert found.absent["vllm"] == f"OSError: lib of {unified_attention.MODULE} is missing"
    assert "OSError: lib of vllm.vllm_flash_attn is missing" in found.absent["fa4"]
    assert "vllm" not in found


@pytest.mark.usefixtures("small")
def test_peers_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A right peer is timed, one with another scale or window is reported, one that fails too."""
    case = case_of("prefill")
    template, problem = case.job.template, case.job.problem
    seen = []

    def ours(changes: dict[str, Any], _: Any, inputs: AttentionInputs) -> Callable[[], Any]:
        # The peers see valid blocks and finite values only.
        seen.append(bool((inputs.block_table != NO_BLOCK).all() and inputs.keys.isfinite().all()))
        changed = dataclasses.replace(inputs, **changes)
        return functools.partial(template.launch, changed, template.stock_config(problem))  # type: ignore[misc]

    def failing(problem: Any, constants: Constants, inputs: AttentionInputs) -> Callable[[], Any]:
        if constants == STOCK:
            raise RuntimeError("no such operator\nat all")
        return ours({}, problem, inputs)

    peers = Peers([])
    peers.absent.clear()
    measurer = RowMeasurer(Bench("cpu"), peers, 3)
    monkeypatch.setattr(attention_measure, "_unified", functools.partial(ours, {}))
    monkeypatch.setattr(attention_measure, "_swept", failing)
    monkeypatch.setattr(
        attention_measure.flash_attention, "launch", functools.partial(ours, {"scale": 0.0625})
    )
    monkeypatch.setattr(attention_measure.flash_attention, "forget_disk", lambda: None)
    found = measurer.measure(case, picks_of(case, tmp_path))
    assert all(seen)
    assert set(found.times) == {"default", "stock", "vllm", "vllm_best", "copy"}
    assert "wrong result: relative error" in found.absent["fa4"]
    assert found.configs["vllm_best"]["block_m"] > 0
    assert "vllm_best" not in found.absent
    assert set(found.against) == {"stock", "vllm", "vllm_best"}
    assert found.errors["default"] < 1e-5

    narrower = functools.partial(ours, {"window": rows.TINY_WINDOW - 1})
    monkeypatch.setattr(attention_measure, "_unified", narrower)
    decode = case_of("decode")
    template, problem = decode.job.template, decode.job.problem
    found = measurer.measure(decode, picks_of(decode, tmp_path))
    assert "wrong result" in found.absent["vllm"]
    assert found.absent["vllm_best"] == "swept in prefill only"


def test_a_nan_is_no_small_error() -> None:
    exact = torch.ones(2, 3, 4)
    assert relative_error(exact, exact) == 0.0
    found = exact.clone()
    found[1, 2, 3] = torch.nan
    assert not relative_error(found, exact) <= attention_measure.TOLERANCE
    assert relative_error(exact * 1.1, exact) == pytest.approx(0.1, abs=1e-6)


def row(case: Case, ours: float | None = 10.0, gain: float = 0.5) -> Row:
    times = {"vllm": 40.0, "fa4": 8.0, "copy": 5.0} | ({"tuned": ours} if ours else {})
    return Row(
        case=case, bytes=20_000_000, flops=4_000_000_000,
        times={name: Timing(us, 0.1) for name, us in times.items()},
        configs={"tuned": {"tile": 32}}, absent={"vllm_best": "not asked for"}, errors={},
        against={"vllm": Comparison(0.75, 0.01), "fa4": Comparison(gain, 0.02)}, rounds=11,
    )  # fmt: skip


def test_figures_of_a_row_and_a_report() -> None:
    found = row(case_of("prefill"), gain=-0.25)
    assert found.ours == "tuned"
    assert found.speedup("vllm") == 4.0
    assert found.speedup("vllm_best") is None
    assert found.tflops("tuned") == pytest.approx(400.0)
    assert found.tb_per_s("tuned") == pytest.approx(2.0)
    assert found.slower_than() == ["fa4"]
    assert row(case_of("prefill"), None).speedup("vllm") is None
    report = Report({"device": "G", "date": "d"}, False)
    report.rows = [found, row(case_of("decode"), 4.0, 0.5)]
    report.errors, report.left = [("p", "broken")], ["q"]
    report.skipped = [("s", "needs too much")]
    (line,) = report.behind()
    assert "slower than fa4 by 25.0% (noise 2.0%; 10.00 against 8.00 us)" in line
    values = report.to_dict()
    assert [group["phase"] for group in values["summary"]] == ["prefill", "decode"]
    assert values["summary"][0]["vllm"] == {"mean": 4.0, "least": 4.0}
    assert values["rows"][1]["copy_share"] == 1.25
    text = attention_render.markdown(report)
    assert "| 4.00x | **0.80x** | 400, 100, 500 |" in text
    assert "| 10.00x | 2.00x | 5.00, 0.50, 2.50 | 125% |" in text
    assert "- not measured: vllm best: not asked for" in text
    for part in ("- p: broken", "- s: needs too much", "Not reached within the budget (1)"):
        assert part in text
    closing = "\n".join(attention_render.closing(report))
    assert "prefill, sliding: 1 rows, 1 tuned; 4.00x (4.00x) vs vllm" in closing
    assert "the budget ended before 1 rows, first: q" in closing


def write_table(root: Path, case: Case) -> None:
    """A measured table whose config is the stock one but for the warps."""
    device = Device(
        name=H200.name, capability=list(H200.capability), sms=H200.sms, memory_bytes=1, driver=None
    )
    run = Run(
        provenance="measured", device=device, gemma_tune="0", triton=triton.__version__,
        torch="0", python="3.11", finished_at="2026-01-01T00:00:00Z",
    )  # fmt: skip
    template, problem = case.job.template, case.asked.problem
    config = record_to_dict(template.default(problem, H200)) | {"num_warps": 8}
    entry = Entry(
        problem=record_to_dict(problem), config=config, verdict="tuned",
        time_us=TimingFields(median=1.0, spread=0.0), trials=1, rejected={},
        models=["e2b"], source_hash=template.source_hash, run="r",
    )  # fmt: skip
    update_table(root, make_table(template.name, "r", run, [entry]))


def dry_run(out: Path, *options: str) -> Any:
    arguments = ["--gpu", "h200", "--dry-run", "--model", "e2b", "--peers", "", "--rounds", "3"]
    arguments += ["--blocks", "16"]
    return CliRunner().invoke(attention.app, [*arguments, "--out", str(out), *options])


@pytest.mark.usefixtures("small")
def test_dry_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tables").mkdir()
    write_table(tmp_path / "tables", case_of("decode"))
    measure = RowMeasurer.measure

    def failing(self: RowMeasurer, case: Case, picks: Picks) -> Row:
        if case.layers == "full":
            raise MemoryError("1 GiB of inputs") if case.peer.queries == 1 else ValueError("odd")
        return measure(self, case, picks)

    monkeypatch.setattr(RowMeasurer, "measure", failing)
    done = dry_run(tmp_path, "--configs", str(tmp_path / "tables"))
    assert done.exit_code == 0, done.output
    # Never where a device's results lie.
    found = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("attention.*"))
    assert found == [Path("dry_run/attention.dry_run.json"), Path("dry_run/attention.dry_run.md")]
    values = json.loads((tmp_path / found[0]).read_text())
    assert values["environment"]["device"] == "NVIDIA H200 (dry run)"
    assert [reason for _, reason in values["errors"]] == ["ValueError: odd"]
    assert [reason for _, reason in values["skipped"]] == ["1 GiB of inputs"]
    prefill, decode = values["rows"]
    assert (prefill["ours"], decode["ours"]) == ("default", "tuned")
    assert decode["configs"]["tuned"]["num_warps"] == 8
    assert decode["table_tokens"] == 2
    assert set(prefill["times_us"]) == {"default", "stock", "copy"}
    assert prefill["absent"]["vllm"] == "not asked for"
    text = (tmp_path / found[1]).read_text()
    assert attention_render.DRY_RUN in text
    assert '- tuned (2 on 7): `{"tile": 16' in text


def test_the_budget_ends_the_run(tmp_path: Path) -> None:
    done = dry_run(tmp_path, "--budget", "0.001s", "--phase", "decode")
    assert done.exit_code == 1
    assert "the budget ended before 4 rows" in done.output


def test_a_lost_gpu_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: Any) -> Row:
        raise ContextLostError("illegal memory access")

    monkeypatch.setattr(RowMeasurer, "measure", lost)
    done = dry_run(tmp_path)
    assert done.exit_code == 1
    assert "illegal memory access: the GPU answers no more" in done.output
    assert "the budget ended before 7 rows" in done.output


def test_wrong_usage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert dry_run(tmp_path, "--phase", "training").exit_code == 2
    assert dry_run(tmp_path, "--peers", "cudnn").exit_code == 2
    assert dry_run(tmp_path, "--model", "none").exit_code == 2
    assert dry_run(tmp_path, "--configs", str(tmp_path / "none")).exit_code == 2
    monkeypatch.delenv("TRITON_INTERPRET")
    assert dry_run(tmp_path).exit_code == 2


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two small batches of the E2B; peers that are installed must be right."""
    monkeypatch.setattr(rows, "PREFILL", (Workload("prefill", 2, 700, 0),))
    monkeypatch.setattr(rows, "DECODE", (Workload("decode", 2, 1, 700),))
    arguments = ["--gpu", attached_gpus()[0].name, "--model", "e2b", "--rounds", "5"]
    arguments += ["--out", str(tmp_path), "--configs", str(tmp_path), "--blocks", "16"]
    done = CliRunner().invoke(attention.app, arguments)
    assert done.exit_code == 0, done.output
    (path,) = tmp_path.rglob("attention.json")
    values = json.loads(path.read_text())
    assert not values["errors"]
    assert len(values["rows"]) == 4
    for found in values["rows"]:
        assert {"default", "copy"} <= set(found["times_us"])
        assert not any("wrong result" in reason for reason in found["absent"].values())
