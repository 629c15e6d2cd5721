"""``gemma-tune bench`` and ``verify``: stock and tuned vLLM side by side, in child processes."""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from .console import FAILED, LOG, NO_GPU, OUT, fail, seconds_of
from .model import PRESET_FOLDER, ModelConfigError, load_model, preset_names

#: CUDA graphs of these sizes, as far as the workloads need them: each costs start time.
CAPTURE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def model_folder(model: str, folder: Path, layers: int | None, dtype: str) -> tuple[str, bool]:
    """Path of a folder that vLLM loads, and whether its weights are to be drawn.

    A preset or a config without weights beside it becomes a folder of its own in ``folder``.
    """
    from vllm_plugin.serving.checkpoint import write_folder

    try:
        load_model(model)
    except ModelConfigError as error:
        fail(str(error))
    path = Path(model)
    if path.is_dir() and any(path.glob("*.safetensors")):
        if layers is not None:
            fail("--layers cuts models whose weights are drawn; this one has its own")
        return str(path), False
    if os.path.exists(model):
        file = path / "config.json" if path.is_dir() else path
    else:
        name = next(name for name in preset_names() if name in model.lower())
        file = PRESET_FOLDER / f"{name}.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    try:
        return str(write_folder(config, folder, layers, dtype)), True
    except ValueError as error:
        fail(str(error))


def require_vllm() -> None:
    """End with a message where vLLM cannot be imported."""
    if importlib.util.find_spec("vllm") is None:
        fail("vLLM is not installed here: `pip install vllm` beside gemma-tune", NO_GPU)


