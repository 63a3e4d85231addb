#!/usr/bin/env bash
# Makes a base model again from nothing: bash scripts/make_tiny.sh [--domain backend|frontend|sql|real] [FOLDER]
# models/tiny (functions) in about 30 minutes on 2 cores, models/tiny_pages (pages) in about 35, models/tiny_sql
# (queries) in less. real: SmolLM2-135M learns the protocol in hours, out/real/base/model.
# To try it out in two minutes: OUT=out/try NUM_TASKS=12 bash scripts/make_tiny.sh out/try/tiny
# Another base model, of other tasks and other first weights:
# SEED=1 OUT=out/other bash scripts/make_tiny.sh out/other/tiny
# A model imitates three kinds of scripted dialogues on training tasks: clear requests that are answered at once, vague
# ones with a noisy agent, and vague ones with an agent that knows the reference, which is put in front of these. The
# last kind teaches what a pretrained model brings along (and a small one has to learn): to read a stated reference.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh
take_domain "$@"
shift $taken
set_up_domain
py=.venv/bin/python
{ read -r base; read -r rollout; read -r ranks; } < <($py -c "
from scripts import study
domain = study.read_domain('$domain')
print(domain['base'], domain['rollout'], study.num_devices(), sep='\n')")
tasks=$domain
case $domain in                                                      # tasks; epochs of two rounds
    backend) num_tasks=4000 epochs=2 again=2 ;;
    frontend) num_tasks=1000 epochs=1 again=1 ;;
    sql) num_tasks=1500 epochs=2 again=1 ;;
    real) num_tasks=1000 tasks=backend ;;
esac
work=${OUT:-out}/make_$(basename "$base") folder=${1:-$base} num_tasks=${NUM_TASKS:-$num_tasks} seed=${SEED:-0}
torchrun=".venv/bin/torchrun --standalone --nproc-per-node $ranks"
dialogues() {                                                        # NAME AGENT NUMBER-OF-TASKS [flags of 01]
    $py 01_generate_tasks.py --domain "$tasks" --split train --seed $((100 + seed)) --num-tasks "$3" "${@:4}" \
        --out "$work/$1_tasks.jsonl"
    $torchrun $rollout --samples "$samples" --agent "$2" \
        --tasks "$work/$1_tasks.jsonl" --out "$work/$1.jsonl"
}
train() {                                                            # NAME MODEL flags of 04
    $torchrun 04_train_policy.py --trajectories "$work/demonstrations.jsonl" --model "$2" --seed "$seed" "${@:3}" \
        --out "$work/$1"
}
mkdir -p "$work"
samples=2 num_clear=$num_tasks num_informed=$num_tasks
[ $domain != real ] || samples=1 num_clear=$((num_tasks / 2)) num_informed=$((2 * num_tasks))
dialogues clear script "$num_clear" --told all
dialogues script script "$num_tasks"
dialogues informed script-informed "$num_informed"
# Agents share tasks, and each counts "sample" from 0: without this key a task's dialogues are numbered by their order.
cat "$work"/{clear,script,informed}.jsonl | sed 's/"sample": [0-9]*, //' > "$work/demonstrations.jsonl"
if [ $domain = real ]; then                                          # rft: of the noisy agent's dialogues the right half
    train model smollm2 --method rft --lr 5e-4 --epochs 1 --dtype bfloat16 --max-tokens 4096 --save-every 20 \
        --micro-batch-size 4 --batch-size 8
else
    # Two rounds: after the first some slots (the oven's normal label) are still answered by chance.
    train first tiny --method sft --epochs $epochs --micro-batch-size 16 --lr 4e-3
    train model "$work/first" --method sft --epochs $again --micro-batch-size 16 --lr 2e-3 --seed $((seed + 1))
fi
model=$work/model
if [ $domain = frontend ]; then
    # A third round of small batches: after the second 10 % of the sampled pages break at some token.
    model=$work/third
    train third "$work/model" --method sft --epochs 1 --batch-size 8 --micro-batch-size 8 --lr 2e-3 --seed $((seed + 2))
fi
mkdir -p "$folder"
cp "$model"/{model*,config.json,generation_config.json,tokenizer*.json,chat_template.jinja} "$folder"
echo "writes $folder"
