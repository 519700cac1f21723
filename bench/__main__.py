"""``python -m bench NAME [options]``."""

from __future__ import annotations

from bench.registry import main

if __name__ == "__main__":
    raise SystemExit(main())
