"""The part of PC104 on declared schemes: weights compared with the std that the scheme in the probe prescribes."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from propcheck.analysis.name_patterns import folded, path, pattern, place, subject, verb
from propcheck.formatting import count, number
from propcheck.rules.rule import Hit
from propcheck.targets.decoder.init_schemes import WITHOUT_FANS, scheme_std

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from propcheck.config.decoder import InitScheme
    from propcheck.records import ParameterRecord, Run
    from propcheck.targets.decoder.init_schemes import WeightKind

# The std of n normal numbers has a relative standard error of 1 / sqrt(2 n); this many of them are noise.
SIGMAS = 6.0
# Placements with their own gains on the value, output and feed-forward weights, whatever the scheme.
_PLACEMENTS_WITH_GAINS = frozenset({"deepnorm", "sub-ln"})
# ln of more rows than any vocabulary has.
_MAX_UNIFORM_LOSS = 40.0
_KIND_NAMES = {
    "embedding": "the token embedding",
    "head": "the head",
    "output": "a residual projection",
    "inner": "a matrix that is no residual projection",
}


def differs_from(record: ParameterRecord, std: float, threshold: float) -> bool:
    """Whether a weight's std differs from ``std`` by more than a factor ``threshold`` and sampling noise."""
    noise = SIGMAS / math.sqrt(2 * record.numel)
    return _log_distance(record, std) > math.log(threshold) + noise


def scheme_hits(run: Run, weights: Sequence[ParameterRecord], threshold: float) -> list[tuple[list[ParameterRecord], Hit]]:
    """Compare weights with the scheme that the run's probe declares.

    Parameters
    ----------
    run
        The run.
    weights
        Its drawn, nonzero weights that are large enough for their std to mean something.
    threshold
        Factor by which a std may differ.

    Returns
    -------
    list of (list of ParameterRecord, Hit)
        The weights that differ and their hit, per name, or per kind of weight if many names differ. Empty if no scheme is
        declared.
    """
    scheme = _declared_scheme(run)
    if scheme is None:
        return []
    expected = {p.name: match for p in weights if (match := scheme.expect(p)) is not None}
    off = [p for p in weights if p.name in expected and differs_from(p, expected[p.name].std, threshold)]
    kinds = dict.fromkeys(expected[p.name].kind for p in off)
    groups = [group for kind in kinds for group in folded(p for p in off if expected[p.name].kind == kind)]
    return [(group, _hit(group, expected, scheme, threshold)) for group in groups]


@dataclass(frozen=True, slots=True)
class _Expected:
    """The scheme's std for a weight; ``swapped_std`` is what it would be with the depth factor on the wrong weights."""

    kind: WeightKind
    std: float
    swapped_std: float


@dataclass(frozen=True, slots=True)
class _DeclaredScheme:
    name: InitScheme
    std: float
    embedding_std: float | None
    width: int
    blocks: int
    vocabulary: int | None
    experts: dict[int | None, frozenset[int]]  # per block, the possible numbers of experts

    def expect(self, record: ParameterRecord) -> _Expected | None:
        """Return the std that a weight should have, None if it is not judged."""
        kind = self._kind(record)
        if kind is None:
            return None
        if self.name not in WITHOUT_FANS and not (record.fan_in and record.fan_out):
            return None  # the shape of a stack of matrices does not say which dimension is summed over
        if kind == "embedding" and self.embedding_std is not None:
            return _Expected(kind, self.embedding_std, self.embedding_std)
        kinds: list[WeightKind] = [kind]
        if self.name == "olmo-llama" and kind == "inner" and record.sublayer in ("mlp", "moe"):
            kinds.append("up")  # gate and up cannot be told apart, and are drawn differently
        fans = [(record.fan_in or 0, record.fan_out or 0)]
        if kind in ("inner", "output") and self.name not in WITHOUT_FANS:
            fans.append(fans[0][::-1])  # a matrix that is multiplied from the right has its inputs first
        candidates = [self._std(candidate, *pair) for candidate in kinds for pair in fans]
        std = min(candidates, key=lambda candidate: _log_distance(record, candidate))
        if kind not in ("inner", "output"):
            return _Expected(kind, std, std)
        return _Expected(kind, std, self._std("inner" if kind == "output" else "output", *fans[0]))

    def _std(self, kind: WeightKind, fan_in: int, fan_out: int) -> float:
        return scheme_std(self.name, kind, fan_in, fan_out, width=self.width, layers=self.blocks, std=self.std)

    def _kind(self, record: ParameterRecord) -> WeightKind | None:
        outside = record.block is None
        if len(record.shape) == 2 and record.shape[0] == self.vocabulary and outside:
            return "embedding" if record.role == "embedding" else "head" if record.role == "linear" else None
        if record.role != "linear" or record.writes is None or outside or self._is_router(record):
            return None
        return "output" if record.writes else "inner"

    def _is_router(self, record: ParameterRecord) -> bool:
        is_candidate = record.sublayer == "moe" and len(record.shape) == 2 and not record.writes
        return is_candidate and record.shape[0] in self.experts.get(record.block, ())