def bench(
    model: Annotated[
        str, typer.Option(help="Preset, config.json (weights are drawn) or a checkpoint's folder.")
    ] = "e2b",
    workload: Annotated[
        str,
        typer.Option(
            help="Workloads, separated by commas: prefill, prefill4096, decode1, decode8, "
            "decode32, decode256, or SEQUENCESxPROMPT+NEW."
        ),
    ] = "prefill,decode1,decode32,decode256",
    variant: Annotated[
        list[str] | None,
        typer.Option(
            help="stock or tuned, then :BACKEND, +fast or +nofast (fast prefill), +block64; may be "
            "repeated, the first is what others are compared with.",
            show_default="stock and tuned",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds of every variant.")] = 3,
    budget: Annotated[
        str | None,
        typer.Option(help="Begin no further round after this time: 90s, 5m.", show_default="none"),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the report and the engines' logs.")] = Path(
        "serving"
    ),
    layers: Annotated[
        int | None, typer.Option(min=1, help="Only so many layers.", show_default="all")
    ] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    kv_gib: Annotated[float, typer.Option(min=0.01, help="KV cache of each engine, GiB.")] = 8.0,
    batched_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a step.")] = 8192,
    eager: Annotated[bool, typer.Option("--eager", help="No compilation, no CUDA graphs.")] = False,
    profile: Annotated[
        bool, typer.Option("--profile/--no-profile", help="GPU time by hot path, one extra pass.")
    ] = True,
) -> None:
    """Measure stock and tuned vLLM on the same weights and prompts."""
    from vllm_plugin.serving.bench import Variant, measure, parse_workload
    from vllm_plugin.serving.result import Result, plot, table

    try:
        variants = [Variant.parse(text) for text in variant or ["stock", "tuned"]]
        workloads = [parse_workload(text.strip()) for text in workload.split(",")]
    except ValueError as error:
        fail(str(error))
    if len(set(variants)) < len(variants) or len(set(workloads)) < len(workloads):
        fail("a variant or a workload is named twice")
    seconds = seconds_of(budget) if budget else None
    require_vllm()
    with tempfile.TemporaryDirectory(prefix="gemma-tune-") as made:
        folder, drawn = model_folder(model, Path(made), layers, dtype)
        settings: dict[str, Any] = {
            "model": folder,
            "dtype": dtype,
            "max_model_len": max(each.prompt_tokens + each.new_tokens for each in workloads) + 16,
            "max_num_seqs": max(each.sequences for each in workloads),
            "max_num_batched_tokens": batched_tokens,
            "enable_prefix_caching": False,
            "enforce_eager": eager,
            # Of engines that start side by side none can tell what memory is its own.
            "gpu_memory_utilization": 0.02,
            "kv_cache_memory_bytes": int(kv_gib * 2**30),
        }
        settings["max_num_seqs"] = min(settings["max_num_seqs"], 256)
        if drawn:
            settings["load_format"] = "dummy"
        if not eager:
            most = settings["max_num_seqs"]
            sizes = [size for size in CAPTURE_SIZES if size <= most]
            settings["compilation_config"] = {
                "cudagraph_capture_sizes": sizes if sizes[-1] == most else [*sizes, most]
            }
        outcome = measure(
            variants,
            workloads,
            settings,
            out,
            rounds,
            seconds,
            profile,
            say=lambda text: LOG.print(text, soft_wrap=True),
        )
    result = Result.of(outcome, model, {**settings, "model": model, "rounds": rounds})
    if not result.rows:
        fail("nothing was measured: every variant failed", FAILED)
    OUT.print(table(result))
    for path in result.write(out):
        LOG.print(f"wrote {path}", soft_wrap=True)
    try:
        plot(result, out / "serving.svg")
        LOG.print(f"wrote {out / 'serving.svg'}", soft_wrap=True)
    except ImportError:
        LOG.print("no plot: matplotlib is not installed (the `plots` extra)")
    if result.failed:
        raise typer.Exit(FAILED)


def verify(
    model: Annotated[
        str, typer.Option(help="Preset, config.json (weights are drawn) or a checkpoint's folder.")
    ] = "e2b",
    backend: Annotated[
        str | None,
        typer.Option(
            help="Attention backend, for example TRITON_ATTN.", show_default="vLLM's choice"
        ),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Only so many layers.", show_default="all")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Of stock and tuned; the truth is float32.")
    ] = "bfloat16",
    steps: Annotated[int, typer.Option(min=0, help="Decode steps after the prompts.")] = 8,
    kv_gib: Annotated[float, typer.Option(min=0.01, help="KV cache of each engine, GiB.")] = 4.0,
    out: Annotated[Path, typer.Option(help="Folder of the report and the engines' logs.")] = Path(
        "verify"
    ),
) -> None:
    """Check tuned answers against float32, layer by layer: no worse than stock's?

    Exit codes: 0 no worse anywhere; 1 worse somewhere, or nothing was tuned; 2 usage; 3 no vLLM.
    """
    from vllm_plugin.serving.engine import EngineFailed
    from vllm_plugin.serving.verify import LENGTHS
    from vllm_plugin.serving.verify import verify as run
    from vllm_plugin.serving.verify_report import lines, verify_table

    require_vllm()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gemma-tune-") as made:
        folder, drawn = model_folder(model, Path(made) / "model", layers, dtype)
        shape = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        text = shape.get("text_config") or shape
        most = int(text.get("max_position_embeddings") or 2**30) - steps - 1
        lengths = tuple(length for length in LENGTHS if length <= most)
        settings: dict[str, Any] = {
            "model": folder,
            "max_model_len": max(lengths) + steps + 1,
            "max_num_seqs": len(lengths),
            "max_num_batched_tokens": 1024,
            "enable_prefix_caching": False,
            "gpu_memory_utilization": 0.02,
            "kv_cache_memory_bytes": int(kv_gib * 2**30),
            **({"load_format": "dummy"} if drawn else {}),
        }
        try:
            verdict = run(
                model, settings, dtype, backend, int(text["vocab_size"]), steps, Path(made),
                say=lambda line: LOG.print(line, soft_wrap=True), lengths=lengths,
            )  # fmt: skip
        except (EngineFailed, ValueError) as error:
            fail(str(error), FAILED)
    path = out / "verify.json"
    path.write_text(verdict.model_dump_json(indent=1) + "\n", encoding="utf-8")
    OUT.print(verify_table(verdict))
    for line in lines(verdict):
        OUT.print(line, soft_wrap=True)
    LOG.print(f"wrote {path}", soft_wrap=True)
    if not verdict.good:
        raise typer.Exit(FAILED)
