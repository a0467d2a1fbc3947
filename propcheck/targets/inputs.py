"""Representative token ids: what the model is run on.

Every draw comes from a generator of its own that is seeded with the seed alone, so the ids are the same whatever else
the process did before and however many threads it has.
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
    """Draw the ids of one pass.

    Parameters
    ----------
    inputs
        The probe's ``[inputs]`` section.
    vocabulary
        Number of different ids; each id is in [0, vocabulary).
    seed
        Decides every draw.

    Returns
    -------
    torch.Tensor
        int64, ``[batch, tokens]``, on the CPU.

    Raises
    ------
    PropcheckError
        A file that is missing, empty, too short, of the wrong kind, or that holds an id outside the vocabulary.
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    shape = (inputs.batch, inputs.tokens)
    if inputs.source == "zipf":
        ids = zipf(generator, vocabulary, inputs.exponent, shape)
    elif inputs.source == "uniform":
        ids = generator.integers(0, vocabulary, shape)
    else:
        assert inputs.file is not None  # the schema sees to it
        path = Path(inputs.file)
        if inputs.source == "tokens":
            stored = _npy(path) if path.suffix == ".npy" else _bin(path, str(inputs.dtype))
        else:
            stored = _text(path, Path(str(inputs.tokenizer)))
        ids = _windows(stored, path, vocabulary, shape, generator)
    return torch.from_numpy(np.ascontiguousarray(ids, dtype=np.int64))


def zipf(generator: np.random.Generator, vocabulary: int, exponent: float, shape: tuple[int, int]) -> np.ndarray[Any, Any]:
    """Draw ids with p(id) = (id + 1)^-exponent / sum over the whole vocabulary, by inverting the distribution function.

    The id is the rank: tokenizers that merge pairs (BPE) give low ids to frequent tokens. Before training the choice of
    a mapping changes nothing but names, since the rows of an embedding are drawn alike. The exponent is 1 by default,
    Zipf's law: with 248,320 ids the first takes 7.7 % of the text, about what the most frequent token of a corpus does.
    """
    ranks = np.arange(1, vocabulary + 1, dtype=np.float64)
    cumulative = np.cumsum(ranks**-exponent)
    drawn = np.searchsorted(cumulative, generator.random(shape) * cumulative[-1], side="right")
    # The product can round up to the total itself, which lies beyond the last id.
    ids: np.ndarray[Any, Any] = np.minimum(drawn, vocabulary - 1)
    return ids


def _windows(
    stored: np.ndarray[Any, Any], path: Path, vocabulary: int, shape: tuple[int, int], generator: np.random.Generator
) -> np.ndarray[Any, Any]:
    """Cut ``batch`` windows of ``tokens`` ids: apart from each other when the file is long enough, else overlapping."""
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
    # Compared before the cast to int64, in which a huge unsigned id would turn negative.
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
        # Flattening would put the edges of documents inside the windows without a word.
        raise PropcheckError(f"{path}: has shape {stored.shape}; ids must lie in one row, as array.reshape(-1) gives")
    return stored


def _bin(path: Path, dtype: str) -> np.ndarray[Any, Any]:
    kind = np.dtype(dtype).newbyteorder("<")
    if size := _check_size(path) % kind.itemsize:
        raise PropcheckError(f"{path}: {size} bytes remain after the last {dtype}; is inputs.dtype right?")
    return np.memmap(path, dtype=kind, mode="r")


def _check_size(path: Path) -> int:
    """Return the size of the file in bytes; an error when it is empty or cannot be read."""
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
            f"{tokenizer}: reading text needs tokenizers; install the extra hf: pip install -e '.[hf]' in the clone"
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
    # No tokens are added at the ends: a window is a stretch out of the middle of a text.
    return np.array(encoder.encode(text, add_special_tokens=False).ids, dtype=np.int64)