def _declared_scheme(run: Run) -> _DeclaredScheme | None:
    """Read the scheme in ``[expect]``; for the reference decoder, the one it was drawn by."""
    expect = run.settings.get("expect") or {}
    name = expect.get("init")
    other_target = (run.settings.get("huggingface") or {}).get("config") or (run.settings.get("python") or {}).get("target")
    if name is None and not other_target and "init" in run.settings:
        if run.settings["residual"]["placement"] in _PLACEMENTS_WITH_GAINS:
            return None
        expect = run.settings["init"]
        name = expect["scheme"]
    if name is None or not run.model.blocks:
        return None
    uniform = run.loss.uniform
    return _DeclaredScheme(
        name=name,
        std=expect["std"],
        embedding_std=expect["embedding_std"],
        width=run.model.width,
        blocks=run.model.blocks,
        vocabulary=round(math.exp(uniform)) if uniform is not None and 0 < uniform < _MAX_UNIFORM_LOSS else None,
        experts=_experts_per_block(run),
    )


def _experts_per_block(run: Run) -> dict[int | None, frozenset[int]]:
    """Count the experts of each block: matrices of one name in it, or the first dimension of a stack of matrices."""
    matrices = [p for p in run.parameters if p.sublayer == "moe" and p.role == "linear"]
    same_name = Counter((p.block, pattern(path(p))) for p in matrices)
    counts: dict[int | None, set[int]] = {}
    for p in matrices:
        experts = p.shape[0] if len(p.shape) == 3 else same_name[p.block, pattern(path(p))]
        if experts > 1:
            counts.setdefault(p.block, set()).add(experts)
    return {block: frozenset(numbers) for block, numbers in counts.items()}


def _log_distance(record: ParameterRecord, std: float) -> float:
    return abs(math.log((record.std or 0.0) / std))


def _hit(group: Sequence[ParameterRecord], expected: Mapping[str, _Expected], scheme: _DeclaredScheme, threshold: float) -> Hit:
    worst = max(group, key=lambda p: _log_distance(p, expected[p.name].std))
    std, match = worst.std or 0.0, expected[worst.name]
    swapped = not any(differs_from(p, expected[p.name].swapped_std, threshold) for p in group)
    cause, remedy = " So the model does not start at the declared scales.", _REMEDY
    if swapped:
        cause = _depth_factor_cause(match.kind, scheme.blocks)
        remedy = _DEPTH_FACTOR_REMEDY if match.kind == "output" else _NO_DEPTH_FACTOR_REMEDY
    depth = f" at {count(scheme.blocks, 'block')}" if match.kind == "output" and match.std != match.swapped_std else ""
    return Hit(
        sites=(),
        place=place(worst),
        metric="std",
        value=std,
        expected=match.std,
        message=f"{subject(group)} {verb(group, 'has', 'have')} std {number(std)}{_in_worst(group, worst)} "
        f"({worst.init_calls}), {number(std / match.std)} times the {number(match.std)} that the declared scheme {scheme.name} "
        f"gives {_KIND_NAMES[match.kind]}{depth}.{cause}",
        remedy=remedy,
    )


def _depth_factor_cause(kind: WeightKind, blocks: int) -> str:
    """Write the cause for weights whose std is right apart from the depth factor."""
    factor = f"the depth factor 1/sqrt(2 x {blocks}) = {number(1 / math.sqrt(2 * blocks))}"
    if kind == "output":
        return f" This is the std of the other matrices: {factor} was not applied here, so the updates start too large."
    return f" This is the std of a residual projection: {factor} was applied here too."


_REMEDY = (
    "Initialise it as the declared scheme does, or declare in [expect] what you intend: another scheme, std or embedding_std."
)
_DEPTH_FACTOR_REMEDY = (
    "Check how the init function recognises residual projections (a name compared with a qualified name, a flag that is never "
    "set), and apply the depth factor to these weights."
)
_NO_DEPTH_FACTOR_REMEDY = (
    "Apply the depth factor only to the matrices that write the update: the attention output and the last matrix of the MLP."
)


def _in_worst(group: Sequence[ParameterRecord], worst: ParameterRecord) -> str:
    """Name the weight that the std belongs to, if the stds of the group differ."""
    low, high = min(p.std or 0.0 for p in group), max(p.std or 0.0 for p in group)
    return "" if high < low * 1.1 else f" in {worst.name}"
