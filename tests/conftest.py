"""How the tests run kernels: interpreted on the CPU, or on a GPU with ``pytest -m gpu``.

Triton decides at import whether its functions are interpreted, so the choice is made here, before
any test module is imported.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

BF16_KEY = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--vllm-sources",
        action="append",
        default=[],
        metavar="FOLDER",
        help="an unpacked vllm package to check what the plugin relies on; may be repeated",
    )


def _gpu_run(config: pytest.Config) -> bool:
    marks = config.option.markexpr
    return "gpu" in marks and "not gpu" not in marks and torch.cuda.is_available()


def pytest_configure(config: pytest.Config) -> None:
    if _gpu_run(config):
        os.environ.pop("TRITON_INTERPRET", None)
        config.stash[BF16_KEY] = ""
        return
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise pytest.UsageError("triton was imported before the tests could choose its interpreter")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        _repair_interpreter()
        config.stash[BF16_KEY] = ""
    except Exception as error:
        config.stash[BF16_KEY] = f"cannot repair bfloat16 rounding of the interpreter: {error!r}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _gpu_run(config):
        return
    skip = pytest.mark.skip(reason="needs a CUDA device: run `pytest -m gpu` on one")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> torch.device:
    """Where kernels run: the GPU in a GPU run, else the CPU under the interpreter."""
    return torch.device("cuda" if _gpu_run(pytestconfig) else "cpu")


@pytest.fixture(autouse=True)
def _bfloat16(request: pytest.FixtureRequest) -> None:
    """Skip a test with a parameter ``dtype="bfloat16"`` where its rounding would be wrong."""
    reason = request.config.stash[BF16_KEY]
    callspec = getattr(request.node, "callspec", None)
    if reason and callspec is not None and callspec.params.get("dtype") == "bfloat16":
        pytest.skip(reason)


def _repair_interpreter() -> None:
    """Make the interpreter compute what a GPU does, where it does not; raises if it cannot.

    * Its conversion of float32 to bfloat16 truncates (Triton 3.6 to 3.9), and even the explicit
      round-to-nearest of 3.6 rounds ties up and loses the carry into the exponent.  Replaced by
      round to nearest even; NaN stays NaN.
    * Its dot product multiplies bfloat16 operands as the 16-bit integers it keeps them in.  Widened
      to float32 first; products of bfloat16 are exact there.
    * Its loop bounds are arrays of one element, which NumPy 2.4 no longer turns into integers
      (Triton 3.6).
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter._convert_float

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) == (tl.bfloat16, tl.float32):
            return np.ascontiguousarray(data).view(np.uint16).astype(np.uint32) << 16
        towards_zero = rounding == getattr(interpreter._ir.ROUNDING_MODE, "RTZ", object())
        if (source, target) != (tl.float32, tl.bfloat16) or towards_zero:
            return original(data, source, target, rounding)
        bits = np.ascontiguousarray(data).view(np.uint32)
        nearest = (bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16
        quiet_nan = (bits >> 16) | 0x40
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        return np.where(is_nan, quiet_nan, nearest).astype(np.uint16)

    interpreter._convert_float = convert

    builder = interpreter.InterpreterBuilder
    create_dot = builder.create_dot

    def dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        wide = [
            interpreter.TensorHandle(
                convert(x.data, tl.bfloat16, tl.float32, None).view(np.float32), tl.float32
            )
            if x.dtype.scalar == tl.bfloat16
            else x
            for x in (a, b)
        ]
        return create_dot(self, *wide, d, *rest)

    builder.create_dot = dot

    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any, *rest: Any) -> None:
        patch_tensor(tensor, scope, *rest)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch
    _prove_rounding()
    _prove_dot()


def _prove_rounding() -> None:
    """Cast through the interpreter and compare with PyTorch, so that a moved path is noticed."""
    import triton
    import triton.language as tl

    @triton.jit
    def cast(source, target, SIZE: tl.constexpr):
        at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
        tl.store(target + at, tl.load(source + at).to(tl.bfloat16))

    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (256,), generator=generator, dtype=torch.int64)
    source = bits.to(torch.int32).view(torch.float32)
    source[:4] = torch.tensor([1.0 + 2**-8, 1.0 + 3 * 2**-8, torch.inf, torch.nan])
    target = torch.empty_like(source, dtype=torch.bfloat16)
    cast[(1,)](source, target, 256)
    if not torch.equal(target.nan_to_num(7.0), source.to(torch.bfloat16).nan_to_num(7.0)):
        raise RuntimeError("float32 to bfloat16 still differs from PyTorch")


def _prove_dot() -> None:
    """A product of bfloat16 matrices through the interpreter, compared with PyTorch's."""
    import triton
    import triton.language as tl

    @triton.jit
    def product(a, b, c, SIZE: tl.constexpr):
        rows, columns = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
        at = rows * SIZE + columns
        tl.store(c + at, tl.dot(tl.load(a + at), tl.trans(tl.load(b + at)), tl.load(c + at)))

    generator = torch.Generator().manual_seed(0)
    a, b, c = torch.randn(3, 16, 16, generator=generator)
    wanted = c + a.bfloat16().float() @ b.bfloat16().float().t()
    product[(1,)](a.bfloat16(), b.bfloat16(), c, 16)
    if not torch.allclose(c, wanted, rtol=1e-5, atol=1e-5):
        raise RuntimeError("a dot product of bfloat16 still differs from PyTorch")


@pytest.fixture(scope="session")
def vllm_place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models and their tables, for runs of vLLM."""
    from vllm_runs import make_place

    return make_place(tmp_path_factory.mktemp("vllm"))


@pytest.fixture(scope="session")
def vllm_stock(vllm_place: Path) -> dict[str, Any]:
    """What stock vLLM answers, by kind of model."""
    from vllm_runs import run_stock

    return dict(run_stock(vllm_place))
