"""verl and Ray with checkpoint engine "dray": verl's own trainer (FSDP2, two ranks, found by its entry point and
VERL_ENGINE_VENDOR=dray), its CheckpointEngineManager and CheckpointEngineWorker, and in the place of an engine an adapter
that compares every tensor by its bits. Two replicas, one of two workers; 20 steps a run; workers that end between two
steps and in the middle of one."""
import os
import pathlib
import re
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
WORK = pathlib.Path(os.environ["DRAY_WORK"])
SOAK = os.environ.get("DRAY_SOAK") == "1"
RUNS, STEPS, TIMEOUT = 10 if SOAK else 1, 20, 60
os.environ.update(PYTHONPATH=os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")])),
                  VERL_USE_EXTERNAL_MODULES="parts", VERL_PLATFORM="cpu", VERL_ENGINE_DEVICE="cuda",
                  VERL_ENGINE_VENDOR="dray", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", RAY_USAGE_STATS_ENABLED="0",
                  TOKENIZERS_PARALLELISM="false")
sys.path.insert(0, str(HERE))

import ray
import torch
import transformers
import verl
from omegaconf import OmegaConf
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout import RolloutReplica

import dray
import parts
from dray.integrations import verl as integration

SIZES = dict(vocab_size=199, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False)


def configuration(folder, strategy):
    """verl's own, as its command line would make it."""
    config = OmegaConf.load(pathlib.Path(verl.__file__).parent / "trainer/config/_generated_ppo_trainer.yaml")
    OmegaConf.set_struct(config, False)
    config = config.actor_rollout_ref
    config.model.update(path=str(folder), load_tokenizer=False, use_remove_padding=False,
                        override_config={"attn_implementation": "eager"})
    config.actor.update(strategy=strategy, ppo_micro_batch_size_per_gpu=1, use_torch_compile=False)
    config.actor.fsdp_config.update(strategy=strategy, use_torch_compile=False)
    config.rollout.update(name="vllm", log_prob_micro_batch_size_per_gpu=1, tensor_model_parallel_size=1)
    config.rollout.checkpoint_engine.update(backend="dray", update_weights_bucket_megabytes=1,
                                            custom_backend_module="dray.integrations.verl",
                                            engine_kwargs={"dray": {"timeout": TIMEOUT}})
    return config


class Replica(RolloutReplica):
    """verl's workers, and no server."""

    def start(self, workers, shapes):
        create = self.get_ray_class_with_init_args()
        create.kwargs["server_adapter"] = parts.Adapter(shapes, WORK / "dies")
        self.group = RayWorkerGroup(RayResourcePool([workers], use_gpu=False, max_colocate_count=1), create, use_gpu=False,
                                    device_name="cpu", name_prefix=f"rollout_{self.replica_rank}")
        self.workers = self.group.workers
        return self

    async def launch_servers(self):
        pass

    def reports(self):
        return ray.get(self.group.execute_checkpoint_engine(["last_report"] * len(self.workers)))

    def end(self):
        for worker in self.workers:
            ray.kill(worker)


def refused(kind, words, what):
    try:
        what()
    except kind as failure:
        assert all(word in str(failure) for word in words), failure
        return str(failure)
    raise AssertionError(f"not refused: {words}")


