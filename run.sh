#!/usr/bin/env bash
# From a bare machine to the table: bash run.sh [--domain backend|frontend|sql] [SEED]
# Makes .venv, then tasks, offline dialogues of the shipped base model (models/tiny), the critic, the policies (SWEET,
# multi-turn DPO, rejection fine-tuning), dialogues of each on test tasks, and the evaluation. A second call resumes, or
# shows the table again.
# All methods learn from 320 dialogues (80 tasks; pages: 480). SWEET uses all of their turns (pages: those of 6 %).
# OUT (out), ROUNDS (8; pages 4) and sizes can be set from outside. To see that it runs:
# OUT=out/try TRAIN_TASKS=40 TEST_TASKS=20 bash run.sh
# (20 test tasks say nothing about the methods: their intervals are ±.13, and any order comes up.)
#
# Results are in out, with another domain in out/DOMAIN (pages need Chromium, which is installed where this runs as root
# on Debian). The settings stand in scripts/arms.toml; scripts/study.py runs the steps, and studies over seeds.
set -euo pipefail
cd "$(dirname "$0")"
. scripts/setup.sh
take_domain "$@"
shift $taken
seed=${1:-0}
[[ $seed =~ ^[0-9]+$ ]] || { echo "error: seed '$seed': must be a number" >&2; exit 2; }
set_up_domain
out=${OUT:-out}
[ "$domain" = backend ] || out=$out/$domain
[ "$seed" = 0 ] || out=$out/seed$seed
settings=()
[ -z "${TRAIN_TASKS:-}" ] || settings+=("dialogues=$((4 * TRAIN_TASKS))")
[ -z "${TEST_TASKS:-}" ] || settings+=("num_test=$TEST_TASKS")
[ -z "${ROUNDS:-}" ] || settings+=("max_rounds=$ROUNDS")
exec .venv/bin/python scripts/study.py base rft mtdpo sweet --chain "$seed" --domain "$domain" --out "$out" \
    ${settings:+--set "${settings[@]}"}
