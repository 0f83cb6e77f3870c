"""A trainer: FSDP2 of any causal model of transformers, PPO's loss. On GPUs it computes in bf16, parameters and optimiser
stay f32; engines convert what they take. `dray run examples/gpu/job.yaml` starts it."""
import contextlib
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import dray
from lm import arena, arguments, config_json, layers, log_probs, make, turn
from warmup import warm_up

COLUMNS = ["prompt", "response", "reward", "rollout_log_prob", "advantage"]


def shard(model, options, world):
    mesh = init_device_mesh(options.device.type, (world,))
    policy = MixedPrecisionPolicy() if options.dtype == torch.float32 else \
        MixedPrecisionPolicy(param_dtype=options.dtype, reduce_dtype=torch.float32)
    for layer in [*layers(model), model]:
        fully_shard(layer, mesh=mesh, mp_policy=policy)


def loss_of(model, batch, job):
    """The sum over tokens of PPO's clipped loss (Schulman et al., 2017), how many tokens there are, and the largest distance
    of a log-prob from the engine's."""
    clip, responses = job["actor"]["clip"], batch.list("response")
    new, there = log_probs(model, batch.list("prompt"), responses, job["rollout"]["temperature"])
    old = batch.padded("rollout_log_prob", length=new.shape[1])[0].to(new.device)
    weights = torch.from_numpy(batch.weights).float().to(new.device)[:, None] * there
    advantage = batch["advantage"].to(new.device)[:, None]
    gap = (new - old) * there
    ratio = gap.exp()
    loss = -torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    return (loss * weights).sum(), weights.sum(), gap.detach().abs().max()


def everywhere(device, *numbers):
    """Their sums over all ranks."""
    found = torch.tensor([float(number) for number in numbers], device=device)
    dist.all_reduce(found)
    return found.tolist()


def rate(actor, step, steps):
    begin = min(1.0, step / max(1, actor["warmup_steps"]))
    return actor["lr"] * begin * (1 - (1 - actor["final_lr"]) * step / steps)


def batches(step):
    """With what is due behind each. Who has to give a device up waits for all samples before it takes its turn."""
    found = ((batch, step.due) for batch in step)
    return list(found) if "DRAY_LEASES" in os.environ else found


def no_checkpoint(role):
    """For steps(save=), of a run that is not to be resumed: `dray run` waits for the folder alone."""
    def save(number, files):
        if role.rank == 0:
            (role.folder / "checkpoints" / f"step-{number:06d}").mkdir(parents=True)
    return save


def main(role, options):
    job, actor = role.config, role.config["actor"]
    model = make(job, options, torch.float32)
    reward = 0.0
    if role.step == 0 and job["warmup"]["max_steps"]:
        with role.lease():
            reward = warm_up(role, model, log_probs)
    shard(model, options, role.world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=actor["lr"], betas=(actor["beta1"], actor["beta2"]),
                                  eps=actor["epsilon"], weight_decay=actor["weight_decay"])
    role.restore(model, optimizer)
    # Engines read a copy, until the next version is there: one that is started anew gets it, too.
    publisher = role.publisher(model, snapshot=True)
    save = no_checkpoint(role) if options.no_checkpoints else role.saver(model, optimizer, config_json(model))
    made = role.step > 0  # the optimiser's state
    for step in role.steps(publisher, COLUMNS, save=save, ready={"reward_mean": reward}):
        reward = length = total = part = widest = 0.0
        todo = batches(step)
        with turn(role, options.device, "optimizer"):
            for batch, due in todo:
                loss, count, gap = loss_of(model, batch, job)
                (loss * role.world).backward()  # FSDP takes the mean over ranks
                got, summed, tokens = everywhere(options.device, (
                    batch["reward"] * torch.from_numpy(batch.weights)).sum(), loss.detach(), count)
                widest = max(widest, float(gap))
                reward, length, total, part = reward + got, length + tokens, total + summed, part + tokens
                if not due:
                    continue
                for parameter in model.parameters():
                    parameter.grad /= part
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), actor["grad_norm"]).full_tensor()
                for group in optimizer.param_groups:
                    group["lr"] = rate(actor, step.number, job["steps"])
                with contextlib.nullcontext() if made else arena(options.device, "optimizer"):
                    optimizer.step()
                optimizer.zero_grad()
                part, made = 0.0, True
        step.report(reward_mean=reward / step.rows, tokens=int(length), response_length_mean=length / step.rows,
                    loss=total / length, grad_norm=norm, rollout_gap_max=widest,
                    learning_rate=rate(actor, step.number, job["steps"]))


options = arguments(__doc__, no_checkpoints=(False, "of a run that is not to be resumed"))
with dray.Role() as role:
    dist.init_process_group("cpu:gloo,cuda:nccl" if options.device.type == "cuda" else "gloo")
    main(role, options)
    dist.destroy_process_group()
