"""dray's updater and data source with slime's own modules: weights_test_slime_python and queue_test_slime_data_python against the
repository, and slime's contract test of data sources. Needs $DRAY_UPSTREAM/slime."""
import os
import pathlib
import subprocess
import sys

import dray

SOURCE, UPSTREAM = pathlib.Path(os.environ["DRAY_SOURCE_DIR"]), pathlib.Path(os.environ["DRAY_UPSTREAM"], "slime")
variables = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": os.pathsep.join(filter(None, (
    str(SOURCE / "tests/frameworks"), os.environ.get("PYTHONPATH")))), "ABSENT": "aiohttp,pylatexenc,math_verify,sympy,ray,sglang"}
for test in ("weights/test_slime_python.py", "queue/test_slime_data_python.py"):
    subprocess.run([sys.executable, SOURCE / "tests" / test], check=True, env=variables, timeout=250)
with dray.serve(), dray.Queue("samples", tasks={"rollout": (["prompt"], [])}) as queue:
    queue.insert({"prompt": ["2+2="]}, "0")
    variables.update(SLIME_CONTRACT_DATA_SOURCE_PATH="dray.integrations.slime.DataSource", DRAY_ADDRESS=os.environ["DRAY_ADDRESS"])
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "absent", "-k", "data_source",
                           UPSTREAM / "tests/plugin_contracts/test_plugin_path_loading_contracts.py"], env=variables,
                          cwd=os.environ["DRAY_WORK"], stdout=subprocess.PIPE, text=True, timeout=200)
    print(done.stdout)
    assert done.returncode == 0
    assert queue.status()["partitions"][0]["tasks"]["rollout"]["ready"] == 0, "slime's test took no prompt"
print("two ranks of TP2 and EP2 by slime's actor, names and conversion; its contract test of data sources: "
      + done.stdout.strip().splitlines()[-1])
