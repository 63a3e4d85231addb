#!/usr/bin/env bash
# From a bare machine to the table: bash run.sh [SEED]
# Makes .venv, then tasks, offline dialogues of the shipped base model (tests/tiny), the critic, the policies (SWEET,
# multi-turn DPO, rejection fine-tuning), dialogues of each on test tasks, and the evaluation. A second call resumes.
# OUT (out), ROUNDS (8) and sizes can be set from outside; for a quick look: TRAIN_TASKS=40 TEST_TASKS=20 bash run.sh
#
# Web pages: bash run.sh --domain frontend [SEED]   (template pages, results in out/frontend; needs Chromium, which is
# installed where this runs as root on Debian)
#
# Over seeds: bash run.sh --study [SEED …]   (0 1 2 3 4; results in out/study; a second call resumes)
# The same chain for every seed on 500 test tasks, about 15 minutes of one core a seed; then SWEET with other critics
# and with oracles, multi-turn DPO with as many trained tokens as SWEET, and both methods on less data, an estimated
# 30 minutes of one core a seed; at last the first seed's critics compared. ROWS= (empty) stops after the chain.
set -euo pipefail
cd "$(dirname "$0")"
. tests/setup.sh
take_domain "$@"
shift $taken
export py=.venv/bin/python seed out results=${OUT:-out}/study domain

# Run a command, its output in a log; show where it failed, and how long it took.
step() {
    local name=$1 begin=$SECONDS
    shift
    if ! "$@" >> "$out/$name.log" 2>&1; then
        tail -n 20 "$out/$name.log" >&2
        echo "failed: $name (whole log: $out/$name.log)" >&2
        return 1
    fi
    printf '%-36s %4d s  %s\n' "$out/$name" $((SECONDS - begin)) \
        "$(grep -E '^(success|held-out|writes)' "$out/$name.log" | tail -n 1)"
}

# ---------------------------------------------------------------------------------------------------------------------
# the chain; its settings are those that tests/tune.sh found best on validation tasks, of eight for each method

case $domain in
    backend)
        setup_environment requirements.txt
        base=tests/tiny num_train=800 num_test=300
        new_tokens="--max-new-tokens 160"
        rollout="02_rollout.py --simulator rules --max-rounds ${ROUNDS:-8} $new_tokens"
        critic_settings="--beta 1 --lr 3e-4 --epochs 2"
        rft_settings="--lr 1e-3 --epochs 4"
        mtdpo_settings="--lr 1e-4 --nll-coef 0.3 --epochs 2"
        sweet_settings="--lr 3e-5 --nll-coef 0.3 $new_tokens --max-tokens 4096 --pairs-together"
        evaluation="--gates tests/tiny" ;;
    frontend)
        setup_environment requirements.txt tests/frontend.txt
        setup_browser
        base=tests/tiny_pages num_train=120 num_test=50
        new_tokens="--max-new-tokens 220"
        rollout="02_rollout.py --simulator rules --similarity pixels --max-rounds ${ROUNDS:-4} $new_tokens"
        critic_settings="--beta 1 --lr 3e-4 --epochs 1"
        rft_settings="--lr 1e-3 --epochs 4"
        mtdpo_settings="--lr 1e-4 --nll-coef 0.3 --epochs 1"
        sweet_settings="--lr 1e-4 --nll-coef 0.3 --data-frac 0.06 $new_tokens --pairs-together"
        evaluation="--similarity pixels" ;;
esac
export base num_train num_test rollout critic_settings rft_settings mtdpo_settings sweet_settings
tasks() {                                                            # SPLIT NUMBER SEED
    step "tasks-$1" $py 01_generate_tasks.py --domain $domain --split "$1" --num-tasks "$2" --seed "$3" \
        --out "$out/$1.jsonl"
}
data() {
    mkdir -p "$out"
    tasks train "${TRAIN_TASKS:-$num_train}" "$seed"
    tasks test "${TEST_TASKS:-$num_test}" 1000
    step rollout-offline ${ranks:-$py} $rollout --tasks "$out/train.jsonl" --agent $base --samples 4 --seed "$seed" \
        --out "$out/offline.jsonl"
}
train() { ${ranks:-$py} "0$1" --trajectories "$out/offline.jsonl" --model $base --seed "$seed" "${@:2}"; }
critic() { step "$1" train 3_train_critic.py $critic_settings --out "$out/$1" "${@:2}"; }
evaluate() {                                                         # NAME MODEL
    step "rollout-$1" $py $rollout --tasks "$out/test.jsonl" --agent "$2" --samples "${SAMPLES:-2}" --seed "$seed" \
        --out "$out/$1.jsonl"
}
policy() {                                                           # NAME METHOD more flags
    local settings=${2}_settings
    step "$1" train 4_train_policy.py --method "$2" ${!settings} --out "$out/$1" "${@:3}"
    evaluate "$1" "$out/$1"
}
sweet() {
    policy sweet sweet --critic "$out/critic"
    evaluate base $base
}
baselines() {
    policy rft rft
    policy mtdpo mtdpo
}

# ---------------------------------------------------------------------------------------------------------------------
# the study: a process of one thread plays a seed's chain, or its other rows, from beginning to end; two at a time

