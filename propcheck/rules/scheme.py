"""Weights against the init scheme that a probe declares: a part of PC104."""

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

# A standard deviation measured on n normal numbers is off by 1 / sqrt(2 n) of itself; this many times that is chance.
SIGMAS = 6.0
# Placements that give value, output and feed-forward weights a gain of their own, whatever the scheme.
_GAINED = frozenset({"deepnorm", "sub-ln"})
# ln of more rows than any vocabulary has.
_LARGEST_LOSS = 40.0
_WORDS = {
    "embedding": "the token embedding",
    "head": "the head",
    "output": "a residual projection",
    "inner": "a matrix that is no residual projection",
}


def off_by_more(record: ParameterRecord, std: float, limit: float) -> bool:
    """Whether a weight's standard deviation is off ``std`` by more than a factor ``limit`` and chance."""
    chance = SIGMAS / math.sqrt(2 * record.numel)
    return _distance(record, std) > math.log(limit) + chance


def off_scheme(run: Run, weights: Sequence[ParameterRecord], limit: float) -> list[tuple[list[ParameterRecord], Hit]]:
    """Hold weights against the scheme that the run's probe declares.

    Parameters
    ----------
    run
        The run.
    weights
        Its weights that were drawn, are not zero, and are large enough for their standard deviation to mean something.
    limit
        Factor by which one may be off.

    Returns
    -------
    list of (list of ParameterRecord, Hit)
        One for each name, or each kind of weight where many names are off, with the weights that are; nothing where no
        scheme is declared.
    """
    declared = _declared(run)
    if declared is None:
        return []
    expected = {p.name: found for p in weights if (found := declared.expect(p)) is not None}
    odd = [p for p in weights if p.name in expected and off_by_more(p, expected[p.name].std, limit)]
    kinds = dict.fromkeys(expected[p.name].kind for p in odd)
    groups = [group for kind in kinds for group in folded(p for p in odd if expected[p.name].kind == kind)]
    return [(group, _hit(group, expected, declared, limit)) for group in groups]


@dataclass(frozen=True, slots=True)
class _Expected:
    """What the scheme means for a weight; ``other`` is what it would be with the depth factor on the wrong weights."""

    kind: WeightKind
    std: float
    other: float


@dataclass(frozen=True, slots=True)
class _Declared:
    scheme: InitScheme
    std: float
    embedding_std: float | None
    width: int
    blocks: int
    vocabulary: int | None
    experts: dict[int | None, frozenset[int]]  # by block: how many there may be

    def expect(self, record: ParameterRecord) -> _Expected | None:
        """Work out what a weight should have; None for one that is not judged."""
        kind = self._kind(record)
        if kind is None:
            return None
        if self.scheme not in WITHOUT_FANS and not (record.fan_in and record.fan_out):
            return None  # a stack of matrices does not say which of its dimensions is summed over
        if kind == "embedding" and self.embedding_std is not None:
            return _Expected(kind, self.embedding_std, self.embedding_std)
        kinds: list[WeightKind] = [kind]
        if self.scheme == "olmo-llama" and kind == "inner" and record.sublayer in ("mlp", "moe"):
            kinds.append("up")  # gate and up cannot be told apart, and are drawn differently
        fans = [(record.fan_in or 0, record.fan_out or 0)]
        if kind in ("inner", "output") and self.scheme not in WITHOUT_FANS:
            fans.append(fans[0][::-1])  # a matrix that is multiplied from the right has its inputs first
        candidates = [self._std(one, *pair) for one in kinds for pair in fans]
        std = min(candidates, key=lambda one: _distance(record, one))
        other = self._std("inner" if kind == "output" else "output", *fans[0]) if kind in ("inner", "output") else std
        return _Expected(kind, std, other)

    def _std(self, kind: WeightKind, fan_in: int, fan_out: int) -> float:
        return scheme_std(self.scheme, kind, fan_in, fan_out, width=self.width, layers=self.blocks, std=self.std)

    def _kind(self, record: ParameterRecord) -> WeightKind | None:
        outside = record.block is None
        if len(record.shape) == 2 and record.shape[0] == self.vocabulary and outside:
            return "embedding" if record.role == "embedding" else "head" if record.role == "linear" else None
        if record.role != "linear" or record.writes is None or outside:
            return None
        is_router = record.sublayer == "moe" and record.shape[0] in self.experts.get(record.block, ())
        if is_router and len(record.shape) == 2 and not record.writes:
            return None
        return "output" if record.writes else "inner"


