"""Reading bytes and text, one-line errors, and telling formats apart."""

import copy
import gzip
import os
import pickle
import subprocess
import sys
import tracemalloc
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphattn.data import (
    MAX_BYTES,
    FileFormatError,
    read_bytes,
    read_fasta,
    read_structure,
    read_text,
    sniff_format,
)

needs_posix = pytest.mark.skipif(os.name != "posix", reason="file names and devices of POSIX")


def complaint(path) -> FileFormatError:
    """The error of reading `path` as text, after checking what holds for each of them."""
    with pytest.raises(FileFormatError) as caught:
        read_text(path)
    error = caught.value
    assert error.path == os.fspath(path)
    assert str(error).splitlines() == [str(error)]
    assert str(error).isprintable()
    return error


def test_missing_file_is_one_clear_line(tmp_path):
    path = tmp_path / "missing.txt"
    assert str(complaint(path)) == f"{path}: no such file"


@pytest.mark.parametrize(
    "path",
    ["", "nul\0byte", "lone\ud800surrogate", "x" * 5000],
    ids=["empty", "NUL", "surrogate", "long"],
)
def test_a_name_no_file_can_have_is_one_clear_line(path):
    assert complaint(path).reason.startswith(("no such file", "cannot be read: File name too long"))


def test_a_file_used_as_a_folder_is_no_such_file(tmp_path):
    (tmp_path / "file").write_text("text")
    assert complaint(tmp_path / "file" / "below").reason == "no such file"


def test_directory_is_one_clear_line(tmp_path):
    assert str(complaint(tmp_path)) == f"{tmp_path}: is a directory, not a file"


@needs_posix
def test_an_endless_device_is_refused_instead_of_read():
    assert complaint("/dev/zero").reason == "is a device, not a file"


@needs_posix
def test_a_pipe_can_be_read(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; open(sys.argv[1], 'w').write('from a pipe')", pipe]
    ):
        assert read_text(pipe) == "from a pipe"


def test_unreadable_file_is_one_clear_line(tmp_path, monkeypatch):
    # The permission bits do not stop root, who runs many test machines; so the system call fails.
    path = tmp_path / "secret.txt"
    path.write_text("secret")

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("builtins.open", refuse)
    error = complaint(path)
    monkeypatch.undo()
    assert str(error) == f"{path}: cannot be read: Permission denied"


@pytest.mark.parametrize("content", [b"", b" \n\t\r\n ", b"\xef\xbb\xbf", b"\xef\xbb\xbf \n"])
def test_empty_file_is_one_clear_line(tmp_path, content):
    path = tmp_path / "empty.txt"
    path.write_bytes(content)
    assert str(complaint(path)) == f"{path}: is empty"


def test_binary_file_is_one_clear_line(tmp_path):
    path = tmp_path / "picture.txt"
    path.write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    assert "binary" in complaint(path).reason


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_text_that_is_not_utf8_names_its_line(tmp_path, line_end):
    path = tmp_path / "latin1.txt"
    path.write_bytes(line_end.join([b"one", b"two", b"M\xfcller", b"four"]))
    error = complaint(path)
    assert error.line == 3
    assert str(error).startswith(f"{path}: line 3: byte 0xfc is not UTF-8")


def broken_gzips():
    whole = gzip.compress(b"some text " * 1000)
    yield "truncated", whole[: len(whole) // 2]
    yield "header only", whole[:10]
    yield "two bytes", whole[:2]
    yield "wrong checksum", whole[:-8] + b"\1\2\3\4" + whole[-4:]
    yield "corrupt body", whole[:12] + bytes(255 - byte for byte in whole[12:30]) + whole[30:]
    yield "no gzip at all", b">plain\nACGT\n"
    yield "garbage behind", whole + b"garbage"


@pytest.mark.parametrize("content", [pytest.param(c, id=kind) for kind, c in broken_gzips()])
def test_broken_gzip_is_one_clear_line(tmp_path, content):
    path = tmp_path / "broken.txt.gz"
    path.write_bytes(content)
    error = complaint(path)
    assert str(error).startswith(f"{path}: is not a whole gzip file")


def test_gzip_is_read_through_whatever_its_name(tmp_path):
    for name in ("a.txt.gz", "a.txt.GZ", "a.txt"):
        (tmp_path / name).write_bytes(gzip.compress(b"inside\n"))
        assert read_bytes(tmp_path / name) == b"inside\n"
        assert read_text(tmp_path / name) == "inside\n"


@needs_posix
@pytest.mark.parametrize("name", ["two\nlines", "a\rb", "bell\a", "esc\x1b[31m", "u\u2028sep"])
def test_a_control_character_in_the_name_stays_on_one_line(tmp_path, name):
    missing = complaint(tmp_path / name)
    (tmp_path / name).write_bytes(b"")
    empty = complaint(tmp_path / name)
    escaped = name.encode("unicode_escape").decode()
    assert str(missing) == f"{tmp_path}/{escaped}: no such file"
    assert str(empty) == f"{tmp_path}/{escaped}: is empty"


@given(st.text(), st.text(), st.none() | st.integers(1, 10**9))
def test_an_error_is_one_line_and_survives_pickle_and_copy(path, reason, line):
    error = FileFormatError(path, reason, line=line)
    assert str(error).isprintable()
    assert isinstance(error, ValueError)
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (twin.path, twin.reason, twin.line) == (path, reason, line)
        assert str(twin) == str(error)


@settings(deadline=None)
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\r\0\ufeff"), min_size=1))
def test_text_comes_back_as_written(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("text") / "any.txt"
    path.write_bytes(text.encode())
    if text.strip():
        assert read_text(path) == text
    else:
        assert complaint(path).reason == "is empty"


def test_every_kind_of_line_end_becomes_a_newline(tmp_path):
    path = tmp_path / "mixed.txt"
    path.write_bytes(b"\xef\xbb\xbfunix\nwindows\r\nold mac\rlast")
    assert read_text(path) == "unix\nwindows\nold mac\nlast"
    assert read_text(path) == path.read_text(encoding="utf-8-sig")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *((f"x{end}", "fasta") for end in (".fa", ".fasta", ".faa", ".fna", ".FASTA", ".fna.gz")),
        *((f"x{end}", "pdb") for end in (".pdb", ".ent", ".pdb.gz")),
        *((f"x{end}", "mmcif") for end in (".cif", ".mmcif", ".CIF.GZ")),
        *((end, "text") for end in ("x.txt", "x", "x.gz", "fasta", "x.fa/y")),
    ],
)
def test_the_extension_decides_first(name, expected):
    assert sniff_format(name, "just words") == expected
    assert sniff_format(Path(name), "just words") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (">seq\nMKV\n", "fasta"),
        ("\n  \n;a comment\n\n>seq\nMKV\n", "fasta"),
        ("HEADER    HYDROLASE\nATOM      1  N   LYS A   1\n", "pdb"),
        ("HETATM    1  N   MSE A   1", "pdb"),
        ("data_1ABC\n#\nloop_\n_atom_site.id\n1\n", "mmcif"),
        ("# made by hand\ndata_1ABC\n_atom_site.id 1\n", "mmcif"),
        ("data_1ABC\n_cell.length_a 1\n", "text"),
        ("data_driven prose", "text"),
        ("ATOM smashers of the world", "text"),
        ("TITLE of the play\nACT ONE", "text"),
        ("2 > 1\n>seq\nMKV\n", "text"),
    ],
)
def test_the_content_decides_where_the_extension_is_silent(text, expected):
    assert sniff_format("unnamed", text) == expected


