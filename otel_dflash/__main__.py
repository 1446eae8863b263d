"""`otel-dflash`, and `python -m otel_dflash`: the command line, where its packages are installed."""

import sys


def main() -> int:
    """Run the command line; return its exit code."""
    try:
        from otel_dflash.cli.main import main as run
    except ModuleNotFoundError as error:
        print(
            f"otel-dflash: this environment has the trainer side only ({error.name} is missing); pip install otel-dflash, or set "
            "OTEL_DFLASH_AGENT to the otel-dflash of an environment that has all of it",
            file=sys.stderr,
        )
        return 1
    return run()


if __name__ == "__main__":
    sys.exit(main())
