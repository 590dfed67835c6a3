"""`python -m polytempo`: the command line."""

from __future__ import annotations

from polytempo.cli.main import main

if __name__ == "__main__":
    main()
