"""`otel-dflash`, and `python -m otel_dflash`: the command line, where its packages are installed."""

import sys


def main() -> int:
    """Run the command line; return its exit code."""
    try:
        from otel_dflash.cli.main import main as run
    except ModuleNotFoundError as error:
        print(
            f"otel-dflash: this environment has the trainer side only ({error.name} is missing); run the "
            "otel-dflash of an environment that has all of it, or add the rest here: `pip install .` in a "
            "clone of the project",
            file=sys.stderr,
        )
        return 1
    return run()


if __name__ == "__main__":
    sys.exit(main())
