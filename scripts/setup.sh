# Sourced by run.sh, tests/run.sh and scripts/make_tiny.sh in the repository's root: makes .venv and installs what is
# missing.

# take_domain "$@": sets `domain`, and `taken`, how many arguments at the front said so (--domain NAME). One may follow.
take_domain() {
    domain=backend taken=0
    if [ "${1:-}" = --domain ]; then
        domain=${2:-} taken=2
    fi
    if [ $(($# - taken)) -gt 1 ]; then
        echo "error: $*: must be [--domain NAME] and then at most one argument" >&2
        exit 2
    fi
    if ! [[ $domain =~ ^[a-z]+$ ]] || ! grep -q "^\[$domain\]" scripts/recipes.toml; then
        echo "error: --domain '$domain': must be a domain of scripts/recipes.toml: backend, frontend, sql or real" >&2
        exit 2
    fi
}

# set_up_domain: installs what `domain` needs.
set_up_domain() {
    if [ "$domain" = frontend ]; then
        setup_environment requirements.txt scripts/frontend.txt
        setup_browser
    else
        setup_environment requirements.txt
    fi
}

# setup_environment [requirements files …]
setup_environment() {
    # An installed torch that satisfies requirements.txt is used as it is.
    [ -x .venv/bin/python ] || "${PYTHON:-python3}" -m venv --system-site-packages .venv
    local file mark
    for file in "$@"; do
        mark=".venv/installed-$(sha256sum "$file" | cut -c1-16)"
        if [ ! -e "$mark" ]; then
            echo "installing $file"
            install_packages -r "$file"
            touch "$mark"
        fi
    done
    # One thread a process: the stages run side by side. Offline: nothing here needs a hub. The shipped models are too
    # small to gain by a GPU; where CUDA_VISIBLE_DEVICES names GPUs, they are used.
    export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES-}
}

# install_packages ARGUMENTS-OF-PIP-INSTALL…: into .venv, by uv where it is installed. uv does not see what lies outside
# of .venv, so pip takes its place where a torch is there, and where uv finds no packages.
install_packages() {
    if command -v uv > /dev/null && ! torch_lies_outside; then
        uv pip install --quiet --python .venv/bin/python "$@" && return
    fi
    .venv/bin/python -m pip install --quiet --disable-pip-version-check "$@"
}
torch_lies_outside() {
    .venv/bin/python -c "import importlib.util as u, sys
spec = u.find_spec('torch')
sys.exit(spec is None or spec.origin.startswith(sys.prefix))"
}

# What pages need: a browser and fonts (by apt-get, where this runs as root), and the files that answer Tailwind's
# addresses: tailwindcss 2.2.19 (MIT), tailwindcss-cdn 3.4.10 (ISC; MIT inside), @tailwindcss/browser 4.3.3 (MIT).
setup_browser() {
    local name wanted=() fonts
    command -v chromium chromium-browser google-chrome google-chrome-stable chrome > /dev/null || wanted+=(chromium)
    fonts=$(find /usr/share/fonts /usr/local/share/fonts ~/.fonts ~/.local/share/fonts \
        -name 'LiberationSans-Regular.*' 2> /dev/null || true)
    [ -n "$fonts" ] || wanted+=(fonts-liberation)
    if [ ${#wanted[@]} -gt 0 ] && [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
        echo "installing ${wanted[*]}"
        { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
            "${wanted[@]}" > /dev/null; } ||
            echo "not installed: ${wanted[*]}; tests and tasks with pages need them" >&2
    fi
    for name in tailwindcss@2.2.19 tailwindcss-cdn@3.4.10 @tailwindcss/browser@4.3.3; do fetch_pack "$name"; done
}

# fetch_pack NAME@VERSION: unpack an npm package into .venv/tailwind/NAME-VERSION
fetch_pack() {
    local name=${1#@} folder tmp
    name=${name//[@\/]/-}
    folder=.venv/tailwind/$name
    [ ! -e "$folder" ] || return 0
    echo "installing $1"
    mkdir -p .venv/tailwind
    tmp=$(mktemp -d .venv/tailwind-XXXXXX)
    if npm pack --silent --pack-destination "$tmp" "$1" > /dev/null && tar -xzf "$tmp/$name.tgz" -C "$tmp"; then
        mv "$tmp/package" "$folder"
    else
        echo "not installed (by npm): $1; pages that load it cannot be drawn" >&2
    fi
    rm -r "$tmp"
}
