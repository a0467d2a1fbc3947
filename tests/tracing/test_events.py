"""The tracer sends what happens as events, without measuring anything."""

import torch
from handwritten import BATCH, LAYERS, TOKENS, VOCABULARY, Block, Model

from propcheck.tracing.events import Listener
from propcheck.tracing.tracer import Tracer


class Recorder(Listener):
    """Collects the events of a pass by name."""

    def __init__(self):
        self.parameters, self.events = set(), []

    def parameter_used(self, parameter, function):
        self.parameters.add(parameter)

    def before_addition(self, operands):
        self.events.append("before")

    def addition(self, values):
        assert torch.equal(values.stream + values.updates[0], values.total)
        self.events.append("values")

    def after_addition(self, operands, total):
        self.events.append("after")

    def norm(self, call):
        self.events.append("norm")

    def fused_attention(self, call):
        self.events.append("attention")


BLOCK = ["norm", "attention", "before", "values", "after", "norm", "before", "values", "after"]


def traced(*listeners):
    model = Model(Block)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tracer = Tracer(names, listeners)
    tracer.watch(model)
    ids = torch.randint(VOCABULARY, (BATCH, TOKENS))
    with tracer:
        logits = model(ids)
    tracer.end(logits.mean())
    return model, tracer


def test_a_pass_sends_its_norms_attentions_and_additions_in_order():
    recorder = Recorder()
    model, tracer = traced(recorder)
    assert recorder.events == BLOCK * LAYERS + ["norm"]
    assert recorder.parameters == {name for name, _ in model.named_parameters()}
    assert [site.number for site in tracer.sites] == list(range(2 * LAYERS))


def test_a_pass_without_listeners_finds_the_same_sites():
    (_, silent), (_, heard) = traced(), traced(Recorder())
    assert [(site.branch.module, site.shape) for site in silent.sites] == [
        (site.branch.module, site.shape) for site in heard.sites
    ]


def test_a_block_that_is_computed_again_sends_its_additions_without_values():
    model, tracer = traced()
    recorder = Recorder()
    mode = tracer.recomputation(1, 3, [recorder])  # embedding + positions is the first addition, then two per block
    with mode:
        model.blocks[1](torch.randn(BATCH, TOKENS, 16))
    assert recorder.events == ["before", "after"] * 2
    assert mode.additions_met == 5


def test_listeners_of_a_segment_hear_that_segment_only():
    tracer, (outer, inner) = Tracer({}), (Recorder(), Recorder())
    tracer.listeners.subscribed = (outer,)
    norm, x = torch.nn.LayerNorm(4), torch.ones(2, 4)
    tracer.begin(x)
    with tracer:
        with tracer.segment(0, [inner]):
            norm(x)
        norm(x)
        norm(x)
    assert (outer.events, inner.events) == (["norm"] * 2, ["norm"])
