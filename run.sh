#!/usr/bin/env bash
# From a bare machine to the table: bash run.sh [SEED]
# Makes .venv, then tasks, offline dialogues of the shipped base model (tests/tiny), the critic, the policies (SWEET,
# multi-turn DPO, rejection fine-tuning), dialogues of each on test tasks, and the evaluation. A second call resumes.
# The sizes can be set from outside, for a quick look: TRAIN_TASKS=40 TEST_TASKS=20 bash run.sh
set -euo pipefail
cd "$(dirname "$0")"
. tests/setup.sh
setup_environment requirements.txt
seed=${1:-0}
out=${OUT:-out}
[ "$seed" = 0 ] || out=$out/seed$seed
py=.venv/bin/python
mkdir -p "$out"

# Run a command, its output in a log; show where it failed, and how long it took.
step() {
    local name=$1 begin=$SECONDS
    shift
    if ! "$@" > "$out/$name.log" 2>&1; then
        tail -n 20 "$out/$name.log" >&2
        echo "failed: $name (whole log: $out/$name.log)" >&2
        return 1
    fi
    printf '%-18s %4d s  %s\n' "$name" $((SECONDS - begin)) "$(grep -E '^(success|held-out|writes)' "$out/$name.log" | tail -n 1)"
}

rollout="$py 02_rollout.py --simulator rules --max-rounds 8 --max-new-tokens 160"
evaluate() {
    step "rollout-$1" $rollout --tasks "$out/test.jsonl" --agent "$2" --samples 2 --seed "$seed" --out "$out/$1.jsonl"
}

echo "seed $seed, results in $out"
step tasks-train $py 01_generate_tasks.py --split train --num-tasks "${TRAIN_TASKS:-800}" --seed "$seed" --out "$out/train.jsonl"
step tasks-test $py 01_generate_tasks.py --split test --num-tasks "${TEST_TASKS:-300}" --seed 1000 --out "$out/test.jsonl"
step rollout-offline .venv/bin/torchrun --standalone --nproc-per-node 2 ${rollout#$py } --tasks "$out/train.jsonl" \
    --agent tests/tiny --samples 4 --seed "$seed" --out "$out/offline.jsonl"

train="--trajectories $out/offline.jsonl --model tests/tiny --seed $seed"
sweet() {
    step critic $py 03_train_critic.py $train --beta 1 --lr 3e-4 --epochs 2 --out "$out/critic"
    step sweet $py 04_train_policy.py --method sweet $train --critic "$out/critic" --lr 3e-5 --data-frac 0.1 \
        --max-new-tokens 160 --out "$out/sweet"
    evaluate sweet "$out/sweet"
}
baselines() {
    step mtdpo $py 04_train_policy.py --method mtdpo $train --beta 0.3 --lr 1e-4 --epochs 2 --out "$out/mtdpo"
    evaluate mtdpo "$out/mtdpo"
    step rft $py 04_train_policy.py --method rft $train --lr 3e-4 --epochs 2 --out "$out/rft"
    evaluate rft "$out/rft"
    evaluate base tests/tiny
}
# Two processes of one thread each share the two cores.
sweet & first=$!
baselines & second=$!
wait $first
wait $second
$py 05_evaluate.py base="$out/base.jsonl" rft="$out/rft.jsonl" mtdpo="$out/mtdpo.jsonl" sweet="$out/sweet.jsonl" \
    --baseline mtdpo --gates tests/tiny --out "$out/report" | tee "$out/evaluate.log"
