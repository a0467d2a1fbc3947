"""Random generators whose draws depend on a key alone, such as (seed, parameter name, call index)."""

from __future__ import annotations

import hashlib

import torch


def generator_for(*key: object) -> torch.Generator:
    """Return a CPU generator that depends on ``key`` alone (BLAKE2 over its text)."""
    digest = hashlib.blake2b("\0".join(map(str, key)).encode(), digest_size=8).digest()
    generator = torch.Generator()
    generator.manual_seed(int.from_bytes(digest, "little") >> 1)  # manual_seed takes a signed 64-bit number
    return generator
