#!/bin/sh
# GRPO by verl with vLLM and weights by dray: FSDP2 trains on half of this machine's GPUs, vLLM generates on the
# others, and each of vLLM's workers reads its part of the trainer's shards (docs/verl.md). Samples lie in dray's
# shared memory, too (docs/transfer-queue.md).
#
#     pip install verl==0.9.1 vllm dray_rl-*.whl
#     examples/verl_vllm.sh MODEL TRAIN.parquet TEST.parquet [verl's options...]
#
# MODEL: a folder or a name of Hugging Face's; TRAIN and TEST: as verl's examples/data_preprocess make them.
set -eu
[ $# -ge 3 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 2; }
model=$1 train=$2 test=$3
shift 3
half=$(($(nvidia-smi -L | grep -c '^GPU') / 2))
[ "$half" -ge 1 ] || { echo "verl_vllm.sh: 2 GPUs or more are needed" >&2; exit 1; }

folder=$(mktemp -d)
dray serve --listen "unix:$folder/socket" >"$folder/log" &
coordinator=$!
trap 'kill $coordinator; rm -rf "$folder"' EXIT
export DRAY_ADDRESS="unix:$folder/socket" # Ray's processes, which verl starts, find it by this
export VERL_ENGINE_VENDOR=dray            # trainers hand over their shards, and gather nothing
export VERL_USE_EXTERNAL_MODULES=dray.integrations.transfer_queue

python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$train" data.val_files="$test" \
    data.train_batch_size=128 data.max_prompt_length=512 data.max_response_length=1024 \
    actor_rollout_ref.model.path="$model" \
    actor_rollout_ref.hybrid_engine=false \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.nnodes=1 \
    actor_rollout_ref.rollout.n_gpus_per_node="$half" \
    actor_rollout_ref.rollout.tensor_model_parallel_size="$half" \
    actor_rollout_ref.rollout.checkpoint_engine.backend=dray \
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=dray.integrations.verl \
    transfer_queue.backend.storage_backend=Dray \
    trainer.use_v1=true \
    trainer.v1.trainer_mode=separate_async \
    trainer.v1.separate_async.parameter_sync_step=4 \
    trainer.nnodes=1 trainer.n_gpus_per_node="$half" \
    trainer.logger='[console]' trainer.total_epochs=1 "$@"
