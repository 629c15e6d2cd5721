"""The benchmark of the hot paths: its rule, its figures, and a dry run under the interpreter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from typer.testing import CliRunner

from benchmarks import hot_paths, render
from benchmarks.fixed import NoFixedLaunchError, fixed, warps_of
from benchmarks.measure import ContextLostError, Measurer, Picks, pick
from benchmarks.result import PEERS, Report, Row, largest, summary
from kernel_templates.base import record_to_dict, template, templates
from tuned_configs.lookup import TableSet
from tuned_configs.schema import Device, Entry, Run
from tuned_configs.schema import Timing as TimingFields
from tuned_configs.store import make_table, update_table
from tuner.device import attached_gpus, from_data_file
from tuner.model import load_model
from tuner.run import Job, plan
from tuner.timing import Comparison, Timing
from tuner.trial import Bench, WrongResultError

H200 = from_data_file("h200")
PEER_TIMES = {"default": 12.0, "inductor": 9.0, "fixed": 20.0, "copy": 8.0}


def write_tables(root: Path, jobs: list[Job], **changes: Any) -> None:
    """A measured table whose config is the default but for ``changes``."""
    device = Device(
        name=H200.name, capability=list(H200.capability), sms=H200.sms, memory_bytes=1, driver=None
    )
    run = Run(
        provenance="measured", device=device, gemma_tune="0", triton=triton.__version__,
        torch="0", python="3.11", finished_at="2026-01-01T00:00:00Z",
    )  # fmt: skip
    for job in jobs:
        config = record_to_dict(job.template.default(job.problem, H200)) | changes
        entry = Entry(
            problem=record_to_dict(job.problem), config=config, verdict="tuned",
            time_us=TimingFields(median=1.0, spread=0.0), trials=1, rejected={},
            models=list(job.models), source_hash=job.template.source_hash, run="r",
        )  # fmt: skip
        update_table(root, make_table(job.template.name, "r", run, [entry]))


def jobs_of(name: str, tokens: int = 2, model: str = "e2b") -> list[Job]:
    return plan([load_model(model)], [name], [tokens])


def row(tokens: int = 8, tuned: float | None = 10.0, gain: float = 0.0) -> Row:
    times = {"tuned": tuned, **PEER_TIMES} if tuned else dict(PEER_TIMES)
    return Row(
        template="t", kind="k", problem={"tokens": tokens}, models=("m",), bytes=40_000,
        times={name: Timing(us, 0.1) for name, us in times.items()}, configs={},
        kernels={"tuned": 1, "inductor": 3}, absent={},
        against={"inductor": Comparison(gain, 0.02), "default": Comparison(0.1, 0.02)},
    )  # fmt: skip


def test_the_rule_follows_the_block() -> None:
    blocks = (128, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
    assert [warps_of(block) for block in blocks] == [4, 4, 8, 8, 16, 16, 32, 32]
    with pytest.raises(NoFixedLaunchError, match="131072"):
        warps_of(131072)
    with pytest.raises(NoFixedLaunchError, match="no fixed rule"):
        fixed("another", None, H200)


@pytest.mark.parametrize("name", ["attention_decode", "attention_prefill"])
def test_the_rule_is_about_rows_alone(name: str) -> None:
    problem = template(name).problems(load_model("e2b"), [64])[0]
    with pytest.raises(NoFixedLaunchError, match=f"no fixed rule is written down for {name}"):
        fixed(name, problem, H200)


@pytest.mark.parametrize("name", [name for name in templates() if "attention" not in name])
def test_the_rule_covers_every_template(name: str) -> None:
    models = [load_model(model) for model in ("e2b", "12b", "26b-a4b", "31b")]
    refused = set()
    for problem in (p for model in models for p in template(name).problems(model, [2048])):
        try:
            config = fixed(name, problem, H200)
        except NoFixedLaunchError as error:
            refused.add(f"{template(name).describe(problem)}: {error}")
        else:
            assert (config.rows, config.programs_per_sm) == (1, 0)
    assert refused == {
        "gelu_mul": {"width 21504: gelu * up: infeasible: 98304 registers per block, limit 65536"},
        "moe_routing": {"top-8 of 128 experts, float32 logits: infeasible: 4 warps for 1 rows"},
    }.get(name, set())


def test_figures_of_a_row() -> None:
    found = row(gain=-0.11)
    assert found.speedup("inductor") == pytest.approx(0.9)
    assert found.speedup("stock") is None
    assert found.gb_per_s == pytest.approx(4.0)
    assert found.copy_share == pytest.approx(0.8)
    assert found.slower_than == ["inductor"]
    assert row(gain=-0.01).slower_than == []
    alone = row(tuned=None)
    assert alone.gb_per_s is alone.copy_share is alone.speedup("default") is None


def test_report_lists_regressions_and_means() -> None:
    report = Report({"device": "G", "date": "d"}, False, 1 << 30, Timing(500.0, 1.0))
    report.rows = [row(8), row(64, tuned=20.0, gain=-0.5), row(32, tuned=None)]
    report.errors, report.left = [("p", "broken")], ["q"]
    assert report.copy_gb_per_s == pytest.approx(4295, abs=1)
    (line,) = report.regressions()
    assert "64 tokens: slower than inductor by 50.0% (noise 2.0%; 20.00 against 9.00 us)" in line
    found = summary(report.rows, PEERS)
    assert (found["rows"], found["tuned"], found["stock"]) == (3, 2, None)
    assert found["default"] == pytest.approx((1.2 * 0.6) ** 0.5, abs=1e-3)
    assert [one.tokens for one in largest(report.rows)] == [64]
    assert found["copy_share_at_largest"] == pytest.approx(0.4)
    text = render.markdown(report)
    assert "| 64 | 20.00 ± 0.10 |" in text
    assert "**0.45x**" in text
    assert "1 / 3 |" in text
    assert "- p: broken" in text
    assert "Not reached within the budget (1)" in text
    closing = "\n".join(render.closing(report))
    assert "2 of 3 rows tuned; 0.85x vs default, 0.64x vs inductor, 1.41x vs fixed" in closing
    assert "copy of 1 GiB: 4,295 GB/s" in closing


def test_equal_configs_are_timed_once(tmp_path: Path) -> None:
    (job,) = jobs_of("residual_norm")[:1]
    write_tables(tmp_path, [job])
    picks = pick(job, H200, TableSet.load(tmp_path, H200.name))
    assert picks.configs["tuned"] == picks.configs["default"]
    found = Measurer(Bench("cpu"), rounds=3, inductor=False).measure(job, picks)
    assert found.times["tuned"] == found.times["default"]
    assert found.speedup("default") == 1.0
    assert found.against["default"].gain == 0.0
    assert found.absent == {
        "stock": "a server has no kernel of its own here: inductor is the peer",
        "inductor": "not asked for",
    }
    assert list(found.times) == ["tuned", "default", "fixed", "copy"]
    assert found.kernels == {"tuned": 1, "default": 1, "fixed": 1}


def test_a_wrong_config_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    (job,) = jobs_of("moe_routing", 1, "26b-a4b")
    assert job.template.stock_config is not None
    picks = Picks({"tuned": job.template.stock_config(job.problem)})
    picks.configs["default"] = job.template.default(job.problem, H200)
    bench = Bench("cpu")

    def check(config: dict[str, Any]) -> tuple[float, float]:
        if config["method"] == "sort":
            raise WrongResultError("as served: off by one")
        return 1.0, 0.0

    monkeypatch.setattr(bench, "check", check)
    found = Measurer(bench, rounds=3).measure(job, picks)
    assert found.absent["tuned"] == "wrong result: as served: off by one"
    assert "--inductor-moe" in found.absent["inductor"]
    assert list(found.times) == ["default", "copy"]
    assert found.against == {}


def test_a_lost_gpu_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    measurer = Measurer(Bench("cpu"))
    assert measurer.reason(ValueError("no\nmore")) == "ValueError: no"
    monkeypatch.setattr(measurer.bench, "device", torch.device("cuda"))
    with pytest.raises(ContextLostError, match="illegal memory access"):
        measurer.reason(RuntimeError("CUDA error: an illegal memory access was encountered"))


def dry_run(out: Path, *options: str) -> Any:
    arguments = ["--gpu", "h200", "--dry-run", "--out", str(out), "--rounds", "3", *options]
    return CliRunner().invoke(hot_paths.app, arguments)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))


def test_dry_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tables(tmp_path / "tables", jobs_of("residual_norm"), num_warps=1)
    measure = Measurer.measure

    def failing(self: Measurer, job: Job, picks: Picks) -> Row:
        if job.template.name == "residual_norm" and job.problem.norms == 0:
            raise MemoryError("too large")
        return measure(self, job, picks)

    monkeypatch.setattr(Measurer, "measure", failing)
    done = dry_run(
        tmp_path, "--configs", str(tmp_path / "tables"), "--templates",
        "residual_norm,moe_routing", "--tokens", "1,2",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    # Never where a device's results lie.
    found = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("hot_paths*"))
    assert found == [Path("dry_run/hot_paths.dry_run.json"), Path("dry_run/hot_paths.dry_run.md")]
    values = json.loads((tmp_path / found[0]).read_text())
    assert values["dry_run"] is True
    assert values["environment"]["device"] == "NVIDIA H200 (dry run)"
    assert [error for _, error in values["errors"]] == ["MemoryError: too large"] * 2
    assert len(values["rows"]) == 2 * (2 + 2 + 1)
    rows = {(one["kind"], one["problem"]["tokens"]): one for one in values["rows"]}
    tuned = rows[("hidden 1536: norm + add + 1 norm", 1)]
    assert tuned["table_tokens"] == 2  # the nearest
    assert tuned["configs"]["tuned"]["num_warps"] == 1
    assert set(tuned["speedup"]) == {"default", "fixed"}
    without = rows[("hidden 2816: 2 branches + add + scalar + 1 norm", 1)]
    assert "tuned" not in without["times_us"]
    assert "no measured entry" in without["absent"]["tuned"]
    (routing,) = (one for one in values["rows"] if one["template"] == "moe_routing" and
                  one["problem"]["tokens"] == 2)  # fmt: skip
    assert set(routing["times_us"]) == {"default", "stock", "copy"}
    text = (tmp_path / found[1]).read_text()
    assert render.DRY_RUN in text
    assert render.DRY_RUN in done.output
    assert "MemoryError: too large" in text


def test_the_budget_ends_the_run(tmp_path: Path) -> None:
    done = dry_run(tmp_path, "--budget", "0.001s", "--templates", "gelu_mul", "--tokens", "1")
    assert done.exit_code == 1
    assert "the budget ended before 5 problems" in done.output


def test_wrong_usage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def code(*options: str) -> int:
        return CliRunner().invoke(hot_paths.app, ["--gpu", "h200", *options]).exit_code

    assert code("--dry-run", "--templates", "none") == 2
    assert code("--dry-run", "--configs", str(tmp_path / "none")) == 2
    assert code("--dry-run", "--model", "none") == 2
    assert code() == 2  # the interpreter would be timed
    monkeypatch.delenv("TRITON_INTERPRET")
    assert code("--dry-run") == 2
    if not torch.cuda.is_available():
        assert code() == 3


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = Report({"device": "G", "date": "d"}, True, rows=[row(8), row(64), row(512, None)])
    render.plot(report, tmp_path / "plot.svg")
    assert "<svg" in (tmp_path / "plot.svg").read_text()


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    name = attached_gpus()[0].name
    arguments = ["--gpu", name, "--model", "e2b", "--templates", "residual_norm", "--tokens"]
    arguments += ["1,256", "--no-inductor", "--out", str(tmp_path), "--configs", str(tmp_path)]
    done = CliRunner().invoke(hot_paths.app, arguments)
    assert done.exit_code == 0, done.output
    (path,) = tmp_path.rglob("hot_paths.json")
    values = json.loads(path.read_text())
    assert not values["dry_run"]
    assert not values["errors"]
    assert values["large_copy"]["gb_per_s"] > 100
    assert {"default", "fixed", "copy"} <= set(values["rows"][0]["times_us"])


@pytest.mark.slow
def test_resources_of_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    from benchmarks import resources

    arguments = ["--gpu", "a100", "--model", "e2b", "--templates", "gelu_mul", "--tokens", "64"]
    arguments += ["--configs", str(tmp_path), "--out", str(tmp_path), "--jobs", "1"]
    done = CliRunner().invoke(resources.app, arguments)
    assert done.exit_code == 0, done.output
    text = (tmp_path / "NVIDIA_A100-SXM4-80GB" / "resources.md").read_text()
    assert "Nothing was run on this GPU" in text
    assert "## gelu_mul: width 6144: gelu * up" in text
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| 64 |")]
    assert len(rows) == 3
    assert all(int(row[4]) > 0 and int(row[7]) > 0 for row in rows)
    assert CliRunner().invoke(resources.app, ["--gpu", "none"]).exit_code == 2
