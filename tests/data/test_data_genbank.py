"""GenBank: sequences letter by letter, coding bases as the file's own locations say."""

import gzip
import re

import pytest

from graphattn.data import FileFormatError, read_genbank

pytest.importorskip("biotite", reason="GenBank is read with biotite")

ENTRY = """LOCUS       TOY1                  72 bp    DNA     linear   UNA 01-JAN-2000
DEFINITION  A toy of two
            lines.
ACCESSION   TOY1
VERSION     TOY1.3
SOURCE      a toy
  ORGANISM  Toya toyi
            Nothing; Else.
FEATURES             Location/Qualifiers
     source          1..72
     gene            5..40
     CDS             join(5..10,21..25)
                     /gene="a"
     CDS             complement(60..61)
                     /note="runs over
                     two lines CDS 1..72"
     CDS             70^71
ORIGIN
        1 acgtacgtac gtacgtacgt acgtacgtac gtacgtacgt acgtacgtac gtacgtacgt
       61 nrykmswbdh vA
//
"""


@pytest.fixture
def genbank(tmp_path):
    def read(content: str, **options):
        path = tmp_path / "toy.gb"
        path.write_text(content)
        return read_genbank(path, **options)

    return read


def test_an_entry_is_read_as_it_is_written(genbank):
    (record,) = genbank(ENTRY)
    assert record.name == "TOY1.3 A toy of two lines."
    assert record.organism == "Toya toyi"
    assert record.sequence == "ACGT" * 15 + "NRYKMSWBDHVA"
    assert record.labels is None


def test_labels_are_the_bases_of_a_features_parts_on_either_strand(genbank):
    (record,) = genbank(ENTRY, feature="CDS")
    coding = {*range(5, 11), *range(21, 26), 60, 61}  # and 70^71 lies between two bases
    assert record.labels.tolist() == [int(base in coding) for base in range(1, 73)]
    (gene,) = genbank(ENTRY, feature="gene")
    assert gene.labels.tolist() == [int(5 <= base <= 40) for base in range(1, 73)]


def test_all_entries_are_read_gzipped_too(tmp_path):
    path = tmp_path / "two.gbk.gz"
    path.write_bytes(gzip.compress((ENTRY + "\n" + ENTRY.replace("TOY1", "TOY2")).encode()))
    assert [record.name.split()[0] for record in read_genbank(path)] == ["TOY1.3", "TOY2.3"]


@pytest.mark.parametrize(
    ("content", "line", "reason"),
    [
        ("hello\n", 1, "no LOCUS here"),
        ("hello\n//\n", 1, "an entry must begin with LOCUS"),
        (ENTRY.replace("//", ""), 1, "does not end with '//'"),
        (ENTRY + ENTRY.replace("//", ""), 22, "does not end with '//'"),
        (ENTRY.replace("vA", "v?"), 20, "'?' in a sequence is not a letter"),
        (re.sub(r"ORIGIN.*//", "//", ENTRY, flags=re.DOTALL), 1, "no sequence"),
        (ENTRY.replace("21..25", "21..99"), 1, "a CDS is at 21..99, but there are only 72 bases"),
        (ENTRY.replace("21..25", "J00194.1:1..9"), 1, "a location that is not known"),
    ],
)
def test_a_malformed_file_names_its_line(genbank, content, line, reason):
    with pytest.raises(FileFormatError, match=r"toy\.gb") as caught:
        genbank(content, feature="CDS")
    assert reason in caught.value.reason
    assert caught.value.line == line


def test_a_feature_is_named_by_a_string(genbank):
    with pytest.raises(ValueError, match="feature must be a feature key"):
        genbank(ENTRY, feature=3)


def test_three_fifths_of_a_yeast_chromosome_are_coding(real_file):
    path = real_file("dna/yeast_chrI.gb")
    (record,) = read_genbank(path, feature="CDS")
    text = path.read_text()
    origin = text.split("\nORIGIN")[1].split("//")[0]
    assert record.sequence == re.sub("[^a-z]", "", origin).upper()
    assert record.organism == "Saccharomyces cerevisiae S288C"

    coding = [0] * len(record.sequence)
    places = re.findall(r"^     CDS +((?:[\w(.,<>)]|\n {21}(?!/))+)", text, re.MULTILINE)
    assert len(places) == 94
    for place in places:
        for first, last in re.findall(r"<?(\d+)\.\.>?(\d+)", place):
            coding[int(first) - 1 : int(last)] = [1] * (int(last) - int(first) + 1)
    assert record.labels.tolist() == coding
    assert abs(sum(coding) / len(coding) - 0.613) < 5e-4
