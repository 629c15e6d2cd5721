"""vLLM's own fused-MoE tables: ``E=128,N=704,device_name=NVIDIA_H200.json``.

Keys are token counts as text, rows are launch constants.  vLLM passes a row's fields on to the
kernel, so an unknown field is an error; of other top-level keys vLLM 0.26 to 0.33 accepts
``triton_version`` only.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from .faults import Fault, TableError, fault_at
from .jsontext import positions, shown
from .store import read_strict

FILE_NAME = re.compile(r"E=\d+,N=\d+,device_name=[^,]+(,.*)?\.json")
ACCEPTED_METADATA = "triton_version"

_BLOCKS = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K")
_REQUIRED = (*_BLOCKS, "GROUP_SIZE_M", "num_warps", "num_stages")
#: SPLIT_K is of newer vLLM, the others are of AMD GPUs.
_OPTIONAL = ("SPLIT_K", "waves_per_eu", "matrix_instr_nonkdim", "kpack")
_WARPS = (1, 2, 4, 8, 16, 32)
_COUNT = re.compile(r"[1-9][0-9]*")
_LIKE_A_COUNT = re.compile(r"\s*[A-Za-z]?\s*[+-]?\d[\d\s._]*")

Row = dict[str, int]


def device_part(device_name: str) -> str:
    """A GPU as vLLM names it in these files: ``NVIDIA_H200`` for every H200."""
    name = device_name.replace(" ", "_")
    return "NVIDIA_H200" if "H200" in name.split("_") else name


def file_name(
    experts: int,
    width: int,
    device_name: str,
    dtype: str | None = None,
    block_shape: tuple[int, int] | None = None,
) -> str:
    """The name under which vLLM looks for a table: for whoever writes one and whoever seeks one.

    ``width`` is the experts' on this rank (the second weight's last dimension, doubled back where
    int4 packs two values in a byte), ``dtype`` vLLM's word: None for bf16 and fp16, ``fp8_w8a8``,
    ``int4_w4a16``, ``float32``; ``block_shape`` that of fp8 scales.
    """
    kind = "" if dtype is None else f",dtype={dtype}"
    blocks = "" if block_shape is None else f",block_shape=[{block_shape[0]},{block_shape[1]}]"
    return f"E={experts},N={width},device_name={device_part(device_name)}{kind}{blocks}.json"


def is_moe_table(path: Path) -> bool:
    """Whether a file is named as vLLM names its fused-MoE tables."""
    return FILE_NAME.fullmatch(path.name) is not None


def read_moe_table(path: Path | str) -> tuple[dict[int, Row], list[Fault]]:
    """The rows by token count, and notes on what else the file holds.

    TableError lists every fault with its key and line.
    """
    path = Path(path)
    value, text = read_strict(path)
    if not isinstance(value, dict):
        fault = Fault(f"found {shown(value)}, wanted a JSON object", "", 1, 1)
        raise TableError.of(path, [fault])
    found = positions(text)
    rows: dict[int, Row] = {}
    faults: list[Fault] = []
    notes: list[Fault] = []
    for key, row in value.items():
        if not _is_row(key, row):
            notes.append(fault_at(found, (key,), _metadata_note(key)))
            continue
        problems = [((key,), message) for message in _key_faults(key)]
        problems += [((key, *where), message) for where, message in _row_faults(row)]
        faults += [fault_at(found, where, message) for where, message in problems]
        if not problems:
            rows[int(key)] = row
    if not rows and not faults:
        faults.append(Fault('no rows, wanted at least one such as "16": {...}', "", 1, 1))
    if faults:
        raise TableError.of(path, faults)
    return dict(sorted(rows.items())), notes


def _is_row(key: str, value: Any) -> bool:
    if key.startswith("_"):
        return False
    looks_like_a_row = isinstance(value, dict) and any(name in value for name in _REQUIRED)
    return looks_like_a_row or _LIKE_A_COUNT.fullmatch(key) is not None


def _metadata_note(key: str) -> str:
    if key == ACCEPTED_METADATA:
        return "metadata, skipped"
    return "metadata, skipped here, but vLLM 0.26 to 0.33 refuses it: keep it in a file beside this"


def _key_faults(key: str) -> list[str]:
    if _COUNT.fullmatch(key):
        return []
    return [f'found key {shown(key)}, wanted a token count in plain digits such as "16"']


def _row_faults(row: Any) -> list[tuple[tuple[str, ...], str]]:
    if not isinstance(row, dict):
        return [((), f"found {shown(row)}, wanted an object with {', '.join(_REQUIRED)}")]
    faults: list[tuple[tuple[str, ...], str]] = [
        ((name,), "missing key") for name in _REQUIRED if name not in row
    ]
    for name, value in row.items():
        wanted = _wanted(name, value)
        if wanted:
            faults.append(((name,), wanted))
    return faults


def _wanted(name: str, value: Any) -> str | None:
    """What is wrong with one field of a row, None if nothing."""
    if name not in _REQUIRED and name not in _OPTIONAL:
        return f"unknown key, vLLM would pass it to the kernel; known: {', '.join(_REQUIRED)}"
    if isinstance(value, bool) or not isinstance(value, int):
        return f"found {shown(value)}, wanted a whole number"
    if name in _BLOCKS and (value < 16 or value & (value - 1)):
        return f"found {value}, wanted a power of two of at least 16"
    if name == "num_warps" and value not in _WARPS:
        return f"found {value}, wanted one of {', '.join(map(str, _WARPS))}"
    if name in ("GROUP_SIZE_M", "num_stages", "SPLIT_K") and value < 1:
        return f"found {value}, wanted at least 1"
    return None
