#!/usr/bin/env bash
# The search that chose the hyper-parameters of run.sh, on validation tasks: bash tests/tune.sh, after bash run.sh.
# Prints a line of 05_evaluate.py for each setting; an estimated hour on one core. Test tasks are not touched.
set -euo pipefail
cd "$(dirname "$0")/.."
. tests/setup.sh
setup_environment requirements.txt
py=.venv/bin/python
work=out/tune
mkdir -p $work
$py 01_generate_tasks.py --split validation --num-tasks 300 --seed 0 --out $work/validation.jsonl
train="--trajectories out/offline.jsonl --model tests/tiny"
files=()

# try NAME METHOD FLAGS…: train, play the validation tasks, remember the file
try() {
    local name=$1 method=$2
    shift 2
    $py 04_train_policy.py --method "$method" $train "$@" --out "$work/$name" > "$work/$name.log"
    $py 02_rollout.py --tasks $work/validation.jsonl --agent "$work/$name" --max-rounds 8 --max-new-tokens 160 --seed 5 \
        --out "$work/$name.jsonl" > "$work/$name.rollout.log" 2>&1
    files+=("$name=$work/$name.jsonl")
}
try rft-3e-4 rft --lr 3e-4 --epochs 2
try rft-1e-3 rft --lr 1e-3 --epochs 2
try mtdpo-3e-4 mtdpo --lr 3e-4 --epochs 2
try mtdpo-1e-4 mtdpo --lr 1e-4 --epochs 2
try mtdpo-1e-4-1 mtdpo --lr 1e-4 --epochs 1
try mtdpo-5e-5 mtdpo --lr 5e-5 --epochs 2
try mtdpo-1e-4-b.3 mtdpo --lr 1e-4 --epochs 2 --beta 0.3
for beta in 0.1 1; do
    $py 03_train_critic.py $train --lr 3e-4 --epochs 2 --beta $beta --out $work/critic-b$beta > $work/critic-b$beta.log
    try sweet-c$beta-3e-5 sweet --critic $work/critic-b$beta --max-new-tokens 160 --lr 3e-5
done
try sweet-c0.1-1e-4 sweet --critic $work/critic-b0.1 --max-new-tokens 160 --lr 1e-4
try sweet-c1-3e-5-b.3 sweet --critic $work/critic-b1 --max-new-tokens 160 --lr 3e-5 --beta 0.3
$py 05_evaluate.py "${files[@]}" --out $work/report
