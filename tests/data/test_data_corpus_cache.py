"""A corpus that was read is kept: used again while it is right, never half, in bounded memory."""

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from multiprocessing import get_context

import pytest
import torch

from graphattn.data import FileFormatError, load_corpus
from graphattn.data.corpus import loading

pytest.importorskip("datasets", reason="corpora are kept with datasets")


def run(code: str, **environment: str) -> str:
    """Run `code` in a fresh interpreter, and return what it prints.

    It must succeed and write nothing to stderr.
    """
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    assert process.stderr == ""
    return process.stdout


@pytest.fixture
def play(tmp_path):
    path = tmp_path / "play.txt"
    path.write_text("to be or not to be\n" * 50)
    return path


@pytest.fixture
def times_written(monkeypatch):
    """A list that grows by one whenever a corpus is written."""
    calls = []
    write = loading._write
    monkeypatch.setattr(loading, "_write", lambda *args: (calls.append(1), write(*args)))
    return calls


def folders(cache):
    return [path for path in cache.iterdir() if path.is_dir()]


def test_a_source_that_did_not_change_is_read_once(play, tmp_path, times_written):
    first = load_corpus(play, cache=tmp_path / "cache")
    second = load_corpus(play, cache=tmp_path / "cache")
    assert len(times_written) == 1
    assert second.fingerprint == first.fingerprint
    assert torch.equal(second.tokens(0), first.tokens(0))


def test_a_source_that_changed_is_read_again(play, tmp_path, times_written):
    first = load_corpus(play, cache=tmp_path / "cache")
    play.write_text("to be or not to bE\n" * 50)
    os.utime(play, ns=(0, 1))
    second = load_corpus(play, cache=tmp_path / "cache")
    assert second.fingerprint != first.fingerprint
    assert second.tokenizer.decode(second.tokens(0, 0, 19)) == "to be or not to bE\n"
    assert first.tokenizer.decode(first.tokens(0, 0, 19)) == "to be or not to be\n"
    load_corpus(play, cache=tmp_path / "cache", tokenizer="characters")
    assert len(times_written) == 3


def test_equal_records_have_equal_fingerprints_wherever_they_lie(play, tmp_path):
    other = tmp_path / "elsewhere" / "play.txt"
    other.parent.mkdir()
    other.write_bytes(play.read_bytes())
    fingerprint = load_corpus(play).fingerprint
    assert load_corpus(other).fingerprint == fingerprint
    assert load_corpus(play, tokenizer="characters").fingerprint != fingerprint
    other.write_text(play.read_text() + ".")
    assert load_corpus(other).fingerprint != fingerprint


def test_other_labels_of_the_same_tokens_give_another_fingerprint(tmp_path):
    pytest.importorskip("biotite", reason="GenBank is read with biotite")
    fingerprints = []
    for place in ("3..6", "3..7"):
        path = tmp_path / "a.gb"
        path.write_text(
            "LOCUS       X\nFEATURES             Location/Qualifiers\n"
            f"     CDS             {place}\nORIGIN\n        1 acgtacgtac\n//\n"
        )
        fingerprints.append(load_corpus(path))
    assert torch.equal(fingerprints[0].tokens(0), fingerprints[1].tokens(0))
    assert fingerprints[0].fingerprint != fingerprints[1].fingerprint


