"""The conformance suite: a template inherits every test here by being registered."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import mmap
import random
import resource
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kernel_templates
from kernel_templates.base import (
    DTYPES,
    DeviceInfo,
    KernelTemplate,
    LayerShape,
    ModelShape,
    record_from_dict,
    record_to_dict,
    templates,
)
from search_spaces.base import spaces
from tuner.check import changed_operands, compare, poison, snapshot, touched_gaps
from tuner.compile import CompilePool
from tuner.device import known_gpus
from tuner.model import load_model, preset_names

EVERY = pytest.mark.parametrize("name", sorted(templates()))
COUNTS = (1, 2, 3, 8, 17, 64, 100, 256, 1000, 1024, 2048, 4096, 8192)
#: With one SM a persistent grid suits few tokens, so small problems reach every kind of config.
ONE_SM = dataclasses.replace(known_gpus()[0], name="one SM", sms=1)


def layer(**changes: Any) -> LayerShape:
    """A small layer of no real model; sizes are no powers of two where none is needed."""
    usual: dict[str, Any] = {
        "kind": "sliding_attention",
        "head_dim": 32,
        "query_heads": 2,
        "kv_heads": 1,
        "k_eq_v": False,
        "kv_shared": False,
        "window": 8,
        "intermediate_size": 72,
        "rotary_pairs": 16,
        "rope_theta": 1e4,
    }
    return LayerShape(**{**usual, **changes})


FULL = {"kind": "full_attention", "head_dim": 64, "rotary_pairs": 8, "window": None}
SMALL_MODELS = (
    ModelShape(
        name="small with PLE",
        hidden_size=96,
        vocab_size=128,
        layers=(layer(), layer(**FULL), layer(kv_shared=True, intermediate_size=144)),
        ple_width=24,
    ),
    ModelShape(
        name="small MoE",
        hidden_size=80,
        vocab_size=128,
        layers=(layer(moe=True), layer(**FULL, moe=True, k_eq_v=True, query_heads=4)),
        num_experts=12,
        top_k_experts=3,
        moe_intermediate_size=40,
    ),
)


#: Of fields beside the tokens that only change the amount of work: what an interpreter can afford.
MOST_WORK = 20


def small_problems(template: KernelTemplate[Any, Any], tokens: int, dtype: str) -> list[Any]:
    models = (dataclasses.replace(model, dtype=dtype) for model in SMALL_MODELS)
    found = [problem for model in models for problem in template.problems(model, [tokens])]
    assert found
    less = [
        dataclasses.replace(
            problem,
            **{
                field: min(getattr(problem, field), MOST_WORK)
                for field in template.same_kernel
                if field != "tokens"
            },
        )
        for problem in found
    ]
    return list(dict.fromkeys(less))


def preset_problems(template: KernelTemplate[Any, Any], tokens: tuple[int, ...]) -> list[Any]:
    """What the presets need, whole and split over eight ranks where they can be."""
    found: dict[Any, None] = {}
    for name in preset_names():
        for tp in (1, 8):
            try:
                model = load_model(name, tp=tp)
            except ValueError:
                assert tp > 1
                continue
            found.update(dict.fromkeys(template.problems(model, list(tokens))))
    return list(found)


def draws(name: str, problem: Any, device: DeviceInfo, seed: int = 0) -> Iterator[Any]:
    """Endless random configs of a space, feasible or not."""
    rng = random.Random(zlib.crc32(f"{name} {problem} {seed}".encode()))
    choices = spaces()[name].choices(problem, device)
    while True:
        values = {field: rng.choice(options) for field, options in choices.items()}
        yield templates()[name].config(**values)


def sample(name: str, problem: Any, device: DeviceInfo, count: int) -> list[Any]:
    """``count`` different feasible random configs, fewer where the space has few."""
    found: dict[Any, None] = {}
    for _, config in zip(range(3000), draws(name, problem, device), strict=False):
        if spaces()[name].infeasible(problem, config, device) is None:
            found[config] = None
        if len(found) == count:
            break
    return list(found)


def assert_right(
    template: KernelTemplate[Any, Any], problem: Any, config: Any, device: torch.device, pad: int
) -> None:
    """Every output right, nothing written beside them, no operand changed."""
    inputs = template.make_inputs(problem, 7, device, pad)
    same = template.reference(inputs)
    exact = template.reference(inputs.upcast())
    poison(inputs)
    before = snapshot(inputs)
    template.launch(inputs, config)
    what = f"{problem} {config} pad {pad}"
    verdict = compare(inputs.outputs(), exact, same, template.exact_outputs)
    assert verdict.ok, f"{what}: {verdict.reason}"
    assert touched_gaps(inputs) == {}, what
    assert changed_operands(inputs, before) == [], what


@EVERY
def test_has_a_space_of_its_config(name: str) -> None:
    space, template = spaces()[name], templates()[name]
    for problem in small_problems(template, 17, "bfloat16"):
        fields = {field.name for field in dataclasses.fields(template.config)}
        assert set(space.choices(problem, ONE_SM)) == fields


@EVERY
def test_default_is_feasible_wherever_it_may_run(name: str) -> None:
    template, space = templates()[name], spaces()[name]
    problems = preset_problems(template, COUNTS)
    assert problems
    for device in known_gpus():
        for problem in problems:
            default = template.default(problem, device)
            reason = space.infeasible(problem, default, device)
            assert reason is None, f"{device.name}: {problem} {default}: {reason}"
            choices = space.choices(problem, device)
            outside = {f: v for f, v in record_to_dict(default).items() if v not in choices[f]}
            assert not outside, f"{device.name}: {problem}: the space lacks {outside}"


@EVERY
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("tokens", [1, 3, 17])
def test_matches_the_reference(name: str, dtype: str, tokens: int) -> None:
    template = templates()[name]
    cpu = torch.device("cpu")
    for problem in small_problems(template, tokens, dtype):
        default = template.default(problem, ONE_SM)
        assert_right(template, problem, default, cpu, pad=0)
        configs = sample(name, problem, ONE_SM, 2)
        assert configs
        for pad, config in zip((8, 3), configs, strict=False):
            assert_right(template, problem, config, cpu, pad)


@pytest.mark.gpu
@EVERY
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_matches_the_reference_on_a_gpu(name: str, dtype: str, device: torch.device) -> None:
    from tuner.device import attached_gpus

    template, gpu = templates()[name], attached_gpus()[0]
    # Attention's binaries take seconds each: fewer models and configs of it.
    tiled = template.tile_work is not None
    presets, drawn = (("e2b", "26b-a4b"), 1) if tiled else (preset_names(), 3)
    for tokens in (1, 3, 257):
        problems = small_problems(template, tokens, dtype)
        for preset in presets:
            problems += template.problems(load_model(preset, dtype=dtype), [tokens])
        for problem in dict.fromkeys(problems):
            configs = [template.default(problem, gpu), *sample(name, problem, gpu, drawn)]
            for pad, config in zip((0, 8, 3, 16), configs, strict=False):
                assert_right(template, problem, config, device, pad)


#: Elements between rows: the third row lies beyond 2^31 elements, the second not.
FAR = 2**30 + 64


def far_apart(rows: torch.Tensor, fill: float | None = None) -> torch.Tensor:
    """Three rows, :data:`FAR` elements apart, in memory that exists only where it is written.

    As much of it lies before the first row, so that an offset which wraps in 32 bits reads zeros
    and writes nowhere rather than ending the process.
    """
    assert len(rows) == 3
    elements = 2**31 + 2 * FAR + rows[0].numel()
    private_anonymous_noreserve = 0x02 | 0x20 | 0x4000
    memory = mmap.mmap(-1, elements * rows.element_size(), flags=private_anonymous_noreserve)
    flat = torch.frombuffer(memory, dtype=rows.dtype)
    placed = flat.as_strided(rows.shape, (FAR, *rows[0].stride()), 2**31)
    return placed.copy_(rows) if fill is None else placed.fill_(fill)


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's memory without reservation")
@EVERY
def test_row_offsets_beyond_32_bits(name: str) -> None:  # case 49
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    template = templates()[name]
    for problem in small_problems(template, 3, "float16"):
        # An expert's problem counts rows: more than one a token.
        problem = dataclasses.replace(problem, tokens=3)
        inputs = template.make_inputs(problem, 7, torch.device("cpu"), 0)
        same, exact = template.reference(inputs), template.reference(inputs.upcast())
        moved: dict[str, torch.Tensor] = {
            key: far_apart(tensor.contiguous())
            for key, tensor in inputs.operands().items()
            if tensor.dim() > 1 and len(tensor) == 3
        }
        for key, output in inputs.outputs().items():
            moved[key] = far_apart(output, torch.nan if output.is_floating_point() else -7)
        assert len(moved) > len(inputs.outputs())
        inputs = dataclasses.replace(inputs, **moved)
        for config in (template.default(problem, ONE_SM), *sample(name, problem, ONE_SM, 1)):
            template.launch(inputs, config)
            verdict = compare(inputs.outputs(), exact, same, template.exact_outputs)
            assert verdict.ok, f"{problem} {config}: {verdict.reason}"
    # Only pages that were touched may exist: the views span many GB.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_kib < 2**20


@EVERY
def test_a_wrong_output_is_seen(name: str) -> None:
    template = templates()[name]
    problem = small_problems(template, 3, "bfloat16")[0]
    inputs = template.make_inputs(problem, 7, torch.device("cpu"), 0)
    same, exact = template.reference(inputs), template.reference(inputs.upcast())
    assert set(same) == set(inputs.outputs())
    for output in same:
        wrong = {key: value.clone() for key, value in same.items()}
        wrong[output][-1] += 1
        verdict = compare(wrong, exact, same, template.exact_outputs)
        assert [key for key, error in verdict.outputs.items() if not error.ok] == [output]


@EVERY
def test_outputs_have_the_references_dtype(name: str) -> None:  # case 35
    template = templates()[name]
    for dtype in ("bfloat16", "float16"):
        for problem in small_problems(template, 3, dtype):
            inputs = template.make_inputs(problem, 7, torch.device("cpu"), 0)
            for key, value in template.reference(inputs).items():
                output = inputs.outputs()[key]
                assert (output.dtype, output.shape) == (value.dtype, value.shape)
                if value.is_floating_point() and value.dtype != DTYPES[dtype]:
                    assert (name, key) == ("moe_routing", "weights")


@EVERY
def test_no_tokens_launch_nothing(name: str) -> None:
    template = templates()[name]
    for problem in small_problems(template, 0, "bfloat16"):
        config = template.default(problem, ONE_SM)
        inputs = template.make_inputs(problem, 7, torch.device("cpu"), 8)
        calls = template.calls(inputs, config)
        assert all(0 in call.grid for call in calls)
        template.launch(inputs, config)


@EVERY
def test_records_survive_json(name: str) -> None:
    template = templates()[name]
    for problem in (
        *small_problems(template, 3, "float16"),
        *preset_problems(template, (1, 100)),
    ):
        default = template.default(problem, ONE_SM)
        for kind, record in ((template.problem, problem), (template.config, default)):
            values = json.loads(json.dumps(record_to_dict(record)))
            again = record_from_dict(kind, values)
            assert again == record
            assert hash(again) == hash(record)
            with pytest.raises(ValueError, match="unknown field 'colour'"):
                record_from_dict(kind, {**values, "colour": 1})


@pytest.mark.parametrize("name", sorted(templates()))
def test_infeasible_says_the_number(name: str) -> None:
    template, space = templates()[name], spaces()[name]
    device = known_gpus()[0]
    reasons = set()
    for problem in (
        *small_problems(template, 3, "bfloat16"),
        *preset_problems(template, (1, 8192)),
    ):
        for _, config in zip(range(200), draws(name, problem, device), strict=False):
            reasons.add(space.infeasible(problem, config, device))
    reasons.discard(None)
    assert reasons
    assert [reason for reason in reasons if not any(c.isdigit() for c in reason)] == []


@EVERY
def test_cost_grows_with_the_tokens(name: str) -> None:
    template = templates()[name]
    for few, many in zip(
        preset_problems(template, (16,)), preset_problems(template, (1024,)), strict=True
    ):
        small, large = template.cost(few), template.cost(many)
        assert 0 < small.bytes < large.bytes <= 64 * small.bytes
        assert 0 < small.flops < large.flops <= 64 * 64 * small.flops


@EVERY
def test_kinds_of_a_model_have_different_names(name: str) -> None:
    template = templates()[name]
    for preset in preset_names():
        names: dict[str, Any] = {}
        for problem in template.problems(load_model(preset), [1, 8192]):
            kind = template.kernel_problem(problem)
            assert names.setdefault(template.describe(problem), kind) == kind
        assert "" not in names


# --- the source hash ------------------------------------------------------------------------------


def copy_package(folder: Path, package: str, edits: dict[str, str]) -> None:
    (folder / package).mkdir()
    for file in Path(kernel_templates.__path__[0]).glob("*.py"):
        text = edits.get(file.stem, file.read_text(encoding="utf-8"))
        (folder / package / file.name).write_text(text, encoding="utf-8")


def functions(text: str) -> dict[str, tuple[ast.FunctionDef, bool]]:
    """Top-level functions of a module, and whether each is a ``@triton.jit`` kernel."""
    return {
        node.name: (node, any("triton.jit" in ast.unparse(d) for d in node.decorator_list))
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef)
    }


def after(text: str, node: ast.FunctionDef, line: str) -> str:
    """``text`` with ``line`` as the last one of a function's body."""
    lines = text.splitlines()
    assert node.end_lineno is not None
    return "\n".join([*lines[: node.end_lineno], f"    {line}", *lines[node.end_lineno :], ""])


