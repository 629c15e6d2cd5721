"""The README says what the code does and what the tables hold."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.readme_table import table

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_measured_figures_are_those_of_the_tables() -> None:
    assert table() in README, "run `python -m benchmarks.readme_table` and paste its output"


def test_ci_runs_the_test_command() -> None:
    commands = re.findall(r"^    (.+)$", README, re.MULTILINE)
    tests = next(command for command in commands if "pytest" in command)
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert tests in script


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
