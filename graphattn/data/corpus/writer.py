"""Writing records to Arrow files in bounded memory."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy

FORMAT = 1  # must be increased if the format of these files changes, so that old caches are ignored
VALUES, RECORDS, FACTS = "values.arrow", "records.arrow", "corpus.json"

_BLOCK = 2**20  # values per batch of the Arrow file
_ROWS = 2**12
_ROW_BYTES = 2**24


class CorpusWriter:
    """Writes records into an empty folder: their values piece by piece, then their names.

    ``values.arrow`` has the tokens (for images: the pixels) of all records in one column, and
    labels per token in another one. ``records.arrow`` has the first value of every record.
    """

    def __init__(
        self, folder: Path, *, dtype: Any, has_labels: bool = False, has_structures: bool = False
    ) -> None:
        import pyarrow  # type: ignore[import-untyped]
        from datasets.arrow_writer import ArrowWriter

        columns = [("value", pyarrow.from_numpy_dtype(numpy.dtype(dtype)))]
        if has_labels:
            columns.append(("label", pyarrow.uint8()))
        rows = [
            *(("name", pyarrow.string()), ("group", pyarrow.string())),
            *(("start", pyarrow.int64()), ("size", pyarrow.int64())),
            *(("label", pyarrow.int64()), ("has_labels", pyarrow.bool_())),
        ]
        if has_structures:
            rows.append(("structure", pyarrow.large_binary()))
        self._folder, self._arrow, self._dtype = folder, pyarrow, numpy.dtype(dtype)
        self._value_schema, self._row_schema = pyarrow.schema(columns), pyarrow.schema(rows)
        self._values = ArrowWriter(
            path=str(folder / VALUES), schema=self._value_schema, writer_batch_size=_BLOCK
        )
        self._records = ArrowWriter(
            path=str(folder / RECORDS), schema=self._row_schema, writer_batch_size=_ROWS
        )
        self._pieces: list[tuple[Any, Any]] = []  # values and labels that are not written yet
        self._num_unwritten = 0
        self._rows: list[dict[str, Any]] = []
        self._row_bytes = 0
        self._labelled = False  # whether the current record has labels
        self._hash = hashlib.blake2b(digest_size=8)
        self.num_values = self.num_records = self._start = 0

    @property
    def size(self) -> int:
        """The number of values of the current record."""
        return self.num_values - self._start

    def extend(self, values: Any, labels: Any = None) -> None:
        """Add values, and their labels, to the current record."""
        values = numpy.ascontiguousarray(values, dtype=self._dtype).reshape(-1)
        self._hash.update(values)
        if labels is not None:
            labels = numpy.ascontiguousarray(labels, dtype=numpy.uint8)
            self._hash.update(labels)
            self._labelled = True
        self.num_values += len(values)
        self._pieces.append((values, labels))
        self._num_unwritten += len(values)
        if self._num_unwritten >= _BLOCK:
            self._write_values()

    def end(
        self, name: str, *, group: str = "", label: int | None = None,
        structure: bytes | None = None,
    ) -> None:  # fmt: skip
        """End the current record, and give it a name."""
        row = {"name": name, "group": group, "start": self._start, "size": self.size}
        row |= {"label": label, "has_labels": self._labelled}
        self._hash.update(json.dumps(row).encode())
        if structure is not None:
            self._hash.update(structure)
            row["structure"] = structure
        self._rows.append(row)
        self._row_bytes += len(structure or b"") + len(name)
        self.num_records += 1
        self._start, self._labelled = self.num_values, False
        if len(self._rows) >= _ROWS or self._row_bytes >= _ROW_BYTES:
            self._write_rows()

    def finish(self, facts: dict[str, Any]) -> None:
        """Write the remaining values, and `facts` as JSON, and wait until all is on the disk."""
        if self._pieces:
            self._write_values()
        if self._rows:
            self._write_rows()
        self._values.finalize()
        self._records.finalize()
        self._hash.update(json.dumps(facts, sort_keys=True).encode())
        written = {
            "format": FORMAT,
            "fingerprint": self._hash.hexdigest(),
            "num_records": self.num_records,
            "num_values": self.num_values,
            "bytes": {name: (self._folder / name).stat().st_size for name in (VALUES, RECORDS)},
        }
        (self._folder / FACTS).write_text(json.dumps(written | facts), encoding="utf-8")
        for name in (VALUES, RECORDS, FACTS, "."):  # the last one holds the names
            number = os.open(self._folder / name, os.O_RDONLY)
            try:
                os.fsync(number)
            finally:
                os.close(number)

    def close(self) -> None:
        """Close the files, even if they are not complete."""
        for writer in (self._values, self._records):
            with contextlib.suppress(OSError):  # An error of writing was raised before.
                writer.close()

    def _write_values(self) -> None:
        columns = {"value": numpy.concatenate([values for values, _ in self._pieces])}
        if "label" in self._value_schema.names:
            labels = [
                numpy.zeros(len(values), numpy.uint8) if given is None else given
                for values, given in self._pieces
            ]
            columns["label"] = numpy.concatenate(labels)
        self._values.write_table(self._arrow.table(columns, schema=self._value_schema))
        self._pieces, self._num_unwritten = [], 0

    def _write_rows(self) -> None:
        table = self._arrow.Table.from_pylist(self._rows, schema=self._row_schema)
        self._records.write_table(table)
        self._rows, self._row_bytes = [], 0
