#!/usr/bin/env bash
# From a bare machine to the table: bash run.sh [--domain backend|frontend|sql] [SEED]
# Makes .venv, then by the commands of scripts/recipes.toml, where [backend.chain] has them in their order:
#     01  tasks                         02  four dialogues of the base model (models/tiny) on each
#     03  the critic                    04  the agents: rejection fine-tuning, multi-turn DPO, SWEET
#     02  two dialogues of each agent on test tasks              05  the table and the report
# Each command is printed as it starts, two at a time. A second call resumes, or shows the table again.
# All methods learn from 320 dialogues (80 tasks; pages: 480). SWEET uses all of their turns (pages: those of 6 %).
# OUT (out), ROUNDS (8; pages 4) and sizes can be set from outside. To see that it runs:
# OUT=out/try TRAIN_TASKS=40 TEST_TASKS=20 bash run.sh
# (20 test tasks say nothing about the methods: their intervals are ±.13, and any order comes up.)
#
# Results are in out, with another domain in out/DOMAIN (pages need Chromium, which is installed where this runs as root
# on Debian). scripts/study.py runs the commands, and studies over seeds.
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
exec .venv/bin/python scripts/study.py --chain "$seed" --domain "$domain" --out "$out" \
    ${settings:+--set "${settings[@]}"}
