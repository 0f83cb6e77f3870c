"""A trainer: FSDP2 (fully_shard) over gloo, PPO's loss. `dray run examples/roles/job.yaml` starts two
ranks of it. A new run's model first learns right answers (warmup.py)."""
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dray
from model import config_json, log_probs, make_model
from warmup import warm_up

torch.set_num_threads(1)


def loss_of(model, batch, job):
    """The sum over tokens of PPO's clipped loss (Schulman et al., 2017), and how many tokens there are."""
    clip, responses = job["actor"]["clip"], batch.list("response")
    new, there = log_probs(model, batch.list("prompt"), responses, job["rollout"]["temperature"])
    old, _ = batch.padded("rollout_log_prob", length=new.shape[1])
    weights = torch.from_numpy(batch.weights).float()[:, None] * there
    advantage = batch["advantage"][:, None]
    ratio = ((new - old) * there).exp()
    loss = -torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    return (loss * weights).sum(), weights.sum()


def everywhere(*numbers):
    """Their sums over all ranks."""
    found = torch.tensor([float(number) for number in numbers])
    dist.all_reduce(found)
    return found.tolist()


def rate(actor, step, steps):
    begin = min(1.0, step / max(1, actor["warmup_steps"]))
    return actor["lr"] * begin * (1 - (1 - actor["final_lr"]) * step / steps)


def main(role):
    job, actor = role.config, role.config["actor"]
    model = make_model(job)
    reward = warm_up(role, model, log_probs) if role.step == 0 else 0.0
    mesh = init_device_mesh("cpu", (role.world,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=actor["lr"], betas=(actor["beta1"], actor["beta2"]),
                                  eps=actor["epsilon"], weight_decay=actor["weight_decay"])
    role.restore(model, optimizer)
    # Engines read a copy, until the next version is there: one that is started anew gets it, too.
    publisher = role.publisher(model, snapshot=True)
    columns = ["prompt", "response", "reward", "rollout_log_prob", "advantage"]
    save = role.saver(model, optimizer, config_json(model))
    for step in role.steps(publisher, columns, save=save, ready={"reward_mean": reward},
                           micro=role.rules.rows // actor["optimiser_steps"] // role.world):
        reward = length = total = part = 0.0
        for batch in step:
            loss, count = loss_of(model, batch, job)
            (loss * role.world).backward()  # FSDP takes the mean over ranks
            got, summed, tokens = everywhere((batch["reward"] * torch.from_numpy(batch.weights)).sum(),
                                             loss.detach(), count)
            reward, length, total, part = reward + got, length + tokens, total + summed, part + tokens
            if not step.due:  # samples that are complete first come in groups, as many as there are
                continue
            for parameter in model.parameters():
                parameter.grad /= part
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), actor["grad_norm"])
            for group in optimizer.param_groups:
                group["lr"] = rate(actor, step.number, job["steps"])
            optimizer.step()
            optimizer.zero_grad()
            part = 0.0
        step.report(reward_mean=reward / step.rows, tokens=int(length), response_length_mean=length / step.rows,
                    loss=total / length, grad_norm=norm.full_tensor(), learning_rate=rate(
                        actor, step.number, job["steps"]))


with dray.Role() as role:
    dist.init_process_group("gloo")
    main(role)
    dist.destroy_process_group()
