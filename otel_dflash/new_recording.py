"""The directory of a new recording: made whole or not at all, and marked with the node that it belongs to."""

from __future__ import annotations

import errno
import re
from contextlib import suppress
from pathlib import Path
from typing import Final

from otel_dflash import config
from otel_dflash.config import ConfigError

NODE_FILE: Final = "node"  # in a recording: the name of the node that makes it
PROBE_BYTES: Final = 4096


class RecordingExistsError(ConfigError):
    """This node has a recording of that run."""

    def __init__(self, recording: Path) -> None:
        """Name it, and the remedy."""
        super().__init__(f"recording {recording} exists; choose another run id, or remove it")
        self.recording = recording


def create_recording_directory(base: Path, run_id: str, node: str, suffix: str) -> Path:
    """Create the directory of this node's recording and return it: `<run>`, or `<run>@<node>` where another
    node of the run has that.

    It is made beside its place and renamed, so whoever finds it also finds its node's name in it, even on a
    shared file system.

    Raises:
        RecordingExistsError: This node has recorded a run of that id, or is recording it now.
        ConfigError: The directory cannot be written.
    """
    draft = base / f".{run_id}-{suffix}"
    places = (base / run_id, base / f"{run_id}@{re.sub(r'[^A-Za-z0-9._-]', '-', node)}")
    try:
        draft.mkdir(parents=True)
        (draft / NODE_FILE).write_bytes(node.encode().ljust(PROBE_BYTES))  # so that a full disk is seen here
        (draft / NODE_FILE).write_bytes(node.encode())
        for place in places:
            try:
                return draft.rename(place)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                    raise
            if _node_of(place) in (node, None):
                break
    except OSError as error:
        _discard(draft)
        reason = f"cannot create the recording {places[0]}: {error.strerror}"
        raise ConfigError(f"{reason}; set {config.DIRECTORY_VARIABLE} to a writable directory") from None
    _discard(draft)
    raise RecordingExistsError(place)


def _node_of(recording: Path) -> str | None:
    try:
        return (recording / NODE_FILE).read_bytes().decode(errors="replace")
    except OSError:
        return None


def _discard(draft: Path) -> None:
    with suppress(OSError):
        (draft / NODE_FILE).unlink(missing_ok=True)
        draft.rmdir()
