"""Blocks with a mixture of experts."""

from synthetic import parameter


def mixture(*, blocks, experts, idle, **changes):
    """Two weights an expert and a router; ``changes`` are those of the experts in ``idle``."""
    found = []
    for block in range(blocks):
        found.append(parameter(f"blocks.{block}.moe.router.weight", block=block, sublayer="moe", used=True))
        for expert in range(experts):
            own = {"used": True, "sublayer": "moe", **({"sublayer": None, **changes} if expert in idle else {})}
            prefix = f"blocks.{block}.moe.experts.{expert}"
            found += [parameter(f"{prefix}.{name}.weight", block=block, **own) for name in ("up", "down")]
    return found
