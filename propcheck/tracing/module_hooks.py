"""Follow which module of a model runs, by forward hooks on all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from propcheck.tracing.graph_builder import GraphBuilder


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """A call of a module."""

    path: str
    block: int | None
    is_block: bool  # the module is a whole block
    products: int  # their number when it began


OnReturn = Callable[[ModuleCall, nn.Module, tuple[Any, ...], Mapping[str, Any], Any], None]


class ModuleHooks:
    """The modules that run, outermost first.

    Parameters
    ----------
    graph
        Is told the innermost module.

    Attributes
    ----------
    on_return
        Called with each call of a module when it returns, with the module, its arguments and its output; None after the pass.
    since
        By block: the last step of the graph before it began.
    """

    def __init__(self, graph: GraphBuilder) -> None:
        self.on_return: OnReturn | None = None
        self.since: dict[int, int] = {}
        self._graph = graph
        self._running: list[ModuleCall] = []
        self._blocks: dict[str, int | None] = {}  # by module

    @property
    def module(self) -> str | None:
        """Path of the innermost module that runs."""
        return self._running[-1].path if self._running else None

    @property
    def block(self) -> int | None:
        """Number of the block that this module is in."""
        return self._running[-1].block if self._running else None

    def block_of(self, module: str | None) -> int | None:
        """Return the number of the block that a module is in."""
        return self._blocks.get(module or "")

    def register(self, model: nn.Module, blocks: Mapping[str, int]) -> list[Any]:
        """Register the hooks on every module and return their handles; ``blocks`` are the numbers of the blocks by path."""
        handles: list[Any] = []
        for name, module in model.named_modules():
            if name:
                parts = name.split(".")
                prefixes = (".".join(parts[:depth]) for depth in range(len(parts), 0, -1))
                block = self._blocks[name] = next((blocks[prefix] for prefix in prefixes if prefix in blocks), None)
                handles.append(module.register_forward_pre_hook(self._entry_hook(name, block, is_block=name in blocks)))
                handles.append(module.register_forward_hook(self._return, with_kwargs=True, always_call=True))
        return handles

    def _entry_hook(self, path: str, block: int | None, *, is_block: bool) -> Callable[..., None]:
        def enter(_module: nn.Module, _args: Any) -> None:
            if block is not None and self.block != block:
                self.since[block] = self._graph.steps
            self._running.append(ModuleCall(path, block, is_block, self._graph.products))
            self._graph.module = path

        return enter

    def _return(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call = self._running.pop()
        self._graph.module = self.module
        if self.on_return is not None:
            self.on_return(call, module, args, kwargs, output)
