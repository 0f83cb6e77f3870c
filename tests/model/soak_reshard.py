"""20,000 seeds of test_reshard.py."""
from begin import needs, seed as SEED


with needs:
    import numpy  # noqa: F401

import dray  # noqa: F401 (skips without the library)
import reshard

reshard.run(20000, SEED)
