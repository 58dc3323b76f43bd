"""`python -m dream_trainer` is the command `dream-trainer`."""

import sys

from dream_trainer.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