def before_body(text: str, node: ast.FunctionDef, line: str) -> str:
    lines = text.splitlines()
    at = node.body[0].lineno - 1
    return "\n".join([*lines[:at], f"    {line}", "", *lines[at:], ""])


@EVERY
def test_source_hash_follows_the_code_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = templates()[name]
    module = inspect.getmodule(template.calls)
    assert module is not None
    stem = module.__name__.rpartition(".")[2]
    folder = Path(kernel_templates.__path__[0])
    text = (folder / f"{stem}.py").read_text(encoding="utf-8")
    common = (folder / "common.py").read_text(encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    packages: list[str] = []

    def hashed(edits: dict[str, str]) -> str:
        package = f"copied_{name}_{len(packages)}"
        packages.append(package)
        copy_package(tmp_path, package, edits)
        importlib.invalidate_caches()
        copied = importlib.import_module(f"{package}.{stem}").TEMPLATE
        return str(copied.source_hash)

    try:
        assert hashed({}) == template.source_hash
        own = functions(text)
        kernels = [node for node, jit in own.values() if jit]
        assert kernels
        for node in (*kernels, own["calls"][0]):
            assert hashed({stem: before_body(text, node, "# why")}) == template.source_hash
        assert hashed({stem: after(text, own["cost"][0], "unused = 1")}) == template.source_hash

        changed = [hashed({stem: after(text, node, "unused = 1")}) for node in kernels]
        changed.append(hashed({stem: before_body(text, own["calls"][0], "unused = 1")}))
        helper = functions(common)["tile_rows"][0]
        changed.append(hashed({"common": after(common, helper, "unused = 1")}))
        assert len({template.source_hash, *changed}) == 1 + len(changed)
    finally:
        for loaded in [key for key in sys.modules if key.partition(".")[0] in packages]:
            del sys.modules[loaded]


# --- compiled without a GPU -----------------------------------------------------------------------


@pytest.fixture(scope="module", params=[80, 90])
def pool(request: pytest.FixtureRequest) -> Iterator[tuple[CompilePool, DeviceInfo]]:
    device = next(gpu for gpu in known_gpus() if gpu.target == request.param)
    with CompilePool(request.param, jobs=1) as compilers:
        yield compilers, device


#: Bytes a thread: vLLM's own tile of 32 keys at head 512 costs attention four registers on 8.0.
FEW_SPILLS = 16


@pytest.mark.slow
@EVERY
def test_compiles_without_spills(name: str, pool: tuple[CompilePool, DeviceInfo]) -> None:
    compilers, device = pool
    template = templates()[name]
    problems = preset_problems(template, (1024,))
    for problem in {problems[0], problems[-1]}:
        default = template.default(problem, device)
        for config in (default, *sample(name, problem, device, 1)):
            resources = compilers.submit(template, problem, config).result()
            assert resources
            for used in resources:
                assert used.registers > 0
                assert used.infeasible(device) is None
                if config == default:
                    assert used.spill_bytes <= FEW_SPILLS, f"{problem} {config}"
