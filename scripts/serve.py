"""Serve a model over HTTP: `python scripts/serve.py MODEL` is `jpaged serve MODEL`."""

from __future__ import annotations

import sys

from jpaged.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
