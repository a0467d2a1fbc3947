"""Token ids: their statistics against closed forms, files read exactly, every bad file answered with one line."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from propcheck.config.probe import InputsConfig
from propcheck.errors import PropcheckError
from propcheck.targets.inputs import token_ids


def refusal(inputs, vocabulary=100):
    with pytest.raises(PropcheckError) as caught:
        token_ids(inputs, vocabulary, seed=0)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.fixture
def ids_file(tmp_path):
    """Ten thousand ids, each its own position, so that a window tells where it was cut."""
    path = tmp_path / "ids.npy"
    np.save(path, np.arange(10_000, dtype=np.int32))
    return str(path)


def tokens(file, **keys):
    return InputsConfig(source="tokens", file=str(file), **keys)


@pytest.mark.parametrize("exponent", [0.8, 1.0, 1.3])
def test_zipf_ids_have_the_frequencies_of_the_closed_form(exponent):
    vocabulary, count = 1000, 200_000
    ids = token_ids(InputsConfig(batch=200, tokens=1000, exponent=exponent), vocabulary, seed=3).flatten()
    weights = [rank**-exponent for rank in range(1, vocabulary + 1)]
    expected = np.array(weights) / sum(weights) * count
    observed = torch.bincount(ids, minlength=vocabulary).numpy()
    # Pearson's statistic: mean 999, standard deviation sqrt(2 x 999) = 44.7 if the frequencies are these.
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    assert abs(chi_square - 999) < 4 * 44.7


def test_the_first_id_of_the_qwen_vocabulary_has_its_share():
    """p(0) = 1 / H_V, with H_V = ln V + 0.5772 for large V: 0.0770 at V = 248,320."""
    count = 400_000
    ids = token_ids(InputsConfig(batch=400, tokens=1000), 248_320, seed=0)
    share = 1 / (np.log(248_320) + 0.5772)
    assert share == pytest.approx(0.0770, abs=1e-4)
    assert abs((ids == 0).double().mean().item() - share) < 4 * (share * (1 - share) / count) ** 0.5
    # Half of Zipf's mass lies below sqrt(V) or so: the tail of the vocabulary is drawn too.
    assert ids.max() > 240_000


def test_uniform_ids_have_equal_frequencies():
    ids = token_ids(InputsConfig(source="uniform", batch=100, tokens=1000), 100, seed=1).flatten()
    observed = torch.bincount(ids, minlength=100).double()
    chi_square = ((observed - 1000) ** 2 / 1000).sum().item()
    assert abs(chi_square - 99) < 4 * (2 * 99) ** 0.5


@pytest.mark.parametrize("source", ["zipf", "uniform"])
def test_ids_are_int64_of_the_asked_shape_within_the_vocabulary(source):
    ids = token_ids(InputsConfig(source=source, batch=3, tokens=50), 2, seed=0)
    assert (ids.dtype, ids.shape) == (torch.int64, (3, 50))
    assert set(ids.unique().tolist()) == {0, 1}


@pytest.mark.parametrize("source", ["zipf", "uniform", "tokens"])
def test_the_seed_alone_decides(source, ids_file):
    inputs = InputsConfig(source=source, batch=2, tokens=64, file=ids_file if source == "tokens" else None)
    first = token_ids(inputs, 10_000, seed=5)
    torch.manual_seed(99)
    np.random.seed(99)  # noqa: NPY002 - the global state is the point
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert torch.equal(token_ids(inputs, 10_000, seed=5), first)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(token_ids(inputs, 10_000, seed=6), first)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint32", "int64", ">u2"])
def test_an_npy_file_of_any_integer_kind_is_read(tmp_path, dtype):
    np.save(tmp_path / "a.npy", np.array([7, 1, 9, 4], dtype=dtype))
    assert token_ids(tokens(tmp_path / "a.npy", tokens=4), 10, seed=0).tolist() == [[7, 1, 9, 4]]


@pytest.mark.parametrize(("dtype", "code"), [("uint16", "<H"), ("uint32", "<I")])
def test_a_raw_bin_file_is_little_endian(tmp_path, dtype, code):
    import struct

    values = [1, 256, 65535, 0]
    (tmp_path / "a.bin").write_bytes(b"".join(struct.pack(code, value) for value in values))
    assert token_ids(tokens(tmp_path / "a.bin", tokens=4, dtype=dtype), 65536, seed=0).tolist() == [values]


@pytest.mark.parametrize("batch", [1, 7, 100])
def test_windows_are_stretches_of_the_file_that_do_not_overlap(ids_file, batch):
    ids = token_ids(tokens(ids_file, batch=batch, tokens=100), 10_000, seed=2)
    assert torch.equal(ids, ids[:, :1] + torch.arange(100))
    assert ids.unique().numel() == batch * 100


def test_every_part_of_the_file_is_drawn_from(ids_file):
    starts = torch.cat([token_ids(tokens(ids_file, batch=1, tokens=300), 10_000, seed)[:, 0] for seed in range(300)])
    # 33 slots; that a given one is missed by 300 draws has probability (32/33)^300 = 1e-4.
    assert (torch.bincount(starts // 300, minlength=33)[:33] > 0).sum() >= 32
    assert len(set((starts % 300).tolist())) > 50  # and not on one grid


def test_a_short_file_gives_overlapping_windows(ids_file):
    ids = token_ids(tokens(ids_file, batch=4, tokens=9000), 10_000, seed=0)
    assert torch.equal(ids, ids[:, :1] + torch.arange(9000))


def test_an_id_outside_the_vocabulary_is_named_with_its_position(tmp_path):
    np.save(tmp_path / "a.npy", np.array([1, 2, 100, 3], dtype=np.int64))
    np.save(tmp_path / "b.npy", np.array([1, 2, 3, -1], dtype=np.int64))
    np.save(tmp_path / "c.npy", np.array([2**64 - 1, 2], dtype=np.uint64))
    at = refusal(tokens(tmp_path / "a.npy", tokens=4))
    assert at == f"{tmp_path}/a.npy: id 100 at position 2 is outside the vocabulary, 0 to 99"
    assert "id -1 at position 3" in refusal(tokens(tmp_path / "b.npy", tokens=4))
    assert "id 18446744073709551615 at position 0" in refusal(tokens(tmp_path / "c.npy", tokens=2))
    assert token_ids(tokens(tmp_path / "a.npy", tokens=4), 101, seed=0).max() == 100


def test_the_position_counts_from_the_start_of_the_file(ids_file):
    words = refusal(tokens(ids_file, tokens=100), vocabulary=10).split()
    assert words[2] == words[5]  # in this file an id is its own position
    assert int(words[2]) >= 10


def test_bad_files_are_refused(tmp_path):
    np.save(tmp_path / "float.npy", np.ones(300, dtype=np.float32))
    np.save(tmp_path / "bool.npy", np.ones(300, dtype=bool))
    np.save(tmp_path / "square.npy", np.ones((300, 300), dtype=np.int32))
    np.save(tmp_path / "short.npy", np.ones(255, dtype=np.int32))
    np.save(tmp_path / "none.npy", np.ones(0, dtype=np.int32))
    np.save(tmp_path / "object.npy", np.array([None] * 300), allow_pickle=True)
    (tmp_path / "text.npy").write_text("not an array")
    (tmp_path / "cut.npy").write_bytes((tmp_path / "float.npy").read_bytes()[:500])
    (tmp_path / "empty.npy").touch()
    (tmp_path / "empty.bin").touch()
    (tmp_path / "odd.bin").write_bytes(b"x" * 1025)
    (tmp_path / "short.bin").write_bytes(b"x\0" * 10)
    (tmp_path / "folder.npy").mkdir()
    messages = {
        "missing.npy": "No such file or directory",
        "folder.npy": "Is a directory",
        "float.npy": "holds float32, not integers",
        "bool.npy": "holds bool, not integers",
        "square.npy": "has shape (300, 300); must be one-dimensional, as array.reshape(-1) returns",
        "short.npy": "holds 255 ids, fewer than inputs.tokens = 256",
        "none.npy": "holds 0 ids, fewer than inputs.tokens = 256",
        "empty.npy": "is empty",
    }
    for name, expected in messages.items():
        assert refusal(tokens(tmp_path / name)) == f"{tmp_path / name}: {expected}"
    for name in ("object.npy", "text.npy", "cut.npy"):
        assert refusal(tokens(tmp_path / name)).startswith(f"{tmp_path / name}: not a .npy array: ")
    messages = {
        "empty.bin": "is empty",
        "odd.bin": "1 bytes remain after the last uint16; is inputs.dtype right?",
        "short.bin": "holds 10 ids, fewer than inputs.tokens = 256",
    }
    for name, expected in messages.items():
        assert refusal(tokens(tmp_path / name, dtype="uint16")) == f"{tmp_path / name}: {expected}"


@pytest.fixture
def text_inputs(tmp_path):
    """A text and a tokenizer that splits at spaces; the words of the vocabulary are numbered by hand."""
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"the": 0, "cat": 1, "sat": 2, "?": 3}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="? $A", special_tokens=[("?", 3)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("the cat sat the dog")
    return InputsConfig(source="text", file=str(tmp_path / "a.txt"), tokenizer=str(tmp_path / "tokenizer.json"), tokens=5)


def test_a_text_is_encoded_without_special_tokens(text_inputs):
    assert token_ids(text_inputs, 4, seed=0).tolist() == [[0, 1, 2, 0, 3]]


def test_bad_texts_and_tokenizers_are_refused(text_inputs, tmp_path, monkeypatch):
    assert "id 3 at position 4 is outside the vocabulary, 0 to 2" in refusal(text_inputs, vocabulary=3)
    (tmp_path / "a.txt").write_bytes(b"the \xff")
    assert refusal(text_inputs) == f"{tmp_path}/a.txt: byte 4 is not UTF-8 text"
    (tmp_path / "a.txt").write_text("the cat")
    assert refusal(text_inputs) == f"{tmp_path}/a.txt: holds 2 ids, fewer than inputs.tokens = 5"
    (tmp_path / "tokenizer.json").write_text("{}")
    assert refusal(text_inputs).startswith(f"{tmp_path}/tokenizer.json: not a tokenizer.json: ")
    (tmp_path / "tokenizer.json").unlink()
    assert refusal(text_inputs) == f"{tmp_path}/tokenizer.json: No such file or directory"
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert refusal(text_inputs).endswith("reading text needs tokenizers (extra hf): pip install -e '.[hf]' in the clone")
