"""Tables for the tiny models on the Triton interpreter: every entry is the default config."""

from __future__ import annotations

from pathlib import Path

from kernel_templates.base import DeviceInfo, record_to_dict, templates
from tuned_configs import Device, Entry, MaxError, Predicted, Run, Timing, make_table, write_table
from tuned_configs.store import table_path
from tuner.model import load_model

NAME = "Triton interpreter"
TOKENS = (1, 16, 256)
#: Prompts of the tests: a kernel that vLLM can stand in for serves no count far from the tables'.
MORE = {"attention_prefill": (64,)}


def write_tables(
    root: Path, model: Path, provenance: str = "measured", stock_us: float = 2.0
) -> list[Path]:
    """What the tuner would write for this model; times are invented, 1 us against ``stock_us``."""
    shape = load_model(str(model), dtype="float32")
    device = DeviceInfo(NAME, (0, 0), 1, 0, 0, 0, 0, 0.0, 0.0)
    measured = provenance == "measured"
    run = Run(
        provenance=provenance,  # type: ignore[arg-type]
        device=Device(name=NAME, capability=[0, 0], sms=1, memory_bytes=1, driver=None),
        gemma_tune="0.1.0",
        triton=None,
        torch=None,
        python=None,
        finished_at="2026-12-01T00:00:00Z",
    )
    paths = []
    for name, kernel in templates().items():
        entries = [
            Entry(
                problem=record_to_dict(problem),
                config=record_to_dict(kernel.default(problem, device)),
                verdict="default",
                time_us=Timing(median=1.0, spread=0.0) if measured else None,
                default_us=Timing(median=1.0, spread=0.0) if measured else None,
                stock_us=Timing(median=stock_us, spread=0.0) if measured else None,
                predicted_us=None if measured else Predicted(config=1.0, default=1.0),
                max_error=MaxError(ratio=0.0, absolute=0.0) if measured else None,
                trials=1,
                rejected={},
                models=["tiny"],
                source_hash=kernel.source_hash,
                run="test",
            )
            for problem in kernel.problems(shape, (*TOKENS, *MORE.get(name, ())))
        ]
        if entries:
            path = table_path(root, NAME, name)
            write_table(path, make_table(name, "test", run, entries))
            paths.append(path)
    return paths
