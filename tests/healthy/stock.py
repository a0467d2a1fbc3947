"""Stock configs at their real depth: how a width is reduced without changing what products give, and the scan."""

import dataclasses
import math
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig

from propcheck import rules
from propcheck.api.measurement import measure
from propcheck.api.requests import ScanRequest
from propcheck.config.probe import Probe, load_probe
from propcheck.config.resolve import Override
from propcheck.records import Run
from propcheck.targets.huggingface import huggingface_task
from propcheck.targets.target import Target, Task

VOCABULARY = 1024
STDS = ("initializer_range", "init_std")  # what configs call the one std of all matrices
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id", "cls_token_id", "sep_token_id", "decoder_start_token_id")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stock:
    """A released model, and what of it is smaller in the scan.

    ``kind`` is transformers' model type, ``source`` the release. ``published`` holds what its config gives beside the class
    defaults (depth, width and what else decides the init), ``none`` the keys that are null there, ``small`` what is reduced.
    ``embeddings`` says what a reduced width does to the token embeddings: "kept" leaves their std; "follow" scales it like a
    matrix's, for models that multiply the embedding by sqrt(width) or norm it. ``vocabulary`` is its key, "" without one.
    """

    name: str
    kind: str
    source: str
    published: dict[str, Any]
    none: tuple[str, ...] = ()
    small: dict[str, Any] = dataclasses.field(default_factory=dict)
    embeddings: str = "kept"
    tokens: int = 64
    vocabulary: str = "vocab_size"

    @property
    def full(self) -> PreTrainedConfig:
        """The config as published."""
        return self._config()

    @property
    def ratio(self) -> float:
        """Published width over the scan's."""
        return self.full.hidden_size / self._config(**self.small).hidden_size

    @property
    def std(self) -> str | None:
        """The key of a std that is the same at every width; None where each matrix follows its own fan-in."""
        return next((name for name in STDS if hasattr(self.full, name)), None)

    @property
    def config(self) -> PreTrainedConfig:
        """The config that is scanned."""
        changed: dict[str, Any] = {"dtype": "bfloat16"}
        if self.vocabulary:
            changed[self.vocabulary] = VOCABULARY
        changed |= {name: 2 for name in SPECIAL if getattr(self.full, name, None) is not None}
        if self.std is not None:
            changed[self.std] = getattr(self.full, self.std) * math.sqrt(self.ratio)
        return self._config(**changed | self.small)

    def _config(self, **changed: Any) -> PreTrainedConfig:
        return CONFIG_MAPPING[self.kind](**self.published | dict.fromkeys(self.none) | changed)


def stocks() -> dict[str, Stock]:
    """Read ``families.toml``."""
    table = tomllib.loads((Path(__file__).parent / "families.toml").read_text(encoding="utf-8"))
    return {name: Stock(name=name, **fields) for name, fields in table.items()}


def scan(stock: Stock, folder: Path, init: Callable[[nn.Module], None] | None = None) -> Run:
    """Scan ``stock`` in bf16 from the ``config.json`` that is written to ``folder``; ``init`` draws its weights again."""
    stock.config.save_pretrained(folder)
    probe = load_probe(str(folder), [Override("inputs.tokens", stock.tokens, "tokens")])

    def task(probe: Probe) -> Task:
        own = huggingface_task(probe)

        def build() -> Target:
            target = own.build()
            _keep_look_ups(target.model, stock)
            if init is not None:
                init(target.model)
            return target

        return dataclasses.replace(own, build=build)

    run = measure(ScanRequest(stock.name, probe, task))
    return dataclasses.replace(run, findings=rules.judge(run))


def _keep_look_ups(model: Any, stock: Stock) -> None:
    """Give what does not sum over the width its published std again: embeddings, depthwise convolutions, patches."""
    if stock.std is None or stock.ratio == 1:
        return
    tokens = model.get_input_embeddings()
    for module in model.modules():
        follows = module is tokens and stock.embeddings == "follow"
        if isinstance(module, nn.Embedding | nn.Conv1d | nn.Conv2d) and not follows:
            module.weight.data.mul_(stock.ratio**-0.5)
