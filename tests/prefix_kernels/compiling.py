"""Compiling what would be launched, for a GPU that is not there.

`launching.recording()` keeps each launch with the types and the divisibility of its very arguments. So "this kernel
compiles for sm_80" is said of the code that runs, in the shapes that it runs in.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from prefix_kernels.launching import Launch

_POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.uint8: "*u8",
}
_DIVISIBLE = 16


def compiled(launched: Launch, capability: int) -> Any:
    """Triton's compiled kernel: `.asm["ptx"]`, `.asm["cubin"]`, `.metadata.shared` in bytes.

    Args:
        launched: from `recording()`.
        capability: 80 for sm_80, 90 for sm_90 (with its own instructions), and so on.
    """
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for at, parameter in enumerate(launched.kernel.params):
        value = launched.arguments[parameter.name]
        one = isinstance(value, int) and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or one:
            signature[parameter.name] = "constexpr"
            constants[(at,)] = value
            continue
        signature[parameter.name] = _type_of(value)
        number = value.data_ptr() if isinstance(value, torch.Tensor) else value
        if isinstance(number, int) and number % _DIVISIBLE == 0 and not parameter.do_not_specialize:
            attributes[(at,)] = [["tt.divisibility", _DIVISIBLE]]
    of_language = GluonASTSource if launched.kernel.is_gluon() else ASTSource
    source = of_language(fn=launched.kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(launched.options))


def _type_of(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    assert isinstance(value, int)
    return "i32" if -(2**31) <= value < 2**31 else "i64"
