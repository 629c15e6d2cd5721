"""Which GPU this is, which hot paths its tables serve, and which config a launch takes."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kernel_templates.base import (
    DeviceInfo,
    KernelTemplate,
    record_from_dict,
    record_to_dict,
    template,
)
from tuned_configs import Entry, Match, TableSet, problem_key
from tuned_configs.keys import BUCKET
from tuned_configs.roots import roots

from . import settings

#: The device's name where ``TRITON_INTERPRET=1`` runs the kernels on a CPU, as tests do.
INTERPRETER = "Triton interpreter"


class Unavailable(Exception):
    """Why nothing of the plugin can be used here."""


@dataclass(frozen=True)
class Decision:
    """Whether the tables serve one kind of problem, and why (not)."""

    template: str
    kind: str
    active: bool
    reason: str


def find_device() -> DeviceInfo:
    """The GPU of this process; Unavailable with the reason where there is none.

    Bandwidth and compute are unknown here, hence 0; a template's ``default`` reads neither.
    """
    if not torch.cuda.is_available():
        if os.environ.get("TRITON_INTERPRET") == "1":
            return DeviceInfo(INTERPRETER, (0, 0), 1, 0, 0, 0, 0, 0.0, 0.0)
        raise Unavailable("no GPU found")
    if torch.version.hip is not None:
        raise Unavailable("the tables are for NVIDIA GPUs")
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return DeviceInfo(
        name=properties.name,
        capability=(properties.major, properties.minor),
        sms=properties.multi_processor_count,
        shared_per_block=properties.shared_memory_per_block_optin,
        shared_per_sm=properties.shared_memory_per_multiprocessor,
        l2_bytes=properties.L2_cache_size,
        memory_bytes=properties.total_memory,
        bandwidth=0.0,
        bf16_flops=0.0,
        attached=True,
    )


class Choices:
    """Configs by problem for one GPU; looked up once per problem, then a plain dict.

    ``faults`` are the tables that could not be used.
    """

    def __init__(self, device: DeviceInfo, tables: TableSet) -> None:
        self.device = device
        self.faults = tables.faults
        #: What ``gemma-tune --model`` would be given for the model at hand.
        self.model = "MODEL"
        self._tables = tables
        self._configs: dict[Any, Any] = {}
        self._instead: dict[Any, dict[str, Any]] = {}

    @classmethod
    def load(cls) -> Choices:
        """The tables of this process's GPU; Unavailable where there is no GPU."""
        device = find_device()
        measured_only = not settings.predicted_allowed()
        return cls(
            device, TableSet.load(roots(), device.name, measured_only, on_reason=settings.log.info)
        )

    def config(self, kernel: KernelTemplate[Any, Any], problem: Any) -> Any:
        """The config to launch with: the tables', else the template's default."""
        key = (kernel.name, problem)
        config = self._configs.get(key)
        if config is None:
            config = self._configs[key] = self._find(kernel, problem)
        return config

    def _find(self, kernel: KernelTemplate[Any, Any], problem: Any) -> Any:
        values = record_to_dict(problem)
        borrowed = self._instead.get((kernel.name, problem_key(values, without=BUCKET)))
        if borrowed is not None:
            values |= borrowed
        match = self._tables.lookup(kernel.name, values, kernel.source_hash)
        config = self._config_of(kernel, match)
        return kernel.default(problem, self.device) if config is None else config

    def faster(self, kernel: KernelTemplate[Any, Any], problem: Any) -> Any:
        """The tuned config, None where there is none or it was measured slower than stock.

        For a kernel that has vLLM's own to fall back on.
        """
        key = (kernel.name, problem)
        if key not in self._configs:
            values = record_to_dict(problem)
            match = self._tables.lookup(kernel.name, values, kernel.source_hash)
            entry = None if match is None else match.entry
            if entry is not None and entry.time_us is not None and entry.stock_us is not None:
                match = match if entry.time_us.median <= entry.stock_us.median else None
            self._configs[key] = self._config_of(kernel, match)
        return self._configs[key]

    @staticmethod
    def _config_of(kernel: KernelTemplate[Any, Any], match: Match | None) -> Any:
        if match is None:
            return None
        try:
            return record_from_dict(kernel.config, match.config)
        except ValueError as error:
            settings.warn_once(
                f"config {kernel.name}",
                "gemma-tune: %s: %s; it is not used",
                match.path,
                error,
            )
            return None

    def tuned_counts(self, name: str) -> set[int]:
        """Every token count that a table of this template has an entry for."""
        return {
            entry.problem[BUCKET]
            for loaded in self._tables.tables
            if loaded.table.template == name
            for entry in loaded.table.entries
            if BUCKET in entry.problem
        }

    def borrow(self, kernel: str, problem: Mapping[str, Any], changed: Mapping[str, Any]) -> None:
        """Let a kind of problem without entries use those of the kind with ``changed`` fields."""
        self._instead[(kernel, problem_key(problem, without=BUCKET))] = dict(changed)

    def decide(self, name: str, problem: Any) -> Decision:
        """Whether the tables serve this kind of problem (its token count does not matter).

        They do when entries exist for the running kernel source and their provenance is accepted;
        measured ones must on average (geometric mean) be no slower than what a server runs.
        """
        kernel = template(name)
        values = record_to_dict(problem)
        kind = kernel.describe(problem)
        used, predicted = self._entries(kernel, values)
        if not used:
            if predicted:
                reason = (
                    f'only predicted entries; run `gemma-tune confirm --gpu "{self.device.name}" '
                    f"--model {self.model}` on this GPU"
                )
            else:
                reason = self._tables.explain(name, values, kernel.source_hash)
                reason = reason.removeprefix(f"{name}: ").removesuffix("; default used")
            return Decision(name, kind, False, reason)
        ratios = [
            entry.time_us.median / entry.stock_us.median
            for entry in used
            if entry.time_us is not None and entry.stock_us is not None
        ]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None
        if mean is not None and mean > 1.0:
            return Decision(name, kind, False, f"measured {mean:.2f}x as slow as stock")
        gain = f", {1 / mean:.2f}x stock" if mean is not None else ""
        return Decision(name, kind, True, f"{len(used)} entries{gain}")

    def _entries(
        self, kernel: KernelTemplate[Any, Any], values: Mapping[str, Any]
    ) -> tuple[list[Entry], bool]:
        """The usable entries of a kind, and whether predicted ones were left out."""
        wanted = problem_key(values, without=BUCKET)
        used: list[Entry] = []
        predicted = False
        for loaded in self._tables.tables:
            if loaded.table.template != kernel.name:
                continue
            for entry in loaded.table.entries:
                same = problem_key(entry.problem, without=BUCKET) == wanted
                if not same or entry.source_hash != kernel.source_hash:
                    continue
                provenance = loaded.table.runs[entry.run].provenance
                if provenance == "measured" or not self._tables.measured_only:
                    used.append(entry)
                else:
                    predicted = True
        return used, predicted

    def digest(self, active: Mapping[str, Any]) -> str:
        """Hash of the plugin's version, the device, the tables' text and what is active."""
        hashed = hashlib.sha256()
        for loaded in sorted(self._tables.tables, key=lambda loaded: str(loaded.path)):
            hashed.update(loaded.table.model_dump_json().encode())
        what = {"version": settings.version(), "device": self.device.name, "active": active}
        hashed.update(json.dumps(what, sort_keys=True).encode())
        return hashed.hexdigest()[:16]
