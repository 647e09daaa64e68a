"""What to say of rows that cannot be read: which partition, field, row and sample it is."""

from __future__ import annotations

from tqclient.errors import CorruptBlock, TQError
from tqclient.info import PartitionRef
from tqclient.rows import RowSet, Run


def locate(ref: PartitionRef, name: str, rows: RowSet, error: CorruptBlock) -> CorruptBlock:
    """Says of damage in a field where it is; the error names the row by its place in the batch, if it is known."""
    row = int(error.rows[0]) if error.rows else None
    where = f"partition {ref.name!r}, field {name!r}"
    if row is None or row >= len(rows.ids):
        return CorruptBlock(f"{where}: {error.message}")
    sample = int(rows.ids[row])
    return CorruptBlock(f"{where}, row {row}, sample {sample}: {error.message}", ids=[sample], rows=[row])


def unreadable(ref: PartitionRef, rows: RowSet, block_id: int, error: TQError) -> CorruptBlock:
    """Says of a block that is not what the controller was told which row and field it would have given first."""
    for name, runs in rows.runs.items():
        row = 0
        for run in runs:
            if run.block_id == block_id:
                return locate(ref, name, rows, CorruptBlock(error.message, rows=[row]))
            row += len(run.rows)
    return CorruptBlock(f"partition {ref.name!r}, block {block_id}: {error.message}")


def blocks_of(runs: list[Run], error: CorruptBlock) -> list[int]:
    """Returns the block that holds the first damaged row; all of the field's when the row is not known."""
    end = 0
    for run in runs:
        end += len(run.rows)
        if error.rows and error.rows[0] < end:
            return [run.block_id]
    return list({run.block_id for run in runs})
