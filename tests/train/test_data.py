"""Sources, tokenizers and the corpus."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from themis.core.errors import ConfigError
from themis.train.data import DataConfig, is_prepared, open_corpus, prepare
from themis.train.sources import documents
from themis.train.tokenizer import ByteTokenizer, load_tokenizer


def corpus_of(source: Path, directory: Path, **changes):
    config = DataConfig(source=str(source), **changes)
    prepare(config, directory)
    return open_corpus(config, directory)


def test_bytes_round_trip():
    tokenizer = ByteTokenizer()
    text = "naïve “text”\n\tλ"
    assert tokenizer.decode(tokenizer.encode(text).tolist()) == text
    assert tokenizer.encode(text).max() < tokenizer.vocab_size == 256
    assert tokenizer.decode([104, 300, 105]) == "h?i"


def test_one_text_keeps_its_tail_for_evaluation(tmp_path):
    (tmp_path / "a.txt").write_text("0123456789" * 100)
    corpus = corpus_of(tmp_path / "a.txt", tmp_path / "data", held_out=0.1)
    assert corpus.train_T.size == 901
    assert corpus.held_out_T.size == 100
    whole = np.concatenate([corpus.train_T, corpus.held_out_T]).tolist()
    assert corpus.tokenizer.decode(whole) == "0123456789" * 100 + "\0"


def test_many_documents_are_held_out_whole(tmp_path):
    for n in range(200):
        (tmp_path / f"{n:03}.txt").write_text(f"document {n}")
    (tmp_path / "image.bin").write_bytes(b"\0\xff\xfe")
    (tmp_path / ".hidden").write_text("hidden")
    corpus = corpus_of(tmp_path, tmp_path.parent / "data", held_out=0.05)
    held_out = corpus.tokenizer.decode(corpus.held_out_T.tolist()).split("\0")[:-1]
    train = corpus.tokenizer.decode(corpus.train_T.tolist()).split("\0")[:-1]
    assert len(held_out) == 10
    assert sorted(train + held_out) == sorted(f"document {n}" for n in range(200))


def test_jsonl_reads_its_field_and_skips_blank_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "one"}\n\n{"body": "two", "n": 1}\n')
    assert list(documents(str(path), "body")) == ["one", "two"]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
def test_token_files_are_mapped_in_place(tmp_path, dtype):
    tokens = np.arange(100).astype(dtype)
    tokens.tofile(tmp_path / "a.bin")
    (tmp_path / "a.json").write_text(json.dumps({"dtype": dtype}))
    np.save(tmp_path / "b.npy", tokens)
    for name in ("a.bin", "b.npy"):
        corpus = corpus_of(tmp_path / name, tmp_path / "data", held_out=0.25)
        assert isinstance(corpus.train_T, np.memmap)
        np.testing.assert_array_equal(corpus.train_T, tokens[:75])
        np.testing.assert_array_equal(corpus.held_out_T, tokens[75:])
    assert not (tmp_path / "data").exists()


def test_the_standard_library_is_the_default(tmp_path):
    texts = list(documents("", "text"))
    assert len(texts) > 300
    assert texts == list(documents("", "text"))
    assert any("def dataclass(" in text for text in texts)


def test_a_tokenizer_file(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<eos>": 0, "a": 1, "b": 2, "?": 3}, unk_token="?"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.vocab_size == 4
    assert tokenizer.separator == 0
    assert tokenizer.encode("b a c").tolist() == [2, 1, 3]
    (tmp_path / "a.txt").write_text("a b " * 50)
    corpus = corpus_of(tmp_path / "a.txt", tmp_path / "data", tokenizer=str(tmp_path), held_out=0.2)
    assert corpus.train_T.dtype == np.uint8
    assert corpus.train_T[:4].tolist() == [1, 2, 1, 2]
    assert corpus.held_out_T[-1] == 0


def test_prepared_data_is_used_again_and_redone_for_another_configuration(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("before " * 20)
    config = DataConfig(source=str(path), held_out=0.5)
    assert not is_prepared(config, tmp_path / "data")
    prepare(config, tmp_path / "data")
    assert is_prepared(config, tmp_path / "data")
    path.write_text("after " * 20)
    prepare(config, tmp_path / "data")
    assert open_corpus(config, tmp_path / "data").train_T[:6].tobytes() == b"before"
    other = DataConfig(source=str(path), held_out=0.25)
    prepare(other, tmp_path / "data")
    assert open_corpus(other, tmp_path / "data").train_T[:5].tobytes() == b"after"


def test_batches_are_windows_of_the_corpus(tmp_path):
    (tmp_path / "a.txt").write_text(" ".join(str(n) for n in range(500)))
    corpus = corpus_of(tmp_path / "a.txt", tmp_path / "data", held_out=0.2)
    rows = corpus.batch(range(8), step=3, global_batch=8, length=10, seed=1)
    assert rows.shape == (8, 11)
    text = corpus.train_T.tobytes()
    assert all(bytes(row.tolist()) in text for row in rows)
    np.testing.assert_array_equal(corpus.batch([5], 3, 8, 10, 1)[0], rows[5])
    assert corpus.batch([], 3, 8, 10, 1).shape == (0, 11)
    held_out = corpus.held_out_batch(range(4), 4, 10)
    assert all(bytes(row.tolist()) in corpus.held_out_T.tobytes() for row in held_out)
    assert len({tuple(row) for row in held_out.tolist()}) == 4
    assert corpus.held_out_blocks(1000, 10) == (corpus.held_out_T.size - 1) // 10


def test_check_names_what_is_too_small(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 99)
    corpus = corpus_of(tmp_path / "a.txt", tmp_path / "data", held_out=0.1)
    corpus.check(length=9, vocab_size=256)
    with pytest.raises(ConfigError, match="held-out part of the data has 10 tokens; with sequences of 10"):
        corpus.check(length=10, vocab_size=256)
    with pytest.raises(ConfigError, match=r"model\.vocab_size is 255; the tokenizer has 256"):
        corpus.check(length=9, vocab_size=255)
