"""Prompts from a Hugging Face datasets folder, read by pyarrow: what `save_to_disk` wrote, or a snapshot's Parquet files.

`prompts.source = "towline.environment.table_prompts:folder"`. Arrow files are mapped, not loaded; `datasets` isn't needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from towline.environment.prompts import PromptSource, from_rows
from towline.errors import UsageError


def folder(
    tokenizer: Any,
    *,
    seed: int,
    path: str,
    split: str | None = None,
    columns: dict[str, str] | None = None,
    shuffle: bool = True,
    epochs: int | None = None,
    prompt_key: str = "prompt",
    start: int = 0,
    stop: int | None = None,
    chat_template: bool = False,
) -> PromptSource:
    """Rows [start, stop) of the folder's table, or of one `split` of it; each column but the prompt's is the verifier's.

    `split` names a sub-folder (`train/`) or the files' prefix (`data/train-00000-of-00001.parquet`). `columns` keeps only
    these columns, under other names: {"question": "prompt", "answer": "answer"}. The rest is as for `jsonl`.
    """
    rows = Rows(Path(path), split, columns)[start:stop]
    needed = {prompt_key, "tokens"} & set(rows.names)
    if not needed:
        raise UsageError(
            f"prompts: {path} has the columns {', '.join(rows.names)}; name the prompt's with prompt_key or columns",
            code="prompts_file",
        )
    name = Path(path).name if split is None else f"{Path(path).name}/{split}"
    return from_rows(
        name, rows, tokenizer, seed=seed, shuffle=shuffle, epochs=epochs, prompt_key=prompt_key, chat_template=chat_template
    )


class Rows(Sequence[Mapping[str, Any]]):
    """A table's rows as mappings, each made when it's asked for; a slice is a view."""

    def __init__(self, path: Path, split: str | None = None, columns: dict[str, str] | None = None) -> None:
        table = _read(path, split)
        if columns is not None:
            if missing := sorted(columns.keys() - set(table.column_names)):
                raise UsageError(f"prompts: {path} has no column {missing[0]!r}; it has {', '.join(table.column_names)}",
                                 code="prompts_file")  # fmt: skip
            table = table.select(list(columns)).rename_columns(list(columns.values()))
        self._table = table

    @property
    def names(self) -> list[str]:
        return list(self._table.column_names)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            start, stop, _ = index.indices(len(self))
            part = Rows.__new__(Rows)
            part._table = self._table.slice(start, max(stop - start, 0))
            return part
        row: dict[str, Any] = self._table.slice(index, 1).to_pylist()[0]
        return row

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return (self[index] for index in range(len(self)))


def _read(path: Path, split: str | None) -> Any:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise UsageError("a datasets folder is read by pyarrow: pip install 'towline[parquet]'", code="prompts_pyarrow") from None
    files = _files(path, split)
    try:
        if files[0].suffix == ".parquet":
            return pa.concat_tables([pq.read_table(file) for file in files], promote_options="default")
        return pa.concat_tables([pa.ipc.open_stream(pa.memory_map(str(file))).read_all() for file in files])
    except (pa.ArrowException, OSError) as error:
        raise UsageError(f"prompts: {files[0]} can't be read: {error}", code="prompts_file") from error


def _files(path: Path, split: str | None) -> list[Path]:
    """The split's files in the order of their names: Arrow files where there are some, else Parquet."""
    if not path.is_dir():
        raise UsageError(f"prompts: {path} is no folder; download the dataset, or save it with save_to_disk", code="prompts_file")
    inside = path / split if split is not None and (path / split).is_dir() else path
    for suffix in (".arrow", ".parquet"):
        found = sorted(file for file in inside.rglob(f"*{suffix}") if not file.name.startswith("cache-"))
        if split is not None and inside == path:
            found = [file for file in found if file.name.split("-")[0].removesuffix(suffix) == split]
        if found:
            return found
    where = f"split {split!r} of {path}" if split is not None else str(path)
    raise UsageError(f"prompts: {where} has neither .arrow nor .parquet files", code="prompts_file")
