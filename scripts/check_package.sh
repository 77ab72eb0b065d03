#!/usr/bin/env bash
# Installs what is in dist/ where nothing else is, and trains there: the .tar.gz
# and the .deb in a fresh Debian of its base alone, without a network; the wheel
# in a fresh environment of Python. As root.
source scripts/common.sh
[[ $(id -u) == 0 ]] || fail "package: --check makes a Debian of its own, for which it must be root."
set_up_first --with 'debootstrap debootstrap' --with 'man-db man'

scratch=$(mktemp -d /tmp/tessera-package.XXXXXX)
trap 'rm -rf --one-file-system "$scratch"' EXIT
debian=$scratch/debian log=$scratch/log
say() { printf '\n== %s\n' "$1"; }

# The first of apt's sources for this Debian; debootstrap knows where else.
mirror() {
  apt-get indextargets --format '$(REPO_URI) $(CODENAME)' |
    awk -v name="$1" '$2 == name { print $1; exit }'
}

# inside COMMAND...: in the Debian, with processes and shared memory of its own and
# no network.
inside() {
  unshare --mount --pid --net --ipc --fork bash -c '
    mount -t proc proc "$0/proc" && mount -t tmpfs tmpfs "$0/dev/shm" &&
    exec chroot "$0" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root "$@"' \
    "$debian" "$@"
}

# first_token FOLDER TESSERA...: in the Debian, in a folder that is made.
first_token() {
  local folder=$1
  shift
  inside mkdir "$folder"
  inside bash -c 'cd "$0" && exec bash /first_token.sh "$@"' "$folder" "$@" 2>&1 |
    tee "$log" | grep -v '^step: ' || { cat "$log"; fail "package: failed in $folder"; }
}

codename=$(. /etc/os-release && echo "$VERSION_CODENAME")
say "Debian $codename, its base alone"
debootstrap --variant=minbase "$codename" "$debian" "$(mirror "$codename")" >"$log" 2>&1 ||
  fail "package: debootstrap failed: $(tail -n 5 "$log")"
mkdir -p "$debian/dev/shm"
cp scripts/first_token.sh "$debian/"
cp dist/*.deb dist/*.tar.gz "$debian/"

say "The .tar.gz, unpacked into /opt"
inside bash -c 'tar -xzf /tessera-*.tar.gz -C /opt && mv /opt/tessera-* /opt/tessera'
first_token /by_tar /opt/tessera/bin/tessera
inside rm -r /opt/tessera

say "The .deb"
time inside bash -c 'dpkg -i /tessera_*.deb'
first_token /by_deb tessera
inside bash -c 'set -e
  zcat /usr/share/man/man1/tessera.1.gz | head -n 2 | grep -q "^.TH TESSERA"
  test -s /usr/share/fish/vendor_completions.d/tessera.fish -a -s /usr/share/zsh/vendor-completions/_tessera
  . /usr/share/bash-completion/completions/tessera && complete -p tessera'
# Who builds against it has another LibTorch: this machine's is named nowhere.
inside grep -rl "$PWD" /usr/lib/cmake /usr/lib/pkgconfig /usr/share && fail "package: these name $PWD"
inside dpkg --remove tessera
inside bash -c '! command -v tessera && test ! -e /usr/lib/tessera'

say "The wheel, in a fresh environment"
python3 -m venv "$scratch/venv"
mkdir "$scratch/by_wheel"
started=$SECONDS
"$scratch/venv/bin/pip" install --disable-pip-version-check dist/tessera-*.whl >"$log" 2>&1 ||
  fail "package: pip failed: $(tail -n 5 "$log")"
installed=$SECONDS
# No path to here: only what pip installed is found.
(cd "$scratch/by_wheel" && env -i PATH="$scratch/venv/bin:/usr/bin:/bin" HOME="$scratch" \
  bash "$OLDPWD/scripts/first_token.sh" tessera) 2>&1 | grep -v '^step: '
echo "seconds of pip install: $((installed - started)); from its start to the first text: $((SECONDS - started))"
(cd "$scratch/by_wheel" && PATH="$scratch/venv/bin:$PATH" \
  torchrun --no-python --nproc-per-node 2 tessera train run.json --run.name=torchrun) 2>&1 | tail -n 1
test -d "$scratch/by_wheel/runs/torchrun"
MANPATH=$scratch/venv/share/man man -w tessera
say "package: everything installs and runs"
