"""`python -m fedbayes.cli`."""

import sys

from fedbayes.cli import main

sys.exit(main())
