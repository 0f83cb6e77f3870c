"""For pytest: `import transfer_queue` is dray's, and Ray is not there."""
import sys

import dray.compat.transfer_queue as shim

shim.install()
assert "ray" not in sys.modules or "no_ray" in sys.modules["ray"].__file__


def pytest_sessionfinish():
    loaded = [name for name in sys.modules if name in ("zmq", "ray._raylet", "msgspec")]
    assert not loaded, f"the shim needs none of {loaded}"
