"""`python -m otel_dflash` is `otel-dflash`."""

import sys

from otel_dflash.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
