"""What a tunable kernel is: the types every template, space and tool shares.

A *template* is one hot path of Gemma 4 with everything needed to tune and to run it.  Its module
holds, top to bottom: the mathematics, a frozen ``Problem`` (what is given), a frozen ``Config``
(what may vary), the ``@triton.jit`` kernel, ``calls`` (the one place that turns inputs and a config
into kernel launches), a plain PyTorch ``reference``, ``make_inputs``, ``problems``, ``default``,
``cost`` and, last, ``TEMPLATE = KernelTemplate(...)``.  Importing the module registers nothing by
itself: :func:`templates` finds every module of this package that defines ``TEMPLATE``.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import inspect
import io
import pkgutil
import tokenize
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

DTYPES: Mapping[str, torch.dtype] = types.MappingProxyType(
    {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
)


@dataclass(frozen=True)
class DeviceInfo:
    """The numbers of one GPU that validity and prediction depend on.

    ``name`` is the driver's own name (``NVIDIA H200``); rules use the numbers and never the name.
    Bandwidth is in byte/s, compute in FLOP/s (dense bf16), memory and caches in bytes.
    ``attached`` is True when the numbers were read from a GPU in this machine, False when they come
    from the data file of GPU facts.
    """

    name: str
    capability: tuple[int, int]
    sms: int
    shared_per_block: int
    shared_per_sm: int
    l2_bytes: int
    memory_bytes: int
    bandwidth: float
    bf16_flops: float
    registers_per_sm: int = 65536
    threads_per_sm: int = 2048
    blocks_per_sm: int = 32
    driver: str | None = None
    uuid: str | None = None
    attached: bool = False

    @property
    def target(self) -> int:
        """The capability as Triton names it: 80 for (8, 0)."""
        return self.capability[0] * 10 + self.capability[1]

    @property
    def has_warpgroups(self) -> bool:
        """Whether the full rate of matrix products takes the instructions of whole warpgroups.

        The consumer GPUs of 12.x have a warp's only.
        """
        return self.capability[0] in (9, 10)

    def multiplies_by_warpgroups(self, rows: int, num_warps: int) -> bool:
        """Whether Triton multiplies a tile of so many rows by them, operands in shared memory."""
        return self.has_warpgroups and rows >= 64 and num_warps >= 4


@dataclass(frozen=True)
class LayerShape:
    """One decoder layer's text shapes, per tensor-parallel rank.

    ``rotary_pairs`` is the number of rotated (cos, sin) pairs out of ``head_dim / 2``;
    ``window`` is None in full-attention layers.
    """

    kind: str
    head_dim: int
    query_heads: int
    kv_heads: int
    k_eq_v: bool
    kv_shared: bool
    window: int | None
    intermediate_size: int
    rotary_pairs: int
    rope_theta: float
    moe: bool = False


@dataclass(frozen=True)
class ModelShape:
    """A Gemma 4 text model as the hot paths see it, per tensor-parallel rank."""

    name: str
    hidden_size: int
    vocab_size: int
    layers: tuple[LayerShape, ...]
    ple_width: int = 0
    num_experts: int = 0
    top_k_experts: int = 0
    moe_intermediate_size: int = 0
    rms_eps: float = 1e-6
    final_softcap: float | None = 30.0
    dtype: str = "bfloat16"
    tp: int = 1


@dataclass(frozen=True)
class Cost:
    """The least work a problem needs: each input read once, each output written once."""

    bytes: int
    flops: int


@dataclass(frozen=True)
class TileWork:
    """What the programs of a tiled matrix kernel do, whatever the caches hold.

    ``programs`` walk through ``steps`` tiles in all, the longest of them through ``longest``.  A
    step loads ``step_bytes`` and does ``step_flops``, masked and repeated work included; a program
    moves ``program_bytes`` beside its steps.  ``rows`` are those of its tile.  ``scratch_bytes``
    are written for a second kernel, 0 where there is none.  ``pipelined``: a step's loads overlap
    the arithmetic of the one before.
    """

    programs: int
    steps: int
    longest: int
    step_bytes: int
    step_flops: int
    program_bytes: int
    rows: int
    pipelined: bool
    scratch_bytes: int = 0


@dataclass
class Inputs:
    """Base of every template's inputs: tensors and scalars in, preallocated tensors out.

    Subclasses are dataclasses.  A field made with :func:`out` is written by the kernel, one made
    with :func:`scratch` is written and read back within a launch; every other tensor is only read.
    A field may be None when the problem has no such operand.
    """

    def outputs(self) -> dict[str, torch.Tensor]:
        """The tensors the kernel writes, by field name, without absent ones."""
        return {
            f.name: value
            for f in dataclasses.fields(self)
            if f.metadata.get("out") and (value := getattr(self, f.name)) is not None
        }

    def operands(self) -> dict[str, torch.Tensor]:
        """The tensors the kernel reads, by field name."""
        return {
            f.name: value
            for f in dataclasses.fields(self)
            if not (f.metadata.get("out") or f.metadata.get("scratch"))
            and isinstance(value := getattr(self, f.name), torch.Tensor)
        }

    def scratches(self) -> dict[str, torch.Tensor]:
        """The tensors whose contents mean nothing before and after a launch, by field name."""
        return {
            f.name: value
            for f in dataclasses.fields(self)
            if f.metadata.get("scratch") and (value := getattr(self, f.name)) is not None
        }

    def upcast(self) -> Inputs:
        """A copy whose floating-point operands are float32, for the exact reference."""
        return dataclasses.replace(
            self,
            **{
                name: tensor.float()
                for name, tensor in self.operands().items()
                if tensor.is_floating_point()
            },
        )

    def nbytes(self) -> int:
        """Bytes of operands and outputs; scratch, which a server keeps warm, does not count."""
        tensors = [*self.operands().values(), *self.outputs().values()]
        return sum(t.numel() * t.element_size() for t in tensors)

    def reference_bytes(self) -> int:
        """Bytes that computing the references takes beside the inputs, at most.

        Float32 copies of operands and outputs, the same-dtype answer, the temporaries of both, and
        the inputs of a smaller case.
        """
        return 11 * self.nbytes()


def out() -> Any:
    """A dataclass field for a tensor that the kernel writes (None when the problem has none)."""
    return field(default=None, metadata={"out": True})


def scratch() -> Any:
    """A dataclass field for memory that a launch fills before it reads it (None if not needed)."""
    return field(default=None, metadata={"scratch": True})


@dataclass(frozen=True)
class KernelCall:
    """One launch of one ``@triton.jit`` kernel: everything Triton needs, nothing else.

    The same object launches (:meth:`run`), and compiles without a GPU when its tensors live on the
    ``meta`` device (:meth:`warmup`), so what is compiled ahead, checked, timed and shipped is one
    thing.
    """

    kernel: Any
    grid: tuple[int, ...]
    args: Mapping[str, Any]
    num_warps: int
    num_stages: int = 1

    def run(self) -> Any:
        """Launch on the current stream; an empty grid launches nothing.

        Returns Triton's compiled kernel, None where nothing was launched or it was interpreted.
        """
        if not all(self.grid):
            return None
        return self.kernel[self.grid](
            **self.args, num_warps=self.num_warps, num_stages=self.num_stages
        )

    def warmup(self) -> Any:
        """Compile without launching; returns Triton's compiled kernel."""
        return self.kernel.warmup(
            grid=self.grid, **self.args, num_warps=self.num_warps, num_stages=self.num_stages
        )


