"""Token ids for a scan: drawn from Zipf's law or uniformly, or cut from a file of ids or a text.

The ids depend on the seed alone, not on earlier draws of the process or on its threads.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from propcheck.errors import PropcheckError

if TYPE_CHECKING:
    from propcheck.config.probe import InputsConfig


def token_ids(inputs: InputsConfig, vocabulary: int, seed: int) -> torch.Tensor:
    """Return the token ids of one pass.

    Parameters
    ----------
    inputs
        The probe's ``[inputs]`` section.
    vocabulary
        Each id is in [0, vocabulary).
    seed
        Determines every draw.

    Returns
    -------
    torch.Tensor
        int64, ``[batch, tokens]``, on the CPU.

    Raises
    ------
    PropcheckError
        If a file is missing, empty, too short, of the wrong kind, or holds an id outside the vocabulary.
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    shape = (inputs.batch, inputs.tokens)
    if inputs.source == "zipf":
        ids = zipf(generator, vocabulary, inputs.exponent, shape)
    elif inputs.source == "uniform":
        ids = generator.integers(0, vocabulary, shape)
    else:
        assert inputs.file is not None  # checked by the schema
        path = Path(inputs.file)
        if inputs.source == "tokens":
            stored = _npy(path) if path.suffix == ".npy" else _bin(path, str(inputs.dtype))
        else:
            stored = _text(path, Path(str(inputs.tokenizer)))
        ids = _windows(stored, path, vocabulary, shape, generator)
    return torch.from_numpy(np.ascontiguousarray(ids, dtype=np.int64))


def zipf(generator: np.random.Generator, vocabulary: int, exponent: float, shape: tuple[int, int]) -> np.ndarray[Any, Any]:
    """Draw ids with probability proportional to (id + 1)^-exponent, by inverting the distribution function.

    The id is the rank, since BPE tokenizers give low ids to frequent tokens; before training any other order would do, as
    all rows of an embedding have one distribution. Exponent 1 is Zipf's law: of 248,320 ids, the first makes up 7.7 % of the
    text, about the share of the most frequent token of a corpus.
    """
    ranks = np.arange(1, vocabulary + 1, dtype=np.float64)
    cumulative = np.cumsum(ranks**-exponent)
    drawn = np.searchsorted(cumulative, generator.random(shape) * cumulative[-1], side="right")
    # The product can round up to the total, which is beyond the last id.
    ids: np.ndarray[Any, Any] = np.minimum(drawn, vocabulary - 1)
    return ids


def _windows(
    stored: np.ndarray[Any, Any], path: Path, vocabulary: int, shape: tuple[int, int], generator: np.random.Generator
) -> np.ndarray[Any, Any]:
    """Cut ``batch`` windows of ``tokens`` ids: disjoint if the file is long enough, else overlapping."""
    batch, tokens = shape
    length = len(stored)
    if length < tokens:
        raise PropcheckError(f"{path}: holds {length} ids, fewer than inputs.tokens = {tokens}")
    slots = length // tokens
    if slots >= batch:
        offset = int(generator.integers(0, length - slots * tokens + 1))
        starts = offset + tokens * generator.choice(slots, size=batch, replace=False)
    else:
        starts = generator.integers(0, length - tokens + 1, batch)
    ids = np.stack([np.asarray(stored[start : start + tokens]) for start in starts])
    # Compare before the cast to int64, which would make a huge unsigned id negative.
    outside = np.argwhere((ids < 0) | (ids >= vocabulary))
    if len(outside):
        row, column = outside[0]
        raise PropcheckError(
            f"{path}: id {ids[row, column]} at position {starts[row] + column} is outside the vocabulary, 0 to {vocabulary - 1}"
        )
    return ids


def _npy(path: Path) -> np.ndarray[Any, Any]:
    _check_size(path)
    try:
        stored: np.ndarray[Any, Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise PropcheckError(f"{path}: not a .npy array: {' '.join(str(error).split())}") from error
    if stored.dtype.kind not in "iu":
        raise PropcheckError(f"{path}: holds {stored.dtype}, not integers")
    if stored.ndim != 1:
        # Flattening would silently put the edges of documents inside the windows.
        raise PropcheckError(f"{path}: has shape {stored.shape}; must be one-dimensional, as array.reshape(-1) returns")
    return stored


def _bin(path: Path, dtype: str) -> np.ndarray[Any, Any]:
    kind = np.dtype(dtype).newbyteorder("<")
    if size := _check_size(path) % kind.itemsize:
        raise PropcheckError(f"{path}: {size} bytes remain after the last {dtype}; is inputs.dtype right?")
    return np.memmap(path, dtype=kind, mode="r")


def _check_size(path: Path) -> int:
    """Return the size of the file in bytes; refuse an empty or unreadable file."""
    try:
        with path.open("rb"):
            size = path.stat().st_size
    except OSError as error:
        raise PropcheckError(f"{path}: {error.strerror}") from error
    if size == 0:
        raise PropcheckError(f"{path}: is empty")
    return size


def _text(path: Path, tokenizer: Path) -> np.ndarray[Any, Any]:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise PropcheckError(
            f"{tokenizer}: reading text needs tokenizers (extra hf): pip install -e '.[hf]' in the clone"
        ) from error
    _check_size(path)
    _check_size(tokenizer)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PropcheckError(f"{path}: byte {error.start} is not UTF-8 text") from error
    try:
        encoder = Tokenizer.from_file(str(tokenizer))
    except Exception as error:  # tokenizers raises plain Exception for a file that it cannot read
        raise PropcheckError(f"{tokenizer}: not a tokenizer.json: {error}") from error
    # Without special tokens: a window comes from the middle of the text.
    return np.array(encoder.encode(text, add_special_tokens=False).ids, dtype=np.int64)
