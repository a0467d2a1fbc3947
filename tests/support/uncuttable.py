"""Models whose blocks cannot be run one by one."""

from __future__ import annotations

from plain import Block, Model


class SharedDict(Model):
    class Block(Block):
        shared = None

        def forward(self, x):
            y = self.update(x)
            if "previous" in self.shared:
                y = y * self.shared["previous"].sigmoid()
            self.shared["previous"] = y
            return x + y

    def __init__(self):
        super().__init__(self.Block)
        shared = {}
        for block in self.blocks:
            block.shared = shared

    def run(self, x):
        self.blocks[0].shared.clear()
        return super().run(x)
