#!/usr/bin/env bash
# From a bare machine to the table: bash run.sh [SEED]
# Makes .venv, then tasks, offline dialogues of the shipped base model (models/tiny), the critic, the policies (SWEET,
# multi-turn DPO, rejection fine-tuning), dialogues of each on test tasks, and the evaluation. A second call resumes.
# All methods learn from 320 dialogues (80 tasks; pages: 480). SWEET uses all of their turns (pages: those of 6 %).
# OUT (out), ROUNDS (8) and sizes can be set from outside. To see that it runs: TRAIN_TASKS=40 TEST_TASKS=20 bash run.sh
# (20 test tasks say nothing about the methods: their intervals are ±.13, and any order comes up.)
#
# Web pages: bash run.sh --domain frontend [SEED]   (template pages, results in out/frontend; needs Chromium, which is
# installed where this runs as root on Debian)
#
# Ambiguous questions to a database: bash run.sh --domain sql [SEED]   (results in out/sql)
#
# Over seeds, with ablations: bash scripts/study.sh [SEED …], or bash run.sh --study [--domain sql] [SEED …]
set -euo pipefail
cd "$(dirname "$0")"
[ "${1:-}" != --study ] || exec bash scripts/study.sh "${@:2}"
. scripts/chain.sh
take_domain "$@"
shift $taken
seed=${1:-0}
[[ $seed =~ ^[0-9]+$ ]] || { echo "error: seed '$seed': must be a number" >&2; exit 2; }
set_up_domain
few_dialogues

out=${OUT:-out}
[ $domain = backend ] || out=$out/$domain
[ "$seed" = 0 ] || out=$out/seed$seed
echo "seed $seed, results in $out"
# Two ranks of one thread each, or two processes, share the two cores.
ranks=$torchrun
data
critic critic
ranks=
train_policy sweet sweet --critic "$out/critic" & first=$!
baselines & second=$!
wait $first
wait $second
ranks=$torchrun
evaluate sweet "$out/sweet"
files=() report=$out/report
for name in base rft mtdpo sweet; do files+=("$name=$out/$name.jsonl"); done
# Alone on the machine by now: both cores.
export OMP_NUM_THREADS=2
# A check of the base model: is a good turn likelier where c is in front of the dialogue?
[ $domain = frontend ] || $py scripts/critics.py --trajectories "$out/base.jsonl" --gates $base --out "$out/gates"
$py 05_evaluate.py "${files[@]}" --baseline mtdpo $similarity --critic "$out/critic" \
    --candidates "$out/sweet" --out "$report" | tee -a "$out/evaluate.log"
echo "the page, with the credit of every turn: $report/report.html"
