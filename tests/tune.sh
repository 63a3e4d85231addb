#!/usr/bin/env bash
# The search that chose the hyper-parameters of run.sh, on validation tasks: bash tests/tune.sh, after bash run.sh (of
# which it takes the offline dialogues). Eight settings for each method; test tasks are not touched. Writes
# out/tune/grid.csv, which is kept as tests/grid.csv; about 40 minutes on 2 cores.
set -euo pipefail
cd "$(dirname "$0")/.."
. tests/setup.sh
setup_environment requirements.txt
export py=.venv/bin/python work=out/tune
mkdir -p $work
$py 01_generate_tasks.py --split validation --num-tasks "${VALIDATION_TASKS:-300}" --seed 0 --out $work/validation.jsonl

# try NAME FLAGS…: train, play the validation tasks twice
try() {
    local name=$1
    shift
    $py 04_train_policy.py --trajectories out/offline.jsonl --model tests/tiny "$@" --out $work/$name > $work/$name.log
    $py 02_rollout.py --tasks $work/validation.jsonl --simulator rules --agent $work/$name --samples 2 --seed 5 \
        --max-rounds 8 --max-new-tokens 160 --out $work/$name.jsonl > $work/$name.rollout.log 2>&1
    echo "$name: $(grep ^success $work/$name.rollout.log)"
}
export -f try

settings() {
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
            for beta in 0.1 1; do                                    # of the critic; the policy's is the paper's, 0.1
                echo "sweet_${lr}_${beta}_${nll}_1 --method sweet --lr $lr --nll-coef $nll --max-new-tokens 160" \
                    "--critic $work/critic-$beta --candidates $work/candidates/candidates.jsonl"
            done
        done
    done
}
# All settings of SWEET choose from the same candidates.
$py 04_train_policy.py --trajectories out/offline.jsonl --model tests/tiny --method sweet --critic oracle --max-steps 1 \
    --max-new-tokens 160 --out $work/candidates > $work/candidates.log &
for beta in 0.1 1; do
    $py 03_train_critic.py --trajectories out/offline.jsonl --model tests/tiny --lr 3e-4 --epochs 2 --beta $beta \
        --out $work/critic-$beta > $work/critic-$beta.log &
done
wait
settings | xargs -P 2 -d '\n' -I{} bash -ec 'try {}'
files=$(settings | sed -E "s|^([^ ]+) .*|\1=$work/\1.jsonl|")
$py 05_evaluate.py $files --costs --out $work/report --overwrite
$py - $work/report/metrics.json <<'PYTHON' | tee $work/grid.csv
import json, sys
print("method,lr,beta,nll_coef,epochs,success,tests_passed,rounds,all_known,success_when_known,trained_tokens")
for name, m in json.load(open(sys.argv[1])).items():
    numbers = [m[key] for key in ("success_rate", "tests_passed", "mean_rounds", "all_known", "success_when_known")]
    print(name.replace("_-", "_").replace("_", ","), *(f"{x:.3f}" for x in numbers), m["costs"]["trained_tokens"], sep=",")
PYTHON
