"""`python -m isozyme.launch …` and `torchrun -m isozyme.launch …` are the command `isozyme …`."""

import sys

from isozyme.launch.cli import main

sys.exit(main())