def test_real_files_are_recognised_without_their_names(real_files):
    formats = {".fasta": "fasta", ".fa": "fasta", ".gz": "fasta", ".pdb": "pdb", ".cif": "mmcif"}
    paths = real_files("*/*.*") + real_files("structure/*/*.*")
    checked = set()
    for path in paths:
        if path.suffix in {*formats, ".txt", ".csv"}:
            checked.add(path.suffix)
            expected = formats.get(path.suffix, "text")
            assert sniff_format("unnamed", read_text(path)) == expected, path
    assert len(checked) >= 5


# Limits: no file is read or unpacked beyond `max_bytes`.


def most_memory(call) -> int:
    """The most memory, in bytes, that Python and its libraries' objects took at a time."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def refused(read, path, **options) -> str:
    with pytest.raises(FileFormatError) as caught:
        read(path, **options)
    return str(caught.value)


READERS = [read_bytes, read_text, read_fasta, read_structure]


@pytest.mark.parametrize("members", [1, 64])
@pytest.mark.parametrize("read", READERS)
def test_a_gzip_bomb_is_refused_long_before_it_fills_the_memory(tmp_path, read, members):
    pytest.importorskip("biotite")  # the memory of its import does not count
    path = tmp_path / "bomb.pdb.gz"
    path.write_bytes(gzip.compress(b" " * (2**26 // members)) * members)
    assert path.stat().st_size < 100_000
    says = []
    memory = most_memory(lambda: says.append(refused(read, path, max_bytes=2**20)))
    assert memory < 2**23
    assert says[0].startswith(f"{path}: unpacks to more than 1,048,576 bytes, and max_bytes = ")


@pytest.mark.long
def test_the_default_limit_refuses_what_fills_a_gigabyte(tmp_path):
    path = tmp_path / "bomb.txt.gz"
    zeros = zlib.compressobj(wbits=31)
    piece = bytes(2**24)
    path.write_bytes(b"".join([*(zeros.compress(piece) for _ in range(17)), zeros.flush()]))
    assert MAX_BYTES < 17 * 2**24
    assert "max_bytes = 268,435,456 is the limit" in refused(read_bytes, path)


@pytest.mark.parametrize("read", READERS)
def test_a_large_file_is_refused_unread(tmp_path, read):
    path = tmp_path / "large.cif"
    with path.open("wb") as file:
        file.truncate(2**40)  # sparse: it takes no room on the disk either
    assert refused(read, path).startswith(f"{path}: holds 1,099,511,627,776 bytes, and max_bytes")


@needs_posix
def test_a_pipe_that_never_ends_is_left_at_the_limit(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    endless = "import sys\nwith open(sys.argv[1], 'wb') as f:\n while True: f.write(b'y' * 4096)"
    with subprocess.Popen([sys.executable, "-c", endless, pipe], stderr=subprocess.DEVNULL):
        assert "holds more than 1,000,000 bytes" in refused(read_bytes, pipe, max_bytes=10**6)


@pytest.mark.parametrize("packed", [False, True])
def test_the_limit_is_the_last_size_that_is_read(tmp_path, packed):
    content = os.urandom(3_000_000)
    path = tmp_path / "random"
    path.write_bytes(gzip.compress(content) if packed else content)
    room = path.stat().st_size if packed else len(content)
    assert read_bytes(path, max_bytes=max(room, len(content))) == content
    assert read_bytes(path, max_bytes=None) == content
    assert "max_bytes" in refused(read_bytes, path, max_bytes=len(content) - 1)


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, "1 GB"])
def test_a_limit_is_a_positive_integer_or_none(tmp_path, limit):
    with pytest.raises(ValueError, match=r"max_bytes must be an integer >= 1 or None, got"):
        read_text(tmp_path / "any", max_bytes=limit)