P = TypeVar("P")
C = TypeVar("C")


@dataclass(frozen=True)
class KernelTemplate(Generic[P, C]):
    """Everything needed to tune and to run one hot path.

    ``calls(inputs, config)`` is the only launcher.  ``reference(inputs)`` computes in the dtype of
    its inputs and returns the outputs by field name: called on ``inputs.upcast()`` it is the exact
    answer, called on the inputs themselves it is PyTorch's own error in that dtype, and compiled it
    is the peer that a server runs without us.  ``make_inputs(problem, seed, device, pad)`` draws
    fresh inputs; ``pad`` extra elements separate consecutive rows of every strided operand.
    ``problems(model, tokens)`` lists what a model needs, without repeats.  ``same_kernel`` names
    the fields of a problem that only change the amount of work, never the compiled binary.
    ``exact_outputs`` must equal the reference bit for bit (integers, such as expert ids).
    ``stock_config`` is given where a server runs a hand-written kernel: the config with that
    kernel's algorithm and constants, which is the stock peer in place of the compiled reference.
    ``fits(inputs)`` raises ValueError for operands that do not fit together.  A candidate may spill
    ``most_spill`` bytes per thread to local memory, and is measured like any other.
    ``tile_work(problem, config)`` is given where a config decides how often operands are read and
    how much is computed: prediction needs it.  ``served`` is
    the least and the most tokens (None: as many as a server batches) that the kernel is asked for.
    A ``preview`` template is not complete yet and is tuned only when it is named.
    """

    name: str
    problem: type[P]
    config: type[C]
    calls: Callable[[Any, C], Sequence[KernelCall]]
    reference: Callable[[Any], dict[str, torch.Tensor]]
    make_inputs: Callable[[P, int, torch.device, int], Any]
    problems: Callable[[ModelShape, Sequence[int]], list[P]]
    default: Callable[[P, DeviceInfo], C]
    cost: Callable[[P], Cost]
    describe: Callable[[P], str]
    same_kernel: tuple[str, ...] = ("tokens",)
    exact_outputs: tuple[str, ...] = ()
    stock_config: Callable[[P], C] | None = None
    fits: Callable[[Any], None] | None = None
    most_spill: int = 0
    tile_work: Callable[[P, C], TileWork] | None = None
    served: tuple[int, int | None] = (1, None)
    preview: bool = False

    def launch(self, inputs: Any, config: C) -> None:
        """Run the kernel: reads ``inputs``' operands, writes its outputs.

        ValueError, before anything is launched, for inputs that would give a wrong answer.
        """
        self.check(inputs)
        for call in self.calls(inputs, config):
            call.run()

    def check(self, inputs: Any) -> None:
        """ValueError naming an operand or output that cannot be launched on.

        What no kernel here can take, then what this template's ``fits`` says.
        """
        outputs = inputs.outputs()
        tensors = {**inputs.operands(), **outputs}
        devices = {str(tensor.device) for tensor in tensors.values()}
        if len(devices) > 1:
            raise ValueError(
                f"{self.name}: tensors on {' and '.join(sorted(devices))}, wanted one device"
            )
        places: dict[tuple[int, torch.Size], str] = {}
        for name, tensor in outputs.items():
            if any(
                step == 0 and size > 1
                for step, size in zip(tensor.stride(), tensor.shape, strict=True)
            ):
                raise ValueError(
                    f"{self.name}: {name} has strides {tensor.stride()} for shape "
                    f"{tuple(tensor.shape)}, wanted memory of its own for every element"
                )
            other = places.setdefault((tensor.data_ptr(), tensor.shape), name)
            if other != name and tensor.numel() and tensor.device.type != "meta":
                raise ValueError(f"{self.name}: {other} and {name} are the same memory")
        if self.fits is not None:
            self.fits(inputs)

    def kernel_problem(self, problem: P) -> P:
        """The representative of all problems that share this one's compiled binaries."""
        return dataclasses.replace(problem, **dict.fromkeys(self.same_kernel, 16))  # type: ignore[type-var]

    @functools.cached_property
    def source_hash(self) -> str:
        """Hash of the code that gives a config its meaning; comments and blank lines do not count.

        Covers every ``@triton.jit`` function of the template's module, of ``common`` and of the
        modules of this package that those functions are imported from, and ``calls``.  A tuned
        entry with another hash was made for another kernel.
        """
        # A list that grows while it is walked.  `common` counts whether or not it is used: tables
        # were made under that rule.
        modules = [self.calls.__module__, f"{__package__}.common"]
        digest = hashlib.sha256()
        for module in modules:
            imported: set[str] = set()
            for name, function in _jit_functions(module):
                if function.__module__ == module:
                    digest.update(f"{name}\n{_code_of(function)}".encode())
                elif function.__module__.startswith(f"{__package__}."):
                    imported.add(function.__module__)
            modules += sorted(imported.difference(modules))
        digest.update(_code_of(self.calls).encode())
        return digest.hexdigest()[:16]


