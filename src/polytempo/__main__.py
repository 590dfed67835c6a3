"""`python -m polytempo`: the command line. Modules of the current directory, which Python looks for first, are not."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
        del sys.path[0]
    from polytempo.cli.main import main

    main()
