"""Where `towline up` keeps a run on this machine, and how other shells find it again.

DIRECTORY/NAME/settings.toml    what the services read; owner-only: it may hold secrets
               preflight.toml   what `towline up` checked before it started anything
               run.toml.path    the TOML file that the run was started from
               logs/SERVICE.log one for each process, appended to across restarts
               nats/ s3/        the local servers' data, and in keys/ each role's keys for them
               model/           made by model.factory
               processes.json   who runs, with each process's start time
               figures.json     totals over restarts, for the summary
               summary.json     when the run is finished
               report.html      its curves
"""

from __future__ import annotations

import fcntl
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from towline.bundle.manifest import MANIFEST
from towline.config import Settings, load_settings
from towline.errors import ConflictError, UsageError
from towline.local.servers import NatsServer, S3Server
from towline.local.toml import settings_toml
from towline.runtime.files import write_private

START_TIME_SLACK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The folder of one run."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def settings_path(self) -> Path:
        return self.path / "settings.toml"

    @property
    def preflight_path(self) -> Path:
        return self.path / "preflight.toml"

    @property
    def source_path(self) -> Path:
        return self.path / "run.toml.path"

    @property
    def model_path(self) -> Path:
        return self.path / "model"

    @property
    def model_note_path(self) -> Path:
        return self.path / "model.txt"

    @property
    def figures_path(self) -> Path:
        return self.path / "figures.json"

    @property
    def summary_path(self) -> Path:
        return self.path / "summary.json"

    @property
    def report_path(self) -> Path:
        return self.path / "report.html"

    @property
    def processes_path(self) -> Path:
        return self.path / "processes.json"

    @property
    def exists(self) -> bool:
        return self.settings_path.is_file()

    def log_path(self, process: str) -> Path:
        return self.path / "logs" / f"{process}.log"

    def nats(self) -> NatsServer:
        return NatsServer(self.path / "nats", runs=[self.name])

    def s3(self) -> S3Server:
        return S3Server(self.path / "s3", runs=[self.name])

    def load(self) -> Settings:
        """The effective settings; the run's own code can be imported afterwards, as in its services."""
        source = Path(self.source_path.read_text()) if self.source_path.is_file() else None
        settings = load_settings(self.settings_path)
        if source is not None:
            folder = str(source.parent)
            if folder not in sys.path:
                sys.path.insert(0, folder)
        return settings

    def save(self, settings: Settings, source: Path) -> None:
        """The effective settings, readable by the owner alone from the first byte on."""
        self.source_path.write_text(str(source.resolve()))
        write_private(self.settings_path, settings_toml(settings))

    @contextmanager
    def lock(self) -> Iterator[None]:
        """At most one `towline up` a run; `ConflictError` says who has it."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = (self.path / "lock").open("a+")
        except OSError as error:
            reason = "a file stands in its way" if isinstance(error, FileExistsError | NotADirectoryError) else error.strerror
            raise UsageError(
                f"run.directory: {self.path} can't be made or written into ({reason}); name another folder", code="run_directory"
            ) from None
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConflictError(
                    f"run {self.name} is up already; see `towline status {self.name}`, end it with `towline down {self.name}`",
                    code="run_up",
                ) from None
            yield


@dataclass(slots=True)
class Processes:
    """processes.json: process name -> pid and start time. A pid alone may belong to somebody else by now."""

    directory: RunDirectory

    def record(self, name: str, pid: int) -> None:
        known = self._read()
        try:
            known[name] = {"pid": pid, "created": psutil.Process(pid).create_time()}
        except psutil.NoSuchProcess:
            known.pop(name, None)
        write_private(self.directory.processes_path, json.dumps(known, indent=1))

    def forget(self, name: str) -> None:
        known = self._read()
        if known.pop(name, None) is not None:
            write_private(self.directory.processes_path, json.dumps(known, indent=1))

    def alive(self) -> dict[str, psutil.Process]:
        """Those that still run."""
        found = {}
        for name, entry in self._read().items():
            try:
                process = psutil.Process(entry["pid"])
                same = abs(process.create_time() - entry["created"]) < START_TIME_SLACK_SECONDS
                if same and process.status() != psutil.STATUS_ZOMBIE:
                    found[name] = process
            except psutil.NoSuchProcess:
                continue
        return found

    def _read(self) -> dict[str, Any]:
        try:
            known: dict[str, Any] = json.loads(self.directory.processes_path.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return {}
        return known


def directory_of(settings: Settings) -> RunDirectory:
    """Where this run is kept, from the working directory."""
    return RunDirectory((Path(settings.run.directory) / settings.run.name).absolute())


def find_run(target: str) -> tuple[RunDirectory, Settings]:
    """The run that a name or a TOML file names: its effective settings where it was ever up here, else the file's.

    `UsageError` where there is no such run.
    """
    path = Path(target)
    if target.endswith(".toml") or "/" in target:
        if path.is_dir() and (path / "settings.toml").is_file():
            directory = RunDirectory(path.absolute())
            return directory, directory.load()
        _refuse_folder(path)
        settings = load_settings(path)
        directory = directory_of(settings)
        return directory, directory.load() if directory.exists else settings
    directory = RunDirectory((Path("runs") / target).absolute())
    if not directory.exists:
        _refuse_folder(path)
        raise UsageError(f"no run {target!r} in ./runs; give a run's name or its TOML file", code="run_missing")
    return directory, directory.load()


def _refuse_folder(path: Path) -> None:
    if (path / MANIFEST).is_file():
        raise UsageError(
            f"{path} is a bundle, which `towline trace`, `replay`, `ui` and `loadtest record` read; here give a run",
            code="run_bundle",
        )
    if path.is_dir():
        raise UsageError(f"{path} is a folder, and no run's; give a run's name or its TOML file", code="run_missing")