def _declared(run: Run) -> _Declared | None:
    """Read what the probe declares; of the reference decoder, what it was told to draw."""
    expect = run.settings.get("expect") or {}
    scheme = expect.get("init")
    other_target = (run.settings.get("huggingface") or {}).get("config") or (run.settings.get("python") or {}).get("target")
    if scheme is None and not other_target and "init" in run.settings:
        if run.settings["residual"]["placement"] in _GAINED:
            return None
        expect = run.settings["init"]
        scheme = expect["scheme"]
    if scheme is None or not run.model.blocks:
        return None
    uniform = run.loss.uniform
    return _Declared(
        scheme=scheme,
        std=expect["std"],
        embedding_std=expect["embedding_std"],
        width=run.model.width,
        blocks=run.model.blocks,
        vocabulary=round(math.exp(uniform)) if uniform is not None and 0 < uniform < _LARGEST_LOSS else None,
        experts=_experts(run),
    )


def _experts(run: Run) -> dict[int | None, frozenset[int]]:
    """Count the experts of each block: matrices of one name in one block, or the first dimension of a stack of them."""
    moe = [p for p in run.parameters if p.sublayer == "moe" and p.role == "linear"]
    alike = Counter((p.block, pattern(path(p))) for p in moe)
    counts: dict[int | None, set[int]] = {}
    for p in moe:
        number_of = p.shape[0] if len(p.shape) == 3 else alike[p.block, pattern(path(p))]
        if number_of > 1:
            counts.setdefault(p.block, set()).add(number_of)
    return {block: frozenset(found) for block, found in counts.items()}


def _distance(record: ParameterRecord, std: float) -> float:
    return abs(math.log((record.std or 0.0) / std))


def _hit(odd: Sequence[ParameterRecord], expected: Mapping[str, _Expected], declared: _Declared, limit: float) -> Hit:
    worst = max(odd, key=lambda p: _distance(p, expected[p.name].std))
    std, meant = worst.std or 0.0, expected[worst.name]
    factor = f"the depth factor 1/sqrt(2 x {declared.blocks}) = {number(1 / math.sqrt(2 * declared.blocks))}"
    why = ""
    remedy = "Draw it as the declared scheme has it, or declare what is meant in [expect]: another scheme, std, embedding_std."
    if not any(off_by_more(p, expected[p.name].other, limit) for p in odd):
        if meant.kind == "output":
            why = f" It is the scale of the other matrices: {factor} was not applied here."
            remedy = (
                "Look at how the init function recognises residual projections (a name that is compared with a qualified one, "
                "a flag that nothing sets), and give these weights the depth factor."
            )
        else:
            why = f" It is the scale of a residual projection: {factor} was applied here too."
            remedy = "Apply the depth factor to what writes the update alone (attention output, last matrix of the mlp)."
    depth = f" at {count(declared.blocks, 'block')}" if meant.kind == "output" and meant.std != meant.other else ""
    return Hit(
        sites=(),
        place=place(worst),
        metric="std",
        value=std,
        expected=meant.std,
        message=f"{subject(odd)} {verb(odd, 'has', 'have')} a standard deviation of {number(std)}"
        f"{_within(odd, worst)} ({worst.init_calls}); {declared.scheme} means {number(meant.std)} for {_WORDS[meant.kind]}"
        f"{depth}: x{number(std / meant.std)} off.{why}",
        remedy=remedy,
    )


def _within(odd: Sequence[ParameterRecord], worst: ParameterRecord) -> str:
    """Name the weight that a number is of, where those of one finding differ."""
    low, high = min(p.std or 0.0 for p in odd), max(p.std or 0.0 for p in odd)
    return "" if high < low * 1.1 else f" in {worst.name}"
