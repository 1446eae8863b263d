"""A sink's cursor: the file that holds its position in the recording."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

_NUMBER_MAX: Final = 1 << 63  # larger frame numbers or ns in a cursor are not believed


def read_cursor(path: Path) -> dict[str, Any]:
    """Return a saved cursor, {} if there is none or it is damaged: the sink then starts at the beginning."""
    try:
        cursor = json.loads(path.read_bytes())
        numbers = [cursor["position"], *(cursor.get(name, 0) for name in ("delivered", "interval_end_ns"))]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}
    return cursor if all(type(number) is int and 0 <= number <= _NUMBER_MAX for number in numbers) else {}
