# Sourced by scripts/chain.sh and tests/run.sh in the repository's root: makes .venv and installs what is missing.
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
    # One thread a process: the stages run side by side. Offline: nothing here needs a hub.
    export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
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

# What pages need: a browser and its fonts (where apt-get may install them), and the files that answer Tailwind's
# addresses.
setup_browser() {
    local name wanted=()
    have() { command -v "$1" > /dev/null; }
    have chromium || have chromium-browser || have google-chrome || have google-chrome-stable || have chrome ||
        wanted+=(chromium)
    [ -n "$(find /usr/share/fonts /usr/local/share/fonts ~/.fonts ~/.local/share/fonts \
        -name 'LiberationSans-Regular.*' 2> /dev/null)" ] || wanted+=(fonts-liberation)
    if [ ${#wanted[@]} -gt 0 ] && [ "$(id -u)" = 0 ] && have apt-get; then
        echo "installing ${wanted[*]}"
        apt_install() {
            DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "$@" > /dev/null
        }
        apt_install "${wanted[@]}" 2> /dev/null || { apt-get update -qq && apt_install "${wanted[@]}"; } ||
            echo "not installed: ${wanted[*]}; tests and tasks with pages need them" >&2
    fi

    # tailwindcss 2.2.19 (MIT), tailwindcss-cdn 3.4.10 (ISC; MIT inside), @tailwindcss/browser 4.3.3 (MIT)
    for name in tailwindcss@2.2.19 tailwindcss-cdn@3.4.10 @tailwindcss/browser@4.3.3; do fetch_pack "$name"; done
}

# fetch_pack NAME@VERSION: unpack an npm package into .venv/tailwind/NAME-VERSION
fetch_pack() {
    local name=${1#@} folder tmp
    name=${name//[@\/]/-}
    folder=.venv/tailwind/$name
    [ -e "$folder" ] && return
    if ! command -v npm > /dev/null; then
        echo "no npm: pages that load $1 cannot be drawn" >&2
        return
    fi
    echo "installing $1"
    tmp=$(mktemp -d .venv/tailwind-XXXXXX)
    if npm pack --silent --pack-destination "$tmp" "$1" > /dev/null && tar -xzf "$tmp/$name.tgz" -C "$tmp"; then
        mkdir -p .venv/tailwind
        mv "$tmp/package" "$folder"
    else
        echo "not installed: $1; pages that load it cannot be drawn" >&2
    fi
    rm -r "$tmp"
}
