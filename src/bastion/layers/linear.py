"""Linear layers for a handful of rows."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

EMULATED_ROWS = 16  # from here on converting the weight to float32 costs less than emulated products


@cache
def cpu_has_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16. PyTorch's own answer counts emulation on AVX2, which is slow."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:  # not Linux
        return False
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(text.split())


@cache
def packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN has a layout of its own for weights of this type; torch refuses it for bfloat16 on some CPUs."""
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.zeros(1, 1, dtype=dtype), 16)
    except (RuntimeError, AttributeError):  # oneDNN is told to use less than the CPU has; torch is built without it
        return False
    return True


class Linear:
    """`x @ weight.T + bias` for inference.

    On a CPU, in float32 and where it is native in bfloat16, the weight is kept in oneDNN's blocked layout: in a pass of
    a few rows, which is what verification is made of, the further rows then cost little more than the first (see
    docs/decisions/0001-packed-weights.md). Half precision on a CPU that only emulates it is read as it is for a few
    rows, and computed in float32 for many, as in a prompt. Everywhere else it is torch's own product.
    """

    __slots__ = ("bias", "emulated", "packed", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        self.bias = bias
        cpu, half = weight.device.type == "cpu", weight.dtype in (torch.bfloat16, torch.float16)
        self.emulated = cpu and half and not cpu_has_bfloat16()
        wanted = weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and cpu_has_bfloat16())
        self.packed = cpu and wanted and packs(weight.dtype)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, 16) if self.packed else weight.t()

    def plain(self) -> Tensor:
        """The weight [out, in] in the plain layout."""
        return self.weight.to_dense() if self.packed else self.weight.t()

    def __call__(self, x: Tensor) -> Tensor:
        """Rows [n, in] to [n, out]."""
        if self.packed:
            result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            return result
        if self.emulated and len(x) >= EMULATED_ROWS:
            wide = x.float().mm(self.weight.float())
            return (wide if self.bias is None else wide.add_(self.bias)).to(x.dtype)
        return x.mm(self.weight) if self.bias is None else torch.addmm(self.bias, x, self.weight)


class InferenceLinear(nn.Module):
    """A `Linear` inside a module; leading dimensions are flattened for it."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.linear = Linear(weight, bias)
        self.out_features = weight.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        return self.linear(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], self.out_features)


def for_inference(module: nn.Module) -> None:
    """Replace the nn.Linear layers of `module` in place. It can no longer be trained or saved afterwards."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            bias = None if child.bias is None else child.bias.detach()
            setattr(module, name, InferenceLinear(child.weight.detach(), bias))
        else:
            for_inference(child)
