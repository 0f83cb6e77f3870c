"""dray's transfer protocol with miles' own: weights_test_miles_python against the file. Needs $DRAY_UPSTREAM/miles, of a version
that has miles/backends/training_utils/weight_update/protocol.py."""
import os
import pathlib
import subprocess
import sys

SOURCE = pathlib.Path(os.environ["DRAY_SOURCE_DIR"])
FILE = pathlib.Path(os.environ["DRAY_UPSTREAM"], "miles/miles/backends/training_utils/weight_update/protocol.py")
if not FILE.is_file():
    print(f"this miles has no {FILE.relative_to(os.environ['DRAY_UPSTREAM'])}")
    sys.exit(77)
subprocess.run([sys.executable, SOURCE / "tests/weights/test_miles_python.py"], check=True, timeout=250)
print("four ranks of two pipeline stages by miles' WeightTransferProtocol, two engines: bits, joins, failures")
