"""Tuned configs: the JSON tables, their loader and (in ``lint``) their linter.

Needs no GPU, torch or Triton: a server loads this package at startup.
"""

from .faults import Fault, TableError
from .keys import problem_key
from .lookup import Match, TableSet, version_notes
from .naming import folder_name
from .schema import Device, Entry, MaxError, Predicted, Run, Table, Timing
from .store import Update, make_table, read_table, table_path, update_table, write_table
from .tokens import token_counts, vllm_capture_sizes

__all__ = [
    "Device",
    "Entry",
    "Fault",
    "Match",
    "MaxError",
    "Predicted",
    "Run",
    "Table",
    "TableError",
    "TableSet",
    "Timing",
    "Update",
    "folder_name",
    "make_table",
    "problem_key",
    "read_table",
    "table_path",
    "token_counts",
    "update_table",
    "version_notes",
    "vllm_capture_sizes",
    "write_table",
]