def test_without_a_cache_the_files_go_with_the_corpus(play, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    corpus = load_corpus(play)
    examples = iter(corpus)
    assert len(folders(tmp_path / "temporary")) == 1
    del corpus
    assert len(next(examples)["tokens"]) == 950  # whoever reads keeps it
    del examples
    assert folders(tmp_path / "temporary") == []


def test_nothing_is_left_of_a_corpus_that_could_not_be_read(tmp_path, monkeypatch):
    path = tmp_path / "a.fasta"
    path.write_text(">a\nMKV\n>b\nMK7\n")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    for cache in (tmp_path / "temporary", tmp_path / "cache"):
        cache.mkdir()
        with pytest.raises(FileFormatError, match="line 4"):
            load_corpus(path, cache=cache if cache.name == "cache" else None)
        assert folders(cache) == []


def test_a_source_that_changes_while_it_is_read_is_refused(play, tmp_path, monkeypatch):
    read = loading.readers.READERS["text"]

    def read_and_change(*args):
        facts = read(*args)
        play.write_text("something else")
        return facts

    monkeypatch.setitem(loading.readers.READERS, "text", read_and_change)
    with pytest.raises(FileFormatError, match="was changed while it was read"):
        load_corpus(play, cache=tmp_path / "cache")
    assert folders(tmp_path / "cache") == []


def test_a_damaged_cache_is_written_again(play, tmp_path, times_written):
    first = load_corpus(play, cache=tmp_path / "cache")
    (folder,) = folders(tmp_path / "cache")
    values = folder / "values.arrow"
    os.truncate(values, values.stat().st_size - 8)
    second = load_corpus(play, cache=tmp_path / "cache")
    assert len(times_written) == 2
    assert second.fingerprint == first.fingerprint
    (folder / "corpus.json").write_text("{")
    assert load_corpus(play, cache=tmp_path / "cache").fingerprint == first.fingerprint


def test_workers_that_end_take_no_files_with_them(play):
    corpus = load_corpus(play)
    expected = corpus.tokens(0)
    for _ in range(2):
        loader = torch.utils.data.DataLoader(corpus, batch_size=None, num_workers=1)
        (example,) = loader
        assert torch.equal(example["tokens"], expected)


def fingerprint_of(arguments):
    path, cache = arguments
    return load_corpus(path, cache=cache).fingerprint


@pytest.mark.long
def test_of_two_processes_one_writes_and_both_read(play, tmp_path):
    play.write_text("to be or not to be\n" * 100_000)
    with get_context("spawn").Pool(2) as pool:
        fingerprints = pool.map(fingerprint_of, [(play, tmp_path / "cache")] * 2, chunksize=1)
    assert len(set(fingerprints)) == 1
    assert len(folders(tmp_path / "cache")) == 1


@pytest.mark.long
def test_a_killed_process_leaves_nothing_that_is_read(tmp_path):
    path, cache = tmp_path / "long.txt", tmp_path / "cache"
    path.write_text("to be or not to be\n" * 1_000_000)
    expected = load_corpus(path, tokenizer="characters").fingerprint
    code = (
        "import sys, graphattn as ga, datasets\n"
        "print('now', flush=True)\n"
        "ga.data.load_corpus(sys.argv[1], tokenizer='characters', cache=sys.argv[2])\n"
    )
    random.seed(0)
    was_killed = 0
    for moment in [random.uniform(0.0, 0.5) for _ in range(5)]:
        command = [sys.executable, "-c", code, str(path), str(cache)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert process.stdout.readline() == b"now\n"
        time.sleep(moment)
        process.send_signal(signal.SIGKILL)
        was_killed += process.wait() == -signal.SIGKILL
        process.stdout.close()
    assert was_killed
    corpus = load_corpus(path, tokenizer="characters", cache=cache)
    assert corpus.fingerprint == expected
    assert len(folders(cache)) == 1


@pytest.mark.long
def test_a_full_disk_is_said_and_leaves_nothing(tmp_path):
    path, cache = tmp_path / "long.txt", tmp_path / "cache"
    path.write_text("to be or not to be\n" * 100_000)
    code = f"""
        import os, resource, signal, graphattn as ga
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**19, 2**19))
        try:
            ga.data.load_corpus({str(path)!r}, cache={str(cache)!r})
        except OSError as error:
            print(error)
        print(len([own for own in os.scandir({str(cache)!r}) if own.is_dir()]))
    """
    message, left = run(code).splitlines()
    assert "File too large, while a corpus was written" in message
    assert left == "0"


@pytest.mark.long
def test_nothing_is_printed_or_written_elsewhere(play, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    code = f"""
        import socket
        def refuse(*args): raise AssertionError("network")
        socket.socket.connect = socket.getaddrinfo = refuse
        import graphattn as ga
        corpus = ga.data.load_corpus({str(play)!r}, cache={str(tmp_path / "cache")!r})
        assert len(corpus[0]["tokens"]) == 950
    """
    elsewhere = {"HOME": str(home), "XDG_CACHE_HOME": str(home), "HF_HOME": str(home / "hf")}
    assert run(code, **elsewhere, TMPDIR=str(home)) == ""
    assert list(home.rglob("*")) == []


PEAK = """
    import re, graphattn as ga
    def memory(what):
        return int(re.search(what + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
    ga.data.load_corpus({small!r})[0]
    before, own_before = memory("VmHWM"), memory("RssAnon")
    corpus = ga.data.load_corpus({path!r}, tokenizer={tokenizer!r}, cache={cache!r})
    written = memory("VmHWM") - before
    n = corpus.num_tokens
    for start in range(0, n - 512, n // 100):
        part = corpus.tokens(0, start, start + 512)
    print(n, written, memory("RssAnon") - own_before)
"""


@pytest.mark.long
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="peak memory is Linux's")
@pytest.mark.parametrize("tokenizer", ["bytes", "characters"])
def test_a_text_of_200_megabytes_needs_little_memory(play, tmp_path, tokenizer):
    path = tmp_path / "long.txt"
    line = "".join(random.Random(0).choices("abcdefghij ", k=999)) + "\n"
    with path.open("w") as file:
        for _ in range(200):
            file.write(line * 1000)
    places = {"small": str(play), "path": str(path), "cache": str(tmp_path / "cache")}
    n, written, read = map(int, run(PEAK.format(**places, tokenizer=tokenizer)).split())
    assert n == 200_000_000
    assert written < 30e6
    assert read < 10e6  # what is mapped of the file does not count: the system may drop it
