#!/usr/bin/env bash
# From a bare machine to the table: bash run.sh [SEED]
# Makes .venv, then tasks, offline dialogues of the shipped base model (tests/tiny), the critic, the policies (SWEET,
# multi-turn DPO, rejection fine-tuning), dialogues of each on test tasks, and the evaluation. A second call resumes.
# The sizes can be set from outside, for a quick look: TRAIN_TASKS=40 TEST_TASKS=20 bash run.sh
#
# Over seeds: bash run.sh --study [SEED …]   (0 1 2 3 4; out/study; hours; resumes)
# The same chain for every seed on 500 test tasks, about 6 minutes a seed; then for every seed SWEET with other critics
# and the oracle, multi-turn DPO with as many tokens as SWEET, and both methods on less data, about 15 minutes a seed;
# then best-of-N curves of the first seed's critics; 05 puts the seeds together in out/study/report.
set -euo pipefail
cd "$(dirname "$0")"
. tests/setup.sh
setup_environment requirements.txt
export py=.venv/bin/python seed out

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
rollout() { $py 02_rollout.py --simulator rules --max-rounds 8 --max-new-tokens 160 --seed "$seed" "$@"; }
evaluate() {
    step "rollout-$1" rollout --tasks "$out/test.jsonl" --agent "$2" --samples "${SAMPLES:-2}" --out "$out/$1.jsonl"
}
# The settings are those that tests/tune.sh found best on validation tasks, of eight for each method.
train() { $py "0$1" --trajectories "$out/offline.jsonl" --model tests/tiny --seed "$seed" "${@:2}"; }
critic() { step "$1" train 3_train_critic.py --beta 1 --lr 3e-4 --epochs 2 --out "$out/$1" "${@:2}"; }
policy() {
    local settings
    case $2 in
        rft) settings="--lr 3e-4 --epochs 2" ;;
        mtdpo) settings="--beta 0.3 --lr 1e-4 --epochs 2" ;;
        sweet) settings="--lr 3e-5 --data-frac 0.1 --max-new-tokens 160" ;;
    esac
    step "$1" train 4_train_policy.py --method "$2" $settings --out "$out/$1" "${@:3}"
    evaluate "$1" "$out/$1"
}
sweet() {
    critic critic
    policy sweet sweet --critic "$out/critic"
}
baselines() {
    policy mtdpo mtdpo
    policy rft rft
    evaluate base tests/tiny
}
chain() {
    mkdir -p "$out"
    echo "seed $seed, results in $out"
    step tasks-train $py 01_generate_tasks.py --split train --num-tasks "${TRAIN_TASKS:-800}" --seed "$seed" --out "$out/train.jsonl"
    step tasks-test $py 01_generate_tasks.py --split test --num-tasks "${TEST_TASKS:-300}" --seed 1000 --out "$out/test.jsonl"
    step rollout-offline .venv/bin/torchrun --standalone --nproc-per-node 2 02_rollout.py --simulator rules --max-rounds 8 \
        --max-new-tokens 160 --tasks "$out/train.jsonl" --agent tests/tiny --samples 4 --seed "$seed" --out "$out/offline.jsonl"
    # Two processes of one thread each share the two cores.
    sweet & first=$!
    baselines & second=$!
    wait $first
    wait $second
}

# ---------------------------------------------------------------------------------------------------------------------
# the study

# SWEET with a critic of another kind, on the candidates of the seed's SWEET: other NAME CRITIC-FLAGS…
other() {
    critic "critic-$1" "${@:2}"
    policy "sweet-$1" sweet --critic "$out/critic-$1" --candidates "$out/sweet/candidates.jsonl"
}
oracle() { policy sweet-oracle sweet --critic oracle --candidates "$out/sweet/candidates.jsonl"; }
published() { policy sweet-published sweet --critic "$out/critic" --published-ranking --candidates "$out/sweet/candidates.jsonl"; }
more_steps() { policy mtdpo-tokens mtdpo --epochs 4; }               # about as many trained tokens as SWEET
smaller() {
    policy "mtdpo-n$1" mtdpo --num-trajectories "$1"
    critic "critic-n$1" --num-trajectories "$1"
    policy "sweet-n$1" sweet --num-trajectories "$1" --critic "$out/critic-n$1"
}
best_of() {
    step "best-$2@$1" rollout --tasks "$out/few.jsonl" --agent tests/tiny --samples 1 --best-of "$1" --critic "$3" --out "$out/$2@$1.jsonl"
}
export -f step rollout evaluate train critic policy other oracle published more_steps smaller best_of

study() {
    local seeds=${*:-0 1 2 3 4} sizes="${SIZES:-200 800}" files=() curves=() name n
    export TEST_TASKS=${TEST_TASKS:-500} SAMPLES=1
    for seed in $seeds; do out=out/study/seed$seed; chain; done
    for seed in $seeds; do
        out=out/study/seed$seed
        printf '%s\n' "other no-c --no-privileged" "other no-norm --normalize none" "other regression --head regression" oracle \
            published more_steps $(printf 'smaller:%s\n' $sizes) "critic critic-value --head value" | tr : ' ' |
            xargs -P 2 -d '\n' -I{} bash -euc '{}'
    done
    for name in base rft mtdpo mtdpo-tokens sweet sweet-{no-c,no-norm,regression,published,oracle} \
        $(for n in $sizes; do echo "mtdpo-n$n" "sweet-n$n"; done); do
        files+=("$name=$(printf "out/study/seed%s/$name.jsonl," $seeds | sed 's/,$//')")
    done
    $py 05_evaluate.py "${files[@]}" --baseline mtdpo --costs --out out/study/report
}

if [ "${1:-}" = --study ]; then
    study "${@:2}"
else
    seed=${1:-0}
    out=${OUT:-out}
    [ "$seed" = 0 ] || out=$out/seed$seed
    chain
    $py 05_evaluate.py base="$out/base.jsonl" rft="$out/rft.jsonl" mtdpo="$out/mtdpo.jsonl" sweet="$out/sweet.jsonl" \
        --baseline mtdpo --gates tests/tiny --out "$out/report" | tee "$out/evaluate.log"
fi