class Run:
    def __init__(self, folder, shapes, strategy="fsdp2"):
        self.config, self.shapes, self.step = configuration(folder, strategy), shapes, 0
        self.rollout = omega_conf_to_dataclass(self.config.rollout)
        self.trainers = RayWorkerGroup(
            RayResourcePool([2], use_gpu=False, max_colocate_count=1),
            RayClassWithInitArgs(parts.trainer_class(), config=self.config, role="actor"), use_gpu=False,
            device_name="cpu", name_prefix="trainer")
        self.replicas = [self.replica(0, 2), self.replica(1, 1)]
        self.trainers.init_model()
        assert set(self.trainers.forbid_gathering()) == {"DrayFSDPEngine"}
        self.manager = CheckpointEngineManager(self.rollout.checkpoint_engine, self.trainers, list(self.replicas))

    def replica(self, number, workers):
        return Replica(number, self.rollout, None).start(workers, self.shapes)

    def update(self):
        """A step: other numbers in the trainer, and all of them in each worker. The bytes of the trainer's shards."""
        self.step += 1
        held = sum(self.trainers.write(self.step))
        metrics = self.manager.update_weights(self.step)
        assert metrics["dray/send_seconds"] > 0
        return held

    def check(self, held):
        """Every worker has read the model once, and has the newest version."""
        reports = [report for replica in self.manager.replicas for report in replica.reports()]
        assert len({report["version"] for report in reports}) == 1, reports
        assert held == sum(torch.Size(shape).numel() * 4 for shape in self.shapes.values())
        for report in reports:
            assert report["bytes"] == held, (held, report)
            assert report["verified_tensors"] == len(self.shapes)
        return reports

    def another(self, old, workers):
        """In the place of a replica that lost a worker."""
        old.end()
        self.manager.remove_replicas([old])
        new = self.replica(old.replica_rank, workers)
        self.manager.add_replicas([new])

    def end(self):
        for worker in self.trainers.workers:
            ray.kill(worker)
        for replica in self.manager.replicas:
            replica.end()


def one_run(folder, shapes, number):
    run = Run(folder, shapes)
    begun = time.monotonic()
    for _ in range(STEPS):
        reports = run.check(run.update())
    steps = time.monotonic() - begun
    print(f"run {number}: {STEPS} steps in {steps:.1f} s", flush=True)
    # A worker ends between two steps: verl says so at once, and the other replica goes on.
    ray.kill(run.replicas[1].workers[0])
    refused(ray.exceptions.RayActorError, [], run.update)
    run.another(run.replicas[1], 1)
    run.check(run.update())
    print("a worker ended between two steps, and another one took its place", flush=True)
    # One of two workers ends in the middle of an update.
    (WORK / "dies").touch()
    begun = time.monotonic()
    refused(Exception, [], run.update)
    assert time.monotonic() - begun < TIMEOUT / 2, "nobody was told of the death"
    run.another(next(r for r in run.manager.replicas if dead(r)), 1)
    run.check(run.update())
    run.end()
    return steps, reports


def dead(replica):
    try:
        replica.reports()
        return False
    except ray.exceptions.RayActorError:
        return True


def recipe():
    """The options of examples/verl_vllm.sh are options of this verl, and what its separate_async trainer asks of them holds."""
    text = (pathlib.Path(os.environ["DRAY_SOURCE_DIR"]) / "examples/verl_vllm.sh").read_text()
    given = dict(re.findall(r"(?:^|\s)([a-z_0-9.]+)=(\S+)", text[text.index("verl.trainer.main_ppo"):]))
    config = OmegaConf.load(pathlib.Path(verl.__file__).parent / "trainer/config/_generated_ppo_trainer.yaml")
    for key in given:
        parent, _, last = key.rpartition(".")
        assert last in OmegaConf.select(config, parent).keys(), f"examples/verl_vllm.sh: verl has no {key}"
    assert len(given) > 20
    assert int(given["data.train_batch_size"]) == int(given["trainer.v1.separate_async.parameter_sync_step"]) * \
        int(given["actor_rollout_ref.actor.ppo_mini_batch_size"])


def main():
    recipe()
    assert CheckpointEngineRegistry.get("dray") is integration.DrayCheckpointEngine  # found by the entry point
    seen = []
    with dray.serve():
        ray.init(num_cpus=16 * RUNS,  # placement groups keep those of workers that ended: 7 a run
                 include_dashboard=False, log_to_driver=SOAK, configure_logging=False)
        for number in range(RUNS):
            folder = WORK / f"qwen2-{number}"
            model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("qwen2", **SIZES))
            model.save_pretrained(folder)
            shapes = {key: tuple(t.shape) for key, t in model.state_dict().items()}
            seen.append(one_run(folder, shapes, number))
        ray.shutdown()
    seconds = sum(steps for steps, _ in seen)
    print(f"{RUNS} runs of {STEPS} steps, {seconds / RUNS / STEPS * 1e3:.0f} ms a step; "
          f"{seen[-1][1][0]['bytes']} bytes read of trainers' shards by each of 3 workers, nothing gathered; "
          "workers that ended were replaced")


main()
