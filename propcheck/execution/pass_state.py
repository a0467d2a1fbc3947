"""What the calls of one pass share: what is used where, which gradients are to come, what was found against the cut."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

from propcheck.errors import PropcheckError
from propcheck.execution.alias_guard import AliasGuard
from propcheck.execution.whole_model import ANOTHER, IsolationError, sources
from propcheck.tracing.events import Listener

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from propcheck.deferred_init.record import Entry
    from propcheck.execution.outside_tensors import OutsideTensors
    from propcheck.execution.plan import Unit
    from propcheck.execution.weights import Weights
    from propcheck.execution.whole_model import LateLedger
    from propcheck.tracing.events import PassListeners
    from propcheck.tracing.tracer import Tracer

_START = "_propcheck_start"  # on the tensor at which a unit's graph begins: the unit's path


@dataclass(slots=True)
class PassState(Listener):
    """Of one pass that is cut into units.

    Attributes
    ----------
    budget, occupied
        Bytes for the whole process, and how many it has now.
    resident
        Paths of the units whose parameters and graphs are kept, as planned; fewer, if a graph turns out to be larger.
    room
        Bytes for parameters that turn out to be used beside their unit; None: all fit.
    outside
        Parameters and buffers that are used while their unit does not run: they stay.
    """

    tracer: Tracer
    ledger: LateLedger
    weights: Weights
    outside_tensors: OutsideTensors
    seed: int
    resident: frozenset[str]
    progress: Callable[[str, Unit], None]
    entries: Mapping[str, Entry]
    names: Mapping[int, str]
    units: Sequence[Unit]
    room: int | None
    budget: int
    occupied: Callable[[], int]
    used: set[str] = field(default_factory=set)
    outside: dict[str, Entry] = field(default_factory=dict)
    only_lookups: bool = True  # of the unit that runs, so far
    in_backward: bool = False
    changed: list[tuple[str, Tensor]] = field(default_factory=list)  # units, and whether they gave another output again
    guard: AliasGuard = field(init=False)
    listeners: PassListeners = field(init=False)  # of the tracer, this one among them
    _calls: int = 0
    _running: Unit | None = None
    _pending: dict[str, int] = field(default_factory=dict)  # by parameter: calls whose backward is still to come
    _refused: str | None = None
    _growth: int = 0  # the most that the process grew by in one unit

    def __post_init__(self) -> None:
        self.guard = AliasGuard(self.refuse, self.names, self.parameter_used)

    def refuse(self, path: str, what: str) -> NoReturn:
        """End a pass that the cut would falsify."""
        self._refused = self._refused or f"{path}: it {what}"
        raise IsolationError(self._refused)

    def keeps(self, unit: Unit, before: int) -> bool:
        """After the forward of a unit: whether its graph stays.

        That of a block is judged by what the process has grown by since ``before``: beside what is kept there must be room for
        the largest graph that was seen, and as much again to differentiate it. The first blocks show how large that is: later
        ones use memory that these gave back.
        """
        if unit.block is None:  # what follows the blocks is needed again at once
            return unit.path in self.resident
        now = self.occupied()
        self._growth = max(self._growth, now - before)
        if unit.path in self.resident and now + 2 * self._growth > self.budget:
            self.resident -= {unit.path}
        return unit.path in self.resident

    def parameter_used(self, parameter: str, function: str) -> None:
        """Before a parameter is used: one that is not of the unit that runs stays in memory from now on."""
        name = parameter
        self.used.add(name)
        self.only_lookups &= function == "embedding"
        if name in self.outside or (self._running is not None and name in self._running.names):
            return
        entry = self.outside[name] = self.entries[name]
        held = sum(one.nbytes for one in self.outside.values())
        # As much as the largest unit, and the next, it holds anyway.
        if self.room is not None and held > max(self.room, 2 * max(unit.nbytes for unit in self.units)):
            raise PropcheckError(
                f"{name}: it is used while its module is not called, like others before it, so they have to stay: "
                f"{held / 2**30:.3g} GiB, where {max(self.room, 0) / 2**30:.3g} GiB are left; raise --memory, or call it"
            )
        self.weights.bring_permanently([entry])

    def is_foreign(self, leaf: Tensor, unit: Unit) -> bool:
        """Whether a leaf of a unit's graph is the input of another call, or a parameter that is neither its own nor stays."""
        if getattr(leaf, _START, None) is not None:
            return True
        name = self.names.get(id(leaf))
        return name is not None and name not in unit.names and name not in self.outside

    def next_call(self) -> int:
        """Count a call, and return its number."""
        self._calls += 1
        return self._calls - 1

    @contextmanager
    def runs(self, unit: Unit) -> Iterator[None]:
        """Say which unit runs."""
        before, self._running, self.only_lookups = self._running, unit, True
        try:
            yield
        finally:
            self._running = before

    def mark_start(self, start: Tensor, unit: Unit) -> None:
        """Note that the graph of a unit begins at ``start``."""
        setattr(start, _START, unit.path)

    def expect(self, unit: Unit) -> None:
        """Note that a call of ``unit`` has a backward to come."""
        for entry in unit.entries:
            self._pending[entry.name] = self._pending.get(entry.name, 0) + 1

    def settle(self, unit: Unit) -> None:
        """After the backward of a call: measure the parameters that no other call will add to."""
        done = []
        for entry in unit.entries:
            self._pending[entry.name] -= 1
            if not self._pending[entry.name] and entry.name not in self.outside:
                done.append(entry.name)
        self._measure(done)

    def settle_all(self) -> None:
        """At the end: measure what is left, parameters of calls that the loss does not depend on among it."""
        left = {name for name, calls in self._pending.items() if calls} | self.outside.keys()
        self._measure([name for name in self.entries if name in left and self.entries[name].kind == "parameter"])

    def _measure(self, names: list[str]) -> None:
        parameters: dict[str, nn.Parameter] = {name: self.weights.tensors[name] for name in names}  # type: ignore[misc]
        self.ledger.settle(parameters)

    def check_loss(self, loss: Tensor) -> None:
        """Before the backward pass: refuse a loss that depends on what units computed beside what they returned."""
        self._raise_refused()
        owners = {
            id(self.weights.tensors[name]): unit.path for unit in self.units for name in unit.names if name not in self.outside
        }
        for source in sources([loss], lambda _node: False):
            path = getattr(source, _START, None) or owners.get(id(source))
            if path is not None:
                self.refuse(
                    path,
                    "computes a tensor that reaches the loss by another way than its output (an attribute, a list, an object "
                    "that is no tuple or dict)",
                )

    def check(self) -> None:
        """After the backward pass: refuse a run in which a unit did other things again than it had done before."""
        self._raise_refused()
        for unit in self.units:
            done = [name for name in unit.names if not self._pending.get(name) and name not in self.outside]
            if any(self.weights.tensors[name].grad is not None for name in done):
                self.refuse(unit.path, "is differentiated beside its calls (a custom autograd function that computes again)")
        for path, flag in self.changed:
            if flag:
                self.refuse(path, f"computed again {ANOTHER}")

    def _raise_refused(self) -> None:
        """Raise again what the model's own code may have caught."""
        if self._refused is not None:
            raise IsolationError(self._refused)
