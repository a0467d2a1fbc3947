"""What normalisations read and give: measured where they happen, one ``Norm`` each, in forward order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from propcheck.measure.padding import real_positions
from propcheck.measure.statistics import moments, norm_statistics
from propcheck.tracing.graph import Norm, is_transformed, trace_of
from propcheck.tracing.op_names import NORMS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from propcheck.records import NormKind
    from propcheck.tracing.graph import Node, Trace

# Of a reduction that a handwritten norm is built on: what it divides by.
_STATISTICS: dict[str, NormKind] = {"mean": "mean_square", "var": "variance", "std": "variance", "var_mean": "variance"}
# Fused norms over the last dimensions: with the position of their weight, of their eps, and its default.
_FUSED: dict[str, tuple[NormKind, int, int, float | None]] = {
    "layer_norm": ("variance", 2, 4, 1e-5),
    "native_layer_norm": ("variance", 2, 4, None),
    "rms_norm": ("mean_square", 2, 3, None),
}


class Norms:
    """The normalisations of one pass.

    Parameters
    ----------
    names
        The name of each parameter and buffer, by ``id``.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self.met: list[Norm] = []
        self.masks: tuple[Tensor, ...] = ()  # where positions are padding
        self._names = names

    def meet(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        operand: Tensor,
        node: Node | None,
        factors: Sequence[Trace],
        result: Any,
        module: str | None,
    ) -> Norm:
        """Measure a norm that happened: a fused function, or the product of a tensor with a factor made from it."""
        value = result[0] if isinstance(result, tuple | list) else result
        width = operand.shape[-1] if operand.dim() else 1
        kind: NormKind = "mean_square"
        eps: float | None = None
        weight: Any = None
        dtype, known = torch.promote_types(operand.dtype, torch.float32), True  # fused ones compute in fp32 or wider
        if name in _FUSED:
            kind, weight_at, eps_at, default = _FUSED[name]
            weight = kwargs.get("weight", args[weight_at] if len(args) > weight_at else None)
            eps = kwargs.get("eps", args[eps_at] if len(args) > eps_at else default)
            if eps is None and name == "rms_norm":  # torch's own choice
                eps = torch.finfo(operand.dtype).eps
            shape = kwargs.get("normalized_shape", args[1] if len(args) > 1 else (width,))
            width = torch.Size(shape).numel() if not isinstance(shape, int) else shape
        elif name == "normalize":
            kind, eps = "length", kwargs.get("eps", args[3] if len(args) > 3 else 1e-12)
            eps = float(eps) ** 2  # it bounds the length, not its square
            known = kwargs.get("dim", args[2] if len(args) > 2 else 1) in (-1, operand.dim() - 1)
        elif name in NORMS:  # over other dimensions than the last
            known = False
        else:
            own = next((one for one in factors if one.reduced is not None), None)
            known = own is not None
            if own is not None and own.reduced is not None:
                function, dtype = own.reduced
                kind, eps, weight = _STATISTICS.get(function, "length"), own.eps, own.gain
        seen = None
        # linear(x) / rms(x): what was reduced is not what is divided.
        late = bool(factors) and all(one.of is not node for one in factors)
        if not is_transformed(operand) and not late:
            whole = known and isinstance(value, Tensor) and value.shape == operand.shape
            with torch.no_grad():
                after = self._vectors(value, width) if whole else None
                seen = norm_statistics(self._vectors(operand, width), after, kind=kind, eps=eps)
        norm = Norm(len(self.met), kind, dtype, width, module, eps if known else None, seen, late=late)
        norm.parameter = min(frozenset().union(*(one.parameters for one in factors)), default=None)  # a gain within the factor
        self.met.append(norm)
        if isinstance(weight, Tensor):
            known_weight = trace_of(weight)
            self._gain(norm, weight, known_weight.parameters if known_weight is not None else frozenset())
        return norm

    def gain(self, norm: Norm, gains: Sequence[tuple[Tensor, frozenset[str]]], result: Tensor) -> None:
        """Note the gain that the result of a norm was multiplied with: a parameter, or what was computed from one."""
        for tensor, parameters in gains:
            self._gain(norm, tensor, parameters)
        if norm.statistics is not None and norm.statistics.output_mean_square is not None:
            with torch.no_grad():
                norm.output_mean_square = moments(self._vectors(result, norm.width)).mean_square

    def _gain(self, norm: Norm, tensor: Tensor, parameters: frozenset[str] = frozenset()) -> None:
        if is_transformed(tensor):
            return
        own = self._names.get(id(tensor))
        norm.parameter = own if own is not None else min(parameters, default=None)
        with torch.no_grad():
            norm.gain_mean_square = moments(tensor.detach()).mean_square

    def _vectors(self, tensor: Tensor, width: int) -> Tensor:
        real = real_positions(tensor, self.masks)
        return real if not real.dim() or real.shape[-1] == width else real.reshape(-1, width)