candidates() { echo --candidates "$out/sweet/candidates.jsonl"; }    # all choose from those of the seed's SWEET
other() {                                                            # SWEET with a critic of another kind
    critic "critic-$1" "${@:2}"
    policy "sweet-$1" sweet --critic "$out/critic-$1" $(candidates)
}
one_seed() {
    seed=$1 out=$results/seed$1
    data
    baselines
    critic critic
    sweet
    touch "$out/chain-done"
}
row() {                                                              # SEED NAME
    seed=$1 out=$results/seed$1
    local n=${2#n}
    until [ -e "$out/chain-done" ]; do sleep 5; done
    case $2 in
        oracle | oracle-patient) policy "sweet-$2" sweet --critic "$2" $(candidates) ;;
        tokens) policy mtdpo-tokens mtdpo --epochs 4 ;;              # about as many as SWEET, its critic included
        no-c) other no-c --no-privileged ;;
        no-norm) other no-norm --normalize none ;;
        regression) other regression --head regression --beta 0.1 ;; # of two, see tests/grid_critics.csv
        value) other value --head value ;;
        *)
            policy "mtdpo-n$n" mtdpo --num-trajectories "$n"
            critic "critic-n$n" --num-trajectories "$n"
            policy "sweet-n$n" sweet --num-trajectories "$n" --critic "$out/critic-n$n"
            ;;
    esac
}
best_of() {                                                          # NAME CRITIC N
    step "best-$1@$3" $py $rollout --tasks "$out/few/test.jsonl" --agent tests/tiny --seed "$seed" --best-of "$3" \
        --critic "$2" --out "$out/few/$1@$3.jsonl"
}
export -f step tasks data train critic evaluate policy sweet baselines candidates other one_seed row best_of

report() {                                                           # FOLDER BASELINE NAME…
    local files=() name
    for name in "${@:3}"; do files+=("$name=$(printf "$results/seed%s/$name.jsonl\n" $seeds | paste -sd,)"); done
    $py 05_evaluate.py "${files[@]}" --baseline "$2" --costs --overwrite --out "$results/$1-${seeds// /-}"
}
study() {
    local seeds=${*:-0 1 2 3 4} rows=${ROWS-oracle oracle-patient tokens no-c no-norm regression value n200 n800} name n
    local kinds=critic rankings=
    export TEST_TASKS=${TEST_TASKS:-500} SAMPLES=1
    {
        printf 'one_seed %s\n' $seeds
        for seed in $seeds; do
            for name in $rows; do echo "row $seed $name"; done
        done
    } | xargs -P 2 -d '\n' -I{} bash -euo pipefail -c '{}'
    report chain mtdpo base rft mtdpo sweet
    [ "$rows" ] || return 0
    for name in $rows; do                                            # each beside what it is compared with
        case $name in
            tokens) report tokens mtdpo mtdpo mtdpo-tokens sweet ;;
            n[0-9]*) report "$name" "mtdpo-$name" "mtdpo-$name" "sweet-$name" ;;
            *) rankings+=" sweet-$name" ;;
        esac
    done
    [ -z "$rankings" ] || report rankings sweet sweet $rankings

    # The critics of the first seed: best-of-N on a part of the test tasks, pair accuracy, correlation with returns
    seed=${seeds%% *}
    out=$results/seed$seed
    for name in no-c no-norm regression; do                          # those among the rows
        case " $rows " in *" $name "*) kinds+=" critic-$name" ;; esac
    done
    case " $rows " in *" value "*) ;; *) critic critic-value --head value ;; esac
    mkdir -p "$out/few"
    head -n "${FEW_TASKS:-200}" "$out/test.jsonl" > "$out/few/test.jsonl"
    for n in 1 4 16; do
        for name in $kinds critic-value; do echo "best_of $name $out/$name $n"; done
        echo "best_of oracle oracle $n"
        [ "$n" = 16 ] || echo "best_of judge judge:tests/tiny $n"      # it compares one by one: slow
    done | xargs -P 2 -d '\n' -I{} bash -euo pipefail -c '{}'
    $py 05_evaluate.py $(cd "$out/few" && ls *@*.jsonl | sed "s|\(.*\)\.jsonl|\1=$out/few/&|") --out "$out/curves"
    step rollout-few $py $rollout --tasks "$out/few/test.jsonl" --agent tests/tiny --samples 4 --seed "$seed" \
        --out "$out/few/base.jsonl"                                  # pairs need several dialogues of a task
    $py 05_evaluate.py base="$out/few/base.jsonl" --policy tests/tiny --mc-states 100 --out "$out/critics" \
        --critics $(for name in $kinds critic-value; do echo "$name=$out/$name"; done)
}

if [ "${1:-}" = --study ]; then
    [ $domain = backend ] || { echo "error: --study is for the backend" >&2; exit 2; }
    study "${@:2}"
else
    seed=${1:-0}
    out=${OUT:-out}
    [ $domain = backend ] || out=$out/$domain
    [ "$seed" = 0 ] || out=$out/seed$seed
    echo "seed $seed, results in $out"
    # Two ranks of one thread each, then two processes, share the two cores.
    ranks=".venv/bin/torchrun --standalone --nproc-per-node 2"
    data
    critic critic
    ranks=
    sweet & first=$!
    baselines & second=$!
    wait $first
    wait $second
    $py 05_evaluate.py base="$out/base.jsonl" rft="$out/rft.jsonl" mtdpo="$out/mtdpo.jsonl" sweet="$out/sweet.jsonl" \
        --baseline mtdpo $evaluation --out "$out/report" | tee "$out/evaluate.log"
fi
