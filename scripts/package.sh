#!/usr/bin/env bash
# ./dev build --package [--check]: a .deb, a .tar.gz and a wheel with the program, into
# dist/. --check then installs each where it is alone, and trains there.
export TESSERA_PRESET=package
source scripts/common.sh
case ${1:-} in
  '' | --check) check=${1:-} ;;
  *) echo "usage: ./dev build --package [--check]" >&2; exit 2 ;;
esac

set_up_first --with 'dpkg-dev dpkg-shlibdeps' --with 'file file' --with 'gzip gzip'
build
program=$build/cli/tessera
log=$build/package.log

# newest PREFIX FILE: the newest version of symbols PREFIX_x that a file wants.
newest() { readelf -W --dyn-syms "$2" | grep -oP "@$1_\K[0-9.]+" | sort -Vu | tail -n 1; }

# A wheel says with which C library it runs: that of this machine or a later one,
# though the program's symbols may want less. So is the libstdc++ beside it new enough.
platform() { getconf GNU_LIBC_VERSION | sed "s/glibc \(.*\)\.\(.*\)/manylinux_\1_\2_$(uname -m)/"; }

# wheel SCRATCH: packaging/python with what only this build knows.
wheel() {
  local source=$1
  rm -rf "$source"
  mkdir -p "$source/tessera/bin"
  cp -r packaging/python/. LICENSE NOTICE "$build/licences" "$source"
  # Those of LibTorch come with torch.
  rm -rf "$source"/licences/{libtorch,libgomp1}
  cp "$build/cli/wheel/tessera" "$source/tessera/bin/"
  cp -r "$build/tree/share" "$source/share"
  mkdir -p "$source/share/zsh/site-functions"
  cp "$build"/tree/share/zsh/*/_tessera "$source/share/zsh/site-functions/"
  "$python" - "$("$build/tree/bin/tessera" --version)" "$source" <<'PYTHON'
import re, sys
from pathlib import Path
own, torch = re.search(r"tessera (\S+) \(torch (\S+),", sys.argv[1]).groups()
folder = Path(sys.argv[2])
(folder / "VERSION").write_text(own + "\n")
(folder / "requirements.txt").write_text(f"torch=={torch}\n")
(folder / "tessera" / "torch_version").write_text(torch + "\n")
PYTHON
  TESSERA_PLATFORM=$(platform) "$python" -m pip --disable-pip-version-check wheel \
    --no-deps --wheel-dir "$build/packages" "$source"
}

make_packages() {
  rm -rf "$build/packages" "$build/tree"
  cmake --install "$build" --prefix "$build/tree"
  cpack --config "$build/CPackConfig.cmake" -B "$PWD/$build/packages"
  wheel "$build/wheel"
  rm -rf "$build/packages/_CPack_Packages"
}

echo "package: packing (progress in $log)"
# Neither || nor if: within them the first error would not end it.
set +e
(set -e; make_packages) >"$log" 2>&1
status=$?
set -e
[[ $status == 0 ]] || fail "package: failed; the end of $log: $(tail -n 20 "$log")"
rm -rf dist
mv "$build/packages" dist
echo "package: the program needs glibc $(newest GLIBC "$program") and libstdc++ with GLIBCXX_$(newest GLIBCXX "$program") or later"
ls -l dist
[[ -z $check ]] || bash scripts/check_package.sh
