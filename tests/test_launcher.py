"""A launch that is repeated by its layout does what the first one did, on the new operands."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from test_templates import EVERY, small_problems
from triton.tools.tensor_descriptor import TensorDescriptor

from kernel_templates import attention_prefill as prefill
from kernel_templates import gelu_mul
from kernel_templates.attention_problem import Problem
from kernel_templates.base import KernelCall, KernelTemplate, templates
from kernel_templates.launcher import Launcher, layout
from tuner.check import compare, poison
from tuner.device import attached_gpus, known_gpus

CPU = torch.device("cpu")
HOPPER = next(gpu for gpu in known_gpus() if gpu.target == 90)


class Binary:
    """Stands for Triton's compiled kernel: notes what it is launched on."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.launches: list[tuple[tuple[int, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*values: Any) -> None:
            self.launches.append((grid, dict(zip(self.names, values, strict=True))))

        return run


class Kernel:
    """Stands for a ``@triton.jit`` function that has been compiled."""

    def __init__(self, arg_names: list[str]) -> None:
        self.arg_names = arg_names
        self.binary = Binary(arg_names)
        self.compiled = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(num_warps: int, num_stages: int, **_: Any) -> Binary:
            self.compiled += 1
            return self.binary

        return run


def compiled(name: str) -> tuple[KernelTemplate[Any, Any], list[Kernel]]:
    """The template with kernels that note their launches in place of its own."""
    template = templates()[name]
    kernels: dict[Any, Kernel] = {}

    def calls(inputs: Any, config: Any) -> list[KernelCall]:
        made = []
        for call in template.calls(inputs, config):
            kernel = kernels.setdefault(call.kernel, Kernel([*reversed(call.args)]))
            made.append(dataclasses.replace(call, kernel=kernel))
        found[:] = kernels.values()
        return made

    found: list[Kernel] = []
    return dataclasses.replace(template, calls=calls), found


def assert_same_arguments(launched: dict[str, Any], call: KernelCall) -> None:
    assert launched.keys() == call.args.keys()
    for name, wanted in call.args.items():
        value = launched[name]
        if isinstance(wanted, TensorDescriptor):
            assert value.base is wanted.base
            assert {**vars(value), "base": 0} == {**vars(wanted), "base": 0}
        elif isinstance(wanted, torch.Tensor):
            assert value is wanted, name
        else:
            assert (type(value), value) == (type(wanted), wanted), name


@EVERY
def test_a_repeat_has_the_arguments_of_a_launch(name: str) -> None:
    template, kernels = compiled(name)
    launcher = Launcher()
    for problem in small_problems(templates()[name], 9, "float16"):
        config = template.default(problem, HOPPER)
        for kernel in kernels:
            kernel.binary.launches.clear()
            kernel.compiled = 0
        seeds = [template.make_inputs(problem, seed, CPU, 0) for seed in (0, 1)]
        for inputs in seeds:
            launcher.launch(template, inputs, config)
        wanted = template.calls(seeds[1], config)
        launches = [kernel.binary.launches for kernel in kernels if kernel.compiled]
        assert len(launches) == len(wanted)
        for (launch,), call in zip(launches, wanted, strict=True):
            grid, arguments = launch
            assert grid == (*call.grid, 1, 1)[:3]
            assert_same_arguments(arguments, call)
        # Once by Triton's own way, once repeated.
        assert all(kernel.compiled in (0, 1) for kernel in kernels)


def test_descriptors_follow_their_tensors_and_keep_none() -> None:
    template, kernels = compiled("attention_prefill")
    config = prefill.Config(16, 16, 1, True, True, 4, 2)
    problem = Problem(40, 20, 30, 4, 2, 32, 0, 64, dtype="float16")
    launcher = Launcher()
    made = [template.make_inputs(problem, seed, CPU, 0) for seed in (0, 1)]
    for inputs in made:
        launcher.launch(template, inputs, config)
    ((_, arguments),) = kernels[0].binary.launches
    assert arguments["key_rows"].base is made[1].keys
    assert arguments["value_rows"].base is made[1].values
    ((repeat,),) = launcher._known.values()
    assert not any(isinstance(value, torch.Tensor) for value in repeat.values)
    assert all(value.base is None for value in repeat.values if isinstance(value, TensorDescriptor))