def _jit_functions(module: str) -> Iterator[tuple[str, types.FunctionType]]:
    """The Python functions behind the ``@triton.jit`` names of a module, sorted by name."""
    for name, value in sorted(vars(importlib.import_module(module)).items()):
        # Both JITFunction and, under TRITON_INTERPRET, InterpretedFunction keep `.fn`.
        function = getattr(value, "fn", None)
        if inspect.isfunction(function):
            yield name, function


def _code_of(function: Callable[..., Any]) -> str:
    """A function's source without comments and blank lines.

    Text rather than tokens: Python versions cut f-strings into different tokens.
    """
    source = inspect.getsource(function)
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    return "\n".join(line.rstrip() for line in lines if line.strip())


@functools.cache
def templates() -> Mapping[str, KernelTemplate[Any, Any]]:
    """Every template of this package by name, found by importing its modules."""
    package = importlib.import_module(__package__)
    found: dict[str, KernelTemplate[Any, Any]] = {}
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{__package__}.{info.name}")
        template = getattr(module, "TEMPLATE", None)
        if template is not None:
            found[template.name] = template
    return types.MappingProxyType(found)


def template(name: str) -> KernelTemplate[Any, Any]:
    """The template of that name; KeyError naming the known ones otherwise."""
    known = templates()
    if name not in known:
        raise KeyError(f"no kernel template named {name!r}; known: {', '.join(sorted(known))}")
    return known[name]


def record_to_dict(record: Any) -> dict[str, Any]:
    """A problem or config as plain JSON values (tuples become lists)."""
    return {
        f.name: list(value) if isinstance(value := getattr(record, f.name), tuple) else value
        for f in dataclasses.fields(record)
    }


def record_from_dict(kind: type[C], values: Mapping[str, Any]) -> C:
    """Build a problem or config from JSON values; ValueError names a wrong or missing field."""
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(set(values) - set(fields))
    if unknown:
        raise ValueError(f"unknown field {unknown[0]!r}; known: {', '.join(fields)}")
    hints = typing.get_type_hints(kind)
    built: dict[str, Any] = {}
    for name, f in fields.items():
        if name not in values:
            if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
                raise ValueError(f"missing field {name!r}")
            continue
        value = values[name]
        if isinstance(value, list):
            value = tuple(value)
        wanted = typing.get_origin(hints[name]) or hints[name]
        if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
            raise ValueError(f"field {name!r} is {value!r}, wanted {wanted.__name__}")
        built[name] = value
    return kind(**built)
