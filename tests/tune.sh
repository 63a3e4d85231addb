#!/usr/bin/env bash
# The search that chose the hyper-parameters of run.sh, on validation tasks: bash tests/tune.sh [--domain frontend],
# after run.sh with the same (of which it takes the offline dialogues). Eight settings for each method, three with pages;
# test tasks are not touched. Writes out/tune/grid.csv, which is kept as tests/grid.csv, about 40 minutes on 2 cores;
# with pages out/frontend/tune/grid.csv and tests/grid_pages.csv, about 25.
#     KINDS="no-c regression" bash tests/tune.sh
# then searches for SWEET with other critics in place of the methods, eight settings for each, from the same candidates:
# out/tune/grid-critics.csv, kept as tests/grid_critics.csv, about 20 minutes a critic.
set -euo pipefail
cd "$(dirname "$0")/.."
. tests/setup.sh
take_domain "$@"
setup_environment requirements.txt
if [ $domain = frontend ]; then
    setup_environment tests/frontend.txt
    setup_browser
    base=tests/tiny_pages offline=out/frontend/offline.jsonl work=out/frontend/tune new_tokens="--max-new-tokens 220"
    tasks="--domain frontend --num-tasks ${VALIDATION_TASKS:-60}" similarity="--similarity pixels"
    play="--max-rounds 4 $new_tokens $similarity" critic="--lr 3e-4 --epochs 1" betas=1
    candidates="--data-frac 0.06 $new_tokens"
else
    base=tests/tiny offline=out/offline.jsonl work=out/tune new_tokens="--max-new-tokens 160"
    tasks="--num-tasks ${VALIDATION_TASKS:-300}" similarity=
    play="--max-rounds 8 $new_tokens" critic="--lr 3e-4 --epochs 2" betas="0.1 1"
    candidates=$new_tokens
fi
kinds=${KINDS:-} grid=grid
if [ "$kinds" ]; then
    [ $domain = backend ] || { echo "error: KINDS is for the backend" >&2; exit 2; }
    grid=grid-critics
fi
export py=.venv/bin/python base offline work play
mkdir -p $work
$py 01_generate_tasks.py --split validation --seed 0 $tasks --out $work/validation.jsonl

# try NAME FLAGS…: train, play the validation tasks twice
try() {
    local name=$1
    shift
    $py 04_train_policy.py --trajectories $offline --model $base "$@" --out $work/$name > $work/$name.log
    $py 02_rollout.py --tasks $work/validation.jsonl --simulator rules --agent $work/$name --samples 2 --seed 5 \
        $play --out $work/$name.jsonl > $work/$name.rollout.log 2>&1
    echo "$name: $(grep -hE "^(success|similarity \()" $work/$name.rollout.log)"
}
export -f try

# Flags of 03 for a kind of critic, as in run.sh --study
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
sweet_settings() {                                                   # NAME CRITIC more flags
    local lr beta nll
    for lr in 3e-5 1e-4; do
        for nll in 0.01 0.3; do
            for beta in 0.1 1; do                                    # of the critic; the policy's is the paper's, 0.1
                echo "$1_${lr}_${beta}_${nll}_1 --method sweet --lr $lr --nll-coef $nll $new_tokens" \
                    "--critic $work/$2-$beta --candidates $work/candidates/candidates.jsonl" "${@:3}"
            done
        done
    done
}
critic_settings() {
    local kind
    for kind in $kinds; do sweet_settings sweet-$kind critic-$kind --max-tokens 4096 --pairs-together; done
}
function_settings() {
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
    sweet_settings sweet critic
}
page_settings() {
    local lr
    for lr in 3e-4 1e-3 3e-3; do echo "rft_${lr}_-_-_4 --method rft --lr $lr --epochs 4"; done
    for lr in 3e-5 1e-4 3e-4; do
        echo "mtdpo_${lr}_0.1_0.3_1 --method mtdpo --lr $lr --nll-coef 0.3 --epochs 1"
        echo "sweet_${lr}_1_0.3_1 --method sweet --lr $lr --nll-coef 0.3 --pairs-together $candidates --critic" \
            "$work/critic-1 --candidates $work/candidates/candidates.jsonl"
    done
}
settings=function_settings
[ $domain = backend ] || settings=page_settings
[ -z "$kinds" ] || settings=critic_settings
for kind in ${kinds:-lm}; do
    [ $kind = lm ] && name=critic || name=critic-$kind
    flags=$(kind_flags $kind)
    for beta in $betas; do
        $py 03_train_critic.py --trajectories $offline --model $base $critic --beta $beta $flags \
            --out $work/$name-$beta > $work/$name-$beta.log &
    done
    wait
done
# All settings of SWEET choose from the same candidates, of whichever critic's run.
[ -e $work/candidates/COMPLETED ] || $py 04_train_policy.py --trajectories $offline --model $base --method sweet \
    --critic $work/$name-1 --max-steps 1 $candidates --out $work/candidates > $work/candidates.log
$settings | xargs -P 2 -d '\n' -I{} bash -ec 'try {}'
files=$($settings | sed -E "s|^([^ ]+) .*|\1=$work/\1.jsonl|")
$py 05_evaluate.py $files $similarity --costs --out $work/report-$grid --overwrite
$py - $work/report-$grid/metrics.json <<'PYTHON' | tee $work/$grid.csv
import json, sys
metrics = json.load(open(sys.argv[1]))
keys = ("success_rate", "tests_passed", "mean_rounds", "all_known", "success_when_known", "pixel_similarity")
keys = [key for key in keys if all(key in m for m in metrics.values())]
print("method,lr,beta,nll_coef,epochs", *(key.removesuffix("_rate").removeprefix("mean_") for key in keys),
      "trained_tokens", sep=",")
for name, m in metrics.items():
    numbers = [f"{m[key]:.3f}" for key in keys]
    print(name.replace("_-", "_").replace("_", ","), *numbers, m["costs"]["trained_tokens"], sep=",")
PYTHON
