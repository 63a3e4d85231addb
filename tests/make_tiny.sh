#!/usr/bin/env bash
# Makes tests/tiny, the base model of the embedded default, again from nothing: bash tests/make_tiny.sh [OUT]
# About 30 minutes on 2 cores. It imitates three kinds of scripted dialogues on training tasks: clear requests that are
# answered at once, vague ones with a noisy agent, and vague ones with an agent that knows the reference, which is put in
# front of these. The last kind teaches what a pretrained model brings along: to condition on a stated reference.
set -euo pipefail
cd "$(dirname "$0")/.."
. tests/setup.sh
setup_environment requirements.txt
out=${1:-tests/tiny}
work=out/make_tiny
py=.venv/bin/python
mkdir -p "$work"
$py 01_generate_tasks.py --split train --num-tasks 4000 --seed 100 --out $work/tasks.jsonl
$py 01_generate_tasks.py --split train --num-tasks 4000 --seed 100 --told all --out $work/clear_tasks.jsonl
rollout=".venv/bin/torchrun --standalone --nproc-per-node 2 02_rollout.py --simulator rules --max-rounds 8 --samples 2"
$rollout --agent script --tasks $work/clear_tasks.jsonl --out $work/clear.jsonl
$rollout --agent script --tasks $work/tasks.jsonl --out $work/script.jsonl
$rollout --agent script-informed --tasks $work/tasks.jsonl --out $work/informed.jsonl
cat $work/clear.jsonl $work/script.jsonl $work/informed.jsonl > $work/demonstrations.jsonl
# Two rounds: after the first some slots (the oven's normal label) are still answered by chance.
sft=".venv/bin/torchrun --standalone --nproc-per-node 2 04_train_policy.py --method sft --epochs 2 --micro-batch-size 16"
$sft --model tiny --lr 4e-3 --trajectories $work/demonstrations.jsonl --log-every 25 --out $work/first
$sft --model $work/first --lr 2e-3 --seed 1 --trajectories $work/demonstrations.jsonl --log-every 25 --out $work/model
mkdir -p "$out"
cp $work/model/{model.safetensors,config.json,generation_config.json,tokenizer.json,tokenizer_config.json,chat_template.jinja} "$out"
echo "writes $out"
