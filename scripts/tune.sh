#!/usr/bin/env bash
# The search that chose the settings of many dialogues (study.sh; run.sh with pages), on validation tasks:
# bash scripts/tune.sh [--domain NAME], after run.sh with the same (whose offline dialogues it takes: TRAIN_TASKS=800
# bash run.sh, TRAIN_TASKS=500 with queries). Eight settings for each method, three with pages and
# queries; test tasks are not touched. Writes out/tune/grid.csv, which is kept as docs/grid.csv, about 40 minutes on 2
# cores; with pages out/frontend/tune/grid.csv and docs/grid_pages.csv, about 25; with queries out/sql/tune/grid.csv and
# docs/grid_sql.csv.
#     KINDS="no-c regression" bash scripts/tune.sh
# then searches for SWEET with other critics in place of the methods, eight settings for each, from the same candidates:
# out/tune/grid-critics.csv, kept as docs/grid_critics.csv, about 20 minutes a critic.
# The methods that are not in the paper are searched by scripts/rounds.sh.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/chain.sh
take_domain "$@"
set_up_domain
chain=${OUT:-out} betas="0.1 1" num_validation=300
[ $domain = backend ] || chain=$chain/$domain betas=1 num_validation=60
[ $domain != sql ] || num_validation=150
offline=$chain/offline.jsonl work=$chain/tune
kinds=${KINDS:-} grid=grid
if [ "$kinds" ]; then
    [ $domain = backend ] || { echo "error: KINDS are for the backend" >&2; exit 2; }
    grid=grid-critics
fi
export py base rollout offline work
mkdir -p $work
$py 01_generate_tasks.py --domain $domain --split validation --num-tasks ${VALIDATION_TASKS:-$num_validation} --seed 0 \
    --out $work/validation.jsonl

# try NAME FLAGS…: train, play the validation tasks twice
try() {
    local name=$1
    shift
    $py 04_train_policy.py --trajectories $offline --model $base "$@" --out $work/$name > $work/$name.log
    $py $rollout --tasks $work/validation.jsonl --agent $work/$name --samples 2 --seed 5 \
        --out $work/$name.jsonl > $work/$name.rollout.log 2>&1
    echo "$name: $(result_of $work/$name.rollout.log)"
}
export -f result_of try

# Flags of 03 for a kind of critic, as in scripts/study.sh
kind_flags() {
    case $1 in
        lm) ;;
        no-c) echo --no-privileged ;;
        no-norm) echo --normalize none ;;
        regression) echo --head regression ;;
        *) echo "error: KINDS: no critic $1" >&2; return 2 ;;
    esac
}

# NAME FLAGS… of each setting; the name is its row in the table
sweet_grid() {                                                       # NAME CRITIC
    local lr beta nll
    for lr in 3e-5 1e-4; do
        for nll in 0.01 0.3; do
            for beta in 0.1 1; do                                    # of the critic; the policy's is the paper's, 0.1
                echo "$1_${lr}_${beta}_${nll}_1 --method sweet --lr $lr --nll-coef $nll $sampling $sweet_batches" \
                    "--critic $work/$2-$beta --candidates $work/candidates/candidates.jsonl"
            done
        done
    done
}
critic_grid() {
    local kind
    for kind in $kinds; do sweet_grid sweet-$kind critic-$kind; done
}
function_grid() {
    local lr beta nll epochs
    for lr in 1e-4 3e-4 1e-3 3e-3; do
        for epochs in 2 4; do
            echo "rft_${lr}_-_-_$epochs --method rft --lr $lr --epochs $epochs"
        done
    done
    for lr in 3e-5 1e-4; do
        for nll in 0.01 0.3; do
            for beta in 0.1 0.3; do
                echo "mtdpo_${lr}_${beta}_${nll}_2 --method mtdpo --lr $lr --beta $beta --nll-coef $nll --epochs 2"
            done
        done
    done
    sweet_grid sweet critic
}
short_grid() {
    local lr epochs=1
    [ $domain = frontend ] || epochs=2
    for lr in 3e-4 1e-3 3e-3; do echo "rft_${lr}_-_-_4 --method rft --lr $lr --epochs 4"; done
    for lr in 3e-5 1e-4 3e-4; do
        echo "mtdpo_${lr}_0.1_0.3_$epochs --method mtdpo --lr $lr --nll-coef 0.3 --epochs $epochs"
        echo "sweet_${lr}_1_0.3_1 --method sweet --lr $lr --nll-coef 0.3 $sampling $sweet_batches --critic" \
            "$work/critic-1 --candidates $work/candidates/candidates.jsonl"
    done
}
settings=function_grid
[ $domain = backend ] || settings=short_grid
[ -z "$kinds" ] || settings=critic_grid
for kind in ${kinds:-lm}; do
    [ $kind = lm ] && name=critic || name=critic-$kind
    flags=$(kind_flags $kind)
    for beta in $betas; do
        $py 03_train_critic.py --trajectories $offline --model $base $critic_settings --beta $beta $flags \
            --out $work/$name-$beta > $work/$name-$beta.log &
    done
    wait
done
# All settings of SWEET choose from the same candidates, of whichever critic's run.
[ -e $work/candidates/COMPLETED ] || $py 04_train_policy.py --trajectories $offline --model $base --method sweet \
    --critic $work/$name-1 --max-steps 1 $sampling --out $work/candidates > $work/candidates.log
$settings | xargs -P 2 -d '\n' -I{} bash -ec 'try {}'
files=$($settings | sed -E "s|^([^ ]+) .*|\1=$work/\1.jsonl|")
$py 05_evaluate.py $files $similarity --costs --out $work/report-$grid --overwrite
grid_table $work/report-$grid/metrics.json | tee $work/$grid.csv
