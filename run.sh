#!/usr/bin/env bash
# From a bare machine to the table: bash run.sh [SEED]
# Makes .venv, then tasks, offline dialogues of the shipped base model (models/tiny), the critic, the policies (SWEET,
# multi-turn DPO, rejection fine-tuning), dialogues of each on test tasks, and the evaluation. A second call resumes.
# OUT (out), ROUNDS (8) and sizes can be set from outside; for a quick look: TRAIN_TASKS=40 TEST_TASKS=20 bash run.sh
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

out=${OUT:-out} gates="--gates $base"
[ $domain = backend ] || out=$out/$domain
[ $domain != frontend ] || gates=
[ "$seed" = 0 ] || out=$out/seed$seed
echo "seed $seed, results in $out"
# Two ranks of one thread each, then two processes, share the two cores.
ranks=$torchrun
data
critic critic
ranks=
sweet & first=$!
baselines & second=$!
wait $first
wait $second
$py 05_evaluate.py base="$out/base.jsonl" rft="$out/rft.jsonl" mtdpo="$out/mtdpo.jsonl" sweet="$out/sweet.jsonl" \
    --baseline mtdpo $similarity $gates --out "$out/report" | tee -a "$out/evaluate.log"
