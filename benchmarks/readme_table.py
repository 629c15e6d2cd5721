"""The README's measured table, out of the shipped tables: ``python -m benchmarks.readme_table``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import tuned_configs
from kernel_templates.base import record_from_dict, templates
from tuned_configs.store import read_table, table_path

DEVICE = "NVIDIA H200"
TOKENS = (1, 32, 8192)
HEADER = (
    "| kernel | problem | tokens | tuned us | default us | stock us | vs stock |",
    "|---|---|---:|---:|---:|---:|---:|",
)


def rows(device: str = DEVICE) -> Iterator[str]:
    """One Markdown row per kind of problem and token count, times in microseconds."""
    root = Path(tuned_configs.__file__).parent
    for name, template in templates().items():
        path = table_path(root, device, name)
        if not path.exists():
            continue
        for entry in read_table(path).entries:
            problem = record_from_dict(template.problem, entry.problem)
            if problem.tokens not in TOKENS or entry.time_us is None:
                continue
            tuned = entry.time_us.median
            default = entry.default_us.median if entry.default_us else None
            stock = entry.stock_us.median if entry.stock_us else None
            yield (
                f"| {name} | {template.describe(problem)} | {problem.tokens} | {tuned:.2f} | "
                f"{'-' if default is None else f'{default:.2f}'} | "
                f"{'-' if stock is None else f'{stock:.2f}'} | "
                f"{'-' if stock is None else f'{stock / tuned:.2f}x'} |"
            )


def table() -> str:
    """The whole table."""
    return "\n".join([*HEADER, *rows()])


if __name__ == "__main__":
    print(table())