def gelu(rows: int = 4, width: int = 32, pad: int = 0, shift: int = 0) -> Any:
    memory = torch.zeros(rows * (2 * width + pad) + shift + 8, dtype=torch.float16)
    both = memory[shift:].as_strided((rows, 2 * width), (2 * width + pad, 1))
    output = torch.empty(rows, width, dtype=torch.float16)
    return gelu_mul.GeluMulInputs(both[:, :width], both[:, width:], output)


def test_what_a_layout_tells_apart() -> None:
    plain = layout(gelu())
    assert layout(gelu()) == plain
    assert hash(plain) == hash(layout(gelu()))
    others = [gelu(rows=5), gelu(width=16), gelu(pad=8), gelu(shift=1)]
    single = gelu()
    single.gate = single.gate.float()
    others.append(single)
    assert len({plain, *map(layout, others)}) == 1 + len(others)

    @dataclasses.dataclass
    class Scalars:
        value: Any

    assert len({layout(Scalars(value)) for value in (1, 1.0, True, None)}) == 4


def test_errors_are_those_of_a_launch_every_time() -> None:
    template, kernels = compiled("gelu_mul")
    launcher = Launcher()
    wrong = gelu()
    wrong.output = torch.empty(4, 31, dtype=torch.float16)
    config = template.default(template.problem(4, 32, "halves", 64, "float16"), HOPPER)
    for _ in range(2):
        with pytest.raises(ValueError, match="output has shape"):
            launcher.launch(template, wrong, config)
    assert not kernels
    launcher.launch(template, gelu(), config)
    launcher.launch(template, gelu(), config)
    assert kernels[0].compiled == 1
    assert len(kernels[0].binary.launches) == 1


def test_interpreted_and_empty_launches_are_not_remembered() -> None:
    template = templates()["gelu_mul"]
    launcher = Launcher()
    for rows in (4, 0):
        config = template.default(template.problem(1, 32, "halves", 64, "float16"), HOPPER)
        launcher.launch(template, gelu(rows=rows), config)
    assert not launcher._known


def test_one_tensor_in_two_fields_is_no_pattern_for_two_tensors() -> None:
    template, kernels = compiled("residual_norm")
    launcher = Launcher()
    problem = small_problems(template, 4, "float16")[0]
    config = template.default(problem, HOPPER)
    inputs = template.make_inputs(problem, 0, CPU, 0)
    launcher.launch(template, dataclasses.replace(inputs, residual=inputs.branch0), config)
    assert not launcher._known
    launcher.launch(template, inputs, config)
    launcher.launch(template, inputs, config)
    ((_, arguments),) = kernels[0].binary.launches
    assert arguments["branch0"] is inputs.branch0
    assert arguments["residual"] is inputs.residual


def test_memory_of_layouts_is_bounded() -> None:
    template, kernels = compiled("gelu_mul")
    launcher = Launcher(most=3)
    config = template.default(template.problem(4, 32, "halves", 64, "float16"), HOPPER)
    for rows in range(1, 10):
        launcher.launch(template, gelu(rows=rows), config)
        assert len(launcher._known) <= 3
    launcher.launch(template, gelu(rows=9), config)
    assert kernels[0].compiled == 9


@pytest.mark.gpu
@EVERY
def test_repeats_are_right_on_a_gpu(name: str, device: torch.device) -> None:
    template = templates()[name]
    gpu = attached_gpus()[0]
    launcher = Launcher()
    for problem in small_problems(template, 9, "bfloat16"):
        config = template.default(problem, gpu)
        for seed in range(3):
            inputs = template.make_inputs(problem, seed, device, 0)
            wanted = template.reference(inputs.upcast())
            same = template.reference(inputs)
            poison(inputs)
            launcher.launch(template, inputs, config)
            verdict = compare(inputs.outputs(), wanted, same, template.exact_outputs)
            assert verdict.ok, f"{problem} seed {seed}: {verdict.reason}"
    assert launcher._known
