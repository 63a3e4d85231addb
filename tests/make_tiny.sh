#!/usr/bin/env bash
# Makes the base model of an embedded default again from nothing: bash tests/make_tiny.sh [--domain frontend] [OUT]
# tests/tiny (functions) in about 30 minutes on 2 cores, tests/tiny_pages (pages) in about 35; NUM_TASKS=12 tries it out
# in two. A model imitates three kinds of scripted dialogues on training tasks: clear requests that are answered at
# once, vague ones with a noisy agent, and vague ones with an agent that knows the reference, which is put in front of
# these. The last kind teaches what a pretrained model brings along: to condition on a stated reference.
set -euo pipefail
cd "$(dirname "$0")/.."
. tests/setup.sh
take_domain "$@"
shift $taken
setup_environment requirements.txt
py=.venv/bin/python
ranks=".venv/bin/torchrun --standalone --nproc-per-node 2"
tasks="01_generate_tasks.py --domain $domain --split train --seed 100"
if [ $domain = backend ]; then
    out=${1:-tests/tiny} work=out/make_tiny num_tasks=${NUM_TASKS:-4000} epochs=2
    rollout="$ranks 02_rollout.py --simulator rules --max-rounds 8 --samples 2"
else
    setup_environment tests/frontend.txt
    setup_browser
    out=${1:-tests/tiny_pages} work=out/make_tiny_pages num_tasks=${NUM_TASKS:-1000} epochs=1
    rollout="$ranks 02_rollout.py --simulator rules --max-rounds 4 --samples 2 --similarity pixels"
fi
mkdir -p "$work"
$py $tasks --num-tasks $num_tasks --out $work/tasks.jsonl
$py $tasks --num-tasks $num_tasks --told all --out $work/clear_tasks.jsonl
$rollout --agent script --tasks $work/clear_tasks.jsonl --out $work/clear.jsonl
$rollout --agent script --tasks $work/tasks.jsonl --out $work/script.jsonl
$rollout --agent script-informed --tasks $work/tasks.jsonl --out $work/informed.jsonl
cat $work/clear.jsonl $work/script.jsonl $work/informed.jsonl > $work/demonstrations.jsonl
# Two rounds: after the first some slots (the oven's normal label) are still answered by chance. Pages get a third, of
# small batches: after the second 10 % of the sampled pages fall apart at some token, and hide what there is to learn.
sft="$ranks 04_train_policy.py --method sft --log-every 25 --trajectories $work/demonstrations.jsonl"
$sft --model tiny --epochs $epochs --micro-batch-size 16 --lr 4e-3 --out $work/first
$sft --model $work/first --epochs $epochs --micro-batch-size 16 --lr 2e-3 --seed 1 --out $work/model
model=$work/model
if [ $domain = frontend ]; then
    model=$work/third
    $sft --model $work/model --epochs 1 --batch-size 8 --micro-batch-size 8 --lr 2e-3 --seed 2 --out $model
fi
mkdir -p "$out"
cp $model/{model.safetensors,config.json,generation_config.json} \
    $model/{tokenizer.json,tokenizer_config.json,chat_template.jinja} "$out"
echo "writes $out"
