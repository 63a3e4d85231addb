#!/usr/bin/env bash
# Makes the base model of an embedded default again from nothing:
#     bash scripts/make_tiny.sh [--domain NAME] [FOLDER]
# models/tiny (functions) in about 30 minutes on 2 cores, models/tiny_pages (pages) in about 35, models/tiny_sql
# (queries) in fewer. To try it out in two minutes: OUT=out/try NUM_TASKS=12 bash scripts/make_tiny.sh out/try/tiny
# A model imitates three kinds of scripted dialogues on training tasks: clear requests that are answered at once, vague
# ones with a noisy agent, and vague ones with an agent that knows the reference, which is put in front of these. The
# last kind teaches what a pretrained model brings along: to condition on a stated reference.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/chain.sh
take_domain "$@"
shift $taken
set_up_domain
folder=${1:-$base}
case $domain in
    backend) num_tasks=4000 epochs=2 again=2 ;;
    frontend) num_tasks=1000 epochs=1 again=1 ;;
    sql) num_tasks=1500 epochs=2 again=1 ;;
esac
work=${OUT:-out}/make_$(basename $base) num_tasks=${NUM_TASKS:-$num_tasks}
tasks="01_generate_tasks.py --domain $domain --split train --seed 100"
rollout="$torchrun $rollout --samples 2"
mkdir -p "$work"
$py $tasks --num-tasks $num_tasks --out $work/tasks.jsonl
$py $tasks --num-tasks $num_tasks --told all --out $work/clear_tasks.jsonl
$rollout --agent script --tasks $work/clear_tasks.jsonl --out $work/clear.jsonl
$rollout --agent script --tasks $work/tasks.jsonl --out $work/script.jsonl
$rollout --agent script-informed --tasks $work/tasks.jsonl --out $work/informed.jsonl
cat $work/clear.jsonl $work/script.jsonl $work/informed.jsonl > $work/demonstrations.jsonl
# Two rounds: after the first some slots (the oven's normal label) are still answered by chance. Pages get a third, of
# small batches: after the second 10 % of the sampled pages fall apart at some token, and hide what there is to learn.
sft="$torchrun 04_train_policy.py --method sft --log-every 25 --trajectories $work/demonstrations.jsonl"
$sft --model tiny --epochs $epochs --micro-batch-size 16 --lr 4e-3 --out $work/first
$sft --model $work/first --epochs $again --micro-batch-size 16 --lr 2e-3 --seed 1 --out $work/model
model=$work/model
if [ $domain = frontend ]; then
    model=$work/third
    $sft --model $work/model --epochs 1 --batch-size 8 --micro-batch-size 8 --lr 2e-3 --seed 2 --out $model
fi
mkdir -p "$folder"
cp $model/{model.safetensors,config.json,generation_config.json} \
    $model/{tokenizer.json,tokenizer_config.json,chat_template.jinja} "$folder"
echo "writes $folder"
