"""dray's checkpoint engine with NeMo-RL's own classes: weights_test_nemo_rl_python against the repository, and the repository's
tests of its contract. Needs $DRAY_UPSTREAM/nemo-rl."""
import os
import pathlib
import subprocess
import sys

SOURCE, UPSTREAM = pathlib.Path(os.environ["DRAY_SOURCE_DIR"]), pathlib.Path(os.environ["DRAY_UPSTREAM"], "nemo-rl")
HERE = pathlib.Path(__file__).resolve().parents[1]
ABSENT = ("vllm,uvicorn,fastapi,starlette,pynvml,openai,megatron,nemo_automodel,wandb,mlflow,swanlab,tensorboard,nixl,cupy,hydra,"
          "omegaconf,datasets,torchdata,accelerate,peft,aiohttp,psutil,matplotlib,plotly,decord,requests,math_verify,debugpy,nvtx,prometheus_client")
variables = {**os.environ, "PYTHONPATH": f"{UPSTREAM}:{HERE}", "ABSENT": ABSENT, "PYTHONDONTWRITEBYTECODE": "1"}
subprocess.run([sys.executable, SOURCE / "tests/weights/test_nemo_rl_python.py"], check=True, env=variables, timeout=200)
done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "absent", "--noconftest", "-k",
                       "ABC or helpers or rejects_unknown_short_name or sharded_plugin or policy_worker",
                       UPSTREAM / "tests/unit/utils/test_checkpoint_engine.py"], env=variables, cwd=os.environ["DRAY_WORK"],
                      stdout=subprocess.PIPE, text=True, timeout=200)
print(done.stdout)
assert done.returncode == 0
print("three ranks of a policy and two of a rollout by NeMo-RL's create_checkpoint_engine; its own tests of the contract: "
      + done.stdout.strip().splitlines()[-1])
