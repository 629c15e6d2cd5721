"""The README's measured table, out of the shipped tables: ``python -m benchmarks.readme_table``."""

from __future__ import annotations

from collections.abc import Iterator

from kernel_templates.base import record_from_dict, templates
from tuned_configs.roots import shipped_root
from tuned_configs.store import read_table, table_path
from tuner.report import times

DEVICE = "NVIDIA H200"
TOKENS = (1, 32, 8192)
HEADER = (
    "| kernel | problem | tokens | tuned us | default us | stock us | vs stock |",
    "|---|---|---:|---:|---:|---:|---:|",
)


def rows(device: str = DEVICE) -> Iterator[str]:
    """One Markdown row per kind of problem and token count, times in microseconds."""
    for name, template in templates().items():
        path = table_path(shipped_root(), device, name)
        if template.preview or not path.exists():
            continue
        for entry in read_table(path).entries:
            problem = record_from_dict(template.problem, entry.problem)
            if problem.tokens not in TOKENS or entry.time_us is None:
                continue
            tuned, default, stock = times(entry)
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
