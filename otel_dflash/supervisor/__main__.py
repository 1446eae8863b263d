"""The supervisor as a program: run by its path, because the interpreter is started without site-packages."""

import sys
from pathlib import Path


def main() -> int:
    """Supervise; return the exit code."""
    sys.path.append(str(Path(__file__).parents[2]))  # last: nothing there replaces the standard library
    from otel_dflash.supervisor.supervisor import main as supervise

    return supervise(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
