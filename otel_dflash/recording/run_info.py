"""run.json: the description of a recording's run."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Final

from otel_dflash.recording.atomic_file import write_atomically
from otel_dflash.recording.payloads import is_word

RUN_FILE: Final = "run.json"
FORMAT: Final = 3


class RecordingError(Exception):
    """A recording that cannot be read or written; the text says what, the value, and the remedy."""


@dataclass(frozen=True)
class RunInfo:
    """The run of a recording. The anchor ties monotonic to wall time once for the whole run."""

    run: str
    host: str
    anchor_wall_ns: int
    anchor_mono_ns: int
    created_ns: int  # wall
    version: str
    format: int = FORMAT

    def wall_ns(self, mono_ns: int) -> int:
        """Return anchored wall time of a monotonic time."""
        return mono_ns - self.anchor_mono_ns + self.anchor_wall_ns


def create_recording(directory: Path, info: RunInfo) -> None:
    """Create the directory and its run.json; an existing recording stays as it is.

    Raises:
        OSError: The directory or the file cannot be created.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / RUN_FILE).exists():
        write_atomically(directory / RUN_FILE, json.dumps(asdict(info), indent=1).encode())


def read_info(directory: Path) -> RunInfo:
    """Return the run of a recording.

    Raises:
        RecordingError: The directory is not a recording, or has another format.
    """
    path = directory / RUN_FILE
    try:
        data = json.loads(path.read_bytes())
        if isinstance(data["format"], int) and data["format"] != FORMAT:
            remedy = "install a newer otel-dflash" if data["format"] > FORMAT else "record the run again"
            raise RecordingError(
                f"{directory} has format {data['format']}, this version reads format {FORMAT}; {remedy}"
            )
        info = RunInfo(**{item.name: data[item.name] for item in fields(RunInfo)})
        wrong = [item.name for item in fields(RunInfo) if not _is_usable(data[item.name], item.type)]
    except FileNotFoundError:
        raise RecordingError(
            f"{directory} is not a recording: it has no {RUN_FILE}; `otel-dflash runs` lists recordings"
        ) from None
    except KeyError as error:
        raise RecordingError(f"{path} cannot be read: it lacks {error}") from None
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise RecordingError(f"{path} cannot be read: {error}") from None
    if wrong:
        raise RecordingError(f"{path} cannot be read: {', '.join(wrong)}: wrong type or out of range")
    return info


def _is_usable(value: object, kind: object) -> bool:
    return is_word(value) if kind == "int" else isinstance(value, str)
